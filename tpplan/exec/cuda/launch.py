"""Launches of exchange kernels, prepared so that they cost the host little more than the driver's call.

Programs are ready for all operands of a dtype, and bound to those of a call. Launches that recur become graphs of one
kernel each, which the driver launches in half the time.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen

from tpplan.errors import ExecutionError
from tpplan.exec.handles import Pending
from tpplan.exec.memory.binding import pitch
from tpplan.exec.programs.program import Buffer, Program, Stream
from tpplan.exec.protocol.direct import TOLD
from tpplan.exec.protocol.words import BLOCKS, MOST_WORDS, OPERANDS, ROWS
from tpplan.exec.toolchain.bindings import driver
from tpplan.exec.toolchain.torch_shims import current_device, switch_device

if TYPE_CHECKING:
    from torch import Tensor

_SUCCESS = driver.CUresult.CUDA_SUCCESS


@frozen(eq=False)
class Operands:
    """The caller's tensors as parameters of a kernel.

    Attributes:
        buffers: the buffers in the order of the words; some may have no tensor.
        bits: bitwise or of all byte offsets in rows and of all widths.
        piece: maximum bytes that are moved at once.
        others: further buffers that have to be aligned alike.
        fixed: addresses and pitches of buffers of the context.
        told: buffers that other devices are told of, and for which device.
        least: bytes that are moved at once if not everything is aligned to ``piece``; 0 for as many as possible.
    """

    buffers: tuple[Buffer, ...]
    bits: int
    piece: int
    others: tuple[Buffer, ...] = ()
    fixed: Mapping[Buffer, tuple[int, int]] = field(factory=dict)
    told: tuple[tuple[Buffer, int], ...] = ()
    least: int = 0

    def words(self, tensors: Mapping[Buffer, Tensor]) -> list[int]:
        """Return the bytes that are moved at once, then the address and pitch of each tensor."""
        words, every = [0], self.bits | self.piece
        for buffer in self.buffers:
            address, step = self.fixed[buffer] if buffer in self.fixed else _place(tensors.get(buffer))
            every |= address | step
            words += (address, step)
        for buffer in self.others:
            address, step = _place(tensors.get(buffer))
            every |= address | step
        words[0] = every & -every
        if words[0] < self.piece and self.least:
            words[0] = self.least
        return words


def _place(matrix: Tensor | None) -> tuple[int, int]:
    """Return the address and the pitch of a matrix; zeros if there is none."""
    return (0, 0) if matrix is None else (matrix.data_ptr(), pitch(matrix))


@frozen(eq=False)
class Work:
    """A device's work in an exchange, for a dtype.

    Attributes:
        stream: the program's stream.
        place: index of the table in the parameter.
        table: the words of the table.
        operands: the operands of the call.
        row_bytes: bytes per row that the longest step moves, rounded up.
        blocks: maximum blocks of a launch.
        simple: whether there is a faster kernel for operands aligned to the largest piece.
        pieces: pieces that a thread handles at once.
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
    """A kernel with its parameter, to be bound to operands.

    Attributes:
        stream: the program's stream to launch it on.
    """

    def __init__(
        self,
        kernels: tuple[Any, Any],
        work: Work,
        blocks: int,
        threads: int,
        header: Mapping[int, int],
        *,
        programmatic: tuple[bool, bool] = (False, False),
        reach: Callable[[int, int], int] = lambda address, _: address,
    ) -> None:
        """Write all constant words of the parameter.

        Args:
            kernels: loaded kernels: one for all operands, and one for those aligned to the largest piece.
            work: the device's work.
            blocks: maximum blocks that run at once.
            threads: threads per block.
            header: the context's words, by index.
            programmatic: whether graphs may launch each kernel early, see
                :mod:`tpplan.exec.cuda.programmatic_launch`.
            reach: returns the address by which another device reaches an address of this one.
        """
        self._programmatic, self._reach, self._told = programmatic, reach, work.operands.told
        self.stream = work.stream
        self._operands = work.operands.words
        self._kernel, self._aligned = (driver.CUfunction(int(kernel)) for kernel in kernels)
        self._piece = work.operands.piece
        self._words = (ctypes.c_uint64 * MOST_WORDS)()
        for index, word in {**header, **dict(enumerate(work.table, work.place))}.items():
            self._words[index] = word
        self._packed = Struct(f"<{1 + 2 * len(work.operands.buffers)}Q")
        self._threads, self._blocks = threads, blocks
        self._row_bytes, self._block_bytes = work.row_bytes, threads * self._piece * work.pieces

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Ready:
        """Return a callable that launches the kernel on a given stream any number of times.

        Args:
            operands: the caller's tensors; only their addresses are kept.
            rows: rows of each tensor.
        """
        parameter = (ctypes.c_uint64 * MOST_WORDS).from_buffer_copy(self._words)
        piece, *_ = words = self._operands(operands)
        parameter[ROWS] = rows
        self._packed.pack_into(parameter, 8 * OPERANDS, *words)
        for index, (buffer, device) in enumerate(self._told, TOLD):
            parameter[index] = self._reach(operands[buffer].data_ptr(), device)
        is_aligned = piece == self._piece
        kernel = self._aligned if is_aligned else self._kernel
        blocks = min(self._blocks, -(-rows * self._row_bytes // self._block_bytes)) or 1
        what = f"a kernel of device {self.stream.device}"
        return Ready(what, kernel, (blocks, self._threads), parameter, 1, programmatic=self._programmatic[is_aligned])


class Ready:
    """A kernel with all of its parameters, which can be launched any number of times.

    Attributes:
        what: name of the kernel in errors.
        kernel: the driver's function.
        shape: number of blocks, and threads per block.
        parameters: address of the array of the parameters' addresses.
        programmatic: whether it may be launched early in a graph, see :mod:`tpplan.exec.cuda.programmatic_launch`.
    """

    __slots__ = ("_pointers", "_start", "_words", "kernel", "parameters", "programmatic", "shape", "what")

    def __init__(
        self,
        what: str,
        kernel: driver.CUfunction,
        shape: tuple[int, int],
        words: ctypes.Array[ctypes.c_uint64],
        arguments: int,
        *,
        programmatic: bool = False,
    ) -> None:
        """Take the words of all parameters.

        Args:
            what: name of the kernel in errors.
            kernel: the driver's function.
            shape: number of blocks, and threads per block.
            words: the words of the parameters; kept.
            arguments: number of parameters, each of one word; the last one may have more.
            programmatic: whether it may be launched early in a graph.
        """
        self.what, self.kernel, self.shape, self.programmatic = what, kernel, shape, programmatic
        first = ctypes.addressof(words)
        self._start, self._words = driver.cuLaunchKernel, words
        self._pointers = (ctypes.c_void_p * arguments)(*range(first, first + 8 * arguments, 8))
        self.parameters = ctypes.addressof(self._pointers)

    def __call__(self, stream: int) -> None:
        """Launch the kernel on a stream; if that is a default stream, its device must be current.

        Raises:
            ExecutionError: the driver reports an error.
        """
        blocks, threads = self.shape
        (result,) = self._start(self.kernel, blocks, 1, 1, threads, 1, 1, 0, stream, self.parameters, 0)
        if result != _SUCCESS:
            raise refused(self.what, result)


def refused(what: str, result: driver.CUresult) -> ExecutionError:
    """Return the error for a kernel that the driver did not launch."""
    return ExecutionError(f"{what} was not launched: {result.name}", "earlier work on this device may have failed")


class Step(Protocol):
    """A command of a program, ready for all operands of a dtype."""

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return a callable that issues it to the stream whose handle it is given.

        If that is a default stream, its device must be current.

        Args:
            operands: the caller's tensors.
            rows: rows of each tensor.
        """


@frozen(eq=False)
class ReadyProgram:
    """A program, ready for all operands of a dtype.

    Attributes:
        program: the program, kept alive because it is cached by its identity.
        steps: its commands, without those that are redundant as tpplan's streams are the caller's; each with its
            device, and the handle of its stream, or 0 for the device's current one.
        devices: the devices that it uses.
        loads: the devices whose second streams it uses.
        pending: returns a handle for the results of the call that was issued last.
        on_host: whether the host takes part in it.
        copies: whether the host copies in it.
    """

    program: Program
    steps: tuple[tuple[Step, int, int], ...]
    devices: tuple[int, ...]
    loads: frozenset[int]
    pending: Callable[[], Pending]
    on_host: bool
    copies: bool


#: A callable that issues a step to the stream that it is given, with the step's device and handle.
BoundStep = tuple[Callable[[int], None], int, int]


@define(eq=False)
class Bound:
    """A program on given memory, which can be issued any number of times.

    Attributes:
        ready: the program.
        steps: callables that issue its steps.
        times: how often they were issued; negative for some time after ``quick`` was given up.
        quick: callables that take the host less time, once it was issued often; for a program that is captured, its
            steps; else empty.
    """

    ready: ReadyProgram
    steps: tuple[BoundStep, ...]
    times: int = 0
    quick: tuple[BoundStep, ...] = ()


#: Launches before a graph is made, which takes 45 µs and saves 4 each time (two H200).
_OFTEN = 16
#: Further launches if the graph was dropped before: if more programs take turns than are kept, most would go unused.
_AGAIN = 256
#: Maximum number of programs with graphs: each takes 120 KiB of every device (two H200), 8 MiB in all, which
#: the plan's overhead includes.
_KEPT = 64


class LaunchGraphs:
    """The graphs of programs that are issued often; the oldest are dropped."""

    def __init__(self, ordinals: Mapping[int, int]) -> None:
        """Take the ordinal of each device of the plan in use."""
        self._ordinals = ordinals
        self._latest: deque[Bound] = deque()

    def steps(self, bound: Bound) -> tuple[BoundStep, ...]:
        """Return the steps of a program that is not captured, of which kernels are graphs if it is issued often."""
        bound.times += 1
        if bound.times < _OFTEN:
            return bound.steps
        if not any(isinstance(issue, Ready) for issue, _, _ in bound.steps):
            bound.quick = bound.steps
            return bound.steps
        if len(self._latest) == _KEPT:
            oldest = self._latest.popleft()
            oldest.times, oldest.quick = -_AGAIN, ()
        self._latest.append(bound)
        bound.quick = tuple(
            (graph_of(issue, self._ordinals[device]) or issue if isinstance(issue, Ready) else issue, device, fixed)
            for issue, device, fixed in bound.steps
        )
        return bound.quick

    def clear(self) -> None:
        """Drop all graphs."""
        for bound in self._latest:
            bound.times, bound.quick = 0, ()
        self._latest.clear()


class _Executable:
    """A graph that can be launched. If it is deleted while it runs, the driver frees it when it is complete."""

    __slots__ = ("handle",)
    _destroy = staticmethod(driver.cuGraphExecDestroy)  # still available when modules are torn down

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __del__(self) -> None:
        self._destroy(self.handle)


def graph_of(ready: Ready, ordinal: int) -> Callable[[int], None] | None:
    """Return a callable that does the same as a launch and needs nothing of it; None if the driver refuses a graph.

    It cannot be captured.

    Args:
        ready: the launch.
        ordinal: ordinal of the device that the kernel is loaded on.
    """
    before = current_device()
    try:  # before the switch: an interrupt comes right behind it
        switch_device(ordinal)
        executable = _instantiate(ready)
    finally:
        switch_device(before)
    if executable is None:
        return None
    start, handle, what = driver.cuGraphLaunch, executable.handle, ready.what

    def launch(stream: int, _: object = executable) -> None:
        (result,) = start(handle, stream)
        if result != _SUCCESS:
            raise refused(what, result)

    return launch


def _instantiate(ready: Ready) -> _Executable | None:
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    error, node.ctx = driver.cuCtxGetCurrent()
    if error != _SUCCESS:
        return None
    node.kern = driver.CUkernel(int(ready.kernel))
    node.gridDimX, node.blockDimX = ready.shape
    node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
    node.kernelParams = ready.parameters
    error, graph = driver.cuGraphCreate(0)
    if error != _SUCCESS:
        return None
    try:
        error, _ = driver.cuGraphAddKernelNode(graph, None, 0, node)
        if error != _SUCCESS:
            return None
        error, handle = driver.cuGraphInstantiate(graph, 0)
        return _Executable(handle) if error == _SUCCESS else None
    finally:
        driver.cuGraphDestroy(graph)
