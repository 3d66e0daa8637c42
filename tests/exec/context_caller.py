"""A caller of a context: it has tensors on every virtual device, and knows what each of them should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define
from hypothesis.stateful import RuleBasedStateMachine
from torch import Tensor

from tests.exec.reference import same, values
from tpplan.core.axes import Axis, parse_layers
from tpplan.exec import HOST
from tpplan.exec.programs.fence import caller

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext
    from tpplan.exec.backends.adversary import Adversary
    from tpplan.exec.programs.program import Stream


@define(eq=False)
class Value:
    """A tensor of the caller on a virtual device.

    Attributes:
        tensor: there.
        truth: what it holds when the caller's stream has come this far.
        is_scratch: whether it is gone with the next begin_scratch.
    """

    tensor: Tensor
    truth: Tensor
    is_scratch: bool = False


class ContextCaller(RuleBasedStateMachine):
    """What the rules of a machine do with tensors.

    Attributes:
        plan: what the context was compiled from.
        ctx: the context.
        backend: its devices.
        random: decides what is used again, and what tensors hold.
        known: the tensors on each device.
        seen: results as the caller's streams have read them, and the truth.
        streams: the streams of the caller's own, by device.
    """

    plan: SplitPlan
    ctx: TPContext
    backend: Adversary
    random: Random
    known: dict[int, list[Value]]
    seen: list[tuple[Tensor, Tensor]]
    streams: dict[int, Stream]

    def check(self) -> None:
        """Compare what the caller's streams have read, and what the tensors hold now, with the truth."""
        for found, truth in self.seen:
            assert same(found, truth), "a result read by the caller"
        self.seen.clear()
        for device, known in self.known.items():
            for value in known:
                assert same(value.tensor, value.truth), f"a tensor on device {device}"

    def cut(self, share: int, layer: int | None = None) -> tuple[Axis, int | None]:
        """Return one of the plan's axes with a layer for one of its cuts, or one that the layer has."""
        cuts = [(s.axis, min(parse_layers(s.layers)) if s.layers else layer) for s in self.plan.splits]
        if layer is not None:
            cuts = [(axis, layer) for axis, at in cuts if at == layer]
        return cuts[share % len(cuts)]

    def device(self, share: int, *others: int) -> int:
        """Return one of the devices in use, or another place."""
        places = (*self.ctx.all_devices, *others)
        return places[share % len(places)]

    def lacks(self, sizes: dict[int, int]) -> bool:
        """Tell whether a device has too little scratch."""
        return any(self.ctx.devices[device].arena.free_bytes < size for device, size in sizes.items())

    def parts(self, axis: Axis, layer: int | None, rows: tuple[int, ...], dtype: torch.dtype) -> list[Value]:
        """Return a part of the axis on each of its devices."""
        return [self.input(s.device, rows, s.end - s.start, dtype) for s in self.ctx.split(axis, layer)]

    def input(
        self,
        device: int,
        rows: tuple[int, ...],
        columns: int,
        dtype: torch.dtype,
        taken: Sequence[Value] = (),
        *,
        truth: Tensor | None = None,
    ) -> Value:
        """Return a tensor that is known and not taken, or a new one; written by the caller's stream."""
        known = self.known.get(device, [])
        shape = torch.Size((*rows, columns))
        fit = [v for v in known if v.tensor.shape == shape and v.tensor.dtype == dtype and v not in taken]
        if fit and self.random.random() < 0.7:
            value = self.random.choice(fit)
            if truth is not None:
                self.write(device, value, truth)
            return value
        new = values(rows, columns, dtype, self.random) if truth is None else truth
        value = Value(new.clone(), new)
        known.append(value)
        return value

    def outs(
        self,
        devices: Sequence[int],
        rows: tuple[int, ...],
        columns: Sequence[int],
        dtype: torch.dtype,
        taken: Sequence[Value],
    ) -> list[Value]:
        """Return places for results: tensors that have been used, or new ones."""
        return [self.input(d, rows, n, dtype, taken) for d, n in zip(devices, columns, strict=True)]

    def take(
        self, devices: Sequence[int], results: Sequence[Tensor], truths: Sequence[Tensor], outs: list[Value] | None
    ) -> None:
        """Read results on the caller's streams, and keep them."""
        for i, (device, result, truth) in enumerate(zip(devices, results, truths, strict=True)):
            if outs is None:
                self.known[device].append(Value(result, truth))
            else:
                assert result is outs[i].tensor
                outs[i].truth = truth
            self.do(device, lambda r=result, t=truth: self.seen.append((r.clone(), t)))

    def spoil(self, device: int, value: Value) -> None:
        """Write over an input right after the call; the host does so at once."""
        if device == HOST:
            value.tensor.zero_()
        else:
            self.write(device, value)

    def write(self, device: int, value: Value, truth: Tensor | None = None) -> None:
        """Write to a tensor on the caller's stream."""
        new = values(value.tensor.shape[:-1], value.tensor.shape[-1], value.tensor.dtype, self.random)
        value.truth = new if truth is None else truth
        self.do(device, lambda t=value.truth: value.tensor.copy_(t))

    def do(self, device: int, work: object) -> None:
        """Issue the caller's own work."""
        assert callable(work)
        self.backend.call(self.streams.get(device, caller(device)), work)
