"""Decoding step by step: the tokens and positions of some sequences on all devices, and the graphs of the steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import proxy

import torch

from tpplan.axes import Axis
from tpplan.decoder.prompts import Prompt
from tpplan.decoder.sampling import Sampling, likeliest
from tpplan.errors import RequestError
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpplan.decoder.model import Decoder
    from tpplan.exec.gpu.graph import Graph

#: A step looks at so many places of the cache at least, then at twice as many, and so on: as many graphs are captured.
_SHORTEST_SPAN: Final = 256


class Steps:
    """The first sequences of a decoder's cache, one token further with every step.

    On CUDA devices a step is one graph: the first step of a span runs as it is written, the second is captured. If that
    fails, a warning is logged, and steps run as they are written from then on, unless the context has failed with it.
    """

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, sequences: int, *, graphs: bool | None = None) -> None:
        """Make tokens and positions on every device.

        Args:
            decoder: whose cache; it has to live as long.
            sequences: how many.
            graphs: whether to capture steps; where devices have graphs if not given.
        """
        self._decoder: Decoder = proxy(decoder)  # which keeps this object: its memory shall not wait for a collector
        self._context = decoder.context
        places = [device.device for device in self._context.devices.values()]
        self._tokens, self._positions = (
            [torch.zeros(1, sequences, dtype=torch.int64, device=place) for place in places] for _ in range(2)
        )
        self._captures = places[0].type == "cuda" if graphs is None else graphs
        self._logits: tuple[Tensor, ...] = ()
        self._graphs: dict[tuple[int, bool], Graph | None] = {}
        self._sampling = Sampling()
        self._generator = torch.Generator()
        self._longest = 0

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[int]:
        """Put prompts into the cache, and return the token that follows each.

        Args:
            prompts: one for each sequence.
            sampling: how tokens are chosen, from now on.

        Raises:
            RequestError: there are more or fewer prompts, or they cannot be read: see
                :func:`tpplan.decoder.prompts.check`.
        """
        if len(prompts) != (count := self._tokens[0].shape[1]):
            raise RequestError(f"{len(prompts)} prompts for the steps of {count} sequences", "give one for each")
        self._sampling = sampling
        self._generator.manual_seed(sampling.seed)
        logits = self._decoder.read([Prompt(prompt, sequence) for sequence, prompt in enumerate(prompts)])
        first = [int(token) for token in self._choose(logits).tolist()]
        self._set(self._tokens, first)
        self._set(self._positions, [len(prompt) for prompt in prompts])
        self._longest = max(map(len, prompts))
        return first

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Put the latest tokens into the cache, and return the token that follows each.

        Raises:
            RequestError: there is no room for them.
        """
        if self._longest == self._decoder.length:
            what = f"the longest text has {self._longest} tokens, as many as the plan caches of a sequence"
            raise RequestError(what, "plan with a larger --context")
        self._longest += 1
        self._run(next(span for span in self._spans() if span >= self._longest))
        if self._sampling.temperature:
            self._set(self._tokens, self._choose(self._logits).tolist())
        return [int(token) for token in self._tokens[0][0].tolist()]

    @torch.inference_mode()
    def prepare(self, sampling: Sampling) -> None:
        """Run what texts start with, and a step; on CUDA devices steps of every span, and capture them.

        Args:
            sampling: how tokens are chosen.

        Raises:
            RequestError: see :meth:`start`.
        """
        prompts = [[0]] * self._tokens[0].shape[1]
        self.start(prompts, sampling)
        spans = list(self._spans())
        for span in [span for span in spans for _ in range(2)] if self._captures else spans[:1]:
            self._set(self._positions, [0] * len(prompts))
            self._run(span)

    def _spans(self) -> Iterator[int]:
        """Yield how many places of the cache a step may look at, in ascending order."""
        span = _SHORTEST_SPAN
        while span < self._decoder.length and self._decoder.stack.looks_at_spans:
            yield span
            span *= 2
        yield self._decoder.length

    def _run(self, span: int) -> None:
        """Run a step, or the graph of it."""
        key = (span, self._sampling.temperature == 0)
        if not self._captures or key not in self._graphs:
            self._issue(span)
            self._graphs[key] = None
            return
        captured = self._graphs[key]
        if captured is None:
            self._graphs[key] = captured = self._decoder.captured(partial(self._issue, span), "a step")
        if captured is None:
            self._captures = False
            self._issue(span)
            return
        captured.replay()

    def _issue(self, span: int) -> None:
        """Issue a step: all of it on the devices, without anything that waits."""
        logits = self._decoder.decode([t[0] for t in self._tokens], [p[0] for p in self._positions], span)
        if self._sampling.temperature:  # kept for the host, where no graph of another span makes its own
            self._logits = self._logits or tuple(map(torch.empty_like, logits))
            for kept, new in zip(self._logits, logits, strict=True):
                kept.copy_(new)
        else:
            for tokens, new in zip(self._tokens, self._likeliest(logits), strict=True):
                tokens[0].copy_(new)
        for positions in self._positions:
            positions.add_(1)

    def _choose(self, logits: tuple[Tensor, ...]) -> Tensor:
        """Return the tokens that logits lead to, in host memory."""
        if not self._sampling.temperature:
            return self._likeliest(logits)[0].cpu()
        whole = self._context.gather(logits, Axis.VC).tensor
        return self._sampling.draw(whole, self._generator)

    def _likeliest(self, logits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return likeliest(self._context, logits, self._decoder.stack.steps)

    def _set(self, tensors: list[Tensor], values: Sequence[int]) -> None:
        """Write numbers into a tensor of every device."""
        self._context.broadcast(torch.tensor([values]), source=HOST, out=tensors)
