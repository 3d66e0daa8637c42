"""Host memory on the way from a file to the devices: pinned where devices read it, and used again and again."""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import c_char
from typing import TYPE_CHECKING, Final

import torch

from tpplan.weights.reads import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from tpplan.weights.cuda import CudaSender
    from tpplan.weights.reads import Move

_TURNS: Final = 2


class Sender:
    """What copies from a buffer to a virtual device: at once."""

    def __init__(self, buffer: Tensor, block: Tensor) -> None:
        """Take the bytes of both."""
        self._buffer, self._block = buffer, block

    def send(self, move: Move) -> None:
        """Copy what a move says."""
        size = move.rows, move.width
        source = self._buffer[move.source :].as_strided(size, (move.source_step, 1))
        self._block[move.target :].as_strided(size, (move.target_step, 1)).copy_(source)

    def wait(self) -> None:
        """Return when everything that was sent has arrived."""


class Buffer:
    """Bytes that a read fills and devices are sent their parts of.

    Attributes:
        bytes: to fill.
    """

    def __init__(self, blocks: Mapping[int, Tensor]) -> None:
        """Allocate them, pinned for CUDA devices.

        Args:
            blocks: the bytes of each device.
        """
        pinned = any(block.device.type == "cuda" for block in blocks.values())
        memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        # once: such a type costs far more than a slice
        self.bytes = memoryview((c_char * CHUNK_BYTES).from_address(memory.data_ptr())).cast("B")
        self._senders = {device: _sender(memory, block) for device, block in blocks.items()}

    def send(self, moves: Iterable[Move]) -> None:
        """Copy to the devices, without waiting if these are CUDA devices."""
        for move in moves:
            self._senders[move.device].send(move)

    def wait(self) -> None:
        """Return when everything that was sent has arrived.

        Raises:
            ExecutionError: a device failed; the others were waited for.
        """
        with ExitStack() as stack:  # which calls them all
            for sender in self._senders.values():
                stack.callback(sender.wait)


def _sender(memory: Tensor, block: Tensor) -> Sender | CudaSender:
    if block.device.type != "cuda":
        return Sender(memory, block)
    from tpplan.weights.cuda import CudaSender  # noqa: PLC0415 (needs a driver)

    return CudaSender(memory, block)


class Buffers:
    """Two buffers that take turns, each as large as a read: one is filled while the other is sent."""

    def __init__(self, blocks: Mapping[int, Tensor]) -> None:
        """Allocate nothing yet: not every reader needs them.

        Args:
            blocks: the bytes of each device.
        """
        self._blocks = blocks
        self._turns: list[Buffer] = []

    def take(self) -> Buffer:
        """Return one that is free.

        Raises:
            ExecutionError: a device failed.
        """
        if len(self._turns) < _TURNS:
            self._turns.append(Buffer(self._blocks))
        else:
            self._turns[0].wait()  # the one that was sent first
            self._turns.append(self._turns.pop(0))
        return self._turns[-1]

    def wait(self) -> None:
        """Return when everything that was sent has arrived.

        Raises:
            ExecutionError: a device failed; everything else was waited for.
        """
        with ExitStack() as stack:
            for buffer in self._turns:
                stack.callback(buffer.wait)
