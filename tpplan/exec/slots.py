"""Exchanges through slots on CUDA devices: their tables and counters, and the launches of their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from cuda.core import LaunchConfig, launch
from cuda.core import Stream as LaunchStream
from torch import Tensor

from tpplan.errors import ExecutionError
from tpplan.exec import kernel_cache
from tpplan.exec.binding import no_memory, pitch
from tpplan.exec.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer, Exchange, Stream, Sum
from tpplan.exec.slot_table import (
    BLOCKS,
    COUNTER_BYTES,
    DATA_BYTES,
    MOST_COUNTERS,
    THREADS,
    Place,
    queues,
    table,
    widest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.exec.binding import Memory
    from tpplan.exec.program import Program, Queue

_SUMS = {torch.bfloat16: "slot_sum_bf16", torch.float16: "slot_sum_f16", torch.float32: "slot_sum_f32"}
#: A device that does not answer for about so many cycles of a multiprocessor never will: ten seconds, or a few more.
_DEADLINE = 20_000_000_000


@frozen(eq=False)
class Launch:
    """The kernel of one device in an exchange, for a dtype.

    Attributes:
        stream: of the program, that it is launched on.
        kernel: to launch.
        table: on the device.
        words: of it.
        roles: of the operands, in the order of the kernel's arguments, each with the bits of the bytes it starts at.
        row_bytes: of the program's widest message.
    """

    stream: Stream
    kernel: Any
    table: Tensor
    words: int
    roles: tuple[tuple[Buffer, int], ...]
    row_bytes: int


_INTERRUPTED = 3
#: What the status says.
_FAILURES = {
    1: "a device waited for a message that never came",
    2: "a device waited for a slot to be freed that never came",
    _INTERRUPTED: "the issue of a program was interrupted, so that devices do not agree any more",
}


class Slots:
    """Launches exchanges; the same programs always in the same order on all devices."""

    def __init__(self, memory: Memory, places: Mapping[int, torch.device]) -> None:
        """Load every kernel on every device: one that is loaded later would wait for those that wait for it.

        Args:
            memory: of the context.
            places: torch's device for each of the plan's in use.
        """
        self._memory = memory
        self._places = places
        self._counters: dict[tuple[Queue, str, int], int] = {}
        self._used: dict[int, int] = dict.fromkeys(memory.flags, 0)  # counters, numbered on each device
        self._status = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self._seen, self._word = self._status.numpy(), self._status.data_ptr()
        self._configs = {blocks: LaunchConfig(grid=blocks, block=THREADS) for blocks in range(1, BLOCKS + 1)}
        self._flags: dict[int, tuple[int, int]] = {}  # address and number of each device's counters
        self._kernels: dict[tuple[str, int], Any] = {}
        for area in memory.flags.values():
            area.zero_()
        for device, place in places.items():
            stream = LaunchStream.from_handle(torch.cuda.Stream(place).cuda_stream)  # type: ignore[no-untyped-call]
            nothing = torch.zeros(16, dtype=torch.int64, device=place)
            torch.cuda.synchronize(place)
            for name in ("slot_move", *_SUMS.values()):
                kernel = kernel_cache.load(name, torch.cuda.get_device_capability(place))
                self._kernels[name, device] = kernel
                rest = [0] * (11 if name == "slot_move" else 14)
                launch(stream, self._configs[1], kernel, nothing.data_ptr(), 13, *rest)
            torch.cuda.synchronize(place)

    def launch(self, stream: LaunchStream, ready: Launch, operands: Mapping[Buffer, Tensor], rows: int) -> None:
        """Launch the kernel of one device.

        Args:
            stream: to launch on.
            ready: made by :meth:`prepare`.
            operands: the caller's tensors.
            rows: of each.
        """
        blocks = min(BLOCKS, -(-rows * ready.row_bytes // (DATA_BYTES * THREADS)))
        ends = [end for buffer, bits in ready.roles for end in _end(operands.get(buffer), bits)]
        config = self._configs[max(1, blocks)]
        where, counters = ready.table.data_ptr(), self._flags[ready.stream.device]
        launch(stream, config, ready.kernel, where, ready.words, *counters, rows, *ends, _DEADLINE, self._word)

    def check(self) -> None:
        """Refuse to go on after an exchange in which a device waited in vain.

        Raises:
            ExecutionError: there was one.
        """
        if code := int(self._seen[0]):
            raise ExecutionError(_FAILURES[code], "close the context, and compile again")

    def interrupt(self) -> None:
        """Refuse everything from now on: some devices have their part of a program, and others have not."""
        self._seen[0] = _INTERRUPTED

    def close(self) -> None:
        """Let go of the context's memory."""
        self._memory = no_memory()

    def prepare(self, program: Program, dtype: torch.dtype) -> tuple[Launch, ...]:
        """Return the launches of a program's exchanges, in order.

        The tables of all devices are written first: nothing may be allocated or copied while some of them are waiting.

        Raises:
            ExecutionError: a graph is being captured.
        """
        exchanges = [command for command in program.commands if isinstance(command, Exchange)]
        if exchanges and torch.cuda.is_current_stream_capturing():
            raise ExecutionError(f"{program.name} was not run before", "run everything once before capturing it")
        sums = any(isinstance(step, Sum) for each in exchanges for step in each.steps)
        row_bytes = widest(exchanges) * dtype.itemsize
        for queue in {queue for each in exchanges for queue in queues(each)} - {key[0] for key in self._counters}:
            self._memory.slots(queue).zero_()  # where no message is, no number may be
        launches = []
        for exchange in exchanges:
            device = exchange.stream.device
            found = {queue: self._place(queue, device) for queue in queues(exchange)}
            stride = max((self._memory.slots(queue).shape[1] for queue in found), default=0)
            made = table(exchange, dtype.itemsize, found, stride)
            there = torch.tensor(made.words, dtype=torch.int64).to(self._places[device])
            roles = {INPUT: made.read, RESIDUAL: made.read, OUTPUT: made.written}
            ends = tuple((Buffer(role, device), bits) for role, bits in roles.items() if sums or role != RESIDUAL)
            kernel = self._kernels[_SUMS[dtype] if sums else "slot_move", device]
            launches.append(Launch(exchange.stream, kernel, there, len(made.words), ends, row_bytes))
        for place in self._places.values() if launches else ():
            torch.cuda.synchronize(place)
        return tuple(launches)

    def _place(self, queue: Queue, device: int) -> Place:
        """Return where a device finds a queue; its sender has the credits, unless that is the host's memory."""
        readers = queue.receivers if device == queue.sender else (device,)
        home = HOST if queue.place == HOST else queue.sender
        return Place(
            self._memory.slots(queue).data_ptr(),
            self._counter(queue, "sequence", device, device),
            tuple(self._credit(queue, reader, home, device) for reader in readers),
        )

    def _credit(self, queue: Queue, reader: int, home: int, device: int) -> tuple[int, int]:
        """Return the address of a reader's count, and its number if it is one of the device's counters."""
        number = self._counter(queue, "credit", reader, home)
        address = self._memory.flags[home].data_ptr() + number * COUNTER_BYTES
        return address, number if home == device else -1

    def _counter(self, queue: Queue, name: str, device: int, home: int) -> int:
        """Return the number of a counter, made when it is first asked for.

        Raises:
            ExecutionError: there is no room for more.
        """
        key = (queue, name, device)
        if key not in self._counters:
            number = self._used[home]
            room = len(self._memory.flags[home]) // COUNTER_BYTES
            if number >= (room if home == HOST else min(room, MOST_COUNTERS)):
                raise ExecutionError(f"device {home} has no room for more than {number} counters", "use fewer devices")
            self._counters[key] = number
            self._used[home] += 1
            if home != HOST:
                self._flags[home] = self._memory.flags[home].data_ptr(), self._used[home]
        return self._counters[key]


def _end(matrix: Tensor | None, bits: int) -> tuple[int, int, int]:
    """Return address, pitch, and the largest piece of at most 8 bytes to which everything in a matrix is aligned."""
    if matrix is None:
        return 0, 0, 1
    address, step = matrix.data_ptr(), pitch(matrix)
    every = address | step | bits | DATA_BYTES
    return address, step, every & -every
