"""Guarding a context against use by several threads at once and use after close."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from sys import _current_frames, _getframe
from threading import get_ident
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType, TracebackType

    #: A place in the queue: an object of its own, the thread, and the code of the function that uses the context.
    _Turn = tuple[object, int, CodeType]

#: Seconds between two looks whether another thread's operation has ended.
_LOOK_SECONDS = 5e-4
_GENERATOR = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


class Guard:
    """Lets one thread at a time use a context, and none after its close.

    Threads queue up, and the first has its turn. To join the queue is a single step, between whose parts no interrupt
    such as Ctrl-C can come. To leave it is another one, which an interrupt can prevent: a turn counts only as long as
    the function that took it is running, and whoever comes next drops one that was left behind.

    A function takes one turn at a time, and does not catch an exception and go on after it.

    Attributes:
        closed: whether no operation may begin any more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._queue: deque[_Turn] = deque()

    def __enter__(self) -> None:
        """Take a turn.

        Raises:
            ExecutionError: the context is closed, or an operation is running.
        """
        queue, turn = self._queue, (object(), get_ident(), _getframe(1).f_code)
        queue.append(turn)
        if self.closed or queue[0] is not turn:
            self._begin(turn, _getframe(1))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.popleft()

    def close(self) -> None:
        """Let no operation begin any more, wait for a running one to end, and take the turn of the calling function.

        The function releases everything, and gives the turn back by :meth:`leave`.

        Raises:
            ExecutionError: the thread is in an operation or in such a function already, so that it would wait for
                itself; nothing is closed then.
        """
        caller, thread = _getframe(1), get_ident()
        if any(turn[1] == thread and self._is_running(turn, caller) for turn in self._queue.copy()):
            raise _own()
        self.closed = True
        turn = object(), thread, caller.f_code
        self._queue.append(turn)
        while (first := self._queue[0]) is not turn:
            if self._is_running(first, caller):
                time.sleep(_LOOK_SECONDS)
            else:
                self._drop(first)

    def leave(self) -> None:
        """Give back the turn that :meth:`close` took."""
        self._queue.popleft()

    def _begin(self, turn: _Turn, caller: FrameType) -> None:
        """Drop turns that were left behind before this one, or drop this one and raise an error."""
        while not self.closed and (first := self._queue[0]) is not turn:
            if self._is_running(first, caller):
                self._drop(turn)
                if first[1] == turn[1]:
                    raise _own()
                hint = "give each thread a context of its own, or take turns"
                raise ExecutionError("another thread is using this context", hint)
            self._drop(first)
        if self.closed:
            self._drop(turn)
            raise ExecutionError("the context is closed", "compile the plan again")

    def _drop(self, turn: _Turn) -> None:
        """Remove a turn; another thread may have done so."""
        with suppress(ValueError):
            self._queue.remove(turn)

    def _is_running(self, turn: _Turn, caller: FrameType) -> bool:
        """Return whether the function that took a turn is running.

        Args:
            turn: the turn.
            caller: the calling thread's frame that takes another turn, or is about to.
        """
        _, thread, code = turn
        frame = caller.f_back if thread == get_ident() else _current_frames().get(thread)
        last = frame
        while frame is not None:
            if frame.f_code is code and getattr(frame.f_locals.get("self"), "_guard", self) is self:
                return True
            last, frame = frame, frame.f_back
        # The way up ends at a generator if its thread has gone on meanwhile: it may be running.
        return last is not None and bool(last.f_code.co_flags & _GENERATOR)


def run_all(steps: Sequence[Callable[[], object]]) -> None:
    """Run all steps even if one raises an exception, which is raised at the end.

    Unlike a :class:`contextlib.ExitStack`, it makes no reference cycle of that, which would keep memory.
    """
    if steps:
        try:
            steps[0]()
        finally:
            run_all(steps[1:])


def _own() -> ExecutionError:
    """Return the error for a call from a signal handler or a callback inside an operation of the same thread."""
    hint = "let the handler set a flag, and act on it after the operation"
    return ExecutionError("this thread is in an operation of the context", hint)
