"""The computation steps of a layer on one device in plain torch, for any device and dtype.

Shapes: R rows, D hidden, O output columns of some matrices, I intermediate, H heads, K elements of a head, E experts,
C experts of a row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from tpplan.decoder.cache.heads import attend_by_runs
from tpplan.decoder.layer import experts
from tpplan.decoder.math import (
    angles_at,
    argmax_columns,
    attend,
    attend_in_parts,
    best_tokens,
    merge_parts,
    rms_norm,
    rotate,
)
from tpplan.decoder.model.gates import gated
from tpplan.decoder.weights.products import (
    ROOM,
    ProductOptions,
    add_linear,
    by_torch,
    heads_at_once,
    linear,
    per_head,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.decoder.cache.heads import Heads
    from tpplan.decoder.cache.state import State
    from tpplan.decoder.cache.store import CachePlaces
    from tpplan.decoder.layer.recurrence import DeltaKernels, DeltaWeights
    from tpplan.decoder.math import Merge, Scoring
    from tpplan.decoder.model.router import Router
    from tpplan.decoder.model.settings import Settings
    from tpplan.decoder.weights.device import DeviceWeights
    from tpplan.decoder.weights.quantised import Matrix, Quantised
    from tpplan.decoder.weights.row_kernels import RowKernels
    from tpplan.decoder.weights.stacked import Projection
    from tpplan.exec.cuda.channel import Channel


#: A second attention output needs scratch for this many beside queries, keys and values. A plan counts these and twice
#: the residual stream, so that both outputs also fit if the stream, of which one is there, is wider than both.
_OUTPUTS: Final = 4


@frozen
class NormAndRope:
    """The norms and RoPE (arXiv:2104.09864) applied to queries and keys before attention.

    Attributes:
        angles: RoPE angles of the rows, from :func:`tpplan.decoder.math.angles`.
        norms: weights of the norms applied to query and key heads; empty if there are none.
        are_neighbours: whether neighbouring elements are rotated together, see
            :func:`tpplan.decoder.math.rotate`.
        norms_last: whether the norms are applied after the rotation.
    """

    angles: Tensor
    norms: tuple[Tensor, ...] = ()
    are_neighbours: bool = False
    norms_last: bool = False


class Plain:
    """The computation steps of a layer on one device, each as large as one fused kernel could compute.

    Subclasses override the steps for which they have faster kernels.

    Attributes:
        joint_rows: maximum rows that :meth:`joint` takes.
    """

    joint_rows = 0

    def __init__(self, eps: float, activation: str, *, offset: float = 0.0, room: int = ROOM) -> None:
        """Create the steps for a model.

        Args:
            eps: epsilon that norms add to the mean square.
            activation: name of the gate's activation, see :func:`tpplan.decoder.model.gates.gated`.
            offset: number that norms add to their weights.
            room: elements that the plan has scratch for on the device.
        """
        self._options = ProductOptions(self.dequantise, room, self.kernels)
        self._eps, self._offset = eps, offset
        self._activation = activation

    @classmethod
    def of(cls, settings: Settings, room: int) -> Self:
        """Return the steps for a model of these settings."""
        return cls(settings.norm_eps, settings.activation, offset=settings.family.offset, room=room)

    def embed(self, tokens_R: Tensor, table_VD: Tensor, start: int) -> Tensor:
        """Return the embeddings of tokens, ``[R, D]``: zeros for tokens that are not in the table.

        Args:
            tokens_R: the tokens, in int64.
            table_VD: embeddings of a range of tokens.
            start: the first token of the range.
        """
        local_R = tokens_R - start
        own_R = local_R.clamp(0, len(table_VD) - 1)
        return functional.embedding(own_R, table_VD).mul_((own_R == local_R)[:, None])

    def angles(self, sin_TP: Tensor, cos_TP: Tensor, positions_R: Tensor) -> Tensor:
        """Return the RoPE angles of rows; see :func:`tpplan.decoder.math.angles_at`."""
        return angles_at(sin_TP, cos_TP, positions_R)

    def norm(self, x_RD: Tensor, weight: Tensor, out: Tensor | None = None, *, eps: float | None = None) -> Tensor:
        """Return the RMS norm of rows, by default with the model's epsilon; see :func:`tpplan.decoder.math.rms_norm`.

        Args:
            x_RD: rows.
            weight: weights of the norm.
            out: tensor for the result, may be ``x_RD``; a new one if not given.
            eps: epsilon added to the mean square.
        """
        return rms_norm(x_RD, weight, self._eps if eps is None else eps, self._offset, out)

    def add_norm(self, to_RD: Tensor, x_RD: Tensor, weight: Tensor) -> None:
        """Add the RMS norm of rows to others, in place; ``x_RD`` may be overwritten."""
        to_RD.add_(self.norm(x_RD, weight, out=x_RD))

    def linear(self, x: Tensor, weights: DeviceWeights, name: str, *, bias: bool = True) -> Tensor:
        """Multiply by a matrix, given by name, and add its bias if it has one and ``bias`` is true."""
        return linear(x, weights.matrix(name), weights.bias(name) if bias else None, self._options)

    def add_linear(self, to: Tensor, x: Tensor, weights: DeviceWeights, name: str, *, bias: bool = True) -> None:
        """Add the product of rows and a matrix, as of :meth:`linear`, to other rows in place."""
        add_linear(to, x, weights.matrix(name), weights.bias(name) if bias else None, self._options)

    def heads_at_once(self, matrix: Matrix, heads: int) -> int:
        """Return the heads that :meth:`per_head` yields at a time, up to all of them."""
        return heads_at_once(matrix, heads, self._options)

    def per_head(self, matrix: Matrix, heads: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of heads and their rows of a matrix; see :func:`tpplan.decoder.weights.products.per_head`."""
        return per_head(matrix, heads, dtype, self._options)

    def kernels(self, x: Tensor, matrix: Matrix) -> RowKernels[Any] | None:
        """Return kernels that are faster than torch for a product of rows and a matrix, or None."""
        del x, matrix
        return None

    def dequantise(self, matrix: Quantised, start: int, out_RK: Tensor) -> None:
        """Dequantise rows of a matrix from row ``start`` on into ``out_RK``: computed in float32, rounded once."""
        by_torch(matrix, start, out_RK)

    def joint(  # noqa: PLR0917 (all that a product and a sum need)
        self, to: Tensor, x: Tensor, weights: DeviceWeights, name: str, channel: Channel, device: int
    ) -> Callable[[], None] | None:
        """Return the launch of one kernel that adds all devices' products with a matrix to the residual stream.

        Args:
            to: rows of the residual stream, equal on all devices.
            x: the device's columns of the rows to multiply.
            weights: weights of the device.
            name: name of the matrix.
            channel: channel through which the devices add up their products.
            device: index of this device.

        Returns:
            A function that launches the kernel; None if there is no such kernel.
        """
        del to, x, weights, name, channel, device
        return None

    def normed(
        self, x_RD: Tensor, norm: Tensor | None, weights: DeviceWeights, fused: str, names: Sequence[str] = ()
    ) -> Tensor:
        """Multiply the norm of rows by several matrices, and return the products side by side: ``[R, O]``.

        Args:
            x_RD: rows before the norm.
            norm: weights of the norm; None if the rows are multiplied as they are.
            weights: weights of the device.
            fused: name of the matrix that the matrices are joined into; usually the device has it.
            names: names of the separate matrices, used if it does not.
        """
        y_RD = x_RD if norm is None else self.norm(x_RD, norm)
        if weights.find(fused) is not None:
            return self.linear(y_RD, weights, fused)
        return torch.cat([self.linear(y_RD, weights, name) for name in names], dim=-1)

    def gated(
        self, x_RD: Tensor, norm: Tensor | None, weights: DeviceWeights, fused: str, names: Sequence[str]
    ) -> Tensor:
        """Return the gated output ``[R, I]`` of two matrices for the norm of rows; the first has the activation."""
        gate_RI, up_RI = self.normed(x_RD, norm, weights, fused, names).chunk(2, dim=-1)
        return self.gate(gate_RI, up_RI)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the output of a gate; see :func:`tpplan.decoder.model.gates.gated`. ``gate`` is overwritten."""
        return gated(self._activation, gate, up)

    def delta_kernels(self, state: State, weights: DeltaWeights) -> DeltaKernels | None:  # noqa: ARG002
        """Return kernels for the gated delta rule of a layer with these states and weights, or None."""
        return None

    def route(self, x_RD: Tensor, weights: DeviceWeights, name: str, *, wide: bool) -> Tensor:
        """Return the router logits of rows, ``[R, E]``.

        Args:
            x_RD: rows.
            weights: weights of the device.
            name: name of the router matrix.
            wide: whether to compute in float32; a matrix that is stored in it is always computed with in it.
        """
        matrix, dtype = weights.matrix(name), torch.promote_types(x_RD.dtype, torch.float32)
        if dtype == x_RD.dtype or not isinstance(matrix, Tensor) or not (wide or matrix.dtype == dtype):
            return self.linear(x_RD, weights, name)
        bias = weights.bias(name)
        return functional.linear(x_RD.to(dtype), matrix.to(dtype), None if bias is None else bias.to(dtype))

    def choose(self, logits_RE: Tensor, count: int, router: Router, correction_E: Tensor | None = None) -> Tensor:
        """Return the experts that rows are routed to, ``[R, 2 × C]`` in float32: their weights, then their numbers.

        Args:
            logits_RE: router logits of all experts.
            count: number of experts of a row.
            router: how rows are routed.
            correction_E: selection bias, see :func:`tpplan.decoder.layer.experts.choose`.
        """
        return torch.cat(experts.choose(logits_RE, count, router, correction_E), dim=1)

    def takes_experts_up(self, rows: int, chosen: int, gates: Projection, ups: Projection) -> bool:  # noqa: ARG002
        """Tell whether neither the host nor a shape depends on the choice in :meth:`experts_up`, even if not fixed.

        Args:
            rows: number of rows.
            chosen: experts of each row.
            gates: gate projections of all experts.
            ups: up projections of all experts.
        """
        return False

    def takes_experts_down(self, rows: int, chosen: int, downs: Projection) -> bool:  # noqa: ARG002
        """Tell whether neither the host nor a shape depends on the choice in :meth:`experts_down`, even if not fixed.

        Args:
            rows: number of rows.
            chosen: experts of each row.
            downs: down projections of all experts.
        """
        return False

    def experts_up(self, x_RD: Tensor, gates: Projection, ups: Projection, choice_RC: Tensor, *, fixed: bool) -> Tensor:
        """Return the intermediate activations of the rows' experts, ``[R, C, I]``.

        Args:
            x_RD: rows.
            gates: gate projections of all experts, see :func:`tpplan.decoder.layer.experts.up`.
            ups: up projections of all experts.
            choice_RC: the result of :meth:`choose`.
            fixed: whether no shape may depend on the choice.
        """
        return experts.up(x_RD, gates, ups, choice_RC.chunk(2, dim=1)[1].long(), self.gate, self._options, fixed=fixed)

    def experts_down(
        self, h_RCI: Tensor, downs: Projection, choice_RC: Tensor, to_RD: Tensor | None = None, *, fixed: bool
    ) -> Tensor:
        """Return the weighted sum of the outputs of the rows' experts, ``[R, D]``; ``h_RCI`` may be overwritten.

        Args:
            h_RCI: intermediate activations of the experts.
            downs: down projections of all experts.
            choice_RC: the result of :meth:`choose`.
            to_RD: rows to which to add the sum in place; they are returned then.
            fixed: whether no shape may depend on the choice.
        """
        weights_RC, numbers_RC = choice_RC.chunk(2, dim=1)
        y_RD = experts.down(h_RCI, downs, numbers_RC.long(), weights_RC, self._options, fixed=fixed)
        return y_RD if to_RD is None else to_RD.add_(y_RD)

    def norm_and_rope(
        self,
        qkv_RHK: Tensor,
        heads: Heads,
        norm_rope: NormAndRope,
        to: tuple[Tensor, Tensor] | None = None,  # noqa: ARG002 (a kernel may)
    ) -> bool:
        """Apply the norms and rotation to the query and key heads of rows, in place.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: the attention heads of the layer on the device.
            norm_rope: the norms and rotation.
            to: sequence of each row, below 0 for padding, and its place in the cache. A kernel may write the keys and
                values there at once.

        Returns:
            Whether the keys and values are written.
        """
        if not norm_rope.norms_last:
            self._norm_heads(qkv_RHK, heads, norm_rope)
        rotate(qkv_RHK[:, : heads.queries + heads.keys], norm_rope.angles, are_neighbours=norm_rope.are_neighbours)
        if norm_rope.norms_last:
            self._norm_heads(qkv_RHK, heads, norm_rope)
        return False

    def _norm_heads(self, qkv_RHK: Tensor, heads: Heads, norm_rope: NormAndRope) -> None:
        if norm_rope.norms:
            for x_RHK, weight in zip(heads.split_qkv(qkv_RHK), norm_rope.norms, strict=False):
                x_RHK.copy_(self.norm(x_RHK, weight))

    def squares(self, qkv_RHK: Tensor, heads: Heads, group: int) -> Tensor:
        """Return the sums of the squares of a device's queries, and of its keys, ``[R, 2]`` in float32.

        Of a KV head that several devices have, each counts as large a part as it has of the query heads that read it.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: the attention heads of the layer on the device.
            group: query heads that read a KV head, on all devices.
        """
        q_RHK, k_RHK, _ = heads.split_qkv(qkv_RHK)
        q_RH, k_RH = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square_() for x in (q_RHK, k_RHK))
        for run in heads.runs:
            if run.group != group:
                k_RH[:, run.keys].mul_(run.group / group)
        return torch.stack((q_RH.sum(-1), k_RH.sum(-1)), dim=1)

    def norm_all_heads(
        self,
        qkv_RHK: Tensor,
        heads: Heads,
        squares_R2: Tensor,
        counts: tuple[int, int],
        norms: tuple[Tensor, ...],
    ) -> None:
        """Apply the RMS norm of all query heads together, and that of all key heads, in place.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: the attention heads of the layer on the device.
            squares_R2: sums of the squares over all devices, see :meth:`squares`.
            counts: elements of all queries and of all keys of a row.
            norms: the device's weights of both norms.
        """
        sums = squares_R2.unbind(1)
        for x_RHK, sum_R, count, weight in zip(heads.split_qkv(qkv_RHK), sums, counts, norms, strict=False):
            x_RHK.mul_(sum_R.div(count).add_(self._eps).rsqrt_()[:, None, None])
            x_RHK.mul_(weight.view(x_RHK.shape[1:]))

    def append_kv(
        self,
        qkv_RHK: Tensor,
        heads: Heads,
        norm_rope: NormAndRope,
        sequences: Tensor,
        places: Tensor,
        *,
        rows_to_write: Tensor | None = None,
    ) -> None:
        """Apply :meth:`norm_and_rope`, and write the keys and values to the cache.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: the attention heads of the layer on the device, with their cache.
            norm_rope: the norms and rotation.
            sequences: sequence of each row; below 0 for padding.
            places: place of each row in the cache.
            rows_to_write: for each row, the number of the row whose keys and values are written, which is never
                padding. If not given, each row is written and none is padding.
        """
        if self.norm_and_rope(qkv_RHK, heads, norm_rope, (sequences, places)):
            return
        kv_RHK = qkv_RHK[:, heads.queries :]
        if rows_to_write is not None:  # no shape may depend on the padding: a real row is written again, unchanged
            kv_RHK, sequences, places = (x.index_select(0, rows_to_write) for x in (kv_RHK, sequences, places))
        heads.cache.put(sequences, places, *kv_RHK.chunk(2, dim=1))

    def merge(self, out_BHSK: Tensor, sums_BHS: Tensor, new_BHSK: Tensor, new_sums_BHS: Tensor) -> Tensor:
        """Merge attention over another part of the tokens; see :func:`tpplan.decoder.math.merge_parts`."""
        return merge_parts(out_BHSK, sums_BHS, new_BHSK, new_sums_BHS)

    def merge_within_room(self, qkv_RHK: Tensor, heads: Heads) -> Merge | None:
        """Return :meth:`merge` if the plan has room for two attention outputs of these rows, else None.

        Nor is it returned for smaller caches: the longer a text, the fewer heads are read at a time, all new shapes.
        """
        elements = qkv_RHK.numel() + _OUTPUTS * qkv_RHK[:, : heads.queries].numel()
        return self.merge if heads.cache.is_plain and elements <= self._options.room else None

    def attends(self, heads: Heads) -> bool:  # noqa: ARG002 (a kernel may)
        """Tell whether :meth:`attend` needs no mask for these heads, and issues the same work for any positions."""
        return False

    def attend(
        self, qkv_RHK: Tensor, heads: Heads, norm_rope: NormAndRope, places: CachePlaces, scoring: Scoring
    ) -> Tensor:
        """Write one token of each sequence to the cache, and return the attention output ``[R, H × K]``.

        Args:
            qkv_RHK: queries, then keys, then values; afterwards they may have been turned, or not.
            heads: the attention heads of the layer on the device, with their cache.
            norm_rope: the norms and rotation applied to queries and keys first.
            places: where the tokens go in the cache.
            scoring: how scores become weights.
        """
        self.append_kv(qkv_RHK, heads, norm_rope, places.sequences, places.places)
        q_RHK = heads.cache.mix_queries(qkv_RHK[:, : heads.queries])

        def find(some: slice, keys: slice) -> Tensor:
            q_BHSK, sequences = q_RHK[some, :, None], slice(places.first + some.start, places.first + some.stop)
            if heads.cache.takes_parts(places.span):
                read = heads.cache.parts(sequences, places.span, heads.queries)
                parts = ((k, v, places.mask[some, ..., each]) for each, k, v in read)
                return attend_in_parts(q_BHSK, parts, scoring=scoring).flatten(1)
            k_BHTK, v_BHTK = heads.cache.read(sequences, keys, places.span)
            attending = partial(attend, mask=places.mask[some], recurs=True)
            return attend_by_runs(heads.runs_of(keys), q_BHSK, k_BHTK, v_BHTK, attending, scoring=scoring)

        return heads.cache.in_pieces(len(places.places), 0, places.span, find)

    def argmax(self, logits_BV: Tensor, start: int, place: int, places: int, parts: int) -> Tensor:
        """Return the largest logits of rows and their tokens; see :func:`tpplan.decoder.math.argmax_columns`."""
        return argmax_columns(logits_BV, start, place, places, parts)

    def next_tokens(self, found_B2P: Tensor, tokens_B: Tensor, positions_B: Tensor | None = None) -> None:
        """Write the tokens of the largest logits, see :func:`tpplan.decoder.math.best_tokens`, and advance positions.

        Args:
            found_B2P: what :meth:`argmax` returns, summed over all devices.
            tokens_B: the tokens to overwrite, in int64.
            positions_B: positions to add 1 to, in int64, if any.
        """
        tokens_B.copy_(best_tokens(found_B2P))
        if positions_B is not None:
            positions_B.add_(1)
