"""A context's host memory: buffers for the caller, rings for copies, slots for messages."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from tpplan.core.workspace import FRAME_FLAG_BYTES, FRAME_SLOT_BYTES, HOST_FLAG_BYTES, HOST_SLOT_BYTES, PAIR, align
from tpplan.errors import ExecutionError
from tpplan.exec.checks import name_of
from tpplan.exec.memory.arena import Arena
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.core.workspace import Pinned
    from tpplan.exec.programs.program import Queue


class HostMemory:
    """One block of host memory, pinned if CUDA devices use it.

    Attributes:
        flags: memory for the counters of queues in host memory.
        rings: the ring of each sender, the host included, for copies in parts.
    """

    def __init__(self, pinned: Pinned, devices: Sequence[int], *, lock_pages: bool) -> None:
        """Allocate the memory.

        Args:
            pinned: its sizes.
            devices: the devices in use.
            lock_pages: whether to pin it, which needs a driver.

        Raises:
            ExecutionError: it cannot be allocated.
        """
        self._arena = Arena(pinned.total_bytes, torch.device("cpu"), "host memory", pinned=lock_pages)
        self._buffers: tuple[Tensor, ...] = tuple(self._arena.keep(pinned.buffer_bytes) for _ in range(2))
        self.rings = {sender: self._arena.keep(PAIR * pinned.chunk_bytes) for sender in (*devices, HOST)}
        self.flags = self._arena.keep(pinned.queues * (HOST_FLAG_BYTES + FRAME_FLAG_BYTES))
        self._slot_area = self._arena.keep(self._arena.free_bytes)
        self._slots: dict[Queue, Tensor] = {}  # one after the other in that area

    def buffer(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor over one of the caller's buffers.

        Raises:
            ExecutionError: there is no such buffer, or it is too small.
        """
        if type(index) is not int or index not in (0, 1):
            raise ExecutionError(f"there is no host buffer {index!r:.40}", "the buffers are 0 and 1")
        memory = self._buffers[index]
        size = prod(shape) * dtype.itemsize
        if size > len(memory):
            raise ExecutionError(
                f"a host buffer of {len(memory)} bytes has no room for {list(shape)} in {name_of(dtype)}",
                "plan with more --max-rows",
            )
        return memory[:size].view(dtype).view(tuple(shape))

    def slots(self, queue: Queue) -> Tensor:
        """Return the slots of a queue in host memory, ``[slots, bytes]``; the same ones every time.

        Raises:
            ExecutionError: there is no room for more queues.
        """
        if queue not in self._slots:
            size = queue.slots * (
                FRAME_SLOT_BYTES if queue.framed else 2 * HOST_SLOT_BYTES
            )  # flags are inside small ones
            start = sum(align(slots.nbytes) for slots in self._slots.values())
            if start + size > len(self._slot_area):
                free = len(self._slot_area) - start
                raise ExecutionError(f"host memory: a queue takes {size} bytes, {free} are free", "use fewer axes")
            self._slots[queue] = self._slot_area[start : start + size].view(queue.slots, -1)
        return self._slots[queue]

    def close(self) -> None:
        """Release the memory."""
        self._buffers = ()
        self.flags = self._slot_area = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.rings.clear()
        self._slots.clear()
        self._arena.close()
