"""Which part of which tensor each of a plan's devices holds: what the ledger charges, as ranges of elements."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.axes import Axis, slices_of, unit_count
from tpplan.codec import fingerprint
from tpplan.errors import ModelError
from tpplan.model import DTYPE_BITS
from tpplan.plan import Split
from tpplan.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.model import ModelSpec, Parameter
    from tpplan.plan import SplitPlan

_HINT = "plan again for this model, or fetch the checkpoint that the plan was made for"


@frozen
class TensorSlice:
    """The part of a tensor that one device holds.

    Attributes:
        name: of the tensor, with the family's prefix also where the checkpoint leaves it out.
        device: index into the plan's devices.
        dtype: as safetensors writes it, such as ``BF16``.
        whole: elements per dimension of the whole tensor.
        dim: the dimension that is cut; None if the device holds all of the tensor.
        ranges: of this dimension, start (included) and end (excluded); a fused tensor has one for each of its
            segments, to be concatenated in order. Empty where nothing is cut.
    """

    name: str
    device: int
    dtype: str
    whole: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension of the part."""
        if self.dim is None:
            return self.whole
        length = sum(end - start for start, end in self.ranges)
        return (*self.whole[: self.dim], length, *self.whole[self.dim + 1 :])

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def iter_slices(plan: SplitPlan, model: ModelSpec) -> Iterator[TensorSlice]:
    """Yield which part of every tensor goes to which device, the tensors outside the layers first, then by layer.

    Devices that hold no part of a tensor are left out. Where the plan replicates KV heads, a device holds each head
    once, however many replicas of it are its own.

    Args:
        plan: that cuts the model.
        model: from :func:`tpplan.read_model`.

    Raises:
        PlanError: the plan breaks a rule.
        ModelError: the plan is for another model.
    """
    verify(plan)
    given = fingerprint(model)
    if given != plan.model.fingerprint:
        raise ModelError(
            f"the plan for {plan.model.name} is for {plan.model.fingerprint}, this model is {given}", _HINT
        )
    used = tuple(sorted({s.device for split in plan.splits for s in slices_of(split.bounds)}))
    outside = ((Axis.VC, model.vocab_size), (Axis.RS, model.hidden_size))
    parts = [(parameter, -1, _Cuts.of(plan, outside, None, used)) for parameter in model.parameters]
    blocks = {layer: block for block in model.blocks for layer in block.layers}
    for layer, block in sorted(blocks.items()):
        cuts = _Cuts.of(plan, (*outside, *block.sizes()), layer, used)
        for parameter in block.parameters:
            if "{expert}" in parameter.name and parameter.copies != block.experts:
                what = f"the experts of layer {layer} are stored in several ways ({parameter.name})"
                raise ModelError(f"{what}, which tpplan plans but cannot cut", "convert all of them alike")
            parts.append((parameter, layer, cuts))
    layout = plan.request.layout
    return (part for parameter, layer, cuts in parts for part in cuts.slices(parameter, layer, layout))


@frozen
class _Cuts:
    """How a plan cuts the axes of one layer, or of what is outside the layers.

    Attributes:
        splits: by axis.
        used: the devices that hold a part of anything.
    """

    splits: Mapping[Axis, Split]
    used: tuple[int, ...]

    @classmethod
    def of(cls, plan: SplitPlan, sizes: Iterable[tuple[Axis, int]], layer: int | None, used: tuple[int, ...]) -> _Cuts:
        """Look the axes up.

        Raises:
            ModelError: the plan cuts an axis of another size.
            RequestError: the plan has no such axis.
        """
        splits = {}
        for axis, size in sizes:
            splits[axis] = split = plan.split(axis, layer)
            if split.size != size * split.replicas:
                where = "" if layer is None else f" in layer {layer}"
                what = f"the plan for {plan.model.name} cuts {split.size // split.replicas} {axis}{where}"
                raise ModelError(f"{what}, the model has {size}", _HINT)
        return cls(splits, used)

    def slices(self, parameter: Parameter, layer: int, layout: str) -> Iterator[TensorSlice]:
        """Yield the parts of a parameter of a layer, copy by copy and device by device."""
        dim, whole = parameter.cut_dim(layout), parameter.shape
        held: dict[int, list[tuple[int, int]]] = {}
        if dim is None:
            held = {device: [] for device, *_ in self._ranges(None, parameter.home, 0)}
        else:
            at = 0
            for segment in parameter.dims[dim]:
                for device, start, end in self._ranges(segment.axis, parameter.home, segment.length):
                    held.setdefault(device, []).append((at + start, at + end))
                at += segment.length
        name = parameter.name.replace("{layer}", str(layer))
        for expert in range(parameter.copies):
            one = name.replace("{expert}", str(expert))
            for device, ranges in sorted(held.items()):
                yield TensorSlice(one, device, parameter.dtype, whole, dim, tuple(ranges))

    def _ranges(self, axis: Axis | None, home: Axis | None, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield for each device that pays for a segment of this length which part of it the device holds.

        As in the ledger: what no axis cuts is whole on the devices of its home, without a home on all in use.
        """
        key = axis or home
        split = self.splits.get(key) if key else None
        if split is None:
            yield from ((device, 0, length) for device in self.used)
            return
        size = split.size // split.replicas
        for device, start, end in ((s.device, s.start, s.end) for s in slices_of(split.bounds)):
            first, last = start // split.replicas, unit_count(end, split.replicas)
            yield (device, length * first // size, length * last // size) if axis else (device, 0, length)
