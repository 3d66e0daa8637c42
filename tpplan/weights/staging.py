"""Host memory on the way from a file to the devices: pinned where devices read it, and used again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.weights.reads import CHUNK_BYTES

if TYPE_CHECKING:
    from torch import Tensor


class Buffer:
    """Bytes that are filled on the host and then sent.

    Attributes:
        memory: the bytes.
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocate them."""
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._sent: list[torch.cuda.Event] = []

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes of this buffer to a device, without waiting if that is a CUDA device."""
        target.copy_(source, non_blocking=True)
        if target.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(target.device))
            self._sent.append(event)

    def wait(self) -> None:
        """Return when everything that was sent has arrived."""
        for event in self._sent:
            event.synchronize()
        self._sent.clear()


class Buffers:
    """Two buffers that take turns, each as large as a read: one is filled while the other is sent."""

    def __init__(self, *, pinned: bool) -> None:
        """Allocate them."""
        self._turns = [Buffer(CHUNK_BYTES, pinned=pinned) for _ in range(2)]

    def take(self) -> Buffer:
        """Return one that is free."""
        self._turns.reverse()
        free = self._turns[0]
        free.wait()
        return free

    def wait(self) -> None:
        """Return when everything that was sent has arrived."""
        for buffer in self._turns:
            buffer.wait()
