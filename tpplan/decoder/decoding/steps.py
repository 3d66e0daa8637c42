"""Decoding texts step by step, and the graphs of steps, with their latest tokens and positions on all devices.

Greedy choice is an argmax on the devices: each finds its own best token, and one small all-reduce collects them.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Final, Protocol

import torch
from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.sizes import counted
from tpplan.decoder.cache.state import BROKEN
from tpplan.decoder.decoding.finite import not_finite
from tpplan.decoder.decoding.sampling import GREEDY, Sampling, samplings_of
from tpplan.decoder.decoding.texts import Texts
from tpplan.decoder.layer.agree import room_for
from tpplan.decoder.prompts import NO_TOKEN, check_flags, prompts_of, shown
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


#: Why texts cannot go on whose step was interrupted: host and devices may differ.
_UNENDED: Final = "the latest step did not end"
#: Minimum span of a step: the places of the cache it may read. Spans double from here, and each has its own graph.
_SHORTEST_SPAN: Final = 256


class StepGraphs:
    """Runs steps of the first sequences of the KV cache: one token of each, whatever texts these belong to.

    On CUDA devices a step is one graph: the first step of a span runs without a graph, the second is captured. If that
    fails, a warning is logged and all later steps run without graphs, unless the context has failed too.

    Attributes:
        tokens: the latest token of each sequence, ``[1, B]`` in int64 on each device in use; a greedy step reads and
            overwrites them.
        positions: their positions, likewise; a step adds 1.
        logits: those of the latest step that was not greedy, ``[B, V]`` on each device for its part of the vocabulary.
        read_back: memory for the tokens of two greedy steps on their way to the host.
    """

    @torch.inference_mode()
    def __init__(self, forward: Forward, sequences: int, capture: Capture, *, graphs: bool | None = None) -> None:
        """Allocate tokens and positions on every device.

        Args:
            forward: computes the steps.
            sequences: number of sequences.
            capture: captures work as a graph.
            graphs: whether to capture steps; by default on CUDA devices.
        """
        self.forward = forward
        self._capture = capture
        self._context = forward.context
        places = [device.device for device in self._context.devices.values()]
        self.tokens, self.positions = (
            [torch.zeros(1, sequences, dtype=torch.int64, device=place) for place in places] for _ in range(2)
        )
        self.logits: tuple[Tensor, ...] = ()
        self.read_back = [ReadBack.of(self.tokens[0][0]) for _ in range(2)]
        self._captures = self._context.can_capture if graphs is None else graphs
        self._graphs: dict[tuple[int, bool], Graph | None] = {}

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.tokens[0].shape[1]

    def set(self, tensors: list[Tensor], values: Sequence[int]) -> None:
        """Write a value for each sequence into :attr:`tokens` or :attr:`positions`."""
        self._context.broadcast(torch.tensor([values]), source=HOST, out=tensors)

    def run(self, places: int, *, is_greedy: bool) -> None:
        """Run a step that reads so many places of the cache, by its graph if there is one; the host does not wait."""
        self._run(self._span(places), is_greedy=is_greedy)

    def prepare(self, *, is_greedy: bool) -> None:
        """Run a step at the first position; if steps are captured, run and capture one of every span."""
        spans = [*self.spans()]
        for span in [span for span in spans for _ in range(2)] if self._captures else spans[:1]:
            self.set(self.positions, [0] * self.sequences)
            self._run(span, is_greedy=is_greedy)

    def has_graph(self, places: int) -> bool:
        """Tell whether there is a graph of greedy steps that read so many places of the cache."""
        return self._captures and self._graphs.get((self._span(places), True)) is not None

    def greedy(self, logits: tuple[Tensor, ...], positions: Sequence[Tensor] | None = None) -> None:
        """Overwrite the latest tokens by the greedy choice, and add 1 to positions if given."""
        greedy(self._context, logits, self.forward.stack.steps, [t[0] for t in self.tokens], positions)

    def spans(self) -> Iterator[int]:
        """Yield the spans that steps may have, in ascending order."""
        span = _SHORTEST_SPAN
        while span < self.forward.length and self.forward.stack.looks_at_spans:
            yield span
            span *= 2
        yield self.forward.length

    def _span(self, places: int) -> int:
        """Return the span of steps that read so many places of the cache."""
        return next(span for span in self.spans() if span >= places)

    def _run(self, span: int, *, is_greedy: bool) -> None:
        """Run a step of a span, by its graph if there is one."""
        key = (span, is_greedy)
        if not self._captures or key not in self._graphs:
            self._issue(span, is_greedy=is_greedy)
            self._graphs[key] = None
            return
        captured = self._graphs[key]
        if captured is None:
            self._graphs[key] = captured = self._capture(partial(self._issue, span, is_greedy=is_greedy), "a step")
        if captured is None:
            self._captures = False
            self._issue(span, is_greedy=is_greedy)
            return
        captured.replay()

    def _issue(self, span: int, *, is_greedy: bool) -> None:
        """Launch a step on the devices, without waiting."""
        logits = self.forward.decode([t[0] for t in self.tokens], [p[0] for p in self.positions], span)
        if not is_greedy:  # copied to one place for the host, as each graph has logits of its own
            self.logits = self.logits or tuple(map(torch.empty_like, logits))
            for to, new in zip(self.logits, logits, strict=True):
                to.copy_(new)
            for positions in self.positions:
                positions.add_(1)
        else:
            self.greedy(logits, [p[0] for p in self.positions])


class Begin(Protocol):
    """Reads the prompts of new texts, see :meth:`tpplan.decoder.decoder.Decoder.steps`."""

    def __call__(self, check: Callable[[], list[list[int]]], *, resume: bool) -> tuple[Texts, tuple[Tensor, ...]]:
        """Return the texts, and the logits of the token after each prompt.

        Args:
            check: checks the prompts, and returns the tokens of each.
            resume: whether to read only what the cache lacks.
        """


class Steps:
    """Decodes texts in the first sequences of the KV cache, one token of each in a step.

    A decoder has one cache: once something else has overwritten a sequence of the texts, these are refused to go on.

    The graph of a greedy step needs nothing of the host. So it is launched a step ahead: while the host reads tokens
    and deals with them, the devices are at the next ones.
    """

    def __init__(self, graphs: StepGraphs, begin: Begin) -> None:
        """Take what runs the steps; :meth:`tpplan.decoder.decoder.Decoder.steps` calls this.

        Args:
            graphs: runs the steps.
            begin: reads the prompts of new texts.
        """
        self._graphs = graphs
        self._begin = begin
        self._forward = graphs.forward
        self._context = graphs.forward.context
        self._choices: list[tuple[slice, Sampling, torch.Generator]] = []
        self._is_greedy = True
        self._texts = Texts()
        self._at: list[int] = []
        self._lengths: list[int] = []
        self._new = 0
        self._launched = 0

    @torch.inference_mode()
    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        resume: bool = False,
    ) -> list[int]:
        """Read the prompts of new texts, and return the next token of each.

        Texts of other steps and generations, which the cache had before, cannot go on from then on.

        Args:
            prompts: the tokens of one prompt for each sequence.
            sampling: how to choose tokens, here and in later steps; greedily by default. With one for each sequence,
                each has a random generator of its own.
            resume: whether to read only what the cache lacks, where prompts begin like the texts that it has.

        Raises:
            RequestError: the number of prompts or samplings is not that of the sequences, or a prompt is empty, too
                long for the plan's cache, or has tokens outside the vocabulary, or ``resume`` is no bool; earlier texts
                can go on then.
            ExecutionError: the model's logits are not finite, the processes' prompts differ, or the context is closed.
        """
        count = self._graphs.sequences

        def check() -> list[list[int]]:
            check_flags(resume=resume)
            checked = prompts_of(prompts, self._context.plan)
            if len(checked) != count:
                what = f"{counted(len(checked), 'prompt')} for the steps of {counted(count, 'sequence')}"
                raise RequestError(what, "give one for each, or take the steps of as many: steps(number of prompts)")
            samplings_of(sampling, count)
            return checked

        texts, logits = self._begin(check, resume=resume)
        self._sample(sampling)
        self._texts, self._lengths, self._new, self._launched = texts, [*texts.cached], 0, 0
        first = self._checked(self._choose(logits).tolist())
        self._graphs.set(self._graphs.tokens, first)
        self._graphs.set(self._graphs.positions, self._lengths)
        self._at = [*self._lengths]
        texts.obstacle = ""
        return first

    @torch.inference_mode()
    def step(self, over: Sequence[bool] = (), *, more: bool = True) -> list[int]:
        """Run the latest token of each sequence, and return the next ones.

        Args:
            over: for each sequence, whether its text has ended; by default none has. If others need more steps than its
                cache has room for, it starts again at the first position, and its tokens mean nothing from then on.
            more: whether another step may follow, which is then launched ahead where it can be. If none does follow,
                it was in vain: :meth:`start` waits for it.

        Raises:
            RequestError: no text was started, something else has overwritten the texts in the cache since, a step did
                not end, ``over`` is not a bool for each sequence, ``more`` is no bool, or the cache has no room for
                another token.
            ExecutionError: the model's logits are not finite, or the context is closed.
        """
        texts = self._texts
        if texts.obstacle:
            raise texts.refusal()
        check_flags(more=more)
        is_full = max(self._at) == self._forward.length
        if self._have_ended(over) and is_full and not all(over):
            texts.obstacle = _UNENDED
            self._begin_again(over)
            texts.obstacle = ""
            is_full = max(self._at) == self._forward.length
        if is_full:
            what = f"the cache has {max(self._at)} tokens of the longest text, all that the plan has room for"
            raise RequestError(what, "plan with a larger --context")
        texts.obstacle = _UNENDED
        tokens = self._stepped(texts, more=more)
        texts.obstacle = ""
        return tokens

    def _stepped(self, texts: Texts, *, more: bool) -> list[int]:
        """Take a step of texts that can go on."""
        number, at = self._new + 1, [at + 1 for at in self._at]
        progress = self._forward.stack.progress
        if progress:
            progress.set([BROKEN] * len(at))
        if self._launched < number:
            self._launch(max(at))
        self._new, self._at, texts.cached = number, at, at
        if progress:
            progress.set(at)
        if not self._is_greedy:
            tokens = self._choose(self._graphs.logits).tolist()
            self._graphs.set(self._graphs.tokens, tokens)
            return self._checked(tokens)
        latest, texts.ahead = self._graphs.read_back[number % 2], None
        if more and self._can_go_ahead():
            self._launch(max(at) + 1)
            texts.ahead = evolve(self._graphs.read_back[self._launched % 2], positions=tuple(at))
        return self._checked(latest.read())

    @torch.inference_mode()
    def prepare(self, sampling: Sampling) -> None:
        """Run a prompt and a step for each sequence; if steps are captured, run and capture a step of every span.

        Args:
            sampling: how to choose tokens.

        Raises:
            RequestError: see :meth:`start`.
        """
        prompts = [[0]] * self._graphs.sequences
        self.start(prompts, sampling)
        self._texts.lose("prepare() has run")
        self._graphs.prepare(is_greedy=self._is_greedy)
        if progress := self._forward.stack.progress:
            progress.set([1] * len(prompts))

    def _have_ended(self, over: Sequence[bool]) -> bool:
        """Return whether any text has ended.

        Raises:
            RequestError: ``over`` does not say of each text whether it has.
        """
        is_listed, count = isinstance(over, (list, tuple)), len(self._at)
        if is_listed and not over:
            return False
        given: Sequence[object] = over if is_listed else ()
        others = [each for each in given if not isinstance(each, bool)]
        if not is_listed or len(over) != count or others:
            what = f"over is {shown(over)}, the steps are of {counted(count, 'sequence')}"
            if others:
                what = f"over has {shown(others[0])}, which is neither True nor False"
            raise RequestError(what, "give True or False for each sequence, or leave it out if no text has ended")
        return any(over)

    def _begin_again(self, over: Sequence[bool]) -> None:
        """Let sequences whose texts have ended start again at the first position, with their latest token."""
        texts = self._texts
        for i, ended in enumerate(over):
            if ended:
                self._at[i], texts.tokens[i] = 0, texts.tokens[i][-1:]
        texts.cached = self._at
        self._graphs.set(self._graphs.positions, self._at)

    def _can_go_ahead(self) -> bool:
        """Tell whether the next step can be launched before the host has the tokens of this one.

        States of linear attention would be a step ahead of the text. Without a graph, the host would be what is late.
        """
        places = max(self._at) + 1
        return not self._forward.stack.progress and places <= self._forward.length and self._graphs.has_graph(places)

    def _launch(self, places: int) -> None:
        """Launch a step that reads so many places of the cache, and a copy of its tokens to the host, if it has any."""
        number = self._launched + 1
        self._graphs.run(places, is_greedy=self._is_greedy)
        if self._is_greedy:
            self._graphs.read_back[number % 2].copy(self._graphs.tokens[0][0])
        self._launched = number  # not if it failed

    def _choose(self, logits: tuple[Tensor, ...]) -> Tensor:
        """Choose tokens from logits, and return them in host memory."""
        if self._is_greedy:
            self._graphs.greedy(logits)
            return self._graphs.tokens[0][0].cpu()
        out = None
        if not logits:  # the vocabulary is on other processes' devices
            shape = self._graphs.sequences, self._context.plan.split(Axis.VOCAB).size
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
        texts = self._texts.tokens
        new = [text[length:] for text, length in zip(texts, self._lengths, strict=True)]
        return torch.cat(
            [one.draw(logits_BV[rows], generator, texts[rows], new[rows]) for rows, one, generator in self._choices]
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
            self._texts.lose("logits were not finite")
            raise not_finite(self._forward, when)
        whole = [*map(int, tokens)]
        for text, token in zip(self._texts.tokens, whole, strict=True):
            text.append(token)
        return whole
