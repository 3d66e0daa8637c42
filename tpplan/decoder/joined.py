"""A device's weights as the decoder multiplies by them: matrices with the same input are one, and so are experts.

Loading lays a layer's matrices side by side, so that only biases are copied, and norms whose weights are stored less 1;
where matrices lie otherwise, projections stay apart, and experts are copied.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from tpplan.errors import RequestError
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.decoder.settings import Family
    from tpplan.model import Block, ModelSpec
    from tpplan.plan import SplitPlan
    from tpplan.weights import Weights

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def check_weights(weights: Weights, plan: SplitPlan, model: ModelSpec) -> None:
    """Make sure that every device has what a plan gives it of a model.

    Raises:
        RequestError: tensors are missing, or have other shapes.
        ModelError: the plan is for another model.
    """
    held: dict[int, Mapping[str, Tensor]] = {}
    for part in iter_slices(plan, model):
        if part.device not in held:
            try:
                held[part.device] = weights[part.device]
            except LookupError:
                held[part.device] = {}
        tensor = held[part.device].get(part.name)
        if tensor is None or tensor.shape != part.shape:
            found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}, not {list(part.shape)}"
            what = f"the weights are not those of the plan for {plan.model.name}: {part.name} of device {part.device}"
            raise RequestError(f"{what} {found}", "pass what load_weights(plan, directory, context) returns")


def joined(weights: Mapping[str, Tensor], blocks: Sequence[Block], family: Family) -> dict[str, Tensor]:
    """Return a device's weights by name, those of Phi-3's kind (``qkv_proj``, ``gate_up_proj``) fused as there.

    Args:
        weights: by name in the checkpoint.
        blocks: what is in each layer.
        family: names its experts, which become one tensor ``[E, out, in]`` under the name that has ``{expert}`` in it;
            and what its norms add to their weights.
    """
    found, experts = dict(weights), family.experts
    if family.offset:
        found |= {name: w.float() + family.offset for name, w in weights.items() if name.endswith("norm.weight")}
    for layer, block in enumerate(blocks):
        start = f"model.layers.{layer}."
        for fused, names in _FUSED.items():
            tensors = [found[key] for name in names if (key := f"{start}{name}.weight") in found]
            biases = [found[key] for name in names if (key := f"{start}{name}.bias") in found]
            if len(tensors) == len(names) and (one := neighbours(tensors)) is not None:
                found[f"{start}{fused}.weight"] = one
                if biases:
                    found[f"{start}{fused}.bias"] = torch.cat(biases)
        for name in (experts.gate, experts.up, experts.down):
            own = [f"{start}{name}.weight".replace("{expert}", str(i)) for i in range(block.experts)]
            if own and own[0] in found:
                tensors = [found.pop(each) for each in own]
                one = neighbours(tensors)
                one = torch.cat(tensors) if one is None else one
                found[start + name] = torch.unflatten(one, 0, (block.experts, -1))
    return found


def neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that follow each other in memory as one, along the first dimension; None if they do not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == end and tensor.is_contiguous() and tensor.dtype == first.dtype
        if not is_next or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.nbytes
    rows = sum(prod(tensor.shape) for tensor in tensors) // prod(first.shape[1:])
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
