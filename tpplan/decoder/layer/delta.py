"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464) on one device in plain torch.

A head has a state: a matrix S that maps keys to values. Each token decays it by a factor d, replaces the fraction β of
what it says of the token's key k by the token's value v, and reads it by its query q:

    S ← d S,  S ← S + β k (v - kᵀ S),  o = qᵀ S

Queries, keys and values come out of a short causal convolution over the tokens. A step updates the states in place,
with the same work for any tokens. Prompts are read in chunks: within one, the tokens' updates are the solution of a
triangular system (arXiv:2406.06484), so that matrix products replace the recurrence.

Shapes: R rows, N sequences, S rows of each, P parts that channels lie in one behind the other, C channels of a part, T
tokens that the convolution spans, H key heads, G value heads of each, K and V elements of a key and of a value, M
chunks, L rows of a chunk, X chunks of all heads.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from tpplan.decoder.layer.recurrence import DeltaWeights, Rows
from tpplan.decoder.weights.linear import BY_HEAD, JOINED, ONE_BEHIND_THE_OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.decoder.cache.state import State
    from tpplan.decoder.layer.steps import Plain
    from tpplan.decoder.prompts import PromptSlice
    from tpplan.decoder.weights.device import DeviceWeights

#: Epsilon of the L2 norms of queries and keys.
_EPS: Final = 1e-6
#: Rows of a chunk.
_CHUNK: Final = 64
#: Temporaries take one part in this many of what other activations leave of the plan's scratch.
_SHARE: Final = 2


class GatedDelta:
    """The linear attention of a layer on one device: its weights, and the states of the sequences."""

    def __init__(
        self,
        state: State,
        steps: Plain,
        weights: DeviceWeights,
        start: str,
        *,
        eps: float,
        room: int,
        rows: int,
        hidden: int,
    ) -> None:
        """Combine the parts.

        Args:
            state: the states of the sequences.
            steps: the computation steps of the device.
            weights: weights of the device.
            start: start of the names of the layer's tensors.
            eps: epsilon of the norm of the outputs.
            room: bytes of scratch that the plan has on the device.
            rows: maximum rows of a pass.
            hidden: width of the residual stream.
        """
        self.state = state
        self._steps, self._weights, self._start, self._eps = steps, weights, start, eps
        self._joined = BY_HEAD if weights.find(f"{start}{JOINED[BY_HEAD][0]}") is not None else ONE_BEHIND_THE_OTHER
        self._conv_C1T, self._norm_V, rates, dt_bias = (
            weights[f"{start}linear_attn.{name}"] for name in ("conv1d.weight", "norm.weight", "A_log", "dt_bias")
        )
        self._rates_HG, self._dt_bias_HG = (x.view(state.keys, state.group) for x in (rates, dt_bias))
        own = DeltaWeights(self._conv_C1T, rates, dt_bias, self._norm_V)
        self._kernels = steps.delta_kernels(state, own)
        scales = [[1 / state.key_dim], [1 / sqrt(state.key_dim)]]  # of queries and keys, behind RMS norms
        self._scales_21 = torch.tensor(scales, device=state.recurrent.device)
        # Beside temporaries there are the residual stream, its norm, all products of the projections, and what kernels
        # keep, which has no other place in the plan's ledger.
        columns = 2 * hidden + len(self._conv_C1T) + len(rates) * (state.value_dim + 2)
        held = rows * columns * state.inputs.itemsize + (self._kernels.nbytes if self._kernels else 0)
        free = (room - held) // _SHARE
        self._elements, self._floats = (max(1, free // x.itemsize) for x in (state.inputs, state.recurrent))

    def outputs(self, x_RD: Tensor, norm: Tensor, recur: Callable[[Rows], Tensor]) -> Tensor:
        """Return the gated outputs of rows, ``[R, H × G × V]``.

        Args:
            x_RD: rows before the norm.
            norm: weights of the norm of the rows.
            recur: calls :meth:`read` or :meth:`step`.
        """
        rows = self._project(x_RD, norm)
        y_RHGV = recur(rows)
        if self._kernels is not None and (found := self._kernels.gate(y_RHGV, rows.gates, self._eps)) is not None:
            return found
        y_RO = functional.rms_norm(y_RHGV, self._norm_V.shape, self._norm_V, self._eps).flatten(1)
        return self._steps.gate(rows.gates.flatten(1), y_RO)

    def read(self, rows: Rows, prompt_slices: Sequence[PromptSlice]) -> Tensor:
        """Return the outputs of the next tokens of some sequences, ``[R, H, G, V]``, in the memory of the values."""
        state, y_RHGV = self.state, self._heads(rows.mixed)[1]
        for each in prompt_slices:
            some = Rows(*(x[each.rows] for x in rows))
            if self._kernels is not None:
                first, count, out = each.sequence, each.count, y_RHGV[each.rows]
                if self._kernels.recur(some, first, count, out, fresh=each.start == 0):
                    continue
            sequences = slice(each.sequence, each.sequence + each.count)
            inputs_NCT, recurrent_NHGKV = state.inputs[sequences], state.recurrent[sequences]
            if each.start == 0:
                inputs_NCT.zero_()
                recurrent_NHGKV.zero_()
            mixed, beta, logs = (
                torch.unflatten(x, 0, (each.count, each.size))
                for x in (some.mixed, some.betas.sigmoid(), self._log_decays(some))
            )
            self._convolve(mixed, inputs_NCT)
            qk_NSH2K, v_NSHGV = self._heads(mixed)
            read_chunks(qk_NSH2K, v_NSHGV, beta, logs, recurrent_NHGKV, self._floats)
        return y_RHGV

    def step(self, rows: Rows, goes_on_B: Tensor) -> Tensor:
        """Return the outputs of one token of each of the first sequences, ``[B, H, G, V]``; no shape depends on values.

        Args:
            rows: what the projections give of the tokens.
            goes_on_B: whether tokens come before; if not, the sequence begins with a cleared state.
        """
        state, count = self.state, len(goes_on_B)
        values = state.keys * state.group * state.value_dim
        channels, span = state.inputs.shape[1:]
        # Windows and what comes of them, and in 32 bits queries and keys, twice, and what is read and written.
        each = channels * (span + 1) * state.inputs.itemsize
        each += (4 * state.keys * state.key_dim * (1 + state.group) + 5 * values) * state.recurrent.itemsize
        most = max(1, (self._elements * state.inputs.itemsize - count * values * state.inputs.itemsize) // each)
        out_BHGV = rows.mixed.new_empty(count, state.keys, state.group, state.value_dim)
        if self._kernels is not None and self._kernels.recur(rows, 0, count, out_BHGV, goes_on_N=goes_on_B):
            return out_BHGV
        for start in range(0, count, most):
            some = slice(start, min(start + most, count))
            self._step_some(some, Rows(*(x[some] for x in rows)), ~goes_on_B[some], out_BHGV[some])
        return out_BHGV

    def _step_some(self, some: slice, rows: Rows, begins_B: Tensor, out_BHGV: Tensor) -> None:
        """Do a step of some sequences, and write the outputs."""
        inputs_BCT, s_BHGKV = self.state.inputs[some], self.state.recurrent[some]
        # Not times 0, which would keep NaN.
        inputs_BCT.masked_fill_(begins_B[:, None, None], 0)
        s_BHGKV.masked_fill_(begins_B[:, None, None, None, None], 0)
        inputs_BCT.copy_(torch.cat((inputs_BCT[:, :, 1:], rows.mixed.flatten(1)[:, :, None]), dim=2))
        mixed_BC = functional.conv1d(inputs_BCT, self._conv_C1T, groups=len(self._conv_C1T)).squeeze(2)
        mixed_BPC = torch.unflatten(functional.silu(mixed_BC, inplace=True), 1, rows.mixed.shape[1:])
        qk_BH2K, v_BHGV = self._heads(mixed_BPC)
        qk_BH2K = _normed(qk_BH2K.float()).mul_(self._scales_21)
        decay_BHG11 = self._log_decays(rows).exp_()[..., None, None]
        # Reads of the old state serve the output, too: only its own update is missing there.
        reads_BHG2V = (qk_BH2K[:, :, None] @ s_BHGKV).mul_(decay_BHG11)
        new_BHGV = (v_BHGV - reads_BHG2V[..., 1, :]).mul_(rows.betas.sigmoid()[..., None])
        s_BHGKV.mul_(decay_BHG11).addcmul_(qk_BH2K[:, :, None, 1, :, None], new_BHGV[..., None, :])
        seen_BH = qk_BH2K.prod(dim=2).sum(-1)
        out_BHGV.copy_(torch.addcmul(reads_BHG2V[..., 0, :], seen_BH[..., None, None], new_BHGV))

    def _project(self, x_RD: Tensor, norm: Tensor) -> Rows:
        """Return the products of the norm of rows with the projections."""
        joined, state = f"{self._start}{self._joined}", self.state
        names = [f"{self._start}{name}" for name in JOINED[self._joined]]
        keys, group, values = state.keys, state.group, state.keys * state.group * state.value_dim
        mixed, heads = 2 * keys * state.key_dim + values, keys * group
        widths = [mixed + values, 2 * heads] if self._joined == BY_HEAD else [mixed, values, heads, heads]
        if self._weights.find(joined) is not None:
            y_RO = self._steps.normed(x_RD, norm, self._weights, joined)
            parts = torch.split_with_sizes(y_RO, widths, dim=1)
        else:  # not copied into one: that would take as much again
            y_RD = self._steps.norm(x_RD, norm)
            parts = tuple(self._steps.linear(y_RD, self._weights, name) for name in names)
        if self._joined == ONE_BEHIND_THE_OTHER:
            mixed_RC, gates_RC, *others = parts
            beta_RHG, decay_RHG = (torch.unflatten(x, 1, (keys, group)) for x in others)
            return Rows(mixed_RC[:, None], gates_RC, beta_RHG, decay_RHG)
        of_heads, others_RO = parts
        mixed_RHC, gates_RHC = torch.unflatten(of_heads, 1, (keys, -1)).split_with_sizes(
            [mixed // keys, values // keys], 2
        )
        beta_RHG, decay_RHG = torch.unflatten(others_RO, 1, (keys, 2, group)).unbind(2)
        return Rows(mixed_RHC, gates_RHC, beta_RHG, decay_RHG)

    def _log_decays(self, rows: Rows) -> Tensor:
        """Return the logarithms of the factors by which states decay, ``[R, H, G]`` in float32."""
        return functional.softplus(rows.decays + self._dt_bias_HG).mul_(self._rates_HG)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of queries and keys, ``[..., H, 2, K]``, and values, ``[..., H, G, V]``, of ``[..., P, C]``."""
        state = self.state
        keys, group, key_dim, value_dim = state.keys, state.group, state.key_dim, state.value_dim
        if self._joined == BY_HEAD:
            qk, v = torch.split_with_sizes(mixed, [2 * key_dim, group * value_dim], dim=-1)
            return torch.unflatten(qk, -1, (2, key_dim)), torch.unflatten(v, -1, (group, value_dim))
        sizes = [2 * keys * key_dim, keys * group * value_dim]
        qk, v = torch.split_with_sizes(mixed.squeeze(-2), sizes, dim=-1)
        qk = torch.unflatten(qk, -1, (2, keys, key_dim)).transpose(-3, -2)
        return qk, torch.unflatten(v, -1, (keys, group, value_dim))

    def _convolve(self, mixed_NSPC: Tensor, inputs_NCT: Tensor) -> None:
        """Convolve the next inputs of sequences in place, some channels at a time, and keep the latest for later."""
        count, size, parts, _ = mixed_NSPC.shape
        span = inputs_NCT.shape[-1]
        mixed_NPCS = mixed_NSPC.permute(0, 2, 3, 1)
        inputs_NPCT = torch.unflatten(inputs_NCT, 1, (parts, -1))
        conv_PC1T = torch.unflatten(self._conv_C1T, 0, (parts, -1))
        most = max(1, self._elements // (3 * count * (size + span)))  # channels, with what comes of them and a copy
        dim = 1 if parts > 1 else 2
        step = max(1, most // (mixed_NPCS.shape[2] if dim == 1 else 1))
        some = [torch.split(x, step, d) for x, d in ((mixed_NPCS, dim), (inputs_NPCT, dim), (conv_PC1T, dim - 1))]
        for new, kept, weight in zip(*some, strict=True):
            window_NCS = torch.cat((kept[..., 1:], new), dim=-1).flatten(1, 2)
            kept.copy_(torch.unflatten(window_NCS[..., -span:], 1, kept.shape[1:3]))
            weight_C1T = weight.flatten(0, 1)
            found = functional.conv1d(window_NCS, weight_C1T, groups=len(weight_C1T))
            del window_NCS
            new.copy_(torch.unflatten(functional.silu(found, inplace=True), 1, new.shape[1:3]))


def _normed(x: Tensor) -> Tensor:
    """Return the L2 norms of vectors, times the square root of their size, which takes one kernel on GPUs."""
    return functional.rms_norm(x, x.shape[-1:], eps=_EPS / x.shape[-1])


def read_chunks(  # noqa: PLR0917 (what the rule takes)
    qk_NSH2K: Tensor,
    v_NSHGV: Tensor,
    beta_NSHG: Tensor,
    logs_NSHG: Tensor,
    state_NHGKV: Tensor,
    most: int,
) -> None:
    """Apply the gated delta rule to the next tokens of sequences, chunk by chunk.

    Args:
        qk_NSH2K: queries and keys, before their L2 norms.
        v_NSHGV: values; replaced by the outputs.
        beta_NSHG: β of the tokens.
        logs_NSHG: logarithms of the decays, in float32.
        state_NHGKV: states in float32, updated in place.
        most: elements of float32 that temporaries may take; where they are too few, chunks are shorter.
    """
    sequences, size, keys, group, value_dim = v_NSHGV.shape
    length = min(_CHUNK, size)

    def needed() -> int:
        """Return the elements that temporaries of a chunk of one key head take."""
        key_dim = qk_NSH2K.shape[-1]
        return length * (2 * length + 4 * key_dim + group * (3 * length + 4 * (key_dim + value_dim)))

    while length > 1 and needed() > most:
        length //= 2
    units = max(1, most // needed())  # chunks of one key head
    some_keys = min(keys, units)
    some_sequences = min(sequences, max(1, units // keys))
    at_once = length * max(1, units // (some_sequences * some_keys))
    whole = size - size % length
    bounds = [*range(0, whole, at_once), whole, size]
    for first in range(0, sequences, some_sequences):
        for key in range(0, keys, some_keys):
            chosen = slice(first, first + some_sequences), slice(None), slice(key, key + some_keys)
            state = state_NHGKV[chosen[0], chosen[2]]
            parts = [x[chosen] for x in (qk_NSH2K, v_NSHGV, beta_NSHG, logs_NSHG)]
            for start, end in pairwise(bounds):
                if start < end:
                    _read_some([x[:, start:end] for x in parts], state, min(length, end - start))


def _read_some(parts: Sequence[Tensor], state_NHGKV: Tensor, length: int) -> None:
    """Read whole chunks of a length: first all that does not depend on the state, at once.

    Args:
        parts: queries and keys, values, β and logarithms of decays, see :func:`read_chunks`.
        state_NHGKV: states of all these heads of a sequence or more.
        length: rows of a chunk.
    """
    qk_NSH2K, v_NSHGV, beta_NSHG, logs_NSHG = parts
    key_dim, value_dim = qk_NSH2K.shape[-1], v_NSHGV.shape[-1]
    qk_NH2MLK = _normed(torch.unflatten(qk_NSH2K, 1, (-1, length)).permute(0, 3, 4, 1, 2, 5).float())
    q_NHGMLK, k_NHGMLK = torch.split(qk_NH2MLK, 1, dim=2)
    q_NHGMLK.mul_(1 / key_dim)
    k_NHGMLK.mul_(1 / sqrt(key_dim))
    v_NHGMLV = torch.unflatten(v_NSHGV, 1, (-1, length)).permute(0, 3, 4, 1, 2, 5)
    beta_NHGML, logs_NHGML = (
        torch.unflatten(x, 1, (-1, length)).permute(0, 3, 4, 1, 2) for x in (beta_NSHG, logs_NSHG)
    )
    logs_NHGML = logs_NHGML.cumsum(-1)  # of the decays since the start of a chunk
    between_NHGMLL = (logs_NHGML[..., :, None] - logs_NHGML[..., None, :]).exp_().tril_()
    system_NHGMLL = (k_NHGMLK @ k_NHGMLK.mT) * between_NHGMLL
    system_NHGMLL.mul_(beta_NHGML[..., None])
    within_NHGMLL = between_NHGMLL.mul_(q_NHGMLK @ k_NHGMLK.mT)
    decay_NHGML1 = logs_NHGML.exp()[..., None]
    wanted = k_NHGMLK.new_empty(*beta_NHGML.shape, value_dim + key_dim)
    torch.mul(v_NHGMLV, beta_NHGML[..., None], out=wanted[..., :value_dim])
    torch.mul(k_NHGMLK, decay_NHGML1 * beta_NHGML[..., None], out=wanted[..., value_dim:])
    solved = torch.linalg.solve_triangular(system_NHGMLL, wanted, upper=False, unitriangular=True)
    del system_NHGMLL, wanted
    q_NHGMLK = q_NHGMLK * decay_NHGML1
    k_NHGMLK = k_NHGMLK * (logs_NHGML[..., -1:] - logs_NHGML).exp_()[..., None]
    ends_NHGM11 = decay_NHGML1[..., -1:, :]
    state_XKV = state_NHGKV.view(-1, key_dim, value_dim)
    for chunk in range(v_NHGMLV.shape[3]):
        q_XLK, k_XLK, v_and_k, within, end = (
            x[:, :, :, chunk].flatten(0, 2) for x in (q_NHGMLK, k_NHGMLK, solved, within_NHGMLL, ends_NHGM11)
        )
        v_XLV, read_XLK = v_and_k.split_with_sizes([value_dim, key_dim], dim=-1)
        new_XLV = torch.baddbmm(v_XLV, read_XLK, state_XKV, alpha=-1)
        out_XLV = torch.bmm(q_XLK, state_XKV).baddbmm_(within, new_XLV)
        v_NHGMLV[:, :, :, chunk] = torch.unflatten(out_XLV, 0, v_NHGMLV.shape[:3])
        state_XKV.mul_(end).baddbmm_(k_XLK.mT, new_XLV)
