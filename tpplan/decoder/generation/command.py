"""The implementation of ``tpplan generate``: it loads a checkpoint by a plan and generates texts.

An engine computes them: the decoder, or one that the command brings along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.speed import Speed
from tpplan.decoder.decoder import Decoder
from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.generation.generate import generate
from tpplan.decoder.generation.timing import Timing
from tpplan.decoder.generation.warmup import on_gpus
from tpplan.decoder.model.settings import check_model
from tpplan.decoder.text.continuation import Continuation
from tpplan.decoder.weights.gguf import room_note
from tpplan.exec.compiler import compiler
from tpplan.exec.context import TPContext
from tpplan.planner.speed import without_kernels
from tpplan.reports.generate import GenerateReport
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tpplan.decoder.generation.arguments import Task
    from tpplan.decoder.generation.timing import Startup

#: Seeds are below this.
_SEEDS = 2**63


@frozen
class Engine:
    """A loaded model that generates texts.

    Attributes:
        context: the compiled plan.
        tokens: returns an iterator over the next token of each text, None for texts that have ended; from prompts, the
            most new tokens and the sampling of each, and the tokens that end a text.
        speed: what the plan predicts of it; None if nothing.
    """

    context: TPContext
    tokens: Callable[
        [Sequence[Sequence[int]], Sequence[int], Sequence[Sampling], frozenset[int]], Iterator[tuple[int | None, ...]]
    ]
    speed: Speed | None = None


@contextmanager
def by_decoder(task: Task, note: Callable[[str], None], startup: Startup) -> Iterator[Engine]:
    """Load a checkpoint into the decoder; see :func:`loaded`."""
    with loaded(task, note, startup) as decoder:

        def tokens(
            prompts: Sequence[Sequence[int]],
            counts: Sequence[int],
            samplings: Sequence[Sampling],
            end: frozenset[int],
        ) -> Iterator[tuple[int | None, ...]]:
            return generate(decoder, prompts, counts, sampling=samplings, end=end)

        yield Engine(decoder.context, tokens, task.plan.speed if on_gpus(decoder) else None)


@contextmanager
def loaded(task: Task, note: Callable[[str], None], startup: Startup) -> Iterator[Decoder]:
    """Load a checkpoint by a plan. Whatever can be checked is checked before the weights load.

    Args:
        task: what to generate.
        note: called with the reason if the devices are virtual, and with why predictions do not hold.
        startup: gets the parts of loading.

    Raises:
        TpplanError: the plan, the checkpoint and the machine do not fit together.
    """
    plan, source = task.plan, task.source
    check_model(source, source.model, plan)
    with compiler(plan, task.order.backend, note, scratch=False)("auto") as context:
        if plan.speed and (told := without_kernels(source.model)):
            note(told)
        if source.gguf and (told := room_note(context, source.gguf)):
            note(told)
        startup.mark("compile")
        weights = load_weights(plan, source, context)
        startup.mark("weights", weights.nbytes)
        decoder = Decoder(context, source, weights)
        del weights  # the decoder has what it needs of them
        startup.mark("decoder")
        yield decoder


def run(
    task: Task,
    note: Callable[[str], None],
    tell: Callable[[str], None],
    done: Callable[[GenerateReport], None],
    startup: Startup,
    *,
    load: Callable[[Task, Callable[[str], None], Startup], AbstractContextManager[Engine]] = by_decoder,
) -> Timing:
    """Load a checkpoint by a plan, and continue its prompts, as many at a time as the plan has room for.

    Args:
        task: what to generate.
        note: see :func:`loaded`.
        tell: called with every piece of the text, or every token if tokens were given; only if there is one prompt.
        done: called with each text when those that are generated together are complete, in the order of prompts.
        startup: gets the parts of loading, and the first token.
        load: loads the checkpoint into an engine, and calls its second argument with what users should know.

    Raises:
        TpplanError: see :func:`loaded`.
    """
    batch = task.plan.request.batch
    with load(task, note, startup) as engine:
        timing = Timing(engine.speed)
        for first in range(0, len(task.prompts), batch):
            group = task.prompts[first : first + batch]
            show = tell if len(task.prompts) == 1 else None
            for report in _continued(engine, task, group, first, timing, startup, show):
                done(report)
    return timing


def _continued(  # noqa: PLR0917 (what a group of prompts needs)
    engine: Engine,
    task: Task,
    prompts: Sequence[list[int]],
    first: int,
    timing: Timing,
    startup: Startup,
    tell: Callable[[str], None] | None,
) -> list[GenerateReport]:
    """Return what follows prompts that are continued together; ``first`` is the number of the first one."""
    texts = [_Text(task, prompt, tell or (lambda _: None)) for prompt in prompts]
    asked = task.order.sampling
    samplings = [evolve(asked, seed=(asked.seed + first + i) % _SEEDS) for i in range(len(prompts))]
    tokens = engine.tokens(prompts, [*map(task.count, prompts)], samplings, task.end)
    for step in timing.of(sum(map(len, prompts)), tokens):
        startup.end()
        for text, token in zip(texts, step, strict=True):
            if token is not None:
                text.add(token)
        if all(text.ended for text in texts):
            break
    reports = [evolve(text.report(engine.context), times=timing.totals) for text in texts]
    if first:
        return reports
    parts = tuple(startup.parts)
    return [evolve(reports[0], start=parts, start_ns=sum(part.time_ns for part in parts)), *reports[1:]]


class _Text:
    """A text that grows."""

    def __init__(self, task: Task, prompt: list[int], tell: Callable[[str], None]) -> None:
        self.ended = False
        self._task, self._prompt, self._tell = task, prompt, tell
        self._continuation = Continuation(task.tokenizer, prompt, task.order.stops) if task.tokenizer else None
        self._new: list[int] = []
        self._text = ""

    def add(self, token: int) -> None:
        """Add a token, unless the text has ended."""
        if self.ended:
            return
        self._say(self._continuation.add(token) if self._continuation else f"{',' if self._new else ''}{token}")
        self._new.append(token)
        self.ended = token in self._task.end or bool(self._continuation and self._continuation.stop)

    def _say(self, piece: str) -> None:
        self._text += piece
        self._tell(piece)

    def report(self, context: TPContext) -> GenerateReport:
        """Tell what is left of the text, and return all of it."""
        if self._continuation:
            self._say(self._continuation.rest())
        devices = context.devices
        return GenerateReport(
            model=self._task.plan.model.name,
            devices=len(devices),
            backend=next(iter(devices.values())).device.type,
            prompt_tokens=tuple(self._prompt),
            new_tokens=tuple(self._new),
            text=self._text if self._continuation else None,
            ended=self.ended or bool(self._continuation and self._continuation.stop),
            stop=self._continuation.stop if self._continuation else "",
        )
