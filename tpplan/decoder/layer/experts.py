"""A mixture of experts (arXiv:1701.06538) on one device in plain torch: top-k routing, and the experts' products.

Where no shape may depend on the choice, few rows are multiplied by copies of the chosen matrices, and many rows by all
experts: by as many at a time as the plan's scratch has room for. The kernels in
:mod:`tpplan.decoder.fast.launches.experts` need no copies.

Shapes: R rows, D hidden, E experts, C experts of a row, G groups of experts, K eligible ones, I intermediate (the
device's part), N choices of all rows, P some of them.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve
from torch import Tensor

from tpplan.decoder.math import AT_ONCE, concat
from tpplan.decoder.weights.products import ProductOptions, add_sum_of_all, linear, linear_of_all
from tpplan.decoder.weights.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpplan.decoder.model.router import Router
    from tpplan.decoder.weights.stacked import Projection


#: One part in this many of all choices is computed at a time.
_PARTS: Final = 4

_BY_TORCH: Final = ProductOptions()


def choose(logits_RE: Tensor, count: int, router: Router, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights, in float32, and the numbers of the experts that rows are routed to, ``[R, C]`` each.

    Args:
        logits_RE: router logits of all experts.
        count: number of experts of a row.
        router: how rows are routed.
        correction_E: selection bias, added to the scores by which experts are chosen, but not to their weights.
    """
    scores_RE = logits_RE.float().sigmoid() if router.sigmoid else logits_RE.softmax(-1, dtype=torch.float32)
    ranks_RE = scores_RE if correction_E is None else scores_RE + correction_E.float().flatten()
    if router.is_grouped:
        ranks_RE = _eligible(ranks_RE, router)
    ranks_RC, experts_RC = ranks_RE.topk(count, dim=-1)
    weights_RC = ranks_RC if ranks_RE is scores_RE else scores_RE.gather(1, experts_RC)
    if router.normalised:
        weights_RC = weights_RC / weights_RC.sum(-1, keepdim=True).clamp_(min=router.least)
    return weights_RC if router.factor == 1 else weights_RC * router.factor, experts_RC


def _eligible(ranks_RE: Tensor, router: Router) -> Tensor:
    """Return scores that are minus infinity for the experts of groups that rows do not choose from."""
    ranks_RGE = torch.unflatten(ranks_RE, -1, (router.groups, -1))
    groups_RG = ranks_RGE.topk(router.best, dim=-1).values.sum(-1)
    chosen_RK = groups_RG.topk(router.eligible, dim=-1).indices
    is_out_RG = torch.ones_like(groups_RG, dtype=torch.bool).scatter_(1, chosen_RK, value=False)
    return ranks_RGE.masked_fill(is_out_RG[..., None], -torch.inf).flatten(1)


def up(  # noqa: PLR0917 (the inputs of an expert)
    x_RD: Tensor,
    gates: Projection,
    ups: Projection,
    experts_RC: Tensor,
    gating: Callable[[Tensor, Tensor], Tensor],
    options: ProductOptions = _BY_TORCH,
    *,
    fixed: bool,
) -> Tensor:
    """Return the intermediate activations of the chosen experts, ``[R, C, I]``.

    Args:
        x_RD: rows.
        gates: gate projections, whose outputs get the activation.
        ups: up projections.
        experts_RC: numbers of the chosen experts.
        gating: combines the outputs of gate and up projections; it may overwrite the former.
        options: how to dequantise rows of quantised matrices.
        fixed: whether no shape may depend on the choice, as in a graph.
    """
    count = len(gates)
    if not fixed:
        out_NI = x_RD.new_empty(experts_RC.numel(), gates.outputs)
        for choices, parts in _by_expert(experts_RC, count):
            x_PD = x_RD[choices // experts_RC.shape[1]]
            out_NI[choices] = gating(*(_products(x_PD, each, parts, options) for each in (gates, ups)))
        return torch.unflatten(out_NI, 0, experts_RC.shape)
    if experts_RC.numel() <= count:
        gate_RCI, up_RCI = (
            each.plus_bias(_multiply(each.matrix, experts_RC, x_RD[:, None]), experts_RC) for each in (gates, ups)
        )
        return gating(gate_RCI, up_RCI)
    places_RE, size = _places(experts_RC, count), experts_RC.numel() + 1
    made: list[Tensor] = []  # the result, in the dtype of what the gate makes
    # beside the rows, the residual stream, and the result, whose last row is for what no row chose
    room = options.room - 2 * x_RD.numel() - size * gates.outputs
    for some in _in_turn(count, 2 * len(x_RD) * gates.outputs, room):
        y_REI = gating(
            *(part.plus_bias(linear_of_all(x_RD, part.matrix, options)) for part in (gates[some], ups[some]))
        )
        made = made or [y_REI.new_empty(size, gates.outputs)]
        made[0].index_copy_(0, places_RE[:, some].flatten(), y_REI.flatten(0, 1))
        del y_REI  # the next ones are made in its memory
    return torch.unflatten(made[0][:-1], 0, experts_RC.shape)


def down(
    h_RCI: Tensor,
    downs: Projection,
    experts_RC: Tensor,
    weights_RC: Tensor,
    options: ProductOptions = _BY_TORCH,
    *,
    fixed: bool,
) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs, ``[R, D]``; ``h_RCI`` is overwritten.

    Args:
        h_RCI: intermediate activations of the chosen experts.
        downs: down projections.
        experts_RC: numbers of the chosen experts.
        weights_RC: weights of the chosen experts.
        options: how to dequantise rows of quantised matrices.
        fixed: whether no shape may depend on the choice, as in a graph.
    """
    h_RCI *= weights_RC[..., None].to(h_RCI.dtype)
    (rows, chosen, width), count = h_RCI.shape, len(downs)
    if not fixed:
        out_RD = _bias_of_all(downs, experts_RC, weights_RC, h_RCI)
        for choices, parts in _by_expert(experts_RC, count):
            rows_P = choices // chosen
            y_PD = _products(h_RCI[rows_P, choices % chosen], evolve(downs, bias=None), parts, options)
            for _, some in parts:  # one after the other: each has a row once, so that sums are always the same
                out_RD.index_add_(0, rows_P[some], y_PD[some])
        return out_RD
    if experts_RC.numel() <= count:
        out_RD = _multiply(downs.matrix, experts_RC, h_RCI).sum(1)
    else:
        out_RD, places_RE = h_RCI.new_zeros(rows, downs.outputs), _places(experts_RC, count)
        room = options.room - h_RCI.numel() - 3 * out_RD.numel()  # also for the rows, and for what is added
        for some in _in_turn(count, rows * (width + downs.outputs), room):
            places_RE1 = places_RE[:, some, None]
            x_REI = h_RCI.gather(1, (places_RE1 % chosen).expand(-1, -1, width))
            x_REI.masked_fill_(places_RE1 == rows * chosen, 0)
            add_sum_of_all(out_RD, x_REI, downs[some].matrix, options)
            del x_REI  # the next ones are made in its memory
    return out_RD if downs.bias is None else out_RD.add_(_bias_of_all(downs, experts_RC, weights_RC, h_RCI))


def _bias_of_all(downs: Projection, experts_RC: Tensor, weights_RC: Tensor, like: Tensor) -> Tensor:
    """Return the weighted sums of the biases of rows' experts, ``[R, D]``; zeros if there are none."""
    if downs.bias is None:
        return like.new_zeros(len(experts_RC), downs.outputs)
    all_RE = weights_RC.new_zeros(len(experts_RC), len(downs)).scatter_(1, experts_RC, weights_RC)
    return all_RE.to(like.dtype) @ downs.bias


def _by_expert(experts_RC: Tensor, count: int) -> Iterator[tuple[Tensor, list[tuple[int, slice]]]]:
    """Yield parts of all choices in the order of experts: the choices' indices, and which of them are each expert's.

    The host waits for the device once.
    """
    flat = experts_RC.flatten()
    sizes = (flat[:, None] == torch.arange(count, device=flat.device)).sum(0).tolist()
    order, most = flat.argsort(), -(-len(flat) // _PARTS)
    first, parts = 0, list[tuple[int, slice]]()
    for expert, (start, end) in enumerate(pairwise([0, *accumulate(sizes)])):
        for a in range(start, end, most):
            b = min(a + most, end)
            if b - first > most:
                yield order[first:a], parts
                first, parts = a, []
            parts.append((expert, slice(a - first, b - first)))
    yield order[first:], parts


def _products(x_PK: Tensor, projection: Projection, parts: list[tuple[int, slice]], options: ProductOptions) -> Tensor:
    """Return the products of rows with their experts' matrices, given each expert's rows: ``[P, O]``."""
    y_PO = x_PK.new_empty(len(x_PK), projection.outputs)
    for i, some in parts:
        linear(x_PK[some], projection.matrix[i], projection.bias_of(i), options, y_PO[some])
    return y_PO


def _multiply(matrix_EOI: Tensor | Stacked, experts_RC: Tensor, x_RCI: Tensor) -> Tensor:
    """Multiply by copies of the chosen experts' matrices, for some columns of the result at a time."""
    _, rows, columns = matrix_EOI.shape
    if isinstance(matrix_EOI, Stacked):
        x_RCI = matrix_EOI.ordered(x_RCI, experts_RC)
    most, found = max(1, AT_ONCE // (experts_RC.numel() * columns)), []
    for start in range(0, rows, most):
        end = min(start + most, rows)
        if isinstance(matrix_EOI, Tensor):
            part = matrix_EOI[:, start:end][experts_RC]
        else:
            part = matrix_EOI.chosen(experts_RC, start, end, x_RCI.dtype)
        found.append((part @ x_RCI[..., None]).squeeze(-1))
    return concat(found, dim=2)


def _in_turn(count: int, each: int, room: int) -> Iterator[slice]:
    """Yield slices of the experts that are computed at a time.

    Half of the room is for what they take, the rest for what computing it does.

    Args:
        count: number of experts.
        each: elements that each takes.
        room: elements that the plan has scratch for beside what there is already.
    """
    step = max(1, room // 2 // each)
    yield from (slice(start, min(start + step, count)) for start in range(0, count, step))


def _places(experts_RC: Tensor, count: int) -> Tensor:
    """Return the number of each row's choice of each expert, counted over all rows: ``[R, E]``; N if it has none."""
    choices = experts_RC.numel()
    places_RE = experts_RC.new_full((len(experts_RC), count), choices)
    return places_RE.scatter_(1, experts_RC, torch.arange(choices, device=places_RE.device).view(experts_RC.shape))
