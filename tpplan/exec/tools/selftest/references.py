"""Reference results of all operations, from slicing, torch.cat and float32 sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.exec.programs.program import HOST
from tpplan.exec.tools.selftest.trial import Operand, Scene, Trial

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.exec.handles import Gathered


def _broadcast(scene: Scene, source: int) -> Trial:
    (x,) = scene.operands([(source, scene.dim)])

    def call(out: list[Tensor] | None) -> Sequence[Tensor]:
        return scene.context.broadcast(x.tensor, scene.axis, layer=scene.layer, source=source, out=out)

    right = scene.holding(x, scene.dim)
    return Trial(call, (x,), tuple((device, right) for device in scene.devices))


def _scatter(scene: Scene, source: int) -> Trial:
    size = scene.slices[-1][2]
    (x,) = scene.operands([(source, size)])

    def call(out: list[Tensor] | None) -> Sequence[Tensor]:
        context, axis = scene.context, scene.axis or ""
        return context.scatter(x.tensor, axis, dim=scene.dim, layer=scene.layer, source=source, out=out)

    right = scene.holding(x, size)
    return Trial(call, (x,), tuple((device, right[..., a:b]) for device, a, b in scene.slices))


def _parts(scene: Scene) -> tuple[tuple[Operand, ...], Tensor]:
    """Return an input for each slice, and their concatenation."""
    parts = scene.operands((device, b - a) for device, a, b in scene.slices)
    held = (scene.holding(part, b - a) for part, (_, a, b) in zip(parts, scene.slices, strict=True))
    return parts, torch.cat(tuple(held), -1)


def _gather(scene: Scene) -> Trial:
    parts, whole = _parts(scene)

    def call(out: list[Tensor] | None) -> Sequence[Gathered]:
        given = [part.tensor for part in parts]
        target = out[0] if out else None
        return (scene.context.gather(given, scene.axis or "", dim=scene.dim, layer=scene.layer, out=target),)

    return Trial(call, parts, ((HOST, whole),))


def _allgather(scene: Scene) -> Trial:
    parts, whole = _parts(scene)

    def call(out: list[Tensor] | None) -> Sequence[Tensor]:
        given = [part.tensor for part in parts]
        return scene.context.allgather(given, scene.axis or "", dim=scene.dim, layer=scene.layer, out=out)

    return Trial(call, parts, tuple((device, whole) for device in scene.context.all_devices))


def _all_reduce(scene: Scene) -> Trial:
    receivers, columns = scene.context.all_devices, scene.dim
    parts = scene.operands((device, columns) for device in scene.devices)
    residual = scene.operands(((device, columns) for device in receivers), same=True)
    if scene.form.name == "dense":
        residual = ()
    over = residual if scene.form.out == "residual" else ()
    if scene.form.out == "parts" and scene.devices == receivers:
        over = parts

    def call(out: list[Tensor] | None) -> Sequence[Tensor]:
        added = [operand.tensor for operand in residual] or None
        given = [part.tensor for part in parts]
        return scene.context.all_reduce(given, added, axis=scene.axis, layer=scene.layer, out=out)

    addends = [*parts, *residual[:1]]
    total = scene.holding(addends[0], columns).float()
    for operand in addends[1:]:
        total = total + scene.holding(operand, columns).float()
    right = total.to(scene.dtype)
    inputs = tuple(x for x in (*parts, *residual) if all(x is not y for y in over))
    return Trial(call, inputs, tuple((device, right) for device in receivers), over=over)


def _add_residual(scene: Scene) -> Trial:
    size = scene.slices[-1][2]
    full = scene.form.gap == 0  # the operand has all columns, or those of the slice
    widths = tuple((device, size if full else b - a) for device, a, b in scene.slices)
    source = scene.operands(widths, same=full)
    before, expected = [], []
    for operand, (_, width), (device, a, b) in zip(source, widths, scene.slices, strict=True):
        held = scene.holding(operand, width)[..., a:b] if full else scene.holding(operand, width)
        before.append(scene.noise.window((*scene.lead, b - a), scene.dtype, numbers=True))
        expected.append((device, (before[-1].float() + held.float()).to(scene.dtype)))

    def call(out: list[Tensor] | None) -> Sequence[Tensor]:
        target = out or []
        given = [operand.tensor for operand in source]
        scene.context.add_residual(target, given, scene.axis or "", dim=scene.dim, layer=scene.layer)
        return target

    return Trial(call, source, tuple(expected), before=tuple(before))


@frozen
class Kind:
    """A kind of operation to test.

    Attributes:
        make: creates the trial.
        cuts: whether it needs an axis to cut, so that ``axis=None`` is not allowed.
        adds: whether it adds elements.
        hosted: whether the host takes part, so that it cannot be captured.
    """

    make: Callable[[Scene], Trial]
    cuts: bool
    adds: bool = False
    hosted: bool = False


#: All operations, by their name in :class:`~tpplan.exec.explain.Way`.
KINDS = {
    "broadcast": Kind(lambda scene: _broadcast(scene, scene.source), cuts=False),
    "broadcast from the host": Kind(lambda scene: _broadcast(scene, HOST), cuts=False, hosted=True),
    "scatter": Kind(lambda scene: _scatter(scene, scene.source), cuts=True),
    "scatter from the host": Kind(lambda scene: _scatter(scene, HOST), cuts=True, hosted=True),
    "gather": Kind(_gather, cuts=True, hosted=True),
    "allgather": Kind(_allgather, cuts=True),
    "all_reduce": Kind(_all_reduce, cuts=False, adds=True),
    "add_residual": Kind(_add_residual, cuts=True, adds=True),
}
