"""Decoding step by step: the latest tokens and positions of the sequences on all devices, and the steps' graphs.

Greedy choice is an argmax on the devices: each finds its own best token, and one small all-reduce collects them.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.decoder.cache.state import BROKEN
from tpplan.decoder.decoding.finite import not_finite
from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.layer.agree import room_for
from tpplan.decoder.prompts import NO_TOKEN, Prompt
from tpplan.decoder.read_back import ReadBack
from tpplan.errors import RequestError
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from tpplan.decoder.decoding.prefill_graphs import Capture
    from tpplan.decoder.forward import Forward
    from tpplan.decoder.layer.steps import Plain
    from tpplan.exec.context import TPContext
    from tpplan.exec.cuda.graph import Graph


#: Parts of a row of logits that blocks of a kernel search at a time: at most, in all rows together, and the tokens that
#: each has at least. On an H200 a single block takes 29 µs for 128,256 tokens.
_MOST_PARTS, _ROWS, _LEAST_PART = 32, 128, 2048


def greedy(
    context: TPContext,
    logits: Sequence[Tensor],
    steps: Mapping[int, Plain],
    tokens: Sequence[Tensor],
    positions: Sequence[Tensor] | None = None,
) -> None:
    """Write the greedy choice of tokens, the argmax of the logits, on every device in use.

    The token is ``NO_TOKEN`` where the largest logit is not finite.

    Each device finds the largest logits of its part of the vocabulary, and writes them and their tokens to columns that
    are zero on all other devices, so that one small all-reduce collects all of them. float32 represents every token
    number exactly, and all devices choose from the same bits.

    Args:
        context: the compiled plan.
        logits: ``[B, V]`` on each device that holds a part of the vocabulary.
        steps: the computation steps of each device.
        tokens: the tokens to overwrite, ``[B]`` in int64 on each device.
        positions: likewise, positions to add 1 to.
    """
    every, rows = context.plan.slices(Axis.VOCAB), len(tokens[0])
    parts = max(1, min(_MOST_PARTS, _ROWS // rows, context.plan.split(Axis.VOCAB).size // (len(every) * _LEAST_PART)))
    here = [(i, part) for i, part in enumerate(every) if part.device in context.devices]
    bests = [
        steps[part.device].argmax(logits_BV, part.start, i, len(every), parts)
        for (i, part), logits_BV in zip(here, logits, strict=True)
    ]
    out = None if bests else room_for(context, rows, 2 * len(every) * parts, torch.float32)
    found = context.all_reduce(bests, axis=Axis.VOCAB, out=out)
    for device, found_B2P, tokens_B, positions_B in zip(
        context.devices, found, tokens, positions or repeat(None, len(found)), strict=True
    ):
        steps[device].next_tokens(found_B2P, tokens_B, positions_B)


#: Minimum span of a step: the places of the cache it may read. Spans double from here, and each has its own graph.
_SHORTEST_SPAN: Final = 256


class Steps:
    """Decodes the first sequences of the KV cache, one token of each in a step.

    On CUDA devices a step is one graph: the first step of a span runs without a graph, the second is captured. If that
    fails, a warning is logged and all later steps run without graphs, unless the context has failed too.

    The graph of a greedy step needs nothing of the host. So it is launched a step ahead: while the host reads tokens
    and deals with them, the devices are at the next ones.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        sequences: int,
        read: Callable[[Sequence[Prompt]], tuple[Tensor, ...]],
        capture: Capture,
        *,
        graphs: bool | None = None,
    ) -> None:
        """Allocate tokens and positions on every device.

        Args:
            forward: computes the steps.
            sequences: number of sequences.
            read: processes prompts, and returns the logits of the token after each, see
                :meth:`tpplan.decoder.decoder.Decoder.read`.
            capture: captures work as a graph.
            graphs: whether to capture steps; by default on CUDA devices.
        """
        self._forward = forward
        self._read = read
        self._capture = capture
        self._context = forward.context
        places = [device.device for device in self._context.devices.values()]
        self._tokens, self._positions = (
            [torch.zeros(1, sequences, dtype=torch.int64, device=place) for place in places] for _ in range(2)
        )
        self._captures = self._context.can_capture if graphs is None else graphs
        self._logits: tuple[Tensor, ...] = ()
        self._graphs: dict[tuple[int, bool], Graph | None] = {}
        self._choices: list[tuple[slice, Sampling, torch.Generator]] = []
        self._is_greedy = True
        self._texts: list[list[int]] = []
        self._at: list[int] = []
        self._lengths: list[int] = []
        self._new = 0
        self._read_back = [ReadBack.of(self._tokens[0][0]) for _ in range(2)]
        self._launched = 0

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], cached: Sequence[int] = ()
    ) -> list[int]:
        """Run prompts, filling the cache, and return the next token of each.

        Args:
            prompts: one prompt for each sequence.
            sampling: how to choose tokens, here and in later steps; or one for each sequence, which then has a random
                generator of its own.
            cached: for each prompt, the number of its first tokens that the cache already has; none by default.

        Raises:
            RequestError: the number of prompts is not that of the sequences, or a prompt is invalid, see
                :func:`tpplan.decoder.prompts.check`.
            ExecutionError: the model's logits are not finite.
        """
        if len(prompts) != (count := self._tokens[0].shape[1]):
            raise RequestError(f"{len(prompts)} prompts for the steps of {count} sequences", "give one for each")
        if not isinstance(sampling, Sampling) and len(sampling) != count:
            raise RequestError(f"{len(sampling)} samplings for {count} prompts", "give one for all, or one for each")
        starts = cached or [0] * count
        rests = enumerate(zip(prompts, starts, strict=True))
        logits = self._read(  # if it refuses them, texts may go on
            [Prompt(prompt[start:] if start else prompt, sequence, start) for sequence, (prompt, start) in rests]
        )
        self._sample(sampling)
        self._texts = [[*map(int, prompt)] for prompt in prompts]
        self._lengths, self._new, self._launched = [*map(len, prompts)], 0, 0
        first = self._checked(self._choose(logits).tolist())
        self._set(self._tokens, first)
        self._set(self._positions, self._lengths)
        self._at = [*self._lengths]
        return first

    @torch.inference_mode()
    def step(self, over: Sequence[bool] = (), *, more: bool = True) -> list[int]:
        """Run the latest token of each sequence, and return the next ones.

        Args:
            over: for each sequence, whether its text has ended. If others need more steps than its cache has room for,
                it starts again at the first position, and its tokens and its cache mean nothing from then on.
            more: whether another step may follow, which is then launched ahead where it can be. If none does follow,
                it was in vain: :meth:`start` waits for it.

        Raises:
            RequestError: the cache has no room for them.
            ExecutionError: the model's logits are not finite.
        """
        if any(over) and max(self._at) == self._forward.length:
            self._at = [0 if ended else at for at, ended in zip(self._at, over, strict=True)]
            self._set(self._positions, self._at)
        if max(self._at) == self._forward.length:
            what = f"the longest text has {max(self._at)} tokens, as many as the plan caches of a sequence"
            raise RequestError(what, "plan with a larger --context")
        self._at = [at + 1 for at in self._at]
        self._new += 1
        progress = self._forward.stack.progress
        if progress:
            progress.set([BROKEN] * len(self._at))
        if self._launched < self._new:
            self._launch(max(self._at))
        if progress:
            progress.set(self._at)
        if not self._is_greedy:
            tokens = self._choose(self._logits).tolist()
            self._set(self._tokens, tokens)
            return self._checked(tokens)
        latest, unread = self._read_back[self._new % 2], self._forward.unread
        if unread and unread.tokens is latest.tokens:
            unread = self._forward.unread = None
        if more and self._can_go_ahead():
            self._launch(max(self._at) + 1)
            if unread:  # of other steps
                unread.clear_up(self._forward.stack)
            self._forward.unread = evolve(self._read_back[self._launched % 2], positions=tuple(self._at))
        return self._checked(latest.read())

    @torch.inference_mode()
    def prepare(self, sampling: Sampling) -> None:
        """Run a prompt and a step for each sequence; if steps are captured, run and capture a step of every span.

        Args:
            sampling: how to choose tokens.

        Raises:
            RequestError: see :meth:`start`.
        """
        prompts = [[0]] * self._tokens[0].shape[1]
        self.start(prompts, sampling)
        spans = list(self._spans())
        for span in [span for span in spans for _ in range(2)] if self._captures else spans[:1]:
            self._set(self._positions, [0] * len(prompts))
            self._run(span)
        if progress := self._forward.stack.progress:
            progress.set([1] * len(prompts))

    def _spans(self) -> Iterator[int]:
        """Yield the spans that steps may have, in ascending order."""
        span = _SHORTEST_SPAN
        while span < self._forward.length and self._forward.stack.looks_at_spans:
            yield span
            span *= 2
        yield self._forward.length

    def _span(self, places: int) -> int:
        """Return the span of steps that read so many places of the cache."""
        return next(span for span in self._spans() if span >= places)

    def _can_go_ahead(self) -> bool:
        """Tell whether the next step can be launched before the host has the tokens of this one.

        States of linear attention would be a step ahead of the text. Without a graph, the host would be what is late.
        """
        places = max(self._at) + 1
        if self._forward.stack.progress or not self._captures or places > self._forward.length:
            return False
        return self._graphs.get((self._span(places), True)) is not None

    def _launch(self, places: int) -> None:
        """Launch a step that reads so many places of the cache, and a copy of its tokens to the host, if it has any."""
        number = self._launched + 1
        self._run(self._span(places))
        if self._is_greedy:
            self._read_back[number % 2].copy(self._tokens[0][0])
        self._launched = number  # not if it failed

    def _run(self, span: int) -> None:
        """Run a step of a span, by its graph if there is one."""
        key = (span, self._is_greedy)
        if not self._captures or key not in self._graphs:
            self._issue(span)
            self._graphs[key] = None
            return
        captured = self._graphs[key]
        if captured is None:
            self._graphs[key] = captured = self._capture(partial(self._issue, span), "a step")
        if captured is None:
            self._captures = False
            self._issue(span)
            return
        captured.replay()

    def _issue(self, span: int) -> None:
        """Launch a step on the devices, without waiting."""
        logits = self._forward.decode([t[0] for t in self._tokens], [p[0] for p in self._positions], span)
        if not self._is_greedy:  # copied to one place for the host, as each graph has logits of its own
            self._logits = self._logits or tuple(map(torch.empty_like, logits))
            for to, new in zip(self._logits, logits, strict=True):
                to.copy_(new)
            for positions in self._positions:
                positions.add_(1)
        else:
            self._greedy(logits, [p[0] for p in self._positions])

    def _choose(self, logits: tuple[Tensor, ...]) -> Tensor:
        """Choose tokens from logits, and return them in host memory."""
        if self._is_greedy:
            self._greedy(logits)
            return self._tokens[0][0].cpu()
        out = None
        if not logits:  # the vocabulary is on other processes' devices
            shape = self._tokens[0].shape[1], self._context.plan.split(Axis.VOCAB).size
            out = torch.empty(shape, dtype=self._context.dtype, device="cpu")
        whole = self._context.gather(logits, Axis.VOCAB, out=out).tensor
        if self._context.processes == 1:
            return self._drawn(whole)
        # One process draws for all: the host of another may round probabilities otherwise.
        drawn = [] if self._context.process else self._drawn(whole).tolist()
        return torch.tensor(self._context.tell(drawn)[0])

    def _sample(self, sampling: Sampling | Sequence[Sampling]) -> None:
        """Set how tokens are chosen from now on."""
        each = [sampling] if isinstance(sampling, Sampling) else sampling
        rows = [slice(None)] if isinstance(sampling, Sampling) else [slice(i, i + 1) for i in range(len(sampling))]
        generators = [torch.Generator().manual_seed(one.seed) for one in each]
        self._choices = list(zip(rows, each, generators, strict=True))
        self._is_greedy = all(one.is_greedy for one in each)

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        """Return tokens drawn from logits in host memory."""
        new = [text[length:] for text, length in zip(self._texts, self._lengths, strict=True)]
        return torch.cat(
            [
                one.draw(logits_BV[rows], generator, self._texts[rows], new[rows])
                for rows, one, generator in self._choices
            ]
        )

    def _checked(self, tokens: Sequence[float]) -> list[int]:
        """Add tokens to the texts, and return them as whole numbers.

        Raises:
            ExecutionError: logits are not finite. The sequences are cleared, so that others can take their place.
        """
        if NO_TOKEN in tokens:
            texts = [i for i, token in enumerate(tokens) if token == NO_TOKEN]
            new = f" and {self._new} new ones" if self._new else ""
            more = f", and of {len(texts) - 1} other texts" if len(texts) > 1 else ""
            when = f"behind the {self._lengths[texts[0]]} tokens of prompt {texts[0]}{new}{more}"
            self._forward.stack.clear(len(tokens))
            raise not_finite(self._forward, when)
        whole = [*map(int, tokens)]
        for text, token in zip(self._texts, whole, strict=True):
            text.append(token)
        return whole

    def _greedy(self, logits: tuple[Tensor, ...], positions: Sequence[Tensor] | None = None) -> None:
        """Overwrite the latest tokens by the greedy choice, and add 1 to positions if given."""
        greedy(self._context, logits, self._forward.stack.steps, [t[0] for t in self._tokens], positions)

    def _set(self, tensors: list[Tensor], values: Sequence[int]) -> None:
        """Write values into the tensor of every device."""
        self._context.broadcast(torch.tensor([values]), source=HOST, out=tensors)
