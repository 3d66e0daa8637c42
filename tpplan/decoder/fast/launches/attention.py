"""Decode attention: one query token of each sequence over the KV cache, by a kernel that needs no mask.

The places of a token are shared by several blocks (split-K, as in Flash-Decoding); the last to finish merges their
partial softmax sums.

Shapes: R tokens, one of each of the first R sequences, B sequences, L places of a sequence, H heads (KV heads of keys
and values), K elements of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.cache.store import KERNEL_KINDS
from tpplan.decoder.fast.kernels.attention_limits import can_append
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.fast.launches.pointwise import TURN_WORDS
from tpplan.errors import ExecutionError

#: Elements of a head: those of a vector of 16 bytes, the most for which a block has 8 warps, and the most of all.
_VECTOR, _WIDE, _WIDEST = 8, 128, 256
#: Queries and cache places of a tile, as in the kernels.
_QUERIES, _TILE = 8, 16
#: Minimum tiles of a block that shares a token with others; with fewer, merging takes longer than is saved.
_LEAST: Final = 4
#: Minimum compute capabilities: for matrix instructions in both dtypes, and for kernels for wide heads of 16 bits that
#: need no memory.
_OLDEST, _OLDEST_WIDE = (8, 0), (9, 0)


def name_of(dtype: torch.dtype, head_dim: int, cap: float | None, kind: str = "fp16") -> str:
    """Return the name of the kernel for heads of a dtype and size in a kind of cache."""
    return f"attention_{DTYPES[dtype]}_{head_dim}{KERNEL_KINDS[kind]}{'' if cap is None else '_capped'}"


@frozen
class NewTokens:
    """Keys and values of the tokens before norms and RoPE, in the same rows as their queries.

    So they have the queries' pitch, the stride from one token to the next: kernels are told it once. Heads are
    contiguous.

    Attributes:
        keys: keys, ``[R, H, K]``.
        values: values, likewise.
        turn: norms and RoPE, see :meth:`tpplan.decoder.fast.launches.pointwise.Pointwise.words_of_turn`.
    """

    keys: Tensor
    values: Tensor
    turn: Sequence[int]


class Attention:
    """The kernel for one device, dtype, head size and kind of cache, with the memory for its blocks' partial results.

    Calls on different streams must not overlap.

    Attributes:
        appends: whether the kernel takes new tokens, and writes them to the cache.
    """

    def __init__(
        self, place: torch.device, dtype: torch.dtype, head_dim: int, cap: float | None = None, kind: str = "fp16"
    ) -> None:
        """Load the kernel.

        Args:
            place: the CUDA device.
            dtype: bfloat16 or float16.
            head_dim: elements of a head; see :meth:`takes`.
            cap: soft cap of the scores; see :class:`tpplan.decoder.model.settings.Settings`.
            kind: kind of cache: ``fp16``, ``q8`` or ``fp8``, see :class:`tpplan.decoder.cache.store.Store`.
        """
        warps, width = 8 if head_dim <= _WIDE else 4, -(-head_dim // 64) * 64
        self._threads, self._cap = 32 * warps, cap
        self.appends = can_append(head_dim, head_dim * (dtype.itemsize if kind == "fp16" else 1))
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count
        self._launch = Launcher(name_of(dtype, head_dim, cap, kind), place)
        blocks = 3 * self._processors // 2  # at most so many have partial results
        self._turns = torch.zeros(blocks, dtype=torch.int32, device=place)
        self._partial = torch.empty(blocks, _QUERIES, width + 2, device=place)

    @staticmethod
    def takes(place: torch.device, dtype: torch.dtype, head_dim: int, kind: str = "fp16") -> bool:
        """Tell whether there is a kernel for a device, dtype, head size and kind of cache."""
        if place.type != "cuda" or dtype not in DTYPES or kind not in KERNEL_KINDS:
            return False
        if head_dim % _VECTOR or head_dim > _WIDEST:
            return False
        is_large = head_dim > _WIDE and kind == "fp16"
        return torch.cuda.get_device_capability(place) >= (_OLDEST_WIDE if is_large else _OLDEST)

    def __call__(
        self,
        q_RHK: Tensor,
        k_BHLK: Tensor,
        v_BHLK: Tensor,
        positions_R: Tensor,
        scales: Sequence[Tensor] = (),
        *,
        scale: float,
        sinks: Tensor | None = None,
        new: NewTokens | None = None,
    ) -> Tensor:
        """Return the attention output of tokens over places 0 to their position, or all places if these are fewer.

        The host does not wait, and no launch depends on the positions. Scores and sums are in float32, and rounded
        once. With an 8-bit cache, products are in float16, queries included: no element of queries in bfloat16 may
        exceed 65,504.

        Args:
            q_RHK: queries, with a token stride of any multiple of 16 bytes; each KV head is shared by the same number
                of successive query heads.
            k_BHLK: keys of all sequences, as the cache stores them; heads and places are contiguous.
            v_BHLK: values, laid out likewise.
            positions_R: positions of the tokens, int64 and contiguous.
            scales: scales of keys and of values in a ``q8`` cache, ``[B, H, L, K / 32]``, laid out likewise.
            scale: factor of the attention scores.
            sinks: scores of the query heads' sinks, in the dtype of the queries and contiguous; see
                :class:`tpplan.decoder.math.Scoring`.
            new: what to write to the cache first, while queries are normed and turned; None if the cache has the
                tokens, and the queries have been.

        Returns:
            The attention output ``[R, H × K]``.

        Raises:
            ExecutionError: the kernel takes no new tokens, see :attr:`appends`, or not with these strides.
        """
        count, queries, size = q_RHK.shape
        if new:
            self._check_new(new, q_RHK)
        _, heads, length, _ = k_BHLK.shape
        group = queries // heads
        parts = heads * -(-group // _QUERIES)
        splits = splits_of(count * parts, length, self._processors)
        out = q_RHK.new_empty(count, queries * size)
        factor, limit = (scale / log(2), 0.0) if self._cap is None else (scale / self._cap, self._cap / log(2))
        self._launch(
            (splits, parts, count),
            self._threads,
            q_RHK.data_ptr(),
            2 * q_RHK.stride(0),
            k_BHLK.data_ptr(),
            v_BHLK.data_ptr(),
            k_BHLK.element_size() * k_BHLK.stride(0),
            *([each.data_ptr() for each in scales] or [0, 0]),
            positions_R.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            2 * queries * size,
            self._partial.data_ptr(),
            self._turns.data_ptr(),
            length,
            group,
            bits_of(factor),
            bits_of(limit),
            _LEAST,
            *((new.keys.data_ptr(), new.values.data_ptr(), *new.turn) if new else (0,) * (2 + TURN_WORDS)),
        )
        return out

    def _check_new(self, new: NewTokens, q_RHK: Tensor) -> None:
        """Check that the kernel takes new tokens: it would pass over them, or read other rows.

        Raises:
            ExecutionError: it does not.
        """
        size = q_RHK.shape[2]
        if not self.appends:
            what = f"attention kernels of heads of {size} elements write no new tokens to this kind of cache"
            raise ExecutionError(what, "write them by append_kv() before")
        strides = [each.stride() for each in (q_RHK, new.keys, new.values)]
        if len({*strides}) > 1 or strides[0][1:] != (size, 1):
            what = f"queries, new keys and new values have the strides {', '.join(map(str, strides))}"
            raise ExecutionError(what, f"give views of the same rows, with strides of {size} and 1 in each")


def splits_of(count: int, length: int, processors: int) -> int:
    """Return the number of blocks that share the places a token sees, for about one block on each multiprocessor.

    Args:
        count: number of blocks without sharing: tokens times KV heads.
        length: places of the cache.
        processors: multiprocessors of the device, each with room for two blocks.
    """
    return max(1, min(-(-length // (_TILE * _LEAST)), (processors + count // 2) // count))
