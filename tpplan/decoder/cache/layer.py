"""The KV cache of one layer's heads on one device: all tokens, or the latest of a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.decoder.cache.store import Store
from tpplan.decoder.math import AT_ONCE, concat, stack_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


class LayerCache(Store):
    """A ring buffer of the latest keys and values of each sequence: position p is at place p modulo ``length``.

    Attributes:
        length: places of a sequence: all tokens that the plan caches, or those of a sliding window.
        window: tokens that a query sees, itself included; 0 for all.
    """

    def __init__(
        self,
        kind: str,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        window: int = 0,
        *,
        value_dim: int = 0,
    ) -> None:
        """Allocate the memory; see :class:`Store`, whose third size is the length."""
        super().__init__(kind, shape, dtype, device, value_dim=value_dim)
        self.length = shape[2]
        self.window = window

    def in_pieces(self, sequences: int, start: int, end: int, find: Callable[[slice, slice], Tensor]) -> Tensor:
        """Return the attention output ``[R, H × K]``, computed for slices of the sequences and KV heads.

        All are computed in one call, unless reading their keys and values takes memory beside the cache.

        Args:
            sequences: number of sequences.
            start: position of the first new token of each sequence.
            end: position after the last new token.
            find: returns the attention output of a slice of the sequences and a slice of the KV heads.
        """
        heads, (most_sequences, most_heads) = self.heads, (sequences, self.heads)
        if end > self.length or not self.is_plain:
            most = max(1, self.heads_at_once(end - self._first(start, end)))
            most_sequences, most_heads = max(1, most // heads), most
        pieces = [
            [find(some, keys) for keys in _slices(heads, most_heads)] for some in _slices(sequences, most_sequences)
        ]
        return self.unmix(concat([concat(row, dim=1) for row in pieces], dim=0))

    def heads_at_once(self, tokens: int) -> int:
        """Return the number of KV heads whose ``tokens`` keys and values may be copied at a time; 0 if not even one."""
        return AT_ONCE // ((1 if self.value_dim else 2) * tokens * self.head_dim)

    def takes_parts(self, tokens: int) -> bool:
        """Tell whether even one latent of each of so many tokens would take too much memory to copy."""
        return bool(self.value_dim) and not self.is_plain and not self.heads_at_once(tokens)

    def parts(self, sequences: slice, end: int, queries: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield successive places up to ``end``, few enough for memory, and their keys and values ``[B, 1, T, K]``.

        Args:
            sequences: slice of the sequences.
            end: number of places.
            queries: number of queries of a sequence, all heads together, whose scores take memory too.
        """
        each = (sequences.stop - sequences.start) * max(self.head_dim, 3 * queries)
        for places in _slices(end, max(1, AT_ONCE // each)):
            yield places, *self.pair_of(self.read_at(sequences, slice(0, 1), places))

    def append(self, sequences: slice, start: int, k_B1SK: Tensor) -> None:
        """Write the next latents of some sequences, without reading any."""
        self.write(sequences, slice(0, 1), slice(start, start + k_B1SK.shape[2]), k_B1SK[None])

    def latents(self, sequence: int, places: slice) -> Tensor:
        """Return the latents at some places of a sequence, each behind its rotary part, ``[T, K]``."""
        one = slice(0, 1)
        return self.unmix(self.read_at(slice(sequence, sequence + 1), one, places))[0, 0, 0]

    def slices(self, tokens: int) -> list[slice]:
        """Return slices of the KV heads, each of at most :meth:`heads_at_once` heads, which must not be 0."""
        return _slices(self.heads, self.heads_at_once(tokens))

    def extend(
        self, sequences: slice, heads: slice, start: int, k_BHSK: Tensor, v_BHSK: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Write the next tokens of some sequences, and return the keys and values they attend to.

        Args:
            sequences: slice of the sequences.
            heads: slice of the KV heads.
            start: number of tokens that each sequence already has.
            k_BHSK: keys of the new tokens.
            v_BHSK: values of the new tokens.

        Returns:
            Keys and values ``[B, H, T, K]`` of successive tokens up to the last new one, and the window: the maximum
            tokens that a query sees, itself included; 0 for all.
        """
        end = start + k_BHSK.shape[2]
        first = self._first(start, end)
        if end <= self.length:
            k, v = self.extend_at(sequences, heads, start, k_BHSK, v_BHSK)
        else:  # new tokens overwrite older ones, which the first new tokens still see
            new_2BHSK = torch.stack((k_BHSK, v_BHSK))
            k, v = self.read_before(sequences, heads, self._places(first, start), new_2BHSK)
            oldest = max(start, end - self.length)
            places = self._places(oldest, end)
            sizes = [each.stop - each.start for each in places]
            pieces = torch.split_with_sizes(new_2BHSK[:, :, :, oldest - start :], sizes, dim=3)
            for each, piece in zip(places, pieces, strict=True):
                self.write(sequences, heads, each, piece)
        return k, v, self.window if end - first > self.window else 0

    def put(self, sequences_R: Tensor, places_R: Tensor, k_RHK: Tensor, v_RHK: Tensor | None = None) -> None:
        """Write one token for each row.

        Args:
            sequences_R: sequence of each row.
            places_R: place of each row in the cache.
            k_RHK: keys.
            v_RHK: values; None if they are part of the keys.
        """
        kv = k_RHK[:, None] if v_RHK is None else stack_heads(k_RHK, v_RHK)
        self.write(sequences_R, slice(None), places_R, kv)

    def read(self, sequences: slice, heads: slice, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, H, count, K]`` of the first ``count`` places."""
        return self.pair_of(self.read_at(sequences, heads, slice(0, count)))

    def _first(self, start: int, end: int) -> int:
        """Return the first cached position that any of the tokens from ``start`` to ``end`` sees."""
        return 0 if end <= self.length else max(0, start - self.length + 1)

    def _places(self, first: int, end: int) -> list[slice]:
        """Return the places of at most ``length`` tokens ``first`` to ``end``: one range, or two if these wrap."""
        start, count = first % self.length, end - first
        around = start + count - self.length
        return [slice(start, self.length), slice(0, around)] if around > 0 else [slice(start, start + count)]


def _slices(count: int, most: int) -> list[slice]:
    """Split a range of ``count`` into slices of at most ``most``."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]
