"""What modules compute of all columns of a layer, which devices have parts of: norms of groups, and thresholds."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tpplan.core.axes import Axis

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.core.model import LinearAttention
    from tpplan.transformers.operations import Operations


def norm_groups(
    path: str, module: Any, operations: Operations, linear: LinearAttention, layer: int, *, device: int, epsilon: float
) -> None:
    """Normalise the channels of each group of Mamba-2's heads together, on whichever devices these are.

    Args:
        path: name of the module.
        module: a norm with a gate.
        operations: the context's.
        linear: the layer's.
        layer: its number.
        device: index of the device.
        epsilon: what is added to the mean of squares.
    """
    parts = operations.context.plan.slices(Axis.LINEAR_HEADS, layer)
    own = next((range(part.start, part.end) for part in parts if part.device == device), range(1))
    lacks = all(part.device != device for part in parts)
    shares = any(part.start % linear.group for part in parts)
    numbers = torch.tensor([head // linear.group for head in own], device=module.weight.device)
    gates_first = not getattr(module, "norm_before_gate", False)

    def forward(x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.float()
        if gate is not None and gates_first:
            wide = wide * functional.silu(gate.float())
        heads = wide.view(*x.shape[:-1], len(own), -1)
        squares = heads.square().sum(-1) * (not lacks)
        sums = squares.new_zeros(*squares.shape[:-1], linear.key_heads).index_add(-1, numbers, squares)
        if shares:
            sums = operations.sum(path, sums, Axis.LINEAR_HEADS, layer)
        scales = torch.rsqrt(sums / (linear.group * linear.value_head_dim) + epsilon)
        normed: Tensor = module.weight * (heads * scales.index_select(-1, numbers)[..., None]).flatten(-2)
        if gate is not None and not gates_first:
            normed = normed * functional.silu(gate.float())
        return normed.to(x.dtype)

    module.forward = forward


def sparsify(path: str, module: Any, operations: Operations, layer: int, columns: int, *, lacks: bool) -> None:
    """Let a gate of Gemma 3n pass only elements over a quantile, if all columns are distributed normally.

    Args:
        path: name of the module.
        module: an MLP of transformers with an ``activation_sparsity``.
        operations: operations of the context.
        layer: number of the layer.
        columns: number of the gate's columns on all devices.
        lacks: whether this device has none of them.
    """
    quantile = NormalDist().inv_cdf(module.activation_sparsity)

    def passed(gate: Tensor) -> Tensor:
        wide = gate.float() * (not lacks)
        sums = torch.stack([wide.sum(-1), wide.square().sum(-1)], -1)
        mean, square = (operations.sum(path, sums, Axis.INTERMEDIATE, layer) / columns).unsqueeze(-2).unbind(-1)
        threshold = mean + (square - mean.square()).clamp(min=0).sqrt() * quantile
        return functional.relu(gate - threshold.to(gate.dtype))

    module._gaussian_topk = passed  # noqa: SLF001 (which its forward pass calls)
