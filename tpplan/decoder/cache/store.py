"""Storage of the keys and values of one layer's heads on one device, and the places of new tokens in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from tpplan.core.plan import CACHE_KINDS
from tpplan.decoder.math import additive_mask, slice_of
from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

_FLOAT8: Final = torch.float8_e4m3fn
#: Elements that share a 16-bit scale in a ``q8`` cache: 8.5 bits for each element, as the plan counts.
_GROUP: Final = 32
_LARGEST: Final = 127

#: Kinds of caches; no plan has the last one.
_KINDS: Final = ("fp16", "fp8", "q8", "fp32")
#: Kinds that kernels read and write, and the suffixes of these kernels' names.
KERNEL_KINDS: Final = {"fp16": "", "fp8": "_fp8", "q8": "_q8"}

#: Stored form of a tensor: its elements, and for some kinds their scales.
Parts = tuple["Tensor", ...]


def _to_float8(x: Tensor) -> Parts:
    limit = torch.finfo(_FLOAT8).max
    return (x.clamp(-limit, limit).to(_FLOAT8).view(torch.uint8),)


def _from_float8(parts: Parts, out: Tensor) -> None:
    out.copy_(parts[0].view(_FLOAT8))


def _to_int8(x: Tensor) -> Parts:
    groups = torch.unflatten(x.float(), -1, (-1, _GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) * (1 / _LARGEST)).half()
    whole = (groups / scale.float().clamp_min(torch.finfo(torch.half).tiny)).round_().clamp_(-_LARGEST, _LARGEST)
    return whole.to(torch.int8).flatten(-2), scale.squeeze(-1)


def _from_int8(parts: Parts, out: Tensor) -> None:
    whole, groups = (torch.unflatten(x, -1, (-1, _GROUP)) for x in (parts[0], out))
    torch.mul(whole, parts[1].unsqueeze(-1), out=groups)  # into out: temporaries may not fit into memory


def check_kind(kind: str, head_dim: int) -> None:
    """Check that the decoder has a cache of this kind for heads of this size.

    Raises:
        ExecutionError: it has none.
    """
    if kind not in _KINDS or (kind == "q8" and head_dim % _GROUP):
        kinds = ", ".join(each for each in _KINDS if each in CACHE_KINDS)
        raise ExecutionError(
            f"the decoder has no cache of kind {kind} for heads of {head_dim} elements",
            f"plan with --cache {kinds}; q8 takes multiples of {_GROUP}",
        )


class Store:
    """Storage for keys and values ``[2, B, H, L, K]``: B sequences, H KV heads, L places, K elements of a head.

    Attributes:
        kind: kind of cache.
        heads: number of KV heads.
        head_dim: elements of a head.
        is_plain: whether elements are stored in the activations' dtype, so that reading them takes no memory.
        halves: stored keys and stored values, ``[B, H, L, K]`` each; views of the storage.
        scales: scales of keys and of values, ``[B, H, L, K / 32]`` each, for kind ``q8``; empty for other kinds.
    """

    def __init__(self, kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the memory that the plan counts for a cache of this kind.

        Args:
            kind: ``fp16`` (the activations' dtype, or float16 if that is wider), ``fp8``, ``q8`` or ``fp32``.
            shape: B, H, L and K.
            dtype: dtype of the activations.
            device: device of the memory.

        Raises:
            ExecutionError: the decoder has no cache of this kind.
        """
        check_kind(kind, shape[-1])
        self.kind = kind
        _, self.heads, _, self.head_dim = shape
        self._dtype = dtype
        narrow = dtype if dtype.itemsize == 2 else torch.float16  # noqa: PLR2004 - bytes
        kinds: dict[str, tuple[Callable[[Tensor], Parts], Callable[[Parts, Tensor], object]]] = {
            "fp16": (lambda x: (x.to(narrow),), lambda parts, out: out.copy_(parts[0])),
            "fp32": (lambda x: (x.float(),), lambda parts, out: out.copy_(parts[0])),
            "fp8": (_to_float8, _from_float8),
            "q8": (_to_int8, _from_int8),
        }
        self._encode, self._decode = kinds[kind]
        self._parts = tuple(
            torch.zeros(2, *shape[:-1], part.shape[-1], dtype=part.dtype, device=device)
            for part in self._encode(torch.zeros(1, shape[-1]))
        )
        self.is_plain = self._parts[0].dtype == dtype
        self.halves: tuple[Tensor, Tensor] = (self._parts[0][0], self._parts[0][1])
        self.scales: tuple[Tensor, ...] = tuple(half for part in self._parts[1:] for half in part)
        self._rows = _as_rows(self.halves[0]), _as_rows(self.halves[1]), shape[1] * shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(part.nbytes for part in self._parts)

    def as_rows(self) -> tuple[Tensor, Tensor, int]:
        """Return keys and values of all sequences as rows ``[T, H, K]``, and the row stride between sequences.

        They are views of the storage. The first L rows of a sequence are its places; its other rows are meaningless.
        """
        return self._rows

    def extend(
        self, sequences: slice, heads: slice, start: int, k_BHSK: Tensor, v_BHSK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to places from ``start`` on, and return those of all places up to the last new one."""
        end = start + k_BHSK.shape[2]
        if self.is_plain:  # few torch calls: with many devices, the host limits the speed of a pass
            k_BHTK, v_BHTK = (half[sequences, heads, :end] for half in self.halves)
            for to, new in ((k_BHTK, k_BHSK), (v_BHTK, v_BHSK)):
                slice_of(to, slice(start, end), dim=2).copy_(new)
        else:
            self.write(sequences, heads, slice(start, end), torch.stack((k_BHSK, v_BHSK)))
            k_BHTK, v_BHTK = self.read(sequences, heads, slice(0, end))
        return k_BHTK, v_BHTK

    def write(self, sequences: Tensor | slice, heads: slice, places: Tensor | slice, kv: Tensor) -> None:
        """Write keys and values to places: ``[2, B, H, places, K]`` for slices, ``[B, 2, H, K]`` for tensors."""
        for stored, part in zip(self._parts, self._encode(kv), strict=True):
            stored[:, sequences, heads, places] = part

    def read(self, sequences: slice, heads: slice, places: slice) -> Tensor:
        """Return the keys and values of some heads at some places, ``[2, B, H, places, K]``."""
        parts = self._some(sequences, heads, places)
        if self.is_plain:
            return parts[0]
        out = torch.empty(parts[0].shape, dtype=self._dtype, device=parts[0].device)
        self._decode(parts, out)
        return out

    def read_before(self, sequences: slice, heads: slice, places: list[slice], new: Tensor) -> Tensor:
        """Return a new tensor of the keys and values at ranges of places, in order, followed by new ones."""
        *shape, count, width = new.shape
        sizes = [each.stop - each.start for each in places]
        out = new.new_empty(*shape, sum(sizes) + count, width)
        *stored, last = torch.split_with_sizes(out, [*sizes, count], dim=3)
        for each, to in zip(places, stored, strict=True):
            self._decode(self._some(sequences, heads, each), to)
        last.copy_(new)
        return out

    def _some(self, sequences: slice, heads: slice, places: slice) -> Parts:
        return tuple(stored[:, sequences, heads, places] for stored in self._parts)


@frozen
class CachePlaces:
    """The cache places of one new token of each sequence, and those that it attends to, for all caches of a length.

    No shape depends on the positions, so that a graph can be captured.

    Attributes:
        sequences: numbers of the sequences, ``[B]``.
        places: places of the new tokens in the cache, ``[B]``.
        positions: positions of the new tokens, ``[B]``, int64 and contiguous.
        span: number of places that may be in use.
    """

    sequences: Tensor
    places: Tensor
    positions: Tensor
    span: int
    _dtype: torch.dtype
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
