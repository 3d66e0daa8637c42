"""HostWrites on CUDA devices: kernels write to host memory and raise flags there, which the host polls.

Events would cost the host two more driver calls for each device, to record and to wait.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from tpplan.errors import ExecutionError
from tpplan.exec.cuda.launch import Ready
from tpplan.exec.handles import wait_within
from tpplan.exec.memory.binding import finder, no_memory
from tpplan.exec.programs.program import HOST, Copy, Exchange, writes
from tpplan.exec.toolchain.bindings import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.programs.program import Buffer, Program

KERNEL = "landing_move"
#: Distance between two devices' flags in words of 4 bytes; each flag has a line of memory of its own.
LINE = 16
_MASK, _BEHIND = 2**32 - 1, 2**31
_THREADS, _VECTOR_BYTES = 512, 16
#: Bytes that a block moves, and maximum number of blocks: so few saturate the link to the host.
_BLOCK_BYTES, _MOST_BLOCKS = 2**14, 32
#: Polls of a flag before the host yields to other threads, and seconds between checks that devices are still working.
_PATIENCE, _LOOK_SECONDS = 512, 0.01
#: Number of the kernel's arguments.
_ARGUMENTS = 9


def writes_host_memory(program: Program) -> bool:
    """Return whether a program consists of kernels that write to host memory."""
    steps = [step for command in program.commands if isinstance(command, Exchange) for step in command.steps]
    return bool(steps) and all(view.buffer.device == HOST for step in steps for view in writes(step))


class HostWrites:
    """Prepares host_writes, and counts them."""

    def __init__(self, devices: Sequence[int], flags: Tensor, counters: Counters, check: Callable[[], None]) -> None:
        """Start with all counts zero.

        Args:
            devices: the plan's devices in use.
            flags: zeros in pinned memory, ``[LINE]`` in 32 bits for each device.
            counters: the context's counters.
            check: raises an error if a device timed out.
        """
        self._flags = flags
        self._seen = memoryview(flags.numpy())  # type: ignore[arg-type]
        self._words = {device: LINE * i for i, device in enumerate(devices)}
        self._counts = dict.fromkeys(devices, 0)
        self._counters = counters
        self._check = check
        self._is_busy: Callable[[], bool] = lambda: True

    def watch(self, is_busy: Callable[[], bool]) -> None:
        """Set ``is_busy``, called from time to time during a wait to check that devices have unfinished work."""
        self._is_busy = is_busy

    def prepare(self, program: Program, kernels: Sequence[Any], item: int) -> tuple[HostWrite, ...]:
        """Return the launches of a program.

        Args:
            program: a program of which :func:`writes_host_memory` is true.
            kernels: the loaded kernel for each of its exchanges.
            item: bytes of an element.
        """
        steps = [step for each in program.commands if isinstance(each, Exchange) for step in each.steps]
        return tuple(
            HostWrite(kernel, step, item, self._counter(step.stream.device), self.flag(step.stream.device))
            for kernel, step in zip(kernels, steps, strict=True)
            if isinstance(step, Copy)
        )

    def flag(self, device: int) -> int:
        """Return the address of a device's flag."""
        return self._flags.data_ptr() + 4 * self._words[device]

    def _counter(self, device: int) -> int:
        """Return the address of a device's counter of host_writes."""
        return self._counters.address(device, "landed")

    def nothing(self, device: int, kernel: Any) -> Ready:
        """Return a launch of the kernel on no columns, and count it as a host write."""
        self._counts[device] += 1
        words = (0, 0, 0, 0, 0, 1, 1, self._counter(device), self.flag(device))
        return _ready(device, driver.CUfunction(int(kernel)), 1, words)

    def results(self, devices: Sequence[int]) -> Callable[[], HostWritesDone]:
        """Return a callable that counts an issued host write on each of these devices and returns a handle for them."""
        counts, words = self._counts, [(device, self._words[device]) for device in devices]

        def landed() -> HostWritesDone:
            wanted = []
            for device, word in words:
                counts[device] = count = counts[device] + 1 & _MASK
                wanted.append((word, count))
            return HostWritesDone(self._seen, wanted, self._is_busy, self._check)

        return landed


class HostWrite:
    """A kernel that writes a device's columns to host memory.

    Attributes:
        stream: the program's stream to launch it on.
    """

    def __init__(self, kernel: Any, step: Copy, item: int, counter: int, flag: int) -> None:
        """Prepare everything that does not depend on the operands.

        Args:
            kernel: the loaded kernel.
            step: the program's copy.
            item: bytes of an element.
            counter: address of the device's counter of host_writes.
            flag: address of the device's flag in host memory.
        """
        self.stream = step.stream
        self._kernel = driver.CUfunction(int(kernel))
        self._target, self._source = (finder(view, no_memory(), item) for view in (step.target, step.source))
        self._width = (step.target.stop - step.target.start) * item
        self._places = counter, flag

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Ready:
        """Return a callable that launches the kernel on a given stream any number of times.

        Args:
            operands: the caller's tensors; the one in host memory is pinned. Only their addresses are kept.
            rows: rows of each tensor.
        """
        width = self._width
        target, step, _ = self._target(operands, rows)
        source, source_step, _ = self._source(operands, rows)
        if rows == 1 or step == width == source_step:
            rows, width = 1, rows * width
            step = source_step = width
        bits = target | step | source | source_step | width | _VECTOR_BYTES
        words = (target, step, source, source_step, rows, width, bits & -bits, *self._places)
        return _ready(self.stream.device, self._kernel, -(-rows * width // _BLOCK_BYTES), words)


def _ready(device: int, kernel: driver.CUfunction, blocks: int, words: Sequence[int]) -> Ready:
    parameters = (ctypes.c_uint64 * _ARGUMENTS)(*words)
    shape = max(1, min(_MOST_BLOCKS, blocks)), _THREADS
    return Ready(f"a kernel of device {device}", kernel, shape, parameters, _ARGUMENTS)


class HostWritesDone:
    """A handle for an issued program of host_writes."""

    __slots__ = ("_check", "_flags", "_is_busy", "_is_done", "_look", "_wanted")

    def __init__(
        self,
        flags: memoryview,
        wanted: Sequence[tuple[int, int]],
        is_busy: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        """Create a handle that waits for flags.

        Args:
            flags: the flags of all devices.
            wanted: indices of flags, and the numbers that they must reach.
            is_busy: returns whether devices have unfinished work.
            check: raises an error if a device timed out.
        """
        self._flags, self._wanted = flags, wanted
        self._is_busy, self._check = is_busy, check
        self._is_done, self._look = False, 0.0

    def done(self) -> bool:
        """Return whether the results are complete.

        Raises:
            ExecutionError: they never will be, as work on a device failed.
        """
        if not self._is_done:
            self._is_done = self._have_arrived()
            if not self._is_done and (now := time.monotonic()) > self._look:
                is_late, self._look = self._look > 0, now + _LOOK_SECONDS
                if is_late and not self._is_busy():
                    self._is_done = self._have_arrived()
                    if not self._is_done:
                        raise ExecutionError("what a device wrote never arrived", "earlier work on it may have failed")
        return self._is_done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the results are complete.

        Raises:
            TimeoutError: they are not complete after ``timeout`` seconds.
            ExecutionError: they never will be, as a device timed out or work on it failed.
        """
        if timeout is None:
            flags, polls = self._flags, 0
            for word, number in () if self._is_done else self._wanted:
                while (flags[word] - number) & _MASK >= _BEHIND:
                    polls += 1
                    if polls % _PATIENCE == 0:
                        self.done()
                        time.sleep(0)
            self._is_done = True
        else:
            wait_within(timeout, self.done)
        self._check()

    def _have_arrived(self) -> bool:
        return all((self._flags[word] - number) & _MASK < _BEHIND for word, number in self._wanted)
