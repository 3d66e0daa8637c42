"""Storage of the keys and values of one layer's heads on one device, and the places of new tokens in it."""

from __future__ import annotations

from functools import cache, reduce
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from tpplan.core.plan import CACHE_KINDS
from tpplan.decoder.math import additive_mask, slice_of
from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

_FLOAT8: Final = torch.float8_e4m3fn
#: Elements that share a 16-bit scale in caches of integers: half a bit more for each element, as the plan counts.
_GROUP: Final = 32

#: Factors of what :func:`hadamard` makes of stored elements, and of what these are multiplied by: together 1 / 32.
_STORED, _ASKED = 1 / 8, 1 / 4
#: The least float16 above 0.
_TINY: Final = 2.0**-24

#: Kinds of caches; no plan has the last one.
_KINDS: Final = ("fp16", "fp8", "q8", "q6", "q4", "fp32")
#: Those of groups of elements.
_GROUPED: Final = ("q8", "q6", "q4")
#: Those of them whose keys are stored in another way than values.
_OF_HALVES: Final = ("q6",)
#: Kinds that kernels read and write, and the suffixes of these kernels' names.
KERNEL_KINDS: Final = {"fp16": "", "fp8": "_fp8", "q8": "_q8"}

#: Stored form of a tensor: its elements, and for some kinds their scales.
Parts = tuple["Tensor", ...]


class _Codec(NamedTuple):
    """How keys or values are stored.

    Attributes:
        encode: returns the stored form of a tensor.
        decode: writes what is stored into another tensor.
        is_mixed: whether it is of what :func:`hadamard` makes of a tensor.
    """

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, Tensor], object]
    is_mixed: bool = False


def _plain(dtype: torch.dtype) -> _Codec:
    return _Codec(lambda x: (x.to(dtype),), lambda parts, out: out.copy_(parts[0]))


def _to_float8(x: Tensor) -> Parts:
    limit = torch.finfo(_FLOAT8).max
    return (x.clamp(-limit, limit).to(_FLOAT8).view(torch.uint8),)


def _from_float8(parts: Parts, out: Tensor) -> None:
    out.copy_(parts[0].view(_FLOAT8))


def _rounded(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers of groups of elements, from minus the largest to it, and the groups' scales."""
    groups = torch.unflatten(x.to(torch.float32, copy=True), -1, (-1, _GROUP))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = (torch.maximum(-least, most) * (1 / largest)).half()
    groups.div_(scale.float().clamp_min(_TINY)).round_().clamp_(-largest, largest)
    return groups.to(torch.int8).flatten(-2), scale.squeeze(-1)


def _to_int8(x: Tensor) -> Parts:
    return _rounded(x, 127)


def _from_int8(parts: Parts, out: Tensor) -> None:
    whole, groups = (torch.unflatten(x, -1, (-1, _GROUP)) for x in (parts[0], out))
    torch.mul(whole, parts[1].unsqueeze(-1), out=groups)  # into out: temporaries may not fit into memory


def _to_int4(x: Tensor) -> Parts:
    whole, scale = _rounded(hadamard(x, _STORED), 7)
    first, second = whole.add_(8).view(torch.uint8).chunk(2, dim=-1)
    return first | second << 4, scale


def _from_int4(parts: Parts, out: Tensor) -> None:
    first, second = out.chunk(2, dim=-1)
    first.copy_(parts[0] & 15)  # temporaries of half a byte for each element
    second.copy_(parts[0] >> 4)
    groups = torch.unflatten(out.sub_(8), -1, (-1, _GROUP))
    groups.mul_(parts[1].unsqueeze(-1))


def hadamard(x: Tensor, factor: float) -> Tensor:
    """Return the products of each 32 neighbours with a Hadamard matrix: sums of all, half of them subtracted.

    Products of what is mixed so are 32 times those of the tensors, and mixing twice is a factor of 32. An element that
    is much larger than its neighbours, which rounding to few bits would cost theirs, becomes a part of each (QuaRot,
    arXiv:2404.00456; ExLlamaV2's caches of 4 bits do the same).

    Args:
        x: elements.
        factor: multiplies the result: a power of 2.
    """
    return (torch.unflatten(x, -1, (-1, _GROUP)) @ _hadamard_matrix(x.device, x.dtype, factor)).flatten(-2)


@cache
def _hadamard_matrix(device: torch.device, dtype: torch.dtype, factor: float) -> Tensor:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return (factor * reduce(torch.kron, [two] * (_GROUP.bit_length() - 1))).to(device, dtype)


def check_kind(kind: str, head_dim: int, value_dim: int = 0) -> None:
    """Check that the decoder has a cache of this kind for heads of this size.

    Args:
        kind: kind of cache.
        head_dim: elements of a key.
        value_dim: elements of a key that are also its value, see :class:`Store`; 0 if values are stored beside keys.

    Raises:
        ExecutionError: it has none.
    """
    grouped = [each for each in _GROUPED if not value_dim or each not in _OF_HALVES]
    odd = head_dim % _GROUP or value_dim % _GROUP
    if kind not in _KINDS or (kind in _GROUPED and (odd or kind not in grouped)):
        kinds = ", ".join(each for each in _KINDS if each in CACHE_KINDS and each not in _GROUPED)
        what = (
            f"latents of {value_dim} + {head_dim - value_dim} elements"
            if value_dim
            else f"heads of {head_dim} elements"
        )
        whose = "latents and rotary parts" if value_dim else "heads"
        raise ExecutionError(
            f"the decoder has no cache of kind {kind} for {what}",
            f"plan with --cache {kinds}; {', '.join(grouped)} take {whose} of a multiple of {_GROUP}",
        )


class Store:
    """Storage for keys and values ``[2, B, H, L, K]``: B sequences, H KV heads, L places, K elements of a head.

    A value may be the last elements of its key, as in multi-head latent attention (MLA, arXiv:2405.04434), where all
    heads share a rotary part and a latent, which is also the value. Then only keys are stored, ``[1, B, H, L, K]``.

    What is read of a kind of 4 bits is what :func:`hadamard` makes of it: :meth:`mix_queries` does so with queries, and
    :meth:`unmix` makes it undone in what attention returns. So it costs nothing for each token in the cache.

    Attributes:
        kind: kind of cache.
        heads: number of KV heads.
        head_dim: elements of a key.
        value_dim: last elements of a key that are its value; 0 if values are stored beside keys.
        is_plain: whether elements are stored in the activations' dtype, so that reading them takes no memory.
        halves: stored keys and stored values, ``[B, H, L, K]`` each, of 4 bits two in a byte; views of the storage.
            Of values that are part of keys, both are the keys.
        scales: scales of keys and of values, ``[B, H, L, K / 32]`` each, for kinds of integers; empty for others.
    """

    def __init__(
        self,
        kind: str,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        value_dim: int = 0,
    ) -> None:
        """Allocate the memory that the plan counts for a cache of this kind.

        Args:
            kind: ``fp16`` (the activations' dtype, or float16 if that is wider), ``fp8``, ``q8``, ``q4``, ``q6`` (keys
                as ``q8``, values as ``q4``, as in ExLlamaV2) or ``fp32``.
            shape: B, H, L and K.
            dtype: dtype of the activations.
            device: device of the memory.
            value_dim: last elements of a key that are its value; 0 if values are stored beside keys.

        Raises:
            ExecutionError: the decoder has no cache of this kind.
        """
        check_kind(kind, shape[-1], value_dim)
        self.kind = kind
        self.value_dim = value_dim
        _, self.heads, _, self.head_dim = shape
        self._dtype = dtype
        q8, q4 = _Codec(_to_int8, _from_int8), _Codec(_to_int4, _from_int4, is_mixed=True)
        codecs = {
            "fp16": [_plain(dtype if dtype.itemsize == 2 else torch.float16)],  # noqa: PLR2004 - bytes
            "fp32": [_plain(torch.float32)],
            "fp8": [_Codec(_to_float8, _from_float8)],
            "q8": [q8],
            "q6": [q8, q4],
            "q4": [q4],
        }[kind]
        count = (1 if value_dim else 2) // len(codecs)
        self._coded: list[tuple[_Codec, slice, Parts]] = []
        for i, codec in enumerate(codecs):
            parts = tuple(
                torch.zeros(count, *shape[:-1], part.shape[-1], dtype=part.dtype, device=device)
                for part in codec.encode(torch.zeros(1, shape[-1]))
            )
            self._coded.append((codec, slice(i * count, (i + 1) * count), parts))
        self._parts = tuple(part for *_, parts in self._coded for part in parts)
        self._mixes = codecs[0].is_mixed, codecs[-1].is_mixed
        for factor in (_STORED, _ASKED) if any(self._mixes) else ():  # now: no later pass has memory for them
            _hadamard_matrix(device, dtype, factor)
        self.is_plain = self._parts[0].dtype == dtype
        (*_, keys), (*_, values) = self._coded[0], self._coded[-1]
        self.halves: tuple[Tensor, Tensor] = (keys[0][0], values[0][-1])
        self.scales: tuple[Tensor, ...] = tuple(part[i] for i, parts in ((0, keys), (-1, values)) for part in parts[1:])
        self._rows = _as_rows(self.halves[0]), _as_rows(self.halves[1]), shape[1] * shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(part.nbytes for part in self._parts)

    def clear(self, sequences: slice, places: slice = slice(None)) -> None:
        """Clear some places of sequences, by default all."""
        for part in self._parts:
            part[:, sequences, :, places].zero_()

    def mix_queries(self, q: Tensor) -> Tensor:
        """Return the queries whose products with the keys as they are read are those of queries and keys."""
        return hadamard(q, _ASKED) if self._mixes[0] else q

    def unmix(self, out: Tensor) -> Tensor:
        """Return sums of values, given those of the values as they are read."""
        return hadamard(out, _ASKED) if self._mixes[1] else out

    def as_rows(self) -> tuple[Tensor, Tensor, int]:
        """Return keys and values of all sequences as rows ``[T, H, K]``, and the row stride between sequences.

        They are views of the storage. The first L rows of a sequence are its places; its other rows are meaningless.
        """
        return self._rows

    def pair_of(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, given what :meth:`read_at` returns."""
        return (read[0], read[0][..., -self.value_dim :]) if self.value_dim else (read[0], read[1])

    def extend_at(
        self, sequences: slice, heads: slice, start: int, k_BHSK: Tensor, v_BHSK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to places from ``start`` on, and return those of all places up to the last new one."""
        end = start + k_BHSK.shape[2]
        if self.value_dim:
            self.write(sequences, heads, slice(start, end), k_BHSK[None])
            return self.pair_of(self.read_at(sequences, heads, slice(0, end)))
        if self.is_plain:  # few torch calls: with many devices, the host limits the speed of a pass
            k_BHTK, v_BHTK = (half[sequences, heads, :end] for half in self.halves)
            for to, new in ((k_BHTK, k_BHSK), (v_BHTK, v_BHSK)):
                slice_of(to, slice(start, end), dim=2).copy_(new)
        else:
            self.write(sequences, heads, slice(start, end), torch.stack((k_BHSK, v_BHSK)))
            k_BHTK, v_BHTK = self.pair_of(self.read_at(sequences, heads, slice(0, end)))
        return k_BHTK, v_BHTK

    def write(self, sequences: Tensor | slice, heads: slice, places: Tensor | slice, kv: Tensor) -> None:
        """Write keys and values to places: ``[2, B, H, places, K]`` for slices, ``[B, 2, H, K]`` for tensors.

        If values are part of keys, these are all: 1 in place of 2.
        """
        dim = 0 if isinstance(places, slice) else 1
        for codec, some, parts in self._coded:
            for stored, part in zip(parts, codec.encode(slice_of(kv, some, dim)), strict=True):
                stored[:, sequences, heads, places] = part

    def read_at(self, sequences: slice, heads: slice, places: slice) -> Tensor:
        """Return the keys and values of some heads at some places, ``[2, B, H, places, K]``; see :meth:`pair_of`."""
        first = self._parts[0][:, sequences, heads, places]
        if self.is_plain:
            return first
        count = 1 if self.value_dim else 2
        out = torch.empty(count, *first.shape[1:-1], self.head_dim, dtype=self._dtype, device=first.device)
        self._decode(sequences, heads, places, out)
        return out

    def read_before(self, sequences: slice, heads: slice, places: list[slice], new: Tensor) -> Tensor:
        """Return a new tensor of the keys and values at ranges of places, in order, followed by new ones."""
        *shape, count, width = new.shape
        sizes = [each.stop - each.start for each in places]
        out = new.new_empty(*shape, sum(sizes) + count, width)
        *stored, last = torch.split_with_sizes(out, [*sizes, count], dim=3)
        for each, to in zip(places, stored, strict=True):
            self._decode(sequences, heads, each, to)
        for codec, some, _ in self._coded:
            last[some] = hadamard(new[some], _STORED) if codec.is_mixed else new[some]
        return out

    def _decode(self, sequences: slice, heads: slice, places: slice, out: Tensor) -> None:
        for codec, some, parts in self._coded:
            codec.decode(tuple(stored[:, sequences, heads, places] for stored in parts), slice_of(out, some, dim=0))


@frozen
class CachePlaces:
    """The cache places of one new token of each sequence, and those that it attends to, for all caches of a length.

    No shape depends on the positions, so that a graph can be captured.

    Attributes:
        sequences: numbers of the sequences, ``[B]``.
        places: places of the new tokens in the cache, ``[B]``.
        positions: positions of the new tokens, ``[B]``, int64 and contiguous.
        span: number of places that may be in use.
        first: the first of the sequences, which follow each other.
    """

    sequences: Tensor
    places: Tensor
    positions: Tensor
    span: int
    _dtype: torch.dtype
    first: int = 0
    _masks: list[Tensor] = field(default=Factory(list), init=False)

    @classmethod
    def of(cls, positions_B: Tensor, length: int, span: int, dtype: torch.dtype) -> Self:
        """Return the places of tokens in the cache.

        Args:
            positions_B: positions of the tokens, of any integer dtype and stride.
            length: length of the caches, in places.
            span: number of places that may be in use.
            dtype: dtype of the attention scores.
        """
        positions_B = positions_B.long().contiguous()  # as kernels expect
        places = positions_B if span <= length else positions_B % length
        sequences = torch.arange(len(positions_B), device=positions_B.device)
        return cls(sequences, places, positions_B, min(span, length), dtype)

    def of_rows(self, rows: slice) -> Self:
        """Return the places of some of the tokens."""
        sequences, places, positions = (x[rows] for x in (self.sequences, self.places, self.positions))
        return evolve(self, sequences=sequences, places=places, positions=positions, first=self.first + rows.start)

    @property
    def mask(self) -> Tensor:
        """Attention mask of the places in use, ``[B, 1, 1, T]``; see :func:`tpplan.decoder.math.attend`."""
        if not self._masks:
            seen = torch.arange(self.span, device=self.positions.device) <= self.positions[:, None]
            self._masks.append(additive_mask(seen[:, None, None], self._dtype))
        return self._masks[0]


def _as_rows(stored: Tensor) -> Tensor:
    """Return a view ``[T, H, K]`` of ``[B, H, L, K]``: head h of sequence b and place l is in row ``b × H × L + l``."""
    _, heads, length, width = stored.shape
    rows = stored.shape[:3].numel() - (heads - 1) * length
    return stored.as_strided((rows, heads, width), (width, length * width, 1))
