"""Guarding a context against use by several threads at once and use after close."""

from __future__ import annotations

from threading import Lock, get_ident
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from types import TracebackType


class Guard:
    """A non-blocking lock that lets one thread at a time use a context, and none after its close."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = Lock()
        self._owner = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._refuse_own()
            hint = "give each thread a context of its own, or take turns"
            raise ExecutionError("another thread is using this context", hint)
        if self.closed:
            self._lock.release()
            raise ExecutionError("the context is closed", "compile the plan again")
        self._owner = get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = 0
        self._lock.release()

    def close(self) -> bool:
        """Wait for a running operation to end, close the guard, and return whether it was open.

        Raises:
            ExecutionError: the operation is the calling thread's own, so it would deadlock.
        """
        self._refuse_own()
        with self._lock:
            was_open, self.closed = not self.closed, True
        return was_open

    def _refuse_own(self) -> None:
        """Raise an error if the calling thread is in an operation, and now in a signal handler or a callback."""
        if self._owner == get_ident():
            hint = "let the handler set a flag, and act on it after the operation"
            raise ExecutionError("this thread is in an operation of the context", hint)
