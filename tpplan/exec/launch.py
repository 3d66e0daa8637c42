"""The launch of a kernel of an exchange, prepared so that it costs the host little more than the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

from attrs import frozen
from cuda.bindings import driver

from tpplan.errors import ExecutionError
from tpplan.exec.binding import pitch
from tpplan.exec.exchange_table import BLOCKS, MOST_WORDS, OPERANDS, ROWS
from tpplan.exec.program import Buffer, Stream

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class Operands:
    """The caller's tensors, as a kernel is told of them.

    Attributes:
        buffers: in the order of the words; there may be no tensor for some.
        bits: of all bytes at which something starts in a row, and of all widths.
        piece: the largest that is moved at once, in bytes.
    """

    buffers: tuple[Buffer, ...]
    bits: int
    piece: int

    def words(self, tensors: Mapping[Buffer, Tensor]) -> list[int]:
        """Return the largest piece to which everything is aligned, then address and pitch of each."""
        words, every = [0], self.bits | self.piece
        for buffer in self.buffers:
            matrix = tensors.get(buffer)
            address, step = (0, 0) if matrix is None else (matrix.data_ptr(), pitch(matrix))
            every |= address | step
            words += (address, step)
        words[0] = every & -every
        return words


@frozen(eq=False)
class Work:
    """What one device does in an exchange, for a dtype.

    Attributes:
        stream: of the program.
        place: of the table in the parameter.
        table: its words.
        operands: of the call.
        row_bytes: that the longest step moves of each row, rounded up.
        blocks: most of a launch.
        simple: whether there is a kernel that does it faster where everything is aligned to the largest piece.
    """

    stream: Stream
    place: int
    table: Sequence[int]
    operands: Operands
    row_bytes: int
    blocks: int = BLOCKS
    simple: bool = False


class Launch:
    """A kernel with its parameter.

    Attributes:
        stream: of the program, that it is to be launched on.
    """

    def __init__(
        self, kernels: tuple[Any, Any], work: Work, blocks: int, threads: int, header: Mapping[int, int]
    ) -> None:
        """Write all words that never change.

        Args:
            kernels: loaded by cuda.core: one for all operands, and one for those aligned to the largest piece.
            work: of the device.
            blocks: most that run at once.
            threads: of a block.
            header: words of the context, by their place.
        """
        self.stream = work.stream
        self._operands = work.operands.words
        self._kernel, self._aligned = (driver.CUfunction(int(kernel.handle)) for kernel in kernels)
        self._piece = work.operands.piece
        self._words = (ctypes.c_uint64 * MOST_WORDS)()
        for index, word in {**header, **dict(enumerate(work.table, work.place))}.items():
            self._words[index] = word
        self._packed = Struct(f"<{1 + 2 * len(work.operands.buffers)}Q")
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._words))
        self._pointers = ctypes.addressof(self._parameters)
        self._threads, self._blocks = threads, blocks
        self._config = None
        if work.simple:
            c = self._config = driver.CUlaunchConfig()
            c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ = 1, 1, 1, threads, 1, 1
            a = driver.CUlaunchAttribute()
            a.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            v = driver.CUlaunchAttributeValue()
            v.programmaticStreamSerializationAllowed = 1
            a.value = v
            c.attrs, c.numAttrs = [a], 1
        self._row_bytes, self._block_bytes = work.row_bytes, threads * self._piece

    def issue(self, stream: int, tensors: Mapping[Buffer, Tensor], rows: int) -> None:
        """Launch the kernel.

        Args:
            stream: handle of the one to launch on; if it is a default stream, its device has to be current.
            tensors: the caller's.
            rows: of each.

        Raises:
            ExecutionError: the driver refuses.
        """
        words = self._operands(tensors)
        self._words[ROWS] = rows
        self._packed.pack_into(self._words, 8 * OPERANDS, *words)
        kernel = self._aligned if words[0] == self._piece else self._kernel
        blocks = min(self._blocks, -(-rows * self._row_bytes // self._block_bytes)) or 1
        if kernel is self._aligned and self._config is not None:
            self._config.gridDimX = blocks
            self._config.hStream = driver.CUstream(stream)
            (result,) = driver.cuLaunchKernelEx(self._config, kernel, self._pointers, 0)
        else:
            (result,) = driver.cuLaunchKernel(kernel, blocks, 1, 1, self._threads, 1, 1, 0, stream, self._pointers, 0)
        if result != driver.CUresult.CUDA_SUCCESS:
            message = f"a kernel of device {self.stream.device} was not launched: {result.name}"
            raise ExecutionError(message, "earlier work on this device may have failed")
