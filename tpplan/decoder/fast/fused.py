"""The computation steps of a layer on a CUDA device by fused kernels, each of which replaces several of torch."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor

from tpplan.decoder.fast.launches import attention, delta, dense, gemv, norms, packed, pointwise, skinny, wide
from tpplan.decoder.fast.launches.attention import Attention, NewTokens
from tpplan.decoder.fast.launches.delta import Delta
from tpplan.decoder.fast.launches.dense import Dequantiser
from tpplan.decoder.fast.launches.experts import ExpertGemv
from tpplan.decoder.fast.launches.experts import names_of as names_of_experts
from tpplan.decoder.fast.launches.gemv import Gemv
from tpplan.decoder.fast.launches.grouped import GroupedGemm
from tpplan.decoder.fast.launches.grouped import names_of as names_of_grouped
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.norms import Norm
from tpplan.decoder.fast.launches.packed import QuantisedSkinnyGemm
from tpplan.decoder.fast.launches.pointwise import Places, Pointwise
from tpplan.decoder.fast.launches.skinny import SkinnyGemm
from tpplan.decoder.fast.launches.wide import QuantisedGemm
from tpplan.decoder.layer.steps import Plain
from tpplan.decoder.math import concat, slice_of
from tpplan.decoder.weights.products import ROOM
from tpplan.decoder.weights.quantised import ordered
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tpplan.core.model import LinearAttention
    from tpplan.decoder.cache.heads import Heads
    from tpplan.decoder.cache.state import State
    from tpplan.decoder.cache.store import CachePlaces
    from tpplan.decoder.fast.launches.norms import NormKernels
    from tpplan.decoder.layer.recurrence import DeltaKernels, DeltaWeights
    from tpplan.decoder.layer.steps import NormAndRope
    from tpplan.decoder.math import Scoring
    from tpplan.decoder.model.router import Router
    from tpplan.decoder.model.settings import Settings
    from tpplan.decoder.weights.device import DeviceWeights
    from tpplan.decoder.weights.quantised import Matrix, Quantised
    from tpplan.decoder.weights.row_kernels import AllReduceKernels, RowKernels
    from tpplan.decoder.weights.stacked import Projection
    from tpplan.exec.cuda.channel import Channel


def has_kernels(place: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether there are fused kernels for activations of a dtype on a device."""
    return place.type == "cuda" and dtype in DTYPES and not kernel_cache.lacks()


def codes_of(weights: DeviceWeights) -> list[str]:
    """Return the kinds of codes of a device's matrices, of :data:`tpplan.decoder.fast.launches.dense.KINDS`."""
    matrices = [*weights.quantised.values(), *(each.matrix for each in weights.stacked.values())]
    return sorted({dense.kind_of(each) for each in matrices}.intersection(dense.KINDS))


class Fused(Plain):
    """The steps of a layer by fused kernels, in 16 bits; torch computes with tensors that no kernel supports."""

    def __init__(
        self,
        place: torch.device,
        dtype: torch.dtype,
        settings: Settings,
        head_dims: Collection[int],
        kind: str,
        *,
        joint: bool = False,
        experts: bool = False,
        linear: Collection[LinearAttention] = (),
        codes: Collection[str] = (),
        room: int = ROOM,
    ) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of the activations.
            settings: settings of the model.
            head_dims: head sizes of all layers, in elements.
            kind: kind of cache.
            joint: whether to load kernels with an all-reduce over the devices as epilogue.
            experts: whether any layer has experts.
            linear: sizes of linear attention of the layers that have it.
            codes: kinds of codes of the quantised matrices, from :data:`tpplan.decoder.fast.launches.dense.KINDS`.
            room: elements that the plan has scratch for on the device.
        """
        offset = settings.family.offset
        super().__init__(settings.norm_eps, settings.activation, offset=offset, room=room)
        self.joint_rows = skinny.MOST_JOINT if joint else 0
        self._name = settings.activation
        cap = settings.attention_cap
        sizes = [size for size in head_dims if Attention.takes(place, dtype, size, kind)]
        names = [*pointwise.names_of(dtype, self._name, kind), *chain(*gemv.names_of(dtype)), *skinny.names_of(dtype)]
        names += [*gemv.joint_names_of(dtype), skinny.joint_name_of(dtype)] if joint else ()
        names += [attention.name_of(dtype, size, cap, kind) for size in sizes]
        names += [*names_of_experts(dtype, codes), *names_of_grouped(dtype, codes)] if experts else ()
        names += [*dense.names_of(dtype, codes), *packed.names_of(dtype, codes), *packed.normed_names_of(dtype, codes)]
        names += packed.names_of(dtype, codes, joint=True) if joint else ()
        recurs = any(delta.takes(each.kernel, each.key_head_dim, each.value_head_dim) for each in linear)
        names += delta.names_of(dtype) if recurs else ()
        capability = torch.cuda.get_device_capability(place)
        names += wide.names_of(dtype, codes, capability)
        kernel_cache.prepare((name, capability) for name in names)  # compiled in parallel
        self._pointwise = Pointwise(place, dtype, self._name, kind, eps=settings.norm_eps, offset=offset)
        self._normed: list[NormKernels[Any]] = [Gemv(place, dtype, joint=joint)]
        self._joint: list[AllReduceKernels[Any]] = [*self._normed, SkinnyGemm(place, dtype, joint=joint)]
        many: list[RowKernels[Any]] = []
        if packed.names_of(dtype, codes):
            self._normed.append(QuantisedSkinnyGemm(place, dtype, codes, joint=joint))
            self._joint.append(self._normed[-1])
            many.append(QuantisedGemm(place, dtype, codes))
        self._few = [*many, *self._joint]  # in turn, as the first may take rows that the others take as well
        self._attention = {size: Attention(place, dtype, size, cap, kind) for size in sizes}
        self._experts = ExpertGemv(place, dtype, self._name, codes) if experts else None
        self._grouped = GroupedGemm(place, dtype, self._name, codes) if experts else None
        self._products = [each for each in (self._grouped, self._experts) if each]  # the latter for few rows
        self._dense = Dequantiser(place, dtype, codes)
        self._delta = Delta(place, dtype) if recurs else None

    def embed(self, tokens_R: Tensor, table_VD: Tensor, start: int) -> Tensor:
        """Return the embeddings of tokens; zeros for tokens that are not in the table."""
        found = self._pointwise.embed(tokens_R, table_VD, start)
        return super().embed(tokens_R, table_VD, start) if found is None else found

    def angles(self, sin_TP: Tensor, cos_TP: Tensor, positions_R: Tensor) -> Tensor:
        """Return the RoPE angles of rows."""
        found = self._pointwise.angles(sin_TP, cos_TP, positions_R)
        return super().angles(sin_TP, cos_TP, positions_R) if found is None else found

    def norm(self, x_RD: Tensor, weight: Tensor, out: Tensor | None = None, *, eps: float | None = None) -> Tensor:
        """Return the RMS norm of rows."""
        found = self._pointwise.norm(x_RD, weight, out) if eps in {None, self._eps} else None
        return super().norm(x_RD, weight, out, eps=eps) if found is None else found

    def add_norm(self, to_RD: Tensor, x_RD: Tensor, weight: Tensor) -> None:
        """Add the RMS norm of rows to others, in place."""
        if self._pointwise.norm(x_RD, weight, to_RD, added=True) is None:
            super().add_norm(to_RD, x_RD, weight)

    def dequantise(self, matrix: Quantised, start: int, out_RK: Tensor) -> None:
        """Dequantise rows of a matrix from row ``start`` on into ``out_RK``."""
        if self._dense.takes(matrix):
            self._dense(matrix, start, start + len(out_RK), out_RK)
        else:
            super().dequantise(matrix, start, out_RK)

    def joint(  # noqa: PLR0917
        self, to: Tensor, x: Tensor, weights: DeviceWeights, name: str, channel: Channel, device: int
    ) -> Callable[[], None] | None:
        """Return the launch of one kernel that adds all devices' products with a matrix to the residual stream."""
        matrix = weights.matrix(name)
        kernels = next((each for each in self._joint if each.adds_up(x, matrix)), None)
        if kernels is None or weights.bias(name) is not None:
            return None
        return partial(kernels.joint, to, ordered(x, matrix), matrix, channel, device)

    def normed(
        self, x_RD: Tensor, norm: Tensor | None, weights: DeviceWeights, fused: str, names: Sequence[str] = ()
    ) -> Tensor:
        """Multiply the norm of rows by several matrices, and return the products side by side: ``[R, O]``."""
        if norm is not None and (found := self._behind_norm(x_RD, norm, weights, fused)):
            kernels, matrix, of_norm = found
            return kernels.normed(x_RD, matrix, of_norm, weights.bias(fused))
        return super().normed(x_RD, norm, weights, fused, names)

    def gated(
        self, x_RD: Tensor, norm: Tensor | None, weights: DeviceWeights, fused: str, names: Sequence[str]
    ) -> Tensor:
        """Return the gated output ``[R, I]`` of two matrices for the norm of rows; the first has the activation."""
        matrix, bias = weights.find(fused), weights.bias(fused)
        if norm is not None and (found := self._behind_norm(x_RD, norm, weights, fused, gated=True)):
            return found[0].normed_gated(x_RD, found[1], self._name, found[2], bias)
        if matrix is not None and (kernels := self.kernels(x_RD, matrix, gated=True)):
            y_RD = x_RD if norm is None else self.norm(x_RD, norm)
            return kernels.gated(ordered(y_RD, matrix), matrix, self._name, bias)
        return super().gated(x_RD, norm, weights, fused, names)

    def _behind_norm(
        self, x_RD: Tensor, norm: Tensor, weights: DeviceWeights, fused: str, *, gated: bool = False
    ) -> tuple[NormKernels[Any], Matrix, Norm] | None:
        """Return what multiplies the norm of rows by a matrix in one kernel, with both, or None if nothing does."""
        matrix = weights.find(fused)
        if matrix is None or len(x_RD) > norms.MOST_ROWS:  # which passes of prompts need not ask further
            return None
        of_norm = Norm(norm, self._eps, self._offset)
        found = (each for each in self._normed if each.takes_normed(x_RD, matrix, of_norm, gated=gated))
        return next(((each, matrix, of_norm) for each in found), None)

    def kernels(self, x: Tensor, matrix: Matrix, *, gated: bool = False) -> RowKernels[Any] | None:
        """Return the kernels for a product of few rows and a matrix, or None if none support it."""
        return next((each for each in self._few if each.takes(x, matrix, gated=gated)), None)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of ``gate``, multiplied by ``up``; ``gate`` is overwritten with it and returned."""
        return gate if self._pointwise.gate(gate, up) else super().gate(gate, up)

    def delta_kernels(self, state: State, weights: DeltaWeights) -> DeltaKernels | None:
        """Return kernels for the gated delta rule of a layer with these states and weights, or None."""
        return self._delta.of(state, weights) if self._delta else None

    def choose(self, logits_RE: Tensor, count: int, router: Router, correction_E: Tensor | None = None) -> Tensor:
        """Return the experts that rows are routed to, ``[R, 2 × C]``: their weights, then their numbers."""
        found = self._experts.choose(logits_RE, count, router, correction_E) if self._experts else None
        return super().choose(logits_RE, count, router, correction_E) if found is None else found

    def takes_experts_up(self, rows: int, chosen: int, gates: Projection, ups: Projection) -> bool:
        """Tell whether :meth:`experts_up` has kernels that are no slower than torch for this number of rows."""
        return self._grouped is not None and self._grouped.takes_up(rows, chosen, gates, ups)

    def takes_experts_down(self, rows: int, chosen: int, downs: Projection) -> bool:
        """Tell whether :meth:`experts_down` has kernels that are no slower than torch for this number of rows."""
        return self._grouped is not None and self._grouped.takes_down(rows, chosen, downs)

    def experts_up(self, x_RD: Tensor, gates: Projection, ups: Projection, choice_RC: Tensor, *, fixed: bool) -> Tensor:
        """Return the intermediate activations of the rows' experts, ``[R, C, I]``."""
        for kernels in self._products:
            if (found := kernels.up(x_RD, gates, ups, choice_RC)) is not None:
                return found
        return super().experts_up(x_RD, gates, ups, choice_RC, fixed=fixed)

    def experts_down(
        self, h_RCI: Tensor, downs: Projection, choice_RC: Tensor, to_RD: Tensor | None = None, *, fixed: bool
    ) -> Tensor:
        """Return the weighted sum of the outputs of the rows' experts, ``[R, D]``."""
        for kernels in self._products:
            if (found := kernels.down(h_RCI, downs, choice_RC, to_RD)) is not None:
                return found
        return super().experts_down(h_RCI, downs, choice_RC, to_RD, fixed=fixed)

    def norm_and_rope(
        self, qkv_RHK: Tensor, heads: Heads, norm_rope: NormAndRope, to: tuple[Tensor, Tensor] | None = None
    ) -> bool:
        """Apply the norms and rotation to the query and key heads of rows, and write to the cache if a kernel can."""
        norm_rope, cache = self._norm_first(qkv_RHK, heads, norm_rope), heads.cache
        places = None if to is None or cache.value_dim else Places(*cache.as_rows(), *to, cache.scales)
        if places and self._norm_and_rope(qkv_RHK, heads, norm_rope, places):
            return True
        if not self._norm_and_rope(qkv_RHK, heads, norm_rope):
            super().norm_and_rope(qkv_RHK, heads, norm_rope)
        return False

    def _norm_first(self, qkv_RHK: Tensor, heads: Heads, norm_rope: NormAndRope) -> NormAndRope:
        """Apply norms in front of a rotation of a part of each head, for which no kernel has norms; return the rest."""
        if not norm_rope.norms or norm_rope.norms_last or 2 * norm_rope.angles.shape[-1] == qkv_RHK.shape[-1]:
            return norm_rope
        self._norm_heads(qkv_RHK, heads, norm_rope)
        return evolve(norm_rope, norms=())

    def _norm_and_rope(self, qkv_RHK: Tensor, heads: Heads, norm_rope: NormAndRope, to: Places | None = None) -> bool:
        """Apply norms and RoPE by a kernel, and write keys and values to ``to`` if given; return False if none can."""
        if norm_rope.are_neighbours or (norm_rope.norms and norm_rope.norms_last):
            return False
        return self._pointwise.norm_and_rope(
            qkv_RHK, (heads.queries, heads.keys), norm_rope.angles, norm_rope.norms, to
        )

    def merge(self, out_BHSK: Tensor, sums_BHS: Tensor, new_BHSK: Tensor, new_sums_BHS: Tensor) -> Tensor:
        """Merge attention over another part of the tokens."""
        found = self._pointwise.merge(out_BHSK, sums_BHS, new_BHSK, new_sums_BHS)
        return super().merge(out_BHSK, sums_BHS, new_BHSK, new_sums_BHS) if found is None else found

    def attends(self, heads: Heads) -> bool:
        """Tell whether there is an attention kernel for these heads; it needs no mask."""
        return heads.cache.head_dim in self._attention and not heads.cache.value_dim

    def attend(
        self, qkv_RHK: Tensor, heads: Heads, norm_rope: NormAndRope, places: CachePlaces, scoring: Scoring
    ) -> Tensor:
        """Write one token of each sequence to the cache, and return the attention output ``[R, H × K]``."""
        if not self.attends(heads):
            return super().attend(qkv_RHK, heads, norm_rope, places, scoring)
        kernel, cache = self._attention[heads.cache.head_dim], heads.cache
        norm_rope = self._norm_first(qkv_RHK, heads, norm_rope)
        turn = self._words_of_turn(qkv_RHK, norm_rope) if kernel.appends else None
        if not turn:
            self.append_kv(qkv_RHK, heads, norm_rope, places.sequences, places.places)
        (_, new_k_RHK, new_v_RHK), found = heads.split_qkv(qkv_RHK), []
        for run in heads.runs:
            new = NewTokens(new_k_RHK[:, run.keys], new_v_RHK[:, run.keys], turn) if turn else None
            k_BHLK, v_BHLK, *scales = (slice_of(x, run.keys, dim=1) for x in (*cache.halves, *cache.scales))
            q_RHK, sinks = qkv_RHK[:, run.queries], scoring.of(run.queries).sinks
            of_cache = k_BHLK, v_BHLK, places.positions, scales
            found.append(kernel(q_RHK, *of_cache, scale=scoring.scale, sinks=sinks, new=new))
        return concat(found, dim=1)

    def _words_of_turn(self, qkv_RHK: Tensor, norm_rope: NormAndRope) -> tuple[int, ...] | None:
        """Return how kernels are told of norms and RoPE, or None if none can."""
        if norm_rope.are_neighbours or (norm_rope.norms and norm_rope.norms_last):
            return None
        return self._pointwise.words_of_turn(qkv_RHK, norm_rope.angles, norm_rope.norms)

    def argmax(self, logits_BV: Tensor, start: int, place: int, places: int, parts: int) -> Tensor:
        """Return the largest logits of rows and their tokens (argmax)."""
        found = self._pointwise.argmax(logits_BV, start, place, places, parts)
        return super().argmax(logits_BV, start, place, places, parts) if found is None else found

    def next_tokens(self, found_B2P: Tensor, tokens_B: Tensor, positions_B: Tensor | None = None) -> None:
        """Write the tokens of the largest logits, and advance positions."""
        if not self._pointwise.next_tokens(found_B2P, tokens_B, positions_B):
            super().next_tokens(found_B2P, tokens_B, positions_B)
