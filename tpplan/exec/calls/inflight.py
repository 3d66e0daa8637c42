"""Host memory that devices may still be writing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tpplan.exec.overlap import share_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.handles import Pending


class Inflight:
    """The results of incomplete gathers.

    The host has no stream to order later uses of the same memory, and torch does not know of the copies. So the memory
    is kept alive here until they are complete, even if the caller has dropped it.
    """

    def __init__(self) -> None:
        self._writes: deque[tuple[Tensor, Pending]] = deque()

    def add(self, tensor: Tensor, pending: Pending) -> None:
        """Keep a tensor alive until a program has written it, and on until the next :meth:`settle`."""
        self._writes.append((tensor, pending))

    def settle(self, tensor: Tensor) -> None:
        """Wait for all writes that overlap a tensor's memory."""
        writes = self._writes
        while writes and writes[0][1].done():
            writes.popleft()
        for other, pending in writes:
            if not pending.done() and share_bytes(other, tensor):
                pending.wait()

    def clear(self) -> None:
        """Release all tensors, whose writes are complete."""
        self._writes.clear()
