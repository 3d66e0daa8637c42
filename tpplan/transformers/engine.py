"""A checkpoint in a sharded model of transformers, as an engine of ``tpplan generate``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from tpplan.exec.compiler import compiler
from tpplan.exec.context import TPContext
from tpplan.transformers.generate import Sampling, tokens
from tpplan.transformers.sharding import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.weights.source import Source


class _Order(Protocol):
    @property
    def backend(self) -> str:
        """``cuda``, ``cpu`` or ``auto``."""


class Task(Protocol):
    """What is loaded."""

    @property
    def order(self) -> _Order:
        """Where to run."""

    @property
    def plan(self) -> SplitPlan:
        """The plan to load by."""

    @property
    def source(self) -> Source:
        """The checkpoint."""


@frozen
class Engine:
    """A sharded model that is loaded.

    Attributes:
        context: the compiled plan.
        model: the model of transformers.
        static: whether the host decides nothing in a step over a static cache, which is captured on GPUs then.
    """

    context: TPContext
    model: Any
    static: bool

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        samplings: Sequence[Sampling],
        end: frozenset[int],
    ) -> Iterator[tuple[int | None, ...]]:
        """Yield the next token of each text, None for texts that have ended."""
        return tokens(self.model, prompts, counts, samplings, end, static=self.static)


@contextmanager
def loaded(task: Task, note: Callable[[str], None]) -> Iterator[Engine]:
    """Load a checkpoint by a plan, see :func:`tpplan.transformers.sharding.shard`.

    Args:
        task: what to load.
        note: called with the reason if the devices are virtual.

    Raises:
        TpplanError: the plan, the checkpoint, transformers and the machine do not fit together.
    """
    with compiler(task.plan, task.order.backend, note, scratch=False)("auto") as context:
        static = all(
            block.attention and not block.attention.window and not block.linear and not block.experts
            for block in task.source.model.blocks
        )
        yield Engine(context, shard(task.source, task.plan, context), static)
