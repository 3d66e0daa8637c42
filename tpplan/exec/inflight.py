"""Host memory that devices may still be writing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tpplan.exec.overlap import share_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.gathered import Pending


class Inflight:
    """The results of gathers that are not complete.

    The host has no stream that would keep a later use of the same memory behind them, and torch does not know of the
    copies, so that the memory is kept alive here until they are done, whether or not anybody still wants it.
    """

    def __init__(self) -> None:
        self._writes: deque[tuple[Tensor, Pending]] = deque()

    def add(self, tensor: Tensor, pending: Pending) -> None:
        """Keep a tensor until a program has written it, and a little longer: until somebody comes to use another."""
        self._writes.append((tensor, pending))

    def settle(self, tensor: Tensor) -> None:
        """Wait for everything that writes where a tensor is."""
        writes = self._writes
        while writes and writes[0][1].done():
            writes.popleft()
        for other, pending in writes:
            if not pending.done() and share_bytes(other, tensor):
                pending.wait()

    def clear(self) -> None:
        """Forget all of them, as they are complete."""
        self._writes.clear()
