"""Moves by kernels that access another GPU's memory, for the link probe."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from tpplan.exec.cuda.exchanges import Exchanges
from tpplan.exec.cuda.launch import Ready
from tpplan.exec.cuda.streams import new_stream
from tpplan.exec.machine.link_report import Mechanism
from tpplan.exec.machine.probe import COPIER, EXCHANGER, Started
from tpplan.exec.memory.binding import Memory
from tpplan.exec.programs import lower_flags, operation
from tpplan.exec.programs.program import INPUT, OUTPUT, SLOTS, Buffer
from tpplan.exec.protocol.slots import capacity
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.bindings import driver
from tpplan.exec.toolchain.kernel_cache import MOST_SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.exec.cuda.host_writes import HostWrite
    from tpplan.exec.cuda.launch import Launch

_SLOT_BYTES = 2**17
_THREADS, _BLOCKS = 256, 32
#: How long a kernel waits for another one, in seconds; the probe gives up a step that takes longer by itself.
_TIMEOUT = 10.0

#: A source and a target of equal size.
Move = tuple["Tensor", "Tensor"]


def start(mechanism: Mechanism, moves: Sequence[Move]) -> Started:
    """Start concurrent moves by kernels between GPUs that have access to each other's memory.

    Args:
        mechanism: ``store``, ``load`` or ``flag``.
        moves: moves of a multiple of 16 bytes each.

    Raises:
        ExecutionError: a kernel timed out; raised by ``finish``.
    """
    if mechanism == Mechanism.FLAG:
        return _exchange(moves)
    return _copy(moves, by_source=mechanism == Mechanism.STORE)


def _copy(moves: Sequence[Move], *, by_source: bool) -> Started:
    """Let kernels on the sources write the targets, or kernels on the targets read the sources."""
    started = []
    for source, target in moves:
        device = (source if by_source else target).device
        stream = new_stream(device)
        kernel = kernel_cache.load(COPIER, torch.cuda.get_device_capability(device))  # of one source: a copy
        size = source.numel()
        rest = [source.data_ptr(), size] + [0] * (2 * MOST_SOURCES - 2)
        words = [target.data_ptr(), size, 1, size, 1, 1, *rest]
        parameters = (ctypes.c_uint64 * len(words))(*words)
        function = driver.CUfunction(int(kernel))
        Ready(f"a copy by {device}", function, (_BLOCKS, _THREADS), parameters, len(words))(stream.cuda_stream)
        started.append(stream)
    return Started(started, lambda: None)


def _exchange(moves: Sequence[Move]) -> Started:
    """Send every source through slots in its target's memory, which kernels on both ends fill, poll and free."""
    pairs = [_Pair(source, target) for source, target in moves]
    step = capacity(_SLOT_BYTES)
    for start in range(0, max(source.numel() for source, _ in moves), step):
        for pair in pairs:
            pair.launch(start, start + step)

    def finish() -> None:
        for pair in pairs:
            pair.finish()

    return Started([pair.received for pair in pairs], finish)


class _Pair:
    """A sender, device 0, and a receiver, device 1, with slots and counters of their own.

    Attributes:
        received: the receiver's stream.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._ends = (source, target)
        self._sizes: dict[int, tuple[Launch | HostWrite, ...]] = {}
        places = dict(enumerate(end.device for end in self._ends))
        slots = torch.empty((SLOTS, _SLOT_BYTES), dtype=torch.uint8, device=target.device)
        flags = {i: torch.empty(2**12, dtype=torch.uint8, device=place) for i, place in places.items()}
        self._streams = [new_stream(place) for place in places.values()]
        self.received = self._streams[1]
        memory = Memory({}, {}, lambda _: slots, flags)
        self._exchanges = Exchanges(memory, places, (EXCHANGER,), timeout=_TIMEOUT)

    def launch(self, start: int, stop: int) -> None:
        """Send some of the bytes."""
        source, target = (end[start:stop].view(1, -1) for end in self._ends)
        if size := source.numel():
            if size not in self._sizes:
                program = lower_flags.moves(operation.broadcast(0, (1,), size), on_host=False)
                self._sizes[size] = self._exchanges.prepare(program, torch.uint8)
            operands = {Buffer(INPUT, 0): source, Buffer(OUTPUT, 1): target}
            for each in self._sizes[size]:
                each.bind(operands, 1)(self._streams[each.stream.device].cuda_stream)

    def finish(self) -> None:
        """Wait until all moves are complete.

        Raises:
            ExecutionError: a kernel timed out.
        """
        for stream in self._streams:
            stream.synchronize()
        self._exchanges.check()
