"""Staging buffers in host memory between files and devices: reused, and pinned for CUDA devices."""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import c_char
from typing import TYPE_CHECKING, Final

import torch

from tpplan.exec.machine.numa import near
from tpplan.exec.memory.pinning import refused
from tpplan.weights.reads import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from tpplan.weights.cuda import CudaSender
    from tpplan.weights.reads import Move

_TURNS: Final = 2


class Sender:
    """Synchronous copies from a buffer to a virtual device."""

    def __init__(self, buffer: Tensor, block: Tensor) -> None:
        """Keep the buffer and the device's block."""
        self._buffer, self._block = buffer, block

    def send(self, move: Move) -> None:
        """Perform the copy of a move."""
        size = move.rows, move.width
        source = self._buffer[move.source :].as_strided(size, (move.source_step, 1))
        self._block[move.target :].as_strided(size, (move.target_step, 1)).copy_(source)

    def wait(self) -> None:
        """Return at once: all copies are complete."""


class Buffer:
    """A buffer for one read, from which devices are sent their parts.

    Attributes:
        bytes: memory for the read to fill.
    """

    def __init__(self, blocks: Mapping[int, Tensor]) -> None:
        """Allocate the memory, pinned for CUDA devices.

        Args:
            blocks: the block of bytes on each device.

        Raises:
            ExecutionError: the memory cannot be allocated.
        """
        pinned = any(block.device.type == "cuda" for block in blocks.values())
        try:
            with near([block.device for block in blocks.values()]):
                memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            what = f"cannot allocate {CHUNK_BYTES} bytes of host memory to load weights through"
            raise refused(what, CHUNK_BYTES, error, "load the weights before other programs start") from error
        # created once, because the ctypes array type costs far more than a slice
        self.bytes = memoryview((c_char * CHUNK_BYTES).from_address(memory.data_ptr())).cast("B")
        self._senders = {device: _sender(memory, block) for device, block in blocks.items()}

    def send(self, moves: Iterable[Move]) -> None:
        """Copy to the devices; asynchronously for CUDA devices."""
        for move in moves:
            self._senders[move.device].send(move)

    def wait(self) -> None:
        """Wait until all copies are complete.

        Raises:
            ExecutionError: a device failed; copies to the others are complete.
        """
        with ExitStack() as stack:  # calls every one, even after an error
            for sender in self._senders.values():
                stack.callback(sender.wait)


def _sender(memory: Tensor, block: Tensor) -> Sender | CudaSender:
    if block.device.type != "cuda":
        return Sender(memory, block)
    from tpplan.weights.cuda import CudaSender  # noqa: PLC0415 (needs a driver)

    return CudaSender(memory, block)


class Buffers:
    """Double buffering: of two buffers of the size of a read, one is filled while the other is sent."""

    def __init__(self, blocks: Mapping[int, Tensor]) -> None:
        """Defer allocation, because not every reader needs the buffers.

        Args:
            blocks: the block of bytes on each device.
        """
        self._blocks = blocks
        self._turns: list[Buffer] = []

    def take(self) -> Buffer:
        """Return a free buffer, after waiting for its copies.

        Raises:
            ExecutionError: a device failed.
        """
        if len(self._turns) < _TURNS:
            self._turns.append(Buffer(self._blocks))
        else:
            self._turns[0].wait()  # the one that was sent earlier
            self._turns.append(self._turns.pop(0))
        return self._turns[-1]

    def wait(self) -> None:
        """Wait until all copies are complete.

        Raises:
            ExecutionError: a device failed; all other copies are complete.
        """
        with ExitStack() as stack:
            for buffer in self._turns:
                stack.callback(buffer.wait)
