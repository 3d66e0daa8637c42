"""The latest keys and values of one layer's heads on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.decoder.layers import AT_ONCE, side_by_side, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpplan.decoder.cache import Store


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
    def head_dim(self) -> int:
        """Elements of a head."""
        return self._store.head_dim

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are stored, ``[B, H, L, K]``: the store's own memory."""
        return self._store.halves

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Theirs, ``[B, H, L, K / 32]``, if it is of kind ``q8``; none of others."""
        return self._store.scales

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._store.nbytes

    def in_pieces(self, sequences: int, start: int, end: int, find: Callable[[slice, slice], Tensor]) -> Tensor:
        """Put together what queries find, ``[R, H × K]``, in keys and values of some sequences and heads at a time.

        It is all of them at once, unless that takes memory beside the cache's.

        Args:
            sequences: how many there are.
            start: of the new tokens of each.
            end: of these.
            find: what the queries of some sequences find in some KV heads.
        """
        heads, (most_sequences, most_heads) = self._store.heads, (sequences, self._store.heads)
        if end > self.length or not self._store.is_plain:
            most = max(1, AT_ONCE // (2 * (end - self._first(start, end)) * self._store.head_dim))
            most_sequences, most_heads = max(1, most // heads), most
        pieces = [
            [find(some, keys) for keys in _slices(heads, most_heads)] for some in _slices(sequences, most_sequences)
        ]
        return together([together(row, dim=1) for row in pieces], dim=0)

    def extend(
        self, sequences: slice, heads: slice, start: int, k_BHSK: Tensor, v_BHSK: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Take the next tokens of some sequences, and return what they attend to.

        Args:
            sequences: their numbers.
            heads: of the keys and values.
            start: tokens that each has already.
            k_BHSK: keys of the new ones.
            v_BHSK: values of the new ones.

        Returns:
            Keys and values ``[B, H, T, K]`` of successive tokens, the last of them the last new one, and how many of
            them a query sees at most, itself included; 0 for all.
        """
        end = start + k_BHSK.shape[2]
        first = self._first(start, end)
        if end <= self.length:
            k, v = self._store.extend(sequences, heads, start, k_BHSK, v_BHSK)
        else:  # the new tokens push out older ones, which the first of them still see
            new_2BHSK = torch.stack((k_BHSK, v_BHSK))
            k, v = self._store.read_before(sequences, heads, self._places(first, start), new_2BHSK)
            kept = max(start, end - self.length)
            places = self._places(kept, end)
            sizes = [each.stop - each.start for each in places]
            pieces = torch.split_with_sizes(new_2BHSK[:, :, :, kept - start :], sizes, dim=3)
            for each, piece in zip(places, pieces, strict=True):
                self._store.write(sequences, heads, each, piece)
        return k, v, self.window if end - first > self.window else 0

    def in_a_row(self) -> tuple[Tensor, Tensor, int]:
        """Return the rows of the store; see :meth:`Store.in_a_row`."""
        return self._store.in_a_row()

    def put(self, sequences_R: Tensor, places_R: Tensor, k_RHK: Tensor, v_RHK: Tensor) -> None:
        """Take tokens of any sequences.

        Args:
            sequences_R: their numbers.
            places_R: of the tokens.
            k_RHK: their keys.
            v_RHK: their values.
        """
        self._store.write(sequences_R, slice(None), places_R, side_by_side(k_RHK, v_RHK))

    def read(self, sequences: slice, heads: slice, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, H, count, K]`` of the first places."""
        k, v = self._store.read(sequences, heads, slice(0, count))
        return k, v

    def _first(self, start: int, end: int) -> int:
        """Return the first token that any of the tokens from ``start`` to ``end`` sees, of those that are there."""
        return 0 if end <= self.length else max(0, start - self.length + 1)

    def _places(self, first: int, end: int) -> list[slice]:
        """Return where the tokens ``first`` to ``end`` are, which fit: in one range, or in two around the end."""
        start, count = first % self.length, end - first
        around = start + count - self.length
        return [slice(start, self.length), slice(0, around)] if around > 0 else [slice(start, start + count)]


def _slices(count: int, most: int) -> list[slice]:
    """Cut so many things into slices of a length at most."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]
