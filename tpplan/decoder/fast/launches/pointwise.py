"""Launches of kernels beside matrix products: embedding, RMS norm, gates, RoPE with cache append, merging, and argmax.

Shapes: R rows, D hidden, I intermediate, H heads, K elements of a head, W columns of a RoPE table, T places of a cache,
B batch, S queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.cache.store import KERNEL_KINDS
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.model.gates import SWIGLU_OAI
from tpplan.decoder.prompts import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Names of gate kernels, by ``hidden_act`` of a config.json.
GATES: Final = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", SWIGLU_OAI: SWIGLU_OAI}

_ITEM: Final = 2
#: Bytes of a vector access, and its elements.
_VECTOR: Final = 16
_ELEMENTS: Final = _VECTOR // _ITEM
#: Bytes of two elements.
_WORD: Final = 2 * _ITEM
#: Bytes of the sequence, the place, the token or the position of a row, and of a pair of a logit and a token.
_NUMBER: Final = 8

_WARP: Final = 32
_MOST_THREADS: Final = 1024
#: Maximum threads of a block that shares no results with other threads.
_THREADS: Final = 256


#: Parameters of norms and rotation of heads; see :meth:`Pointwise.words_of_turn`.
TURN_WORDS: Final = 8


@frozen
class Places:
    """Where the keys and values of rows go in the cache.

    Attributes:
        keys: keys of the cache, ``[T, H, K]``, see :meth:`tpplan.decoder.cache.store.Store.as_rows`.
        values: values of the cache, likewise.
        sequence_stride: row stride between sequences.
        sequences: sequence of each row, int64; below 0 if the row is not to be written.
        places: place of each row in its sequence, int64.
        scales: scales of keys and of values in a ``q8`` cache, from their beginning; empty for other kinds.
    """

    keys: Tensor
    values: Tensor
    sequence_stride: int
    sequences: Tensor
    places: Tensor
    scales: tuple[Tensor, ...] = ()


def names_of(dtype: torch.dtype, activation: str, kind: str = "fp16") -> list[str]:
    """Return the names of the kernels for a dtype, a gate and a kind of cache."""
    names = [f"pointwise_{what}_{DTYPES[dtype]}" for what in ("norm", GATES[activation], "best", "merge")]
    names.append(f"turn_{DTYPES[dtype]}{KERNEL_KINDS.get(kind, '')}")
    return [*names, "pointwise_next", "pointwise_embed", "pointwise_angles"]


class Pointwise:
    """What is beside matrix products, in 16 bits on a CUDA device; each method tells if it supports its tensors.

    Rows of tensors must begin at, and consist of, multiples of 16 bytes.
    """

    def __init__(
        self,
        place: torch.device,
        dtype: torch.dtype,
        activation: str,
        kind: str = "fp16",
        *,
        eps: float,
        offset: float = 0.0,
    ) -> None:
        """Load the kernels.

        Args:
            place: the device.
            dtype: dtype of the rows, one of :data:`DTYPES`.
            activation: name of the gates' activation, one of :data:`GATES`.
            kind: kind of the cache that keys and values are written to.
            eps: epsilon that norms add to the mean square.
            offset: number that norms add to their weights.
        """
        launchers = [Launcher(name, place) for name in names_of(dtype, activation, kind)]
        self._norm, self._gate, self._best, self._merge, self._norm_and_rope, *of_tokens = launchers
        self._next, self._embed, self._angles = of_tokens
        self._dtype, self._eps, self._offset = dtype, bits_of(eps), bits_of(offset)
        self._stored = {"q8": torch.int8, "fp8": torch.uint8}.get(kind, dtype)

    def embed(self, tokens_R: Tensor, table_VD: Tensor, start: int) -> Tensor | None:
        """Return the embeddings of tokens; see :meth:`tpplan.decoder.layer.steps.Plain.embed`.

        Returns:
            ``[R, D]``, or None if the kernel does not take such tensors.
        """
        matrix = self._matrix(table_VD)
        if matrix is None or tokens_R.dtype is not torch.int64:
            return None
        address, pitch, count, columns = matrix
        out = torch.empty(len(tokens_R), columns, dtype=self._dtype, device=table_VD.device)
        parts, threads = _even(columns // _ELEMENTS, _THREADS)
        words = tokens_R.data_ptr(), tokens_R.stride(0) * _NUMBER, start, count, address, pitch
        self._embed((len(out), parts, 1), threads, *words, out.data_ptr(), columns * _ITEM)
        return out

    def angles(self, sin_TP: Tensor, cos_TP: Tensor, positions_R: Tensor) -> Tensor | None:
        """Return the RoPE angles of rows; see :func:`tpplan.decoder.math.angles_at`.

        Returns:
            ``[R, 1, 2, 2, P]``, or None if the kernel does not take such tensors.
        """
        tables, (count, pairs) = (sin_TP, cos_TP), sin_TP.shape
        are_fitting = all(
            x.dtype is self._dtype and x.stride() == (sin_TP.stride(0), 1) and not x.data_ptr() % _WORD for x in tables
        )
        pitch, width, rows = sin_TP.stride(0) * _ITEM, pairs * _ITEM, len(positions_R)
        if not are_fitting or (pitch | width) % _WORD or positions_R.dtype is not torch.int64 or not rows:
            return None
        out = torch.empty(rows, 1, 2, 2, pairs, dtype=self._dtype, device=sin_TP.device)
        threads = min(-(-width // (_WORD * _WARP)) * _WARP, _THREADS)
        at = positions_R.data_ptr(), positions_R.stride(0) * _NUMBER, count - 1
        self._angles(rows, threads, *at, sin_TP.data_ptr(), cos_TP.data_ptr(), pitch, out.data_ptr(), width)
        return out

    def norm(self, x_RD: Tensor, weight: Tensor, out: Tensor | None = None, *, added: bool = False) -> Tensor | None:
        """Return the RMS norm of rows, computed in float32 and rounded once.

        Args:
            x_RD: rows.
            weight: weights of the norm.
            out: tensor for the result, may be ``x_RD``; a new one if not given.
            added: whether to add the result to ``out``, which is another tensor then.

        Returns:
            The result, or None if the kernel does not take such tensors.
        """
        of_weight = weight.data_ptr()
        if weight.dtype is not self._dtype or of_weight % _VECTOR or not weight.is_contiguous():
            return None
        source = self._matrix(x_RD)
        if out is None and source:
            out = torch.empty_like(x_RD)
        target = self._matrix(out) if out is not None else None
        if not source or not target:
            return None
        start, pitch, rows, columns = source
        _, threads = _even(columns // _ELEMENTS, _MOST_THREADS)
        more = of_weight, self._offset, columns * _ITEM, bits_of(1 / columns), self._eps, added
        self._norm(rows, threads, start, pitch, *target[:2], *more)
        return out

    def gate(self, gate: Tensor, up: Tensor) -> bool:
        """Overwrite ``gate`` with its activation times ``up``; the activation is rounded, then the product.

        Args:
            gate: ``[R, I]``, or contiguous ``[..., I]``.
            up: likewise.

        Returns:
            Whether the kernel takes such tensors.
        """
        if gate.dim() != 2 and gate.is_contiguous() and up.is_contiguous():  # noqa: PLR2004 - a matrix
            gate, up = gate.flatten(0, -2), up.flatten(0, -2)
        of_gate, of_up = self._matrix(gate), self._matrix(up)
        if not of_gate or not of_up:
            return False
        start, pitch, rows, columns = of_gate
        parts, threads = _even(columns // _ELEMENTS, _THREADS)
        self._gate((rows, parts, 1), threads, start, pitch, *of_up[:2], start, pitch, columns * _ITEM)
        return True

    def merge(self, out_BHSK: Tensor, sums_BHS: Tensor, new_BHSK: Tensor, new_sums_BHS: Tensor) -> Tensor | None:
        """Merge attention of one text over another part of its tokens; see :func:`tpplan.decoder.math.merge_parts`.

        Returns:
            The logarithms of the denominators over both parts, or None if the kernel does not take such tensors.
        """
        target, source = self._rows_of_heads(out_BHSK), self._rows_of_heads(new_BHSK)
        are_fitting = all(x.dtype is torch.float32 and x.is_contiguous() for x in (sums_BHS, new_sums_BHS))
        if not target or not source or not are_fitting:
            return None
        start, pitch, rows, columns = target
        merged_BHS = torch.empty_like(sums_BHS)
        parts, threads = _even(columns // _ELEMENTS, _THREADS)
        widths = columns * _ITEM, out_BHSK.shape[3] * _ITEM
        sums = sums_BHS.data_ptr(), new_sums_BHS.data_ptr(), merged_BHS.data_ptr(), rows * sums_BHS.itemsize
        self._merge((rows, parts, 1), threads, start, pitch, *source[:2], *widths, *sums)
        return merged_BHS

    def argmax(self, logits_BV: Tensor, start: int, place: int, places: int, parts: int) -> Tensor | None:
        """Find the largest element in parts of each row; see :func:`tpplan.decoder.math.argmax_columns`.

        Returns:
            ``[B, 2 × places × parts]`` in float32, or None if the kernel does not take such rows.
        """
        matrix = self._matrix(logits_BV)
        if matrix is None:
            return None
        address, pitch, rows, columns = matrix
        found = torch.empty(rows, 2 * places * parts, dtype=torch.float32, device=logits_BV.device)
        threads = min(-(-columns // (_ELEMENTS * _WARP * parts)) * _WARP, _MOST_THREADS)
        words = address, pitch, columns * _ITEM, start
        self._best((rows, parts, 1), threads, *words, found.data_ptr(), 4 * found.stride(0), place, places)
        return found

    def next_tokens(self, found_B2P: Tensor, tokens_B: Tensor, positions_B: Tensor | None = None) -> bool:
        """Write the token of each row's largest logit, see :func:`tpplan.decoder.math.best_tokens`; advance positions.

        Args:
            found_B2P: pairs of a logit and its token, in float32.
            tokens_B: the tokens to overwrite.
            positions_B: positions to add 1 to, if any.

        Returns:
            Whether the kernel takes such tensors.
        """
        numbers = [tokens_B] if positions_B is None else [tokens_B, positions_B]
        if not all(each.dtype is torch.int64 and each.is_contiguous() for each in numbers):
            return False
        start, pitch, (rows, columns) = found_B2P.data_ptr(), found_B2P.stride(0) * 4, found_B2P.shape
        if found_B2P.dtype is not torch.float32 or found_B2P.stride(1) != 1 or (start | pitch) % _NUMBER:
            return False
        positions = 0 if positions_B is None else positions_B.data_ptr()
        self._next(rows, _WARP, start, pitch, columns // 2, tokens_B.data_ptr(), positions, NO_TOKEN % 2**64)
        return True

    def norm_and_rope(
        self,
        qkv_RHK: Tensor,
        counts: tuple[int, int],
        by: Tensor,
        norms: Sequence[Tensor] = (),
        to: Places | None = None,
    ) -> bool:
        """Apply norms and rotation (RoPE) to query and key heads in place, and write keys and values to a cache.

        Products with sines and cosines are rounded, then their sums, as in :func:`tpplan.decoder.math.rotate`.

        Args:
            qkv_RHK: heads of queries, then of keys, then as many of values.
            counts: numbers of query heads and of key heads.
            by: RoPE angles of the rows, ``[R, 1, 2, 2, P]``, see :func:`tpplan.decoder.math.angles`.
            norms: weights of the norms of query and key heads; empty if there are none.
            to: where keys and values go in a cache; they are not written if not given.

        Returns:
            Whether the kernel takes such tensors.
        """
        words, cache_words = self.words_of_turn(qkv_RHK, by, norms), self._words_of(to)
        if words is None or cache_words is None:
            return False
        rows, _, width = qkv_RHK.shape
        lanes, used = width // (2 * _ELEMENTS), sum(counts) + (counts[1] if to else 0)
        _, threads = _even(used * lanes, _THREADS)
        parts = -(-used // (threads // lanes))  # of whole heads
        self._norm_and_rope(
            (rows, parts, 1),
            threads,
            qkv_RHK.data_ptr(),
            qkv_RHK.stride(0) * _ITEM,
            *counts,
            used,
            width * _ITEM,
            *words,
            *cache_words,
        )
        return True

    def words_of_turn(self, qkv_RHK: Tensor, by: Tensor, norms: Sequence[Tensor] = ()) -> tuple[int, ...] | None:
        """Return how kernels are told of the norms and rotation of heads, or None if they do not support them.

        Args:
            qkv_RHK: the heads; see :meth:`norm_and_rope`.
            by: RoPE angles of the rows.
            norms: weights of the norms.
        """
        rows, _, width = qkv_RHK.shape
        turned, lanes = 2 * by.shape[-1], width // (2 * _ELEMENTS)
        if not turned or (width | turned) % (2 * _ELEMENTS) or qkv_RHK.stride(1) != width or lanes > _THREADS:
            return None
        start, pitch = qkv_RHK.data_ptr(), qkv_RHK.stride(0) * _ITEM
        is_fitting = qkv_RHK.dtype is self._dtype and qkv_RHK.stride(2) == 1 and rows and not (start | pitch) % _VECTOR
        if not is_fitting or by.dtype is not self._dtype or not by.is_contiguous():
            return None
        words = [0, 0]
        if norms:
            words = [weight.data_ptr() for weight in norms]
            are_in_warps = lanes <= _WARP and not lanes & (lanes - 1)
            are_fitting = all(weight.dtype is self._dtype and weight.is_contiguous() for weight in norms)
            if turned != width or not are_in_warps or not are_fitting:
                return None
        if (words[0] | words[1] | by.data_ptr()) % _VECTOR:
            return None
        turning = turned * _ITEM, by.data_ptr(), 2 * turned * _ITEM
        return *turning, *words, self._offset, bits_of(1 / width), self._eps

    def _words_of(self, to: Places | None) -> Sequence[int] | None:
        """Return the kernel's parameters for a cache, or None if it does not support that cache."""
        if to is None:
            return (0,) * 10
        k_THK, v_THK, sequences, places = to.keys, to.values, to.sequences, to.places
        if k_THK.dtype is not self._stored or sequences.dtype is not torch.int64 or places.dtype is not torch.int64:
            return None
        starts, width = (k_THK.data_ptr(), v_THK.data_ptr()), k_THK.shape[2]
        if k_THK.stride() != v_THK.stride() or k_THK.stride(0) != width or (starts[0] | starts[1]) % _VECTOR:
            return None
        scales = [each.data_ptr() for each in to.scales] or [0, 0]
        item = k_THK.element_size()
        steps = to.sequence_stride * width * item, k_THK.stride(1) * item
        of_rows = [(each.data_ptr(), each.stride(0) * _NUMBER) for each in (sequences, places)]
        return *starts, *scales, *steps, *of_rows[0], *of_rows[1]

    def _rows_of_heads(self, x_BHSK: Tensor) -> tuple[int, int, int, int] | None:
        """Return what :meth:`_matrix` does of a text's queries, or None if their heads are not side by side."""
        width: int = x_BHSK.shape[3]
        if len(x_BHSK) != 1 or x_BHSK.stride(1) != width or x_BHSK.stride(3) != 1 or width % _ELEMENTS:
            return None
        return self._matrix(x_BHSK[0].transpose(0, 1).flatten(1))

    def _matrix(self, x: Tensor) -> tuple[int, int, int, int] | None:
        """Return address, pitch, rows and columns of a matrix, or None if kernels do not take it."""
        if x.dim() != 2 or x.dtype is not self._dtype:  # noqa: PLR2004 - a matrix
            return None
        start, (step, one), (rows, columns) = x.data_ptr(), x.stride(), x.shape
        if one != 1 or not rows or (start | step * _ITEM | columns * _ITEM) % _VECTOR:
            return None
        return start, step * _ITEM, rows, columns


def _even(count: int, most: int) -> tuple[int, int]:
    """Return the number of blocks that ``count`` threads are spread over, and the threads of each, in whole warps."""
    blocks = -(-count // most)
    return blocks, -(-count // (blocks * _WARP)) * _WARP
