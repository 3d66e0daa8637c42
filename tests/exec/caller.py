"""A caller of operations, for tests: it has tensors on virtual devices, and knows what each of them should hold."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, frozen
from hypothesis import strategies as st
from torch import Tensor

from tests.exec.program_cases import FRAMED, LIMITS, operations
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.backends.engine import Backend
from tpplan.exec.handles import Pending
from tpplan.exec.memory.binding import BITS, Memory
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.lower import lower, route
from tpplan.exec.programs.operation import Addition, Moves, Operation, Reduction
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, SLOTS, Buffer, Queue, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.exec.programs.program import Program

#: Dtypes of 1, 2, 4 and 8 bytes; those that are added first.
ADDED = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*ADDED, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int16, torch.int32, torch.int64, torch.complex64)


#: How a tensor of some rows and columns lies in memory.
LAYOUTS: tuple[Callable[[int, int, torch.dtype], Tensor], ...] = (
    lambda rows, columns, dtype: torch.empty(rows, columns, dtype=dtype),
    lambda rows, columns, dtype: torch.empty(rows, columns + 3, dtype=dtype)[:, 2:-1],
    lambda rows, columns, dtype: torch.empty(2 * rows, columns, dtype=dtype)[::2],
    lambda rows, columns, dtype: torch.empty(columns, rows, dtype=dtype).t(),
)


def memory() -> Memory:
    """Return a context's memory for six devices, exactly as much as ``LIMITS`` say."""
    places = range(HOST, 6)
    slots: dict[Queue, Tensor] = {}

    def slot(queue: Queue) -> Tensor:
        size = FRAMED.frame_bytes if queue.framed else LIMITS.slot_bytes
        return slots.setdefault(queue, torch.empty(queue.slots, size, dtype=torch.uint8))

    return Memory(
        {d: torch.empty(LIMITS.exchange_bytes, dtype=torch.uint8) for d in places},
        {d: torch.empty(SLOTS * LIMITS.stage_bytes, dtype=torch.uint8) for d in places},
        slot,
    )


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers."""
    return tensor.view(BITS[tensor.element_size()])


def noise(rows: int, columns: int, dtype: torch.dtype, random: Random) -> Tensor:
    """Return any bytes that are numbers: for a dtype that is summed, random finite ones."""
    if dtype in ADDED:
        generator = torch.Generator().manual_seed(random.getrandbits(60))
        return torch.randn(rows, columns, generator=generator).to(dtype)
    data = bytearray(random.randbytes(rows * columns * dtype.itemsize))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).view(rows, columns)


def expected(operation: Operation, operands: Mapping[Buffer, Tensor]) -> dict[Buffer, Tensor]:
    """Return what an operation's outputs should hold."""
    if isinstance(operation, Addition):
        return {
            Buffer(OUTPUT, d): total(operands[Buffer(OUTPUT, d)], operands[Buffer(INPUT, d)][:, start:stop])
            for d, start, stop, *_ in operation.shares
        }
    if isinstance(operation, Reduction):
        parts = [operands[Buffer(INPUT, sender)] for sender in operation.senders]
        residuals = [[operands[Buffer(RESIDUAL, d)]] if operation.residual else [] for d in operation.receivers]
        return {Buffer(OUTPUT, d): total(*parts, *r) for d, r in zip(operation.receivers, residuals, strict=True)}
    outputs = sorted({target.buffer for _, target in operation.moves})
    if operation.name == "broadcast":
        ((_, whole),) = ((b, x) for b, x in operands.items() if b.role == INPUT)
        return {output: whole.clone() for output in outputs}
    if operation.name == "scatter":
        return {t.buffer: operands[s.buffer][:, s.start : s.stop].clone() for s, t in operation.moves}
    ends = {(target.start, source.buffer) for source, target in operation.moves}
    gathered = torch.cat([operands[source] for _, source in sorted(ends)], dim=1)
    return {output: gathered.clone() for output in outputs}


def total(first: Tensor, *others: Tensor) -> Tensor:
    """Add in float32, in order, and round once."""
    result = first.to(torch.float32, copy=True)
    for other in others:
        result += other.float()
    return result.to(first.dtype)


def widths(operation: Operation) -> dict[Buffer, int]:
    """Return the columns of each operand, outputs last."""
    if isinstance(operation, Moves):
        views = sorted((view for move in operation.moves for view in move), key=lambda v: (v.buffer.role, v.stop))
        return {view.buffer: view.stop for view in views}
    if isinstance(operation, Addition):
        sources = {Buffer(INPUT, share.receiver): share.stop for share in operation.shares}
        return sources | {Buffer(OUTPUT, share.receiver): share.stop - share.start for share in operation.shares}
    residuals = [Buffer(RESIDUAL, d) for d in operation.receivers if operation.residual]
    inputs = [Buffer(INPUT, d) for d in operation.senders]
    outputs = [Buffer(OUTPUT, d) for d in operation.receivers]
    return dict.fromkeys((*inputs, *residuals, *outputs), operation.columns)


@define(eq=False)
class Value:
    """A tensor of the caller.

    Attributes:
        tensor: on the virtual devices.
        truth: what it should hold, once the caller's stream has come as far as the caller has.
    """

    tensor: Tensor
    truth: Tensor


@define(eq=False)
class Caller:
    """Calls operations one after the other.

    Tensors belong to one of the caller's streams on their device. The host's are written and read at once.

    Attributes:
        devices: virtual ones, plain or adversarial.
        random: decides what is not asked for.
        rows: of all tensors.
        dtype: of all tensors.
        values: of each stream.
        streams: the current one on each device that does not use tpplan's default.
        seen: what the caller's streams read, and what they should have read.
        pending: programs that have outputs on the host, and these.
    """

    devices: Backend
    random: Random
    rows: int
    dtype: torch.dtype
    values: dict[Stream, list[Value]] = Factory(dict)
    streams: dict[int, Stream] = Factory(dict)
    seen: list[tuple[Tensor, Tensor]] = Factory(list)
    pending: list[tuple[Pending, list[Value]]] = Factory(list)

    def use(self, stream: Stream) -> None:
        """Make a stream the current one on its device."""
        self.streams[stream.device] = stream
        if isinstance(self.devices, Adversary):
            self.devices.use(stream)

    def call(self, operation: Operation, program: Program, *, overwrite: bool = True) -> None:
        """Call an operation with tensors that the caller has or makes, some in place, and read its outputs.

        Args:
            operation: what is expected.
            program: what is run.
            overwrite: whether to write over all inputs, and over some outputs, right after the call.
        """
        used: dict[Buffer, Value] = {}
        in_place = self.random.choice(("", INPUT, RESIDUAL)) if isinstance(operation, Reduction) else ""
        for buffer, columns in widths(operation).items():
            same = used.get(Buffer(in_place, buffer.device)) if buffer.role == OUTPUT else None
            residuals = [value.truth for other, value in used.items() if buffer.role == other.role == RESIDUAL]
            used[buffer] = same or self._value(buffer, columns, list(used.values()), *residuals[:1])
        result = expected(operation, {buffer: value.truth for buffer, value in used.items()})
        pending = self.devices.run(program, {buffer: value.tensor for buffer, value in used.items()})
        hosted = []
        for buffer, truth in result.items():
            value = used[buffer]
            value.truth = truth
            if buffer.device == HOST:
                hosted.append(value)
            else:
                self._do(buffer.device, partial(self._read, value.tensor, truth))
        if hosted:
            self.pending.append((pending, hosted))
        if overwrite:
            outputs = [used[buffer] for buffer in result]
            for buffer, value in used.items():
                if value not in outputs or (value not in hosted and self.random.random() < 1 / 2):
                    self._write(buffer.device, value)

    def use_any(self, operation: Operation) -> None:
        """Call from any stream on each of an operation's devices."""
        for device in operation.devices:
            self.use(Stream(self.random.choice(("caller", "other")), device))

    def check_host(self) -> None:
        """Wait for the outputs on the host, and check them."""
        for pending, values in self.pending:
            pending.wait()
            assert pending.done()
            for value in values:
                assert torch.equal(bits(value.tensor), bits(value.truth)), "an output on the host"
                self.values.setdefault(self._stream(HOST), []).append(value)
        self.pending.clear()

    def check(self) -> None:
        """Wait for everything, and check all that was read and all that the tensors hold now."""
        self.check_host()
        self.devices.synchronize()
        for found, truth in self.seen:
            assert torch.equal(bits(found), bits(truth)), "an output read by the caller"
        for values in self.values.values():
            for value in values:
                assert torch.equal(bits(value.tensor), bits(value.truth)), "a tensor of the caller"

    def _value(self, buffer: Buffer, columns: int, taken: list[Value], truth: Tensor | None = None) -> Value:
        """Return a tensor that is not in use for this call, or a new one, written by the caller's stream."""
        known = self.values.setdefault(self._stream(buffer.device), [])
        fit = [value for value in known if value.tensor.shape[1] == columns and value not in taken]
        if truth is not None:
            fit = [value for value in fit if torch.equal(bits(value.truth), bits(truth))]
        if fit and self.random.random() < 0.7:
            value = self.random.choice(fit)
            if buffer == Buffer(OUTPUT, HOST):  # not for another call before this one was waited for
                known[:] = [other for other in known if other is not value]
            return value
        empty = self.random.choice(LAYOUTS)(self.rows, columns, self.dtype)
        value = Value(empty, empty)
        if buffer != Buffer(OUTPUT, HOST):  # which it has once it has waited for it
            known.append(value)
        self._write(buffer.device, value, truth)
        return value

    def _write(self, device: int, value: Value, truth: Tensor | None = None) -> None:
        """Write over a tensor, random numbers if none are given."""
        rows, columns = value.tensor.shape
        new = noise(rows, columns, self.dtype, self.random) if truth is None else truth
        value.truth = new
        self._do(device, lambda: bits(value.tensor).copy_(bits(new)))

    def _read(self, tensor: Tensor, truth: Tensor) -> None:
        self.seen.append((tensor.clone(), truth))

    def _do(self, device: int, work: Callable[[], object]) -> None:
        if isinstance(self.devices, Adversary) and device != HOST:
            self.devices.call(self._stream(device), work)
        else:
            work()

    def _stream(self, device: int) -> Stream:
        return self.streams.get(device, Stream("caller", device))


@frozen
class Script:
    """A sequence of operations.

    Attributes:
        rows: of all tensors.
        dtype: of all tensors.
        calls: operations and transports.
        seed: decides everything else.
    """

    rows: int
    dtype: torch.dtype
    calls: tuple[tuple[Operation, str], ...]
    seed: int

    def play(self, start: Callable[[Memory, Random], Backend]) -> None:
        """Call one operation after the other, and check what they gave."""
        random = Random(self.seed)
        caller = Caller(start(memory(), random), random, self.rows, self.dtype)
        for operation, transport in self.calls:
            caller.use_any(operation)
            way = route(operation, transport, self.rows, self.dtype.itemsize, LIMITS)
            caller.call(operation, lower(operation, way), overwrite=random.random() < 0.5)
            if random.random() < 0.5:
                caller.check_host()
        caller.check()


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Sequences of 2 to 6 operations, which only move in dtypes that are not added."""
    dtype = draw(st.one_of(st.sampled_from(ADDED), st.sampled_from(DTYPES)))
    kinds = operations(4).filter(lambda operation: dtype in ADDED or isinstance(operation, Moves))
    calls = draw(st.lists(st.tuples(kinds, st.sampled_from(TRANSPORTS)), min_size=2, max_size=6))
    return Script(draw(st.integers(1, 7)), dtype, tuple(calls), draw(st.integers(0, 2**32)))
