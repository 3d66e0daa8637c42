"""The launch of a kernel of an exchange, prepared so that it costs the host little more than the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any

from attrs import frozen
from cuda.bindings import driver
from torch import Tensor

from tpplan.errors import ExecutionError
from tpplan.exec.exchange_table import BLOCKS, MOST_WORDS, OPERANDS, ROWS
from tpplan.exec.program import Buffer, Stream


@frozen(eq=False)
class Work:
    """What one device does in an exchange, for a dtype.

    Attributes:
        stream: of the program.
        place: of the table in the parameter.
        table: its words.
        operands: makes the words of the operands; as many for all calls.
        row_bytes: that the longest step moves of each row, rounded up.
        blocks: most of a launch.
    """

    stream: Stream
    place: int
    table: Sequence[int]
    operands: Callable[[Mapping[Buffer, Tensor]], list[int]]
    row_bytes: int
    blocks: int = BLOCKS


class Launch:
    """A kernel with its parameter.

    Attributes:
        stream: of the program, that it is to be launched on.
    """

    def __init__(self, kernel: Any, work: Work, blocks: int, block: tuple[int, int], header: Mapping[int, int]) -> None:
        """Write all words that never change.

        Args:
            kernel: loaded by cuda.core.
            work: of the device.
            blocks: most that run at once.
            block: its threads, and the bytes that each moves at once.
            header: words of the context, by their place.
        """
        self.stream = work.stream
        self._operands = work.operands
        self._kernel = driver.CUfunction(int(kernel.handle))
        self._words = (ctypes.c_uint64 * MOST_WORDS)()
        count = len(work.operands({}))
        for index, word in {**header, **dict(enumerate(work.table, work.place))}.items():
            self._words[index] = word
        self._packed = Struct(f"<{count}Q")
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._words))
        self._pointers = ctypes.addressof(self._parameters)
        self._threads, self._blocks = block[0], blocks
        self._row_bytes, self._block_bytes = work.row_bytes, block[0] * block[1]

    def issue(self, stream: int, operands: Mapping[Buffer, Tensor], rows: int) -> None:
        """Launch the kernel.

        Args:
            stream: handle of the one to launch on; if it is a default stream, its device has to be current.
            operands: the caller's tensors.
            rows: of each.

        Raises:
            ExecutionError: the driver refuses.
        """
        self._words[ROWS] = rows
        self._packed.pack_into(self._words, 8 * OPERANDS, *self._operands(operands))
        blocks = min(self._blocks, -(-rows * self._row_bytes // self._block_bytes)) or 1
        (result,) = driver.cuLaunchKernel(self._kernel, blocks, 1, 1, self._threads, 1, 1, 0, stream, self._pointers, 0)
        if result != driver.CUresult.CUDA_SUCCESS:
            message = f"a kernel of device {self.stream.device} was not launched: {result.name}"
            raise ExecutionError(message, "earlier work on this device may have failed")
