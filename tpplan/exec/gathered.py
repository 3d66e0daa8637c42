"""What a gather returns before it is complete."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

#: By how much longer a coroutine sleeps each time before it asks again, and how long at most.
_STEP_SECONDS, _LONGEST_SECONDS = 2e-5, 1e-3


class Pending(Protocol):
    """A program that was issued."""

    def done(self) -> bool:
        """Return whether its results in host memory are complete."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when they are.

        Raises:
            TimeoutError: they are not, after ``timeout`` seconds.
        """


def wait_within(timeout: float, done: Callable[[], bool]) -> None:
    """Return when something is done; others may work in the meantime.

    Args:
        timeout: seconds.
        done: tells it.

    Raises:
        TimeoutError: it is not, after these.
    """
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"not complete after {timeout} s")
        time.sleep(0)


class Gathered:
    """A tensor in host memory that devices may still be writing; it cannot be seen before it is complete.

    Works like a future: ``done()``, ``result(timeout)``, ``exception(timeout)``, and ``await`` in a coroutine.
    """

    __slots__ = ("__weakref__", "_pending", "_tensor")

    def __init__(self, tensor: Tensor, pending: Pending | None) -> None:
        """Hold back ``tensor`` until ``pending`` is done; None if it is complete."""
        self._tensor = tensor
        self._pending = pending

    def __repr__(self) -> str:
        return f"<Gathered {list(self._tensor.shape)} {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Return whether the tensor is complete; does not wait."""
        return self._pending is None or self._pending.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the tensor is complete.

        Args:
            timeout: in seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it is not complete in time.
        """
        if self._pending is not None:
            self._pending.wait(timeout)
            self._pending = None

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait, as :meth:`wait` does, and return the tensor ``[..., columns]`` on the CPU."""
        self.wait(timeout)
        return self._tensor

    def exception(self, timeout: float | None = None) -> None:
        """Wait, as :meth:`wait` does, and return None: what arrives has no exception."""
        self.wait(timeout)

    @property
    def tensor(self) -> Tensor:
        """The complete tensor ``[..., columns]`` on the CPU; waits for it."""
        self.wait()
        return self._tensor

    def __await__(self) -> Generator[None, None, Tensor]:
        delay = 0.0  # most copies are done at once or soon; what takes longer is not asked all the time
        while not self.done():
            yield from asyncio.sleep(delay).__await__()
            delay = min(delay + _STEP_SECONDS, _LONGEST_SECONDS)
        return self.result()
