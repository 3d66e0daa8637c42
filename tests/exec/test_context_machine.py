"""Any sequence of calls on a context whose devices do the worst that they may, against plain torch tensors."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from torch import Tensor

from tests.contexts import PLANS, context, little_room
from tests.examples import examples
from tests.exec.caller import total
from tests.exec.context_caller import ContextCaller, Value
from tests.exec.reference import same, values
from tpplan.core.axes import Axis
from tpplan.core.workspace import align
from tpplan.exec import HOST
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.fence import caller
from tpplan.exec.programs.program import Stream

if TYPE_CHECKING:
    from tpplan.exec import Gathered

__all__ = ["little_room"]  # a fixture

_ROWS = st.sampled_from(((1,), (2, 2), (12,), (0,)))
_DTYPES = st.sampled_from((torch.bfloat16, torch.float32, torch.float16))
_SHARE = st.integers(0, 99)  # of all axes, cuts, devices


class ContextMachine(ContextCaller):
    """A caller who has tensors on every device, and does with them whatever the context allows."""

    @initialize(name=st.sampled_from(tuple(PLANS)), transport=st.sampled_from(TRANSPORTS), seed=st.integers(0, 2**32))
    def start(self, name: str, transport: str, seed: int) -> None:
        """Compile one of the plans."""
        self.plan = PLANS[name]
        self.random = Random(seed)
        self.pending: list[tuple[Gathered, Tensor, int | None]] = []
        self.open(transport)

    @rule(transport=st.sampled_from(TRANSPORTS))
    def open(self, transport: str) -> None:
        """Close the context, if there is one, and compile the plan again."""
        if self.pending or hasattr(self, "ctx"):
            self.teardown()
        self.ctx = context(self.plan, transport, self.random.getrandbits(32))
        backend = self.ctx._engine.backend
        assert isinstance(backend, Adversary)
        self.backend = backend
        self.known = {device: [] for device in self.ctx.all_devices}
        self.seen = []
        self.pending = []
        self.streams = {}

    @rule(axis=_SHARE, source=_SHARE, rows=_ROWS, dtype=_DTYPES, reuse=st.booleans())
    def broadcast(self, axis: int, source: int, rows: tuple[int, ...], dtype: torch.dtype, reuse: bool) -> None:
        """Copy a tensor of one device, or of the host, to the devices of an axis."""
        name, layer = self.cut(axis)
        targets = self.ctx.devices_of(name, layer)
        origin = self.device(source, HOST)
        x = self.input(origin, rows, 40, dtype)
        outs = self.outs(targets, rows, [40] * len(targets), dtype, [x]) if reuse else None
        out = [value.tensor for value in outs] if outs else None
        results = self.ctx.broadcast(x.tensor, name, layer=layer, source=origin, out=out)
        self.take(targets, results, [x.truth] * len(targets), outs)
        self.spoil(origin, x)

    @rule(axis=_SHARE, source=_SHARE, rows=_ROWS, dtype=_DTYPES, reuse=st.booleans())
    def scatter(self, axis: int, source: int, rows: tuple[int, ...], dtype: torch.dtype, reuse: bool) -> None:
        """Cut a tensor of one device, or of the host."""
        name, layer = self.cut(axis)
        slices = self.ctx.split(name, layer)
        targets = [s.device for s in slices]
        origin = self.device(source, HOST)
        x = self.input(origin, rows, slices[-1].end, dtype)
        outs = self.outs(targets, rows, [s.end - s.start for s in slices], dtype, [x]) if reuse else None
        out = [value.tensor for value in outs] if outs else None
        results = self.ctx.scatter(x.tensor, name, layer=layer, source=origin, out=out)
        self.take(targets, results, [x.truth[..., s.start : s.end] for s in slices], outs)
        self.spoil(origin, x)

    @rule(axis=_SHARE, to=_SHARE, rows=_ROWS, dtype=_DTYPES, reuse=st.booleans())
    def allgather(self, axis: int, to: int, rows: tuple[int, ...], dtype: torch.dtype, reuse: bool) -> None:
        """Put the parts of all devices side by side on the devices of an axis."""
        name, layer = self.cut(axis)
        goal, of_goal = self.cut(to, layer)
        layer = of_goal if layer is None else layer
        parts = self.parts(name, layer, rows, dtype)
        truth = torch.cat([part.truth for part in parts], -1)
        targets = self.ctx.devices_of(goal, layer)
        outs = self.outs(targets, rows, [truth.shape[-1]] * len(targets), dtype, parts) if reuse else None
        out = [value.tensor for value in outs] if outs else None
        results = self.ctx.allgather([part.tensor for part in parts], name, goal, layer=layer, out=out)
        self.take(targets, results, [truth] * len(targets), outs)
        for s, part in zip(self.ctx.split(name, layer), parts, strict=True):
            self.spoil(s.device, part)

    @rule(axis=_SHARE, rows=_ROWS, dtype=_DTYPES, buffer=st.sampled_from((None, 0, 1)))
    def gather(self, axis: int, rows: tuple[int, ...], dtype: torch.dtype, buffer: int | None) -> None:
        """Put the parts side by side on the host, perhaps in one of its buffers, and look at it some other time."""
        name, layer = self.cut(axis)
        parts = self.parts(name, layer, rows, dtype)
        truth = torch.cat([part.truth for part in parts], -1)
        busy = any(buffer == other for _, _, other in self.pending)
        fits = truth.numel() * truth.element_size() <= len(self.ctx._host._buffers[0])
        if buffer is None or busy or not fits:
            buffer = None
        out = None if buffer is None else self.ctx.get_pinned(buffer, *truth.shape, dtype=dtype)
        handle = self.ctx.gather([part.tensor for part in parts], name, layer=layer, out=out)
        self.pending.append((handle, truth, buffer))
        for s, part in zip(self.ctx.split(name, layer), parts, strict=True):
            self.spoil(s.device, part)

    @rule(
        axis=_SHARE,
        rows=_ROWS,
        dtype=_DTYPES,
        residual=st.booleans(),
        where=st.sampled_from(("new", "out", "parts", "residual")),
    )
    def all_reduce(self, axis: int, rows: tuple[int, ...], dtype: torch.dtype, residual: bool, where: str) -> None:
        """Add up parts, and a residual, in place or elsewhere."""
        name, layer = self.cut(axis)
        senders, receivers = self.ctx.devices_of(name, layer), self.ctx.all_devices
        columns = self.plan.split(Axis.RESIDUAL).size
        parts: list[Value] = []
        for sender in senders:
            parts.append(self.input(sender, rows, columns, dtype, parts))
        truth = values(rows, columns, dtype, self.random)
        residuals = (
            [self.input(receiver, rows, columns, dtype, parts, truth=truth) for receiver in receivers]
            if residual
            else []
        )
        outs = None
        if where == "out":
            outs = self.outs(receivers, rows, [columns] * len(receivers), dtype, [*parts, *residuals])
        elif where == "parts" and senders == receivers:
            outs = parts
        elif where == "residual" and residual:
            outs = residuals
        result = total(*(value.truth for value in (*parts, *residuals[:1])))
        results = self.ctx.all_reduce(
            [part.tensor for part in parts],
            [value.tensor for value in residuals] if residual else None,
            axis=name,
            layer=layer,
            out=[value.tensor for value in outs] if outs else None,
        )
        self.take(receivers, results, [result] * len(receivers), outs)

    @rule(axis=_SHARE, rows=_ROWS, dtype=_DTYPES, whole=st.booleans())
    def add_residual(self, axis: int, rows: tuple[int, ...], dtype: torch.dtype, whole: bool) -> None:
        """Add slices to tensors on their devices."""
        name, layer = self.cut(axis)
        slices = self.ctx.split(name, layer)
        targets = self.parts(name, layer, rows, dtype)
        columns = [slices[-1].end if whole else s.end - s.start for s in slices]
        sources = [self.input(s.device, rows, n, dtype, targets) for s, n in zip(slices, columns, strict=True)]
        self.ctx.add_residual([t.tensor for t in targets], [s.tensor for s in sources], name, layer=layer)
        for s, target, source, n in zip(slices, targets, sources, columns, strict=True):
            part = source.truth[..., s.start : s.end] if n == slices[-1].end else source.truth
            self.take([s.device], (target.tensor,), [total(target.truth, part)], [target])
            self.spoil(s.device, source)

    @precondition(lambda self: not self.streams)  # on streams of its own, a caller has to order scratch itself
    @rule(axis=_SHARE, dtype=_DTYPES, full=st.booleans(), begin=st.booleans())
    def scratch(self, axis: int, dtype: torch.dtype, full: bool, begin: bool) -> None:
        """Get slices of scratch, perhaps in place of all older ones, and write to them."""
        name, layer = self.cut(axis)
        slices = self.ctx.split(name, layer)
        widths = [slices[-1].end if full else s.end - s.start for s in slices]
        sizes = {s.device: align(12 * n * dtype.itemsize) for s, n in zip(slices, widths, strict=True)}
        if begin or self.lacks(sizes):
            self.ctx.begin_scratch()
            for known in self.known.values():
                known[:] = [value for value in known if not value.is_scratch]
        if self.lacks(sizes):
            return
        self.ctx.reserve_scratch(sizes)
        tensors = self.ctx.scratch(12, name, dtype=dtype, layer=layer, full=full)
        for s, tensor in zip(slices, tensors, strict=True):
            value = Value(tensor, tensor, is_scratch=True)
            self.known[s.device].append(value)
            self.write(s.device, value)

    @rule(buffer=st.sampled_from((0, 1)), rows=st.integers(1, 12))
    def through_a_host_buffer(self, buffer: int, rows: int) -> None:
        """Copy into a buffer, send it from there, and copy something else into it at once."""
        if any(buffer == other for _, _, other in self.pending):
            return
        x = values((rows,), self.plan.split(Axis.RESIDUAL).size, torch.bfloat16, self.random)
        pinned = self.ctx.copy_pinned(buffer, x)
        results = self.ctx.broadcast(pinned, source=HOST)
        self.ctx.copy_pinned(buffer, torch.zeros_like(x))
        self.take(self.ctx.all_devices, results, [x] * len(results), None)

    @precondition(lambda self: self.pending)
    @rule(which=_SHARE, how=st.sampled_from(("tensor", "result", "wait", "poll", "glance")))
    def look(self, which: int, how: str) -> None:
        """Wait for one of the handles in some way, or just ask."""
        handle, truth, _ = entry = self.pending[which % len(self.pending)]
        if how == "poll":
            while not handle.done():
                pass
        elif how == "wait":
            handle.wait()
        elif how == "glance" and not handle.done():
            return
        assert same(handle.result() if how == "result" else handle.tensor, truth)
        self.pending.remove(entry)

    @precondition(lambda self: not any(v.is_scratch for known in self.known.values() for v in known))
    @rule(device=_SHARE, number=st.integers(0, 2))
    def other_stream(self, device: int, number: int) -> None:
        """Go on with another stream on a device, without what is on its way in the old one."""
        index = self.device(device)
        self.streams[index] = Stream(f"caller {number}", index)
        self.backend.use(self.streams[index])
        self.known[index].clear()

    @rule(steps=st.integers(1, 50))
    def time_passes(self, steps: int) -> None:
        """Let the devices do some of what they have to do."""
        for _ in range(steps):
            self.backend.pass_time()

    @rule()
    def synchronize(self) -> None:
        """Wait for everything, and look at everything."""
        self.ctx.synchronize()
        self.check()
        for device in [d for d, stream in self.streams.items() if stream != caller(d)]:
            self.backend.use(caller(device))
        self.streams.clear()

    @invariant()
    def is_usable(self) -> None:
        """Whatever was called, the context is open and knows its devices."""
        if hasattr(self, "ctx"):
            assert not self.ctx._guard.closed
            assert tuple(self.ctx.devices) == self.ctx.all_devices

    def teardown(self) -> None:
        """Close the context with whatever is under way, and look at everything."""
        if hasattr(self, "ctx"):
            self.ctx.close()
            self.check()
            for handle, truth, buffer in self.pending:
                assert handle.done()
                assert buffer is not None or same(handle.tensor, truth)


TestContext = ContextMachine.TestCase
TestContext.settings = settings(max_examples=examples(60), stateful_step_count=25)
