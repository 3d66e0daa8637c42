"""Hardware limits: the bandwidth of this machine's links, and the minimum time of an operation."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import torch

from tpplan.exec.programs.program import HOST
from tpplan.reports.bench import Limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.exec.tools.bench.case import Case

_COPY_BYTES = 2**26
_COPIES = 16
_TURNS = 3


def measure(places: Mapping[int, torch.device]) -> tuple[Limit, ...]:
    """Return the bandwidth between all pairs of CUDA devices and pinned host memory, in both directions.

    Args:
        places: torch devices in use, by device index in the plan. With virtual devices the result is empty.
    """
    if any(place.type != "cuda" for place in places.values()):
        return ()
    memory = {
        HOST: torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True),
        **{i: torch.empty(_COPY_BYTES, dtype=torch.uint8, device=place) for i, place in places.items()},
    }
    return tuple(
        Limit(source=a, target=b, bytes_per_second=_rate(memory[a], memory[b])) for a, b in permutations(memory, 2)
    )


def _rate(source: torch.Tensor, target: torch.Tensor) -> int:
    """Return the bandwidth of consecutive copies in bytes per second, from the fastest turn."""
    place = source.device if source.is_cuda else target.device  # torch copies on the current stream of this device
    stream = torch.cuda.current_stream(place)
    best = float("inf")
    for _ in range(_TURNS):
        torch.cuda.synchronize(place)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return round(_COPIES * _COPY_BYTES / best)


def least_ns(case: Case, limits: Sequence[Limit], places: Mapping[int, torch.device]) -> int | None:
    """Return the time that the busiest device needs in ns, if it sends and receives only on its fastest link.

    Data sent to several devices counts once, because the receivers can forward it. For a sum over n devices, each sends
    and receives 2 (n - 1) / n of the bytes of the result. None if nothing is sent or no limit was measured.
    """
    if not limits:
        return None
    rates = {(limit.source, limit.target): limit.bytes_per_second for limit in limits}
    index = {place: i for i, place in places.items()}
    sent, received = (dict.fromkeys(places, 0) for _ in range(2))
    if case.slack is not None:
        share = 2 * (len(places) - 1) * case.outputs[0].nbytes // len(places)
        sent, received = (dict.fromkeys(places, share) for _ in range(2))
    else:
        remote = [(target, source) for target, source in case.moves if target.device != source.device]
        for target, source in remote:
            if target.device in index:
                received[index[target.device]] += source.nbytes
        for source in {id(source): source for _, source in remote}.values():
            sent[index[source.device]] += source.nbytes
    others = places if case.captured else (HOST,)
    seconds = [
        amount / max(rates[(i, j) if amounts is sent else (j, i)] for j in others if j != i)
        for amounts in (sent, received)
        for i, amount in amounts.items()
        if amount
    ]
    return round(max(seconds, default=0) * 10**9) or None
