"""A mixture of experts on one device: the router's choice, and the matrices of the experts that it chose.

Shapes: R rows, D hidden, E experts, C experts chosen for a row, I the device's part of an expert's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def choose(scores_RE: Tensor, count: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of the experts that each row is routed to, ``[R, C]``, weights in float32."""
    weights_RC, experts_RC = scores_RE.softmax(-1, dtype=torch.float32).topk(count, dim=-1)
    if normalised:
        weights_RC = weights_RC / weights_RC.sum(-1, keepdim=True)
    return weights_RC, experts_RC


def up(
    x_RD: Tensor,
    gate_EID: Tensor,
    up_EID: Tensor,
    experts_RC: Tensor,
    activation: Callable[[Tensor], Tensor],
    *,
    fixed: bool,
) -> Tensor:
    """Return what the chosen experts have between their matrices, ``[R, C, I]``.

    Args:
        x_RD: rows.
        gate_EID: the matrix of each expert to which the activation belongs.
        up_EID: the other one.
        experts_RC: chosen.
        activation: of the gate.
        fixed: whether no shape may depend on the choice, as in a graph.
    """
    if fixed and experts_RC.numel() <= len(gate_EID):
        x_R1D1 = x_RD[:, None, :, None]
        gate_RCI, up_RCI = ((matrix[experts_RC] @ x_R1D1).squeeze(-1) for matrix in (gate_EID, up_EID))
        return activation(gate_RCI) * up_RCI
    out_RCI = x_RD.new_zeros(*experts_RC.shape, gate_EID.shape[1])
    for expert, chosen in _rows(experts_RC, len(gate_EID), fixed=fixed):
        if fixed:
            one = activation(functional.linear(x_RD, gate_EID[expert])) * functional.linear(x_RD, up_EID[expert])
            out_RCI = torch.where((experts_RC == expert)[..., None], one[:, None], out_RCI)
        else:
            x = x_RD[chosen[0]]
            out_RCI[chosen] = activation(functional.linear(x, gate_EID[expert])) * functional.linear(x, up_EID[expert])
    return out_RCI


def down(h_RCI: Tensor, down_EDI: Tensor, experts_RC: Tensor, weights_RC: Tensor, *, fixed: bool) -> Tensor:
    """Return the weighed sum of what the experts make of ``h``, ``[R, D]``; for the arguments see :func:`up`."""
    h_RCI = h_RCI * weights_RC[..., None].to(h_RCI.dtype)
    if fixed and experts_RC.numel() <= len(down_EDI):
        return (down_EDI[experts_RC] @ h_RCI[..., None]).squeeze(-1).sum(1)
    out_RD = h_RCI.new_zeros(len(h_RCI), down_EDI.shape[1])
    for expert, chosen in _rows(experts_RC, len(down_EDI), fixed=fixed):
        if fixed:
            h = (h_RCI * (experts_RC == expert)[..., None]).sum(1)
            out_RD += functional.linear(h, down_EDI[expert])
        else:
            out_RD.index_add_(0, chosen[0], functional.linear(h_RCI[chosen], down_EDI[expert]))
    return out_RD


def _rows(experts_RC: Tensor, count: int, *, fixed: bool) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield each expert and, if shapes may depend on it, the rows and places that it was chosen for; else nothing."""
    for expert in range(count):
        chosen = () if fixed else torch.where(experts_RC == expert)
        if fixed or len(chosen[0]):
            yield expert, chosen
