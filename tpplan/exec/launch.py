"""The launch of a kernel of an exchange, prepared so that it costs the host little more than the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
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

_SUCCESS = driver.CUresult.CUDA_SUCCESS


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
        self._threads, self._blocks = threads, blocks
        self._row_bytes, self._block_bytes = work.row_bytes, threads * self._piece

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return what launches the kernel, as often as it is called, on the stream that it is given.

        Args:
            operands: the caller's tensors; only their addresses are kept.
            rows: of each.
        """
        parameter = (ctypes.c_uint64 * MOST_WORDS).from_buffer_copy(self._words)
        piece, *_ = words = self._operands(operands)
        parameter[ROWS] = rows
        self._packed.pack_into(parameter, 8 * OPERANDS, *words)
        kernel = self._aligned if piece == self._piece else self._kernel
        blocks = min(self._blocks, -(-rows * self._row_bytes // self._block_bytes)) or 1
        what = f"a kernel of device {self.stream.device}"
        return launching(what, kernel, (blocks, self._threads), [ctypes.addressof(parameter)], parameter)


def launching(
    what: str, kernel: driver.CUfunction, shape: tuple[int, int], parameters: Sequence[int], held: object
) -> Callable[[int], None]:
    """Return what launches a kernel on the stream that it is given; if that is a default stream, its device is current.

    Args:
        what: to call the kernel in errors.
        kernel: of the driver.
        shape: how many blocks, and threads of each.
        parameters: their addresses.
        held: the memory that they are in.

    Raises:
        ExecutionError: the driver refuses, when it is called.
    """
    pointers = (ctypes.c_void_p * len(parameters))(*parameters)
    start, blocks, threads, address = driver.cuLaunchKernel, *shape, ctypes.addressof(pointers)

    def launch(stream: int, _: object = (held, pointers)) -> None:
        (result,) = start(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, address, 0)
        if result != _SUCCESS:
            raise ExecutionError(
                f"{what} was not launched: {result.name}", "earlier work on this device may have failed"
            )

    return launch
