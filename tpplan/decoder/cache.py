"""The keys and values of one layer's heads on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.layers import hiding, hiding_bytes, numbers_bytes, side_by_side, some_of
from tpplan.decoder.room import AMPLE, Room

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.decoder.store import Store


@frozen
class Where:
    """Where the next tokens of some sequences go in caches of a length, and what they see; the same for all layers.

    No shape depends on the positions, so that a graph can do it.

    Attributes:
        sequences: their numbers, ``[B]``.
        positions: of the new tokens, ``[B]``.
        places: of these, ``[B]``.
        span: places that may be in use.
        mask: of these, ``[B, 1, 1, T]``; see :func:`tpplan.decoder.layers.attend`. None if there is no room for it.
    """

    sequences: Tensor
    positions: Tensor
    places: Tensor
    span: int
    mask: Tensor | None

    @classmethod
    def of(cls, positions_B: Tensor, length: int, span: int, dtype: torch.dtype, room: Room = AMPLE) -> Self:
        """Return where tokens go.

        Args:
            positions_B: of the tokens.
            length: of the caches.
            span: places that may be in use.
            dtype: of the scores.
            room: for the mask.
        """
        places = positions_B if span <= length else positions_B % length
        count, span = len(positions_B), min(span, length)
        has_room = numbers_bytes(span) + count * hiding_bytes(span, dtype) <= room.size_bytes
        numbers = torch.arange(max(count, span) if has_room else count, device=positions_B.device)
        seen_BT = numbers[:span] <= positions_B[:, None] if has_room else None
        mask = None if seen_BT is None else hiding(seen_BT[:, None, None], dtype)
        return cls(numbers[:count], positions_B, places, span, mask)

    def seen(self, some: slice, places: slice) -> Tensor:
        """Return which places some of the tokens see, ``[B, T]``."""
        return torch.arange(places.start, places.stop, device=self.places.device) <= self.positions[some, None]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, positions not counted."""
        mask = 0 if self.mask is None else self.mask.nbytes
        return self.sequences.untyped_storage().nbytes() + self.places.nbytes + mask


class LayerCache:
    """Keys and values of the latest tokens of each sequence: position p is at place p modulo ``length``.

    Attributes:
        length: places of a sequence: all that the plan caches, or as many as a sliding window keeps.
        window: tokens that a query sees, itself included; 0 for all.
    """

    def __init__(self, store: Store, length: int, window: int) -> None:
        """Hold a store of ``length`` places."""
        self.length = length
        self.window = window
        self._store = store

    @property
    def is_plain(self) -> bool:
        """Whether what is read is what is stored."""
        return self._store.is_plain

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._store.nbytes

    def head_bytes(self, start: int, end: int) -> int:
        """Return the bytes that a KV head of a sequence takes where its keys and values are not read as they lie there.

        Args:
            start: of the new tokens.
            end: of these.
        """
        if end <= self.length and self._store.is_plain:
            return 0
        return self._store.pair_bytes * self.seen(start, end)

    def seen(self, start: int, end: int) -> int:
        """Return the tokens that queries attend to, those of the tokens from ``start`` to ``end`` together."""
        return end - self._first(start, end)

    @property
    def pair_bytes(self) -> int:
        """Bytes of the keys and values of a token in a head, as they are read."""
        return self._store.pair_bytes

    def extend(
        self, sequences: slice, heads: slice, start: int, k_BHSK: Tensor, v_BHSK: Tensor, *, room: Room = AMPLE
    ) -> tuple[Tensor, Tensor, int]:
        """Take the next tokens of some sequences, and return what they attend to.

        Args:
            sequences: their numbers.
            heads: of the keys and values.
            start: tokens that each has already.
            k_BHSK: keys of the new ones.
            v_BHSK: values of the new ones.
            room: for what is written.

        Returns:
            Keys and values ``[B, H, T, K]`` of successive tokens, the last of them the last new one, and how many of
            them a query sees at most, itself included; 0 for all.
        """
        end = start + k_BHSK.shape[2]
        first = self._first(start, end)
        if end <= self.length:
            k, v = self._store.extend(sequences, heads, start, k_BHSK, v_BHSK, room=room)
        else:  # the new tokens push out older ones, which the first of them still see
            k, v = self._store.read_before(sequences, heads, self._places(first, start), k_BHSK, v_BHSK)
            self.keep(sequences, heads, start, k_BHSK, v_BHSK, room=room.less(2 * k.nbytes))
        return k, v, self.window if end - first > self.window else 0

    def in_a_row(self) -> tuple[Tensor, Tensor, int]:
        """Return the rows of a plain store; see :meth:`Store.in_a_row`."""
        return self._store.in_a_row()

    def fits(self, end: int) -> bool:
        """Tell whether there is a place for each of so many tokens of a sequence."""
        return end <= self.length

    def keep(self, sequences: slice, heads: slice, start: int, k_BHSK: Tensor, v_BHSK: Tensor, *, room: Room) -> None:
        """Take the next tokens of some sequences, in the places of older ones where there are no others.

        For the arguments see :meth:`extend`.
        """
        end = start + k_BHSK.shape[2]
        at = max(start, end - self.length)
        for places in self._places(at, end):
            some = slice(at - start, at - start + places.stop - places.start)
            k, v = (some_of(x, some, dim=2) for x in (k_BHSK, v_BHSK))
            self._store.write_places(sequences, heads, places.start, k, v, room=room)
            at += places.stop - places.start

    def parts(self, sequences: slice, heads: slice, tokens: slice, most: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield what is kept of some tokens, so many at a time at most.

        Args:
            sequences: their numbers.
            heads: of the keys and values.
            tokens: their positions.
            most: tokens at a time.

        Yields:
            Keys and values ``[B, H, T, K]`` of successive tokens, and the position of the first.
        """
        for some in slices(tokens.start, tokens.stop, most):
            first = some.start
            for places in self._places(some.start, some.stop):
                yield (*self.read(sequences, heads, places), first)
                first += places.stop - places.start

    def put(self, sequences_R: Tensor, places_R: Tensor, k_RHK: Tensor, v_RHK: Tensor, *, room: Room = AMPLE) -> None:
        """Take tokens of any sequences.

        Args:
            sequences_R: their numbers.
            places_R: of the tokens.
            k_RHK: their keys.
            v_RHK: their values.
            room: for what is written, as many tokens at a time as fit.
        """
        count = len(k_RHK)
        for some in room.pieces(count, self._store.written_bytes(k_RHK.numel() // count)):
            sequences, places, k, v = (some_of(x, some, dim=0) for x in (sequences_R, places_R, k_RHK, v_RHK))
            self._store.write(sequences, slice(None), places, side_by_side(k, v))

    def read(self, sequences: slice, heads: slice, places: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, H, T, K]`` of some places."""
        k, v = self._store.read(sequences, heads, places)
        return k, v

    def _first(self, start: int, end: int) -> int:
        """Return the first token that any of the tokens from ``start`` to ``end`` sees, of those that are there."""
        return 0 if end <= self.length else max(0, start - self.length + 1)

    def _places(self, first: int, end: int) -> list[slice]:
        """Return where the tokens ``first`` to ``end`` are, which fit: in one range, or in two around the end."""
        start, count = first % self.length, end - first
        around = start + count - self.length
        return [slice(start, self.length), slice(0, around)] if around > 0 else [slice(start, start + count)]


def slices(first: int, end: int, most: int) -> Iterator[slice]:
    """Cut the numbers from ``first`` to ``end`` into slices of a length at most."""
    return (slice(start, min(start + most, end)) for start in range(first, end, most))
