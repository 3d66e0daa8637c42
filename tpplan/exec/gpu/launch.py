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
from tpplan.exec.gpu.exchange_table import BLOCKS, MOST_WORDS, OPERANDS, ROWS
from tpplan.exec.programs.program import Buffer, Stream

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
        pieces: that a thread has at once.
    """

    stream: Stream
    place: int
    table: Sequence[int]
    operands: Operands
    row_bytes: int
    blocks: int = BLOCKS
    simple: bool = False
    pieces: int = 1


class Launch:
    """A kernel with its parameter.

    Attributes:
        stream: of the program, that it is to be launched on.
    """

    def __init__(
        self,
        kernels: tuple[Any, Any],
        work: Work,
        blocks: int,
        threads: int,
        header: Mapping[int, int],
        *,
        early: bool = False,
    ) -> None:
        """Write all words that never change.

        Args:
            kernels: loaded by cuda.core: one for all operands, and one for those aligned to the largest piece.
            work: of the device.
            blocks: most that run at once.
            threads: of a block.
            header: words of the context, by their place.
            early: whether the kernels may be launched so in a graph, see :mod:`tpplan.exec.gpu.early`.
        """
        self._early = early
        self.stream = work.stream
        self._operands = work.operands.words
        self._kernel, self._aligned = (driver.CUfunction(int(kernel.handle)) for kernel in kernels)
        self._piece = work.operands.piece
        self._words = (ctypes.c_uint64 * MOST_WORDS)()
        for index, word in {**header, **dict(enumerate(work.table, work.place))}.items():
            self._words[index] = word
        self._packed = Struct(f"<{1 + 2 * len(work.operands.buffers)}Q")
        self._threads, self._blocks = threads, blocks
        self._row_bytes, self._block_bytes = work.row_bytes, threads * self._piece * work.pieces

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Ready:
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
        return Ready(what, kernel, (blocks, self._threads), parameter, 1, early=self._early)


class Ready:
    """A kernel with all that it is told, ready to be launched as often as wanted.

    Attributes:
        what: to call it in errors.
        kernel: of the driver.
        shape: how many blocks, and threads of each.
        parameters: the address of those of its parameters.
        early: whether it may be launched so in a graph, see :mod:`tpplan.exec.gpu.early`.
    """

    __slots__ = ("_pointers", "_start", "_words", "early", "kernel", "parameters", "shape", "what")

    def __init__(
        self,
        what: str,
        kernel: driver.CUfunction,
        shape: tuple[int, int],
        words: ctypes.Array[ctypes.c_uint64],
        arguments: int,
        *,
        early: bool = False,
    ) -> None:
        """Take the words of all parameters.

        Args:
            what: to call the kernel in errors.
            kernel: of the driver.
            shape: how many blocks, and threads of each.
            words: of the parameters; kept.
            arguments: how many of them are parameters, one word each; the last one may have more.
            early: whether it may be launched so in a graph.
        """
        self.what, self.kernel, self.shape, self.early = what, kernel, shape, early
        first = ctypes.addressof(words)
        self._start, self._words = driver.cuLaunchKernel, words
        self._pointers = (ctypes.c_void_p * arguments)(*range(first, first + 8 * arguments, 8))
        self.parameters = ctypes.addressof(self._pointers)

    def __call__(self, stream: int) -> None:
        """Launch it on a stream; if that is a default stream, its device is current.

        Raises:
            ExecutionError: the driver refuses.
        """
        blocks, threads = self.shape
        (result,) = self._start(self.kernel, blocks, 1, 1, threads, 1, 1, 0, stream, self.parameters, 0)
        if result != _SUCCESS:
            raise refused(self.what, result)


def refused(what: str, result: driver.CUresult) -> ExecutionError:
    """Return what is raised where the driver does not launch a kernel."""
    return ExecutionError(f"{what} was not launched: {result.name}", "earlier work on this device may have failed")
