"""Two contexts that are busy on the same GPUs at the same time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exec.cuda.cuda_cases import plan_for
from tpplan import exec as tpx
from tpplan.decoder.fast.launches.gemv import Gemv
from tpplan.decoder.fast.launches.norms import Norm

if TYPE_CHECKING:
    from collections.abc import Sequence

#: As layers have them, and seconds in which each context replays its graph.
_LAYERS, _SECONDS = 32, 3.0


class _Chain:
    """Sums over two GPUs and products behind norms in turn, captured by a context of its own."""

    def __init__(self, places: Sequence[torch.device], seed: int) -> None:
        self.context = tpx.compile(plan_for(2), backend="cuda", devices=places)
        self.streams = [torch.cuda.Stream(place) for place in places]  # type: ignore[no-untyped-call]
        generator = torch.Generator().manual_seed(seed)
        width = 4096
        weight = (torch.randn(width, width, generator=generator) / width**0.5).bfloat16()
        self._x = [torch.randn(1, width, generator=generator).bfloat16().to(place) for place in places]
        self._weights = [weight.to(place) for place in places]
        self._norms = [Norm(torch.ones(width, dtype=torch.bfloat16, device=place), 1e-5) for place in places]
        self._gemvs = [Gemv(place, torch.bfloat16) for place in places]
        self.out = [torch.empty_like(x) for x in self._x]
        self._issue()
        self.context.synchronize()
        for place in places:
            torch.cuda.synchronize(place)
        self.expected = [out.clone() for out in self.out]
        with self.context.capture() as self.graph:
            self._issue()

    def _issue(self) -> None:
        xs = tuple(self._x)
        for _ in range(_LAYERS):
            sums = self.context.all_reduce(xs)
            steps = zip(self._gemvs, sums, self._weights, self._norms, strict=True)
            xs = tuple(gemv.normed(x, weight, norm) for gemv, x, weight, norm in steps)
        for out, x in zip(self.out, xs, strict=True):
            out.copy_(x)

    def replay(self, found: list[object], turn: int) -> None:
        """Replay on streams of its own, on which now one device is late and now the other."""
        try:
            for stream in reversed(self.streams):
                torch.cuda.set_stream(stream)
            end, count = time.monotonic() + _SECONDS, 0
            while time.monotonic() < end:
                with torch.cuda.device((count + turn) % 2):
                    torch.cuda._sleep(20_000)  # type: ignore[no-untyped-call]
                self.graph.replay()
                count += 1
                if not count % 10:
                    self.context.synchronize()
            self.context.synchronize()
            for stream in self.streams:
                stream.synchronize()
            found.append(count)
        except Exception as error:  # noqa: BLE001 (which the test tells)
            found.append(error)


@pytest.mark.multi_gpu
def test_two_contexts_replay_at_the_same_time() -> None:
    """Each in a thread of its own; neither takes room that the other one needs, and their last results are right."""
    places = [torch.device("cuda", i) for i in range(2)]
    chains = [_Chain(places, seed) for seed in (1, 2)]
    found: list[object] = []
    threads = [threading.Thread(target=chain.replay, args=(found, turn)) for turn, chain in enumerate(chains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = [torch.equal(out, one) for chain in chains for out, one in zip(chain.out, chain.expected, strict=True)]
    for chain in chains:
        chain.context.close()
    assert all(isinstance(count, int) and count > 0 for count in found), found
    assert all(same)
