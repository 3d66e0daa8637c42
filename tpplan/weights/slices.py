"""The slice of every tensor that each device of a plan holds, as ranges of elements; the ledger charges for these."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.axes import Axis, slices_of, unit_count
from tpplan.core.model import DTYPE_BITS, Parameter
from tpplan.core.plan import Split
from tpplan.errors import ModelError
from tpplan.models.formats.storage import split_name
from tpplan.planfile.codec import fingerprint
from tpplan.planfile.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.core.model import Block, ModelSpec, Segment
    from tpplan.core.plan import SplitPlan

_HINT = "plan again for this model, or fetch the checkpoint that the plan was made for"


@frozen
class TensorSlice:
    """The part of a tensor that one device holds.

    Attributes:
        name: name of the tensor, with the family's prefix even where the checkpoint leaves it out.
        device: index of the device in the plan.
        dtype: dtype in safetensors notation, such as ``BF16``.
        whole: shape of the whole tensor.
        dim: the dimension that is cut; None if the device holds the whole tensor.
        ranges: start (included) and end (excluded) in this dimension. A fused tensor has one range for each of its
            segments, to be concatenated in order. Empty if nothing is cut.
    """

    name: str
    device: int
    dtype: str
    whole: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.dim is None:
            return self.whole
        length = sum(end - start for start, end in self.ranges)
        return (*self.whole[: self.dim], length, *self.whole[self.dim + 1 :])

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def iter_slices(plan: SplitPlan, model: ModelSpec) -> Iterator[TensorSlice]:
    """Yield each device's part of every tensor, first of the tensors outside the layers, then layer by layer.

    Devices that hold no part of a tensor are left out. Where the plan replicates KV heads, a device holds each head
    once, however many replicas of it the plan gives the device.

    Args:
        plan: the plan that cuts the model.
        model: a model from :func:`tpplan.read_model`.

    Raises:
        PlanError: the plan breaks a rule.
        ModelError: the plan is for another model, or the tensors are stored so that its cuts cannot be made.
    """
    verify(plan)
    given = fingerprint(model)
    if given != plan.model.fingerprint:
        raise ModelError(
            f"the plan for {plan.model.name} is for {plan.model.fingerprint}, this model is {given}", _HINT
        )
    outside = ((Axis.VOCAB, model.vocab_size), (Axis.RESIDUAL, model.hidden_size))
    cuts = _Cuts.of(plan, outside, None)
    held = [cuts.holding(parameter, parameter.name) for parameter in model.parameters]
    for layer, block in model.by_layer.items():
        cuts = _Cuts.of(plan, (*outside, *block.sizes()), layer)
        for parameter in block.parameters:
            if "{expert}" in parameter.name and parameter.copies != block.experts:
                what = f"the experts of layer {layer} are stored in several ways ({_ways(parameter, block)})"
                raise ModelError(f"{what}, which tpplan plans but does not cut", "convert all of them alike")
            held.append(cuts.holding(parameter, parameter.name.replace("{layer}", str(layer))))
    return chain.from_iterable(one.slices() for one in held)


def _ways(parameter: Parameter, block: Block) -> str:
    """Return the ways in which some experts have a matrix, of which a parameter is a part."""
    stem = split_name(parameter.name)[0]
    some = [each for each in block.parameters if split_name(each.name)[0] == stem and each.copies < block.experts]
    ways = (f"{each.name.removeprefix(f'{stem}.')} {each.dtype} {[*each.shape]} of {each.copies}" for each in some)
    return f"{stem}: {', '.join(ways)}"


@frozen
class _HeldParameter:
    """The parts of one layer's parameter, by device.

    Attributes:
        parameter: the parameter.
        name: name of the tensor, with ``{expert}`` in place of the number.
        dim: the dimension that is cut, None if none is.
        ranges: ranges of this dimension, by device.
    """

    parameter: Parameter
    name: str
    dim: int | None
    ranges: Mapping[int, tuple[tuple[int, int], ...]]

    def slices(self) -> Iterator[TensorSlice]:
        """Yield the parts, copy by copy and device by device."""
        dtype, whole = self.parameter.dtype, self.parameter.shape
        for expert in range(self.parameter.copies):
            name = self.name.replace("{expert}", str(expert))
            for device, ranges in self.ranges.items():
                yield TensorSlice(name, device, dtype, whole, self.dim, ranges)


@frozen
class _Cuts:
    """How a plan cuts the axes of one layer, or those outside the layers.

    Attributes:
        layout: layout of the plan.
        splits: splits by axis.
        used: the devices that hold a part of any axis.
    """

    layout: str
    splits: Mapping[Axis, Split]
    used: tuple[int, ...]

    @classmethod
    def of(cls, plan: SplitPlan, sizes: Iterable[tuple[Axis, int]], layer: int | None) -> _Cuts:
        """Look up the splits of these axes, given their sizes in the model.

        Raises:
            ModelError: the plan cuts an axis of another size.
            RequestError: the plan has no such axis.
        """
        splits = {}
        for axis, size in sizes:
            splits[axis] = split = plan.split(axis, layer)
            if split.size != size * split.replicas:
                where = "" if layer is None else f" of layer {layer}"
                what = f"the plan for {plan.model.name} cuts {split.size // split.replicas} {axis}{where}"
                raise ModelError(f"{what}, the model has {size}", _HINT)
        used = {each.device for split in plan.splits for each in slices_of(split.bounds)}
        return cls(plan.request.layout, splits, tuple(sorted(used)))

    def holding(self, parameter: Parameter, name: str) -> _HeldParameter:
        """Return each device's part of a parameter, for which the ledger charges the device.

        Raises:
            ModelError: a cut of the plan separates elements that are stored together.
        """
        dim = parameter.cut_dim(self.layout)
        if dim is None:
            return _HeldParameter(parameter, name, None, dict.fromkeys(self._holders(parameter.home), ()))
        ranges: dict[int, tuple[tuple[int, int], ...]] = {}
        at = 0
        for segment in parameter.dims[dim]:
            for device, start, end in self._parts(segment, parameter.home, name):
                ranges[device] = (*ranges.get(device, ()), (at + start, at + end))
            at += segment.length
        return _HeldParameter(parameter, name, dim, dict(sorted(ranges.items())))

    def _holders(self, home: Axis | None) -> tuple[int, ...]:
        """Return the devices that hold an uncut tensor: those of its home axis, or all in use if it has none."""
        split = self.splits.get(home) if home else None
        return tuple(each.device for each in slices_of(split.bounds)) if split else self.used

    def _parts(self, segment: Segment, home: Axis | None, name: str) -> Iterator[tuple[int, int, int]]:
        """Yield each device's range of a segment; of what elements of the axis share, all that any of its own have."""
        split = self.splits.get(segment.axis) if segment.axis else None
        if split is None:
            yield from ((device, 0, segment.length) for device in self._holders(segment.axis or home))
            return
        share = split.size // segment.shared if segment.shared else split.replicas
        size = split.size // share
        for device, start, end in ((s.device, s.start, s.end) for s in slices_of(split.bounds)):
            cuts = [segment.length * cut for cut in (start // share, unit_count(end, share))]
            first, last = (cut // size for cut in cuts)
            if any(cut % size for cut in cuts) or any(cut % segment.block for cut in (first, last % segment.length)):
                what = f"the plan cuts {segment.axis} at {start} and {end}, within what {name} stores together"
                raise ModelError(what, _HINT)
            yield device, first, last
