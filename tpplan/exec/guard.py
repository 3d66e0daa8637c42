"""Who may use a context, and until when."""

from __future__ import annotations

import threading

from tpplan.errors import ExecutionError


class Guard:
    """Lets one thread at a time into a context, and nobody after its close."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            hint = "give each thread a context of its own, or take turns"
            raise ExecutionError("another thread is using this context", hint)
        if self.closed:
            self._lock.release()
            raise ExecutionError("the context is closed", "compile the plan again")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> bool:
        """Wait for whoever is inside, and say whether it was open."""
        with self._lock:
            was_open, self.closed = not self.closed, True
        return was_open
