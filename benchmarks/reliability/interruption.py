"""Acting between any two opcodes of chosen functions, as a signal handler may, and noting what memory is left then."""

from __future__ import annotations

import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tpplan
from tpplan.exec.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType, TracebackType

    from torch import Tensor

_PACKAGE = Path(tpplan.__file__).parent
#: Where the functions are in which a context is compiled, used and closed.
CONTEXT = str(_PACKAGE / "exec")
#: Where a file is written.
FILES = str(_PACKAGE / "files" / "text.py")


def interrupt() -> None:
    """Do what Python's own handler of Ctrl-C does."""
    raise KeyboardInterrupt


def within(*starts: str) -> Callable[[CodeType], bool]:
    """Return whether a function is in a file whose path starts like one of these."""
    return lambda code: code.co_filename.startswith(starts)


#: All functions of the package.
EVERYWHERE = within(str(_PACKAGE))


class AtOpcode:
    """Acts once in a ``with`` block, before one opcode of some functions; the debugger's interface shows all of them.

    Attributes:
        count: opcodes so far, up to the one at which it has acted.
        place: the function and the line in which it has acted; empty if the block has fewer opcodes.
        opcodes: each of them so far: its function, and where it is there.
    """

    def __init__(self, at: int, counts: Callable[[CodeType], bool], act: Callable[[], object] = interrupt) -> None:
        """Prepare it.

        Args:
            at: number of the opcode, from 0.
            counts: returns whether the opcodes of a function count.
            act: what to do; it is not traced itself.
        """
        self._at, self._counts, self._act = at, counts, act
        self.count, self.place = 0, ""
        self.opcodes: list[tuple[CodeType, int]] = []

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if self.place or not self._counts(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode" and not self.place:
            if self.count == self._at:
                self.place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                self._act()
            self.count += 1
            self.opcodes.append((frame.f_code, frame.f_lasti))
        return self._step


def sees_opcodes() -> bool:
    """Return whether this Python shows opcodes to a trace function that asks for them when a function is called."""

    def function() -> int:
        return len(())

    with AtOpcode(-1, lambda code: code is function.__code__) as tracer:
        function()
    return tracer.count > 0


class Blocks:
    """The memory of contexts that were compiled."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[Tensor]] = []

    def note(self, arena: Arena) -> None:
        """Note an arena's block."""
        self._alive.append(weakref.ref(vars(arena)["_block"]))

    def all_freed(self) -> bool:
        """Return whether everything noted was freed since, and forget it."""
        left = [block for block in self._alive if block() is not None]
        self._alive.clear()
        return not left


@contextmanager
def noted_blocks() -> Iterator[Blocks]:
    """Note the memory of all contexts that are compiled in the block."""
    blocks, make = Blocks(), Arena.__init__

    def note(self: Arena, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        blocks.note(self)

    Arena.__init__ = note  # type: ignore[method-assign]
    try:
        yield blocks
    finally:
        Arena.__init__ = make  # type: ignore[method-assign]
