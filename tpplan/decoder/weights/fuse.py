"""Joining of a device's weights: matrices with the same input become one, and so do a layer's experts.

Loading places a layer's matrices next to each other, so that joining copies only biases, factors of NVFP4, and norms
whose weights are stored minus 1. If matrices are placed otherwise, projections stay separate and experts are copied.

Experts of gpt_oss, of which all are in one tensor, become views of it. A checkpoint stores ``[E, in, out]`` in 16 or 32
bits, or MXFP4 as codes ``[E, out, in / 32, 16]`` and scales ``[E, out, in / 32]``. Outputs of gate and up projections
alternate, also in their biases. Experts of Qwen3.5 may be stored in one tensor ``[E, out, in]``, too, in which the
outputs of an expert's up projection come behind those of its gate projection.

Shapes: E experts, O outputs, I inputs of an expert's matrix.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve
from torch import Tensor

from tpplan.decoder.model.stored import MXFP4
from tpplan.decoder.weights.convert import begin_overwriting, convert_once
from tpplan.decoder.weights.device import DeviceWeights
from tpplan.decoder.weights.linear import JOINED, prepare_linear
from tpplan.decoder.weights.quantised import Float4Matrix
from tpplan.decoder.weights.stacked import Stacked, stack_rows
from tpplan.errors import RequestError
from tpplan.models.formats.storage import split_name
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, MutableMapping, Sequence

    from tpplan.core.model import Block, ModelSpec
    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.model.settings import Experts, Settings
    from tpplan.decoder.weights.quantised import Quantised
    from tpplan.weights import TensorSlice, Weights


_BIAS: Final = "_bias"


def separate_experts(
    name: str, names: Sequence[str], tensors: MutableMapping[str, Tensor], stacked: MutableMapping[str, Stacked]
) -> None:
    """Replace a tensor of all experts by its projections, whose outputs alternate; nothing if a device lacks it.

    Args:
        name: name of the tensor in the checkpoint.
        names: names of the projections.
        tensors: the device's tensors. Biases get the names of their projections and ``.bias``.
        stacked: gets the projections that are quantised.
    """
    codes, scales = (tensors.pop(name + suffix, None) for suffix in MXFP4)
    bias, whole = tensors.pop(name + _BIAS, None), tensors.pop(name, None)
    if whole is not None:
        whole = convert_once(whole, name, partial(_outputs_first, whole))
    for i, own in enumerate(names):
        if whole is not None:
            tensors[own] = whole[:, i :: len(names)]
        elif codes is not None and scales is not None:
            rows = codes.flatten(2).flatten(0, 1)[i :: len(names)], scales.flatten(0, 1)[i :: len(names)]
            stacked[own] = Stacked(Float4Matrix(rows[0], rows[1]), len(codes))
        if bias is not None:
            tensors[f"{own}.bias"] = bias[:, i :: len(names)]


def _outputs_first(whole_EIO: Tensor) -> Tensor:
    """Transpose the matrices of experts in their own memory, one after the other: ``[E, O, I]``."""
    experts, inputs, outputs = whole_EIO.shape
    to_EOI = whole_EIO.view(experts, outputs, inputs)
    begin_overwriting(whole_EIO)
    for from_IO, to_OI in zip(whole_EIO, to_EOI, strict=True):
        to_OI.copy_(from_IO.mT.clone())
    return to_EOI


def _mix_rows(whole_EOI: Tensor) -> bool:
    """Let the rows of gate and up matrices alternate, in their own memory.

    Then rows of either are equally far apart, so that those of all experts can be seen as one matrix.
    """
    begin_overwriting(whole_EOI)
    _interleave(whole_EOI)
    return True


def _interleave(whole_EOI: Tensor) -> None:
    """Let the rows of the first half of each expert's alternate with the others, in their own memory."""
    for one_OI in whole_EOI:
        one_OI.copy_(torch.stack(one_OI.chunk(2), dim=1).flatten(0, 1))


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "self_attn.kv_a_q_proj": ("self_attn.kv_a_proj_with_mqa", "self_attn.q_proj"),
    **{
        f"{mlp}.gate_up_proj": (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp")
    },
    **JOINED,
}

#: Name of the weights of the norm before the output matrix.
_LAST = "model.norm.weight"


def check_weights(
    weights: Weights, plan: SplitPlan, model: ModelSpec, devices: Collection[int]
) -> dict[int, dict[str, TensorSlice]]:
    """Check that devices have the tensors that a plan gives them, and return their slices by device and name.

    Args:
        weights: the tensors.
        plan: the plan.
        model: its model.
        devices: the devices, all that this process owns.

    Raises:
        RequestError: tensors are missing or have wrong shapes.
        ModelError: the plan is for another model.
    """
    tensors_of: dict[int, Mapping[str, Tensor]] = {}
    slices: dict[int, dict[str, TensorSlice]] = {}
    for part in iter_slices(plan, model):
        if part.device not in devices:
            continue
        if part.device not in tensors_of:
            slices[part.device] = {}
            try:
                tensors_of[part.device] = weights[part.device]
            except LookupError:
                tensors_of[part.device] = {}
        slices[part.device][part.name] = part
        tensor = tensors_of[part.device].get(part.name)
        if tensor is None or tensor.shape != part.shape:
            found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}, not {list(part.shape)}"
            what = f"the weights are not those of the plan for {plan.model.name}: {part.name} of device {part.device}"
            raise RequestError(f"{what} {found}", "pass what load_weights(plan, directory, context) returns")
    return slices


def fuse_weights(
    weights: Mapping[str, Tensor],
    matrices: Mapping[str, Quantised],
    blocks: Sequence[Block],
    settings: Settings,
    dtype: torch.dtype,
) -> DeviceWeights:
    """Return a device's weights, with projections fused as in Phi-3 (``qkv_proj``, ``gate_up_proj``).

    A layer's experts become one tensor ``[E, out, in]`` under the name with ``{expert}`` in it. The weights of the last
    norm include the factor of the logits.

    Args:
        weights: the device's tensors by name in the checkpoint.
        matrices: the quantised matrices, from :func:`tpplan.decoder.weights.convert.matrices_of`.
        blocks: the block that each layer belongs to.
        settings: settings of the model.
        dtype: dtype to convert the biases of quantised matrices to.
    """
    experts, stacked = settings.family.experts, dict[str, Stacked]()
    found = {name.removeprefix(settings.root): each for name, each in _tensors(weights, matrices, dtype).items()}
    quantised = {name.removeprefix(settings.root): matrix for name, matrix in matrices.items()}
    if settings.logit_scale != 1 and _LAST in found:
        found[_LAST] = (found[_LAST].float() * settings.logit_scale).to(dtype)
    if (bias := found.get("lm_head.bias")) is not None:  # of an embedding that is also the output matrix
        found["model.embed_tokens.bias"] = bias
    for layer, block in enumerate(blocks):
        start = f"model.layers.{layer}."
        for fused, names in _FUSED.items():
            _join(f"{start}{fused}", [f"{start}{name}" for name in names], found, quantised)
        if block.linear:
            prepare_linear(f"{start}linear_attn.", block, block.linear, found, dtype)
        _prepare_experts(start, experts, block.experts, found, quantised, stacked)
    return DeviceWeights(found, quantised, stacked)


def _prepare_experts(  # noqa: PLR0917 (see below)
    start: str,
    names: Experts,
    count: int,
    tensors: dict[str, Tensor],
    quantised: dict[str, Quantised],
    stacked: dict[str, Stacked],
) -> None:
    """Let the experts of a layer become one tensor or stack for each projection.

    Args:
        start: start of the names of the layer's tensors.
        names: names of the experts' matrices.
        count: number of experts; 0 if the layer has none.
        tensors: the device's tensors.
        quantised: the device's quantised matrices.
        stacked: filled with the stacks of quantised matrices.
    """
    gate, up, last = (start + name for name in (names.gate, names.up, names.down))
    if names.fused and count:
        separate_experts(start + names.fused, (gate, up), tensors, stacked)
        separate_experts(last, (last,), tensors, stacked)
    elif names.stacked and start + names.stacked[0] in tensors:
        whole, down = (tensors.pop(start + name) for name in names.stacked)
        convert_once(whole, start + names.stacked[0], partial(_mix_rows, whole))
        tensors[gate], tensors[up], tensors[last] = whole[:, ::2], whole[:, 1::2], down
    else:
        first = quantised.get(f"{gate}.weight".replace("{expert}", "0"))
        for name in (gate, up, last):
            _stack(name, count, tensors, quantised, stacked)
        if first:
            alternating = partial(_alternate, (gate, up), stacked, first.codes)
            stacked |= convert_once(first.codes, gate, alternating)


def _join(whole: str, stems: Sequence[str], tensors: dict[str, Tensor], quantised: dict[str, Quantised]) -> None:
    """Add the matrices of some modules as one; nothing if they cannot be joined, or only some of them have a bias."""
    one = _fused([f"{stem}.weight" for stem in stems], tensors, quantised)
    biases = [tensors[key] for stem in stems if (key := f"{stem}.bias") in tensors]
    if one is None or 0 < len(biases) < len(stems):
        return
    if isinstance(one, Tensor):
        tensors[f"{whole}.weight"] = one
    else:
        quantised[f"{whole}.weight"] = one
    if biases:
        tensors[f"{whole}.bias"] = torch.cat(biases)


def _stack(
    name: str,
    count: int,
    tensors: dict[str, Tensor],
    quantised: dict[str, Quantised],
    stacked: dict[str, Stacked],
) -> None:
    """Replace the matrices and biases of experts by one tensor or stack each, if the device has any.

    Args:
        name: name of the matrices, with ``{expert}`` in it.
        count: number of experts.
        tensors: the device's tensors.
        quantised: the device's quantised matrices.
        stacked: filled with the stacks of quantised matrices.
    """
    own = [f"{name}.weight".replace("{expert}", str(i)) for i in range(count)]
    if own and own[0] in tensors:
        found = [tensors.pop(each) for each in own]
        tensor = adjacent(found)
        tensors[name] = torch.unflatten(torch.cat(found) if tensor is None else tensor, 0, (count, -1))
    elif own and own[0] in quantised:
        stacked[name] = Stacked.of([quantised.pop(each) for each in own], adjacent)
    biases = [f"{name}.bias".replace("{expert}", str(i)) for i in range(count)]
    zeros = next((torch.zeros_like(tensors[each]) for each in biases if each in tensors), None)
    if zeros is not None:
        tensors[f"{name}.bias"] = torch.stack([tensors.pop(each, zeros) for each in biases])


def _alternate(names: tuple[str, str], stacked: Mapping[str, Stacked], memory: Tensor) -> dict[str, Stacked]:
    """Let the rows of MXFP4 gate and up projections alternate, as in gpt_oss: kernels find the scales of both alike.

    Args:
        names: names of both projections.
        stacked: the layer's stacks.
        memory: what :func:`convert_once` was called with.

    Returns:
        Both projections anew, in the same memory if they are adjacent there; nothing if they are not MXFP4.
    """
    both = [stacked[name].matrix for name in names if name in stacked]
    pair = [matrix for matrix in both if isinstance(matrix, Float4Matrix) and matrix.scales.dtype == torch.uint8]
    if len(pair) != len(names):
        return {}
    count = len(stacked[names[0]])
    begin_overwriting(memory)
    codes, scales = (alternated(part, count) for part in zip(*((one.codes, one.scales) for one in pair), strict=True))
    return {
        name: Stacked(evolve(one, codes=codes[i::2], scales=scales[i::2]), count)
        for i, (name, one) in enumerate(zip(names, pair, strict=True))
    }


def alternated(two: Sequence[Tensor], count: int) -> Tensor:
    """Return the rows of two tensors in turn, in their own memory if they are adjacent there.

    Args:
        two: tensors of the same shape, with rows of so many experts.
        count: number of experts.
    """
    whole = adjacent(two)
    if whole is None:
        return torch.stack(list(two), 1).flatten(0, 1)
    each = torch.unflatten(whole, 0, (2 * count, -1))  # first of all experts, then second of all
    for start in range(2 * count):  # second behind first, along each cycle of this permutation from its least place
        cycle = [start]
        while (source := cycle[-1] // 2 + count * (cycle[-1] % 2)) > start:
            cycle.append(source)
        if source == start and len(cycle) > 1:
            first = each[start].clone()
            for to, source in pairwise(cycle):
                each[to].copy_(each[source])
            each[cycle[-1]].copy_(first)
    _interleave(torch.unflatten(whole, 0, (count, -1)))
    return whole


def _tensors(weights: Mapping[str, Tensor], matrices: Mapping[str, Quantised], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that are not part of quantised matrices, and the biases of these matrices.

    Biases of all zeros are left out, because some quantisation tools add one to every matrix.
    """
    found = {}
    for name, tensor in weights.items():
        stem, suffix = split_name(name)
        if f"{stem}.weight" not in matrices:
            found[name] = tensor
        elif suffix == ".bias" and any(weights[each].any() for each in _biases(stem) if each in weights):
            found[name] = tensor.to(dtype)
    return found


def _biases(stem: str) -> list[str]:
    """Return the names of the biases of a module and of the modules it is fused with."""
    for names in _FUSED.values():
        for own in names:
            if stem.endswith(f".{own}"):
                return [f"{stem.removesuffix(own)}{name}.bias" for name in names]
    return [f"{stem}.bias"]


def _fused(
    names: Sequence[str], tensors: Mapping[str, Tensor], quantised: Mapping[str, Quantised]
) -> Tensor | Quantised | None:
    """Return matrices joined along their rows; None if the device lacks one or they are not adjacent in memory."""
    if all(name in tensors for name in names):
        return adjacent([tensors[name] for name in names])
    if all(name in quantised for name in names):
        return stack_rows([quantised[name] for name in names], adjacent)
    return None


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view that joins tensors along the first dimension; None if they are not adjacent in memory."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == end and tensor.is_contiguous() and tensor.dtype == first.dtype
        if not is_next or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.nbytes
    rows = sum(prod(tensor.shape) for tensor in tensors) // prod(first.shape[1:])
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
