"""Exchanges on CUDA devices: loading their kernels, preparing launches and checking for failures."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import encode_direct, encode_frames, encode_slots, exclusive
from tpplan.exec.cuda.blocks import DIRECT_BLOCKS, FRAME_BLOCKS, SLOT_BLOCKS, most_blocks
from tpplan.exec.cuda.counters import Counters
from tpplan.exec.cuda.host_writes import KERNEL as LANDING
from tpplan.exec.cuda.host_writes import LINE, HostWrite, HostWrites, writes_host_memory
from tpplan.exec.cuda.launch import Launch, Operands, Ready, Work
from tpplan.exec.cuda.programmatic_launch import is_possible
from tpplan.exec.cuda.sums import NAMES
from tpplan.exec.memory.binding import no_memory
from tpplan.exec.programs.program import OWN, SLOT, Exchange, Queue, Stream, Sum, writes
from tpplan.exec.protocol import direct, frames, slots
from tpplan.exec.protocol.words import ALONE, COUNTER_BYTES, COUNTERS, DEADLINE, STATUS
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.programs.program import Program

#: Kinds of kernels of each transport.
_WAYS = {"peer": ("slot", "direct"), "host": ("slot", "frame"), "events": ()}
#: Threads per block.
_THREADS = {"slot": slots.THREADS, "frame": frames.THREADS, "direct": direct.THREADS}
_INTERRUPTED = 4
#: Messages for the codes of the status word.
_FAILURES = {
    1: "a device waited for a message that never came",
    2: "a device waited for a slot to be freed that never came",
    3: "a device waited for another one that never came",
    _INTERRUPTED: "the issue of a program was interrupted, so that devices do not agree any more",
}


class Exchanges:
    """Prepares the launches of exchanges, which are issued in the same order on all devices.

    Attributes:
        kernels: the loaded kernels, by name and compute capability.
        host_writes: prepares the launches by which devices write to host memory.
    """

    def __init__(
        self,
        memory: Memory,
        places: Mapping[int, torch.device],
        kernels: tuple[str, ...],
        others: Mapping[int, int] = MappingProxyType({}),
        status: torch.Tensor | None = None,
        *,
        timeout: float,
        on_timeout: Callable[[], None] = lambda: None,
        cause: Callable[[int], str] = lambda _: "",
        reach: Callable[[int, int], int] = lambda address, _: address,
    ) -> None:
        """Load every kernel on every device now: loading one later could deadlock with kernels that wait for it.

        Args:
            memory: the context's memory.
            places: torch device for each device of the plan in use that this process owns.
            kernels: names of the kernels that will be used.
            others: multiprocessors of each device that another process owns. Then exchanges may not go through host
                memory.
            status: 16 int32 of host memory that is known to the devices, for the status word; new ones if not given.
            timeout: how long a kernel waits for another device, in seconds.
            on_timeout: called once, when it is first seen that a kernel has waited in vain.
            cause: takes a failure's status word, and returns what another process has to do with it, in words.
            reach: takes an address and another device, and returns the address by which that reaches the same.
        """
        self._memory = memory
        self._reach = reach
        self._places = places
        self._deadline = round(timeout * 10**9)
        self._counters = Counters(memory.flags, others)
        if others:
            self._number((*places, *others))
        if status is None:
            status = torch.zeros(16, dtype=torch.int32, device="cpu", pin_memory=True)
        self._status = status
        self._seen = memoryview(self._status.numpy())  # type: ignore[arg-type]
        self._on_timeout = [on_timeout]
        self._cause = cause
        found = {place: torch.cuda.get_device_properties(place) for place in places.values()}
        rooms = {"slot": SLOT_BLOCKS, "direct": DIRECT_BLOCKS, "frame": FRAME_BLOCKS}
        self._most = {way: most_blocks([*places.values()], room, others.values()) for way, room in rooms.items()}
        self._most["frame"] = min(frames.MOST_BLOCKS, self._most["frame"])
        kernels = tuple(dict.fromkeys(each for name in kernels for each in (name, _for_aligned(name))))
        flags = torch.zeros(LINE * len(places), dtype=torch.int32, device="cpu", pin_memory=True)
        check = partial(_refuse, self._seen, self._on_timeout, cause)  # self.check would be a reference cycle
        self.host_writes = HostWrites(tuple(places), flags, self._counters, check)
        wanted = {(name, (each.major, each.minor)) for name in kernels for each in found.values()}
        kernel_cache.prepare(wanted)
        self.kernels = {each: kernel_cache.load(*each) for each in wanted}
        self._streams = {d: torch.cuda.Stream(place) for d, place in places.items()}  # type: ignore[no-untyped-call]
        for device, place in places.items():
            torch.cuda.synchronize(place)  # until all counters are 0
            stream = self._streams[device]
            for name in kernels:
                self._nothing(name, device)(stream.cuda_stream)
            stream.synchronize()
        self.tell_exclusive(exclusive=False)  # also loads the kernel that fills the word
        exclusive.enter(self, list(places.values()))

    def tell_exclusive(self, *, exclusive: bool) -> None:
        """Tell kernels whether the context has its GPUs to itself."""
        first = ALONE * COUNTER_BYTES
        for device, stream in self._streams.items():
            with torch.cuda.stream(stream):
                self._memory.flags[device][first : first + COUNTER_BYTES].view(torch.int32).fill_(exclusive)
                stream.synchronize()

    def header(self, device: int) -> dict[int, int]:
        """Return the words that every exchange kernel on a device takes, by their index."""
        return {DEADLINE: self._deadline, STATUS: self._status.data_ptr(), COUNTERS: self._counters.area(device)}

    def check(self) -> None:
        """Check that no exchange has timed out or was interrupted.

        Raises:
            ExecutionError: one has.
        """
        _refuse(self._seen, self._on_timeout, self._cause)

    def has_failed(self) -> bool:
        """Return whether :meth:`check` raises."""
        return bool(self._seen[0])

    def interrupt(self) -> None:
        """Mark the context as failed, unless it has: a program was issued on some devices but not on others."""
        self._seen[0] = self._seen[0] or _INTERRUPTED

    def close(self) -> None:
        """Release the context's memory."""
        try:
            exclusive.leave(self)
        finally:
            self._memory = no_memory()

    def prepare(
        self, program: Program, dtype: torch.dtype, *, captured: bool = False
    ) -> tuple[Launch | HostWrite, ...]:
        """Return the launches of a program's exchanges, in order.

        Args:
            program: the program of an operation.
            dtype: dtype of the operands.
            captured: whether the launches become part of a graph.

        Raises:
            ExecutionError: slots must be cleared first, but a graph is being captured.
        """
        exchanges = [command for command in program.commands if isinstance(command, Exchange)]
        if writes_host_memory(program):
            kernels = [self._kernel(LANDING, exchange.stream.device) for exchange in exchanges]
            return self.host_writes.prepare(program, kernels, dtype.itemsize)
        steps = [step for exchange in exchanges for step in exchange.steps]
        what = NAMES[dtype] if any(isinstance(step, Sum) for step in steps) else "move"
        filled = {view.buffer.queue for step in steps for view in writes(step) if view.buffer.role == SLOT}
        if not filled:
            works = encode_direct.prepare(exchanges, dtype.itemsize, self._counters, self._memory)
            return tuple(self._launch(f"direct_{what}", w) for w in works if w.stream.device in self._places)
        if any(queue and queue.framed for queue in filled):
            works = encode_frames.prepare(exchanges, dtype.itemsize, self._memory, self._counters, self._most["frame"])
            return tuple(self._launch(f"frame_{what}", work) for work in works)
        fresh = encode_slots.fresh(exchanges, self._counters)
        if fresh and captured:
            raise ExecutionError(f"{program.name} was not run before", "run everything once before capturing it")
        self._clear(fresh)
        works = encode_slots.prepare(exchanges, dtype.itemsize, self._memory, self._counters, self._most["slot"])
        return tuple(self._launch(f"slot_{what}", work) for work in works if work.stream.device in self._places)

    def _number(self, devices: Sequence[int]) -> None:
        """Number the counters between the devices of all processes, and clear this process's slots.

        The processes then agree on the numbers, also those that take no part in some exchanges.
        """
        for sender, receiver in permutations(sorted(devices), 2):
            pair = Queue(receiver, sender, (receiver,))
            encode_slots.number(pair, self._counters)
            encode_direct.number(pair, self._counters)
            if receiver in self._places:
                self._memory.slots(pair).zero_()

    def _clear(self, fresh: Collection[Queue]) -> None:
        """Clear the slots of queues on first use, so that they hold no message numbers."""
        for queue in fresh:
            self._memory.slots(queue).zero_()
        for place in self._places.values() if fresh else ():
            torch.cuda.synchronize(place)

    def _launch(self, name: str, work: Work) -> Launch:
        device = work.stream.device
        names = name, _for_aligned(name) if work.simple else name
        kernels = self._kernel(names[0], device), self._kernel(names[1], device)
        way = {"packet": "slot", "one": "direct"}.get(start := name.partition("_")[0], start)
        may_be = is_possible(self._capability(device))
        are_early = (may_be and not names[0].startswith("direct"), may_be and not names[1].startswith("direct"))
        blocks, threads = min(self._most[way], work.blocks), _THREADS[way]
        header = self.header(device)
        return Launch(kernels, work, blocks, threads, header, programmatic=are_early, reach=self._reach)

    def _nothing(self, name: str, device: int) -> Ready:
        """Return a launch of a kernel without any work."""
        if name == LANDING:
            return self.host_writes.nothing(device, self._kernel(name, device))
        return self._launch(name, Work(Stream(OWN, device), 0, (), Operands((), 0, 1), 0)).bind({}, 0)

    def _kernel(self, name: str, device: int) -> Any:
        return self.kernels[name, self._capability(device)]

    def _capability(self, device: int) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self._places[device])


def kernels_for(devices: int, transport: str) -> tuple[str, ...]:
    """Return the names of the kernels that this many devices may need; a single one exchanges only with the host."""
    ways = _WAYS[transport] if devices > 1 else ()
    return (*(f"{way}_{what}" for way in ways for what in ("move", *NAMES.values())), LANDING)


def _refuse(seen: memoryview, on_timeout: list[Callable[[], None]], cause: Callable[[int], str]) -> None:
    """Raise an error if the status word reports a failure; call ``on_timeout`` once if it is a time-out."""
    if code := seen[0]:
        calls, on_timeout[:] = on_timeout[:] if code != _INTERRUPTED else [], []
        for call in calls:
            call()
        if lost := cause(code):
            raise ExecutionError(lost, "end all processes, and start them again")
        raise ExecutionError(_FAILURES[code], "close the context, and compile again")


def _for_aligned(name: str) -> str:
    """Return the name of the kernel for operands aligned to packets, or to vectors if it adds up in one shot."""
    return name.replace("slot_", "packet_").replace("direct_sum_", "one_shot_sum_")
