"""What operations return before they are complete: the future of a gather, and the block of work on side streams."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, Self

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType

    from torch import Tensor

#: How much longer a coroutine sleeps after each poll, and the longest sleep.
_STEP_SECONDS, _LONGEST_SECONDS = 2e-5, 1e-3


class Pending(Protocol):
    """A program that is issued and may not be complete."""

    def done(self) -> bool:
        """Return whether its results in host memory are complete."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until its results are complete.

        Raises:
            TimeoutError: they are not complete after ``timeout`` seconds.
        """


def wait_within(timeout: float, done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns true, letting other threads run in the meantime.

    Args:
        timeout: maximum wait, in seconds.
        done: the condition.

    Raises:
        TimeoutError: it is still false after ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"not complete after {timeout} s")
        time.sleep(0)


class Gathered:
    """A future for a tensor in host memory; it gives no access to the tensor while devices may still be writing it.

    It has ``done()``, ``result(timeout)`` and ``exception(timeout)``, and supports ``await`` in a coroutine.
    """

    __slots__ = ("__weakref__", "_pending", "_tensor")

    def __init__(self, tensor: Tensor, pending: Pending | None) -> None:
        """Hold back ``tensor`` until ``pending`` is done; pass None if the tensor is already complete."""
        self._tensor = tensor
        self._pending = pending

    def __repr__(self) -> str:
        return f"<Gathered {list(self._tensor.shape)} {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Return whether the tensor is complete, without waiting."""
        return self._pending is None or self._pending.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the tensor is complete.

        Args:
            timeout: maximum wait, in seconds; None for no limit.

        Raises:
            TimeoutError: the tensor is not complete in time.
        """
        if self._pending is not None:
            self._pending.wait(timeout)
            self._pending = None

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait, as :meth:`wait` does, and return the tensor ``[..., columns]`` on the CPU."""
        self.wait(timeout)
        return self._tensor

    def exception(self, timeout: float | None = None) -> None:
        """Wait, as :meth:`wait` does, and return None: a completed gather has no exception."""
        self.wait(timeout)

    @property
    def tensor(self) -> Tensor:
        """The tensor ``[..., columns]`` on the CPU; waits until it is complete."""
        self.wait()
        return self._tensor

    def __await__(self) -> Generator[None, None, Tensor]:
        delay = 0.0  # most copies are done at once or soon; longer ones are polled less and less often
        while not self.done():
            yield from asyncio.sleep(delay).__await__()
            delay = min(delay + _STEP_SECONDS, _LONGEST_SECONDS)
        return self.result()


class Noting(Protocol):
    """A backend that counts the open :class:`Aside` blocks.

    Attributes:
        asides: number of open blocks.
    """

    asides: int


class Aside:
    """A context manager whose block runs operations concurrently with work issued outside of it, until :meth:`wait`.

    On virtual devices everything runs in order.
    """

    def __init__(self, backend: Noting) -> None:
        """Create it closed; the ``with`` statement opens it.

        Args:
            backend: the backend that issues programs, and whose ``asides`` the block is counted in.
        """
        self._backend = backend
        self._is_open = self._has_ended = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise ExecutionError("this aside is open already", "ask the context for another one")
        self._is_open, self._has_ended = True, False
        self._backend.asides += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open, self._has_ended = False, True
        self._backend.asides -= 1

    def wait(self) -> None:
        """Order work issued from now on after the work of the block, without blocking the host.

        Raises:
            ExecutionError: the block has not ended.
        """
        if not self._has_ended:
            raise ExecutionError("an aside is waited for that has not ended", "call wait() behind the with statement")
