"""The two kinds of pass through a model: the next tokens of some sequences, and one token of each sequence.

Shapes: R rows of the pass, B batch, S queries, T keys, H heads, K elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.decoder.attending import Attending
from tpplan.decoder.cache import Where, slices
from tpplan.decoder.groups import Group
from tpplan.decoder.layers import apart, some_of
from tpplan.decoder.prompts import Stretch
from tpplan.decoder.room import Room

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads
    from tpplan.decoder.parts import Part, Steps

#: Sines and cosines of the rows' positions, from :func:`tpplan.decoder.layers.angles`.
Angles = Tensor


@frozen
class Prefill:
    """The next tokens of some sequences; shapes depend on how many there are, and the host may wait for devices.

    Attributes:
        held: bytes of what the pass keeps beside the residual stream, by device.
        angles: by device.
        groups: of all rows, by device; none if they are one stretch.
        stretches: of all rows, in their order; none if they are sure to attend at once.
        sizes: rows of each stretch.
    """

    held: Mapping[int, int]
    angles: Mapping[int, Angles]
    groups: Mapping[int, Group]
    stretches: Sequence[Stretch] = ()
    sizes: list[int] = field(init=False)
    fixed = False

    @sizes.default
    def _count(self) -> list[int]:
        return [each.count * each.size for each in self.stretches]

    def attention(
        self,
        device: int,
        heads: Heads,
        q_RHK: Tensor,
        k_RHK: Tensor,
        v_RHK: Tensor,
        *,
        scale: float,
        cap: float | None,
        room: Room,
    ) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H × K]``.

        It may be where the queries were, so that not all of both have to be there at once.
        """
        group = self.groups.get(device)
        # Of a graph, which has no stretches, there is no other way.
        has_room = not self.stretches or len(heads.runs) * q_RHK.nbytes <= room.size_bytes
        if group and cap is None and group.fits(heads) and has_room:
            return group.attention(heads, q_RHK, k_RHK, v_RHK, scale=scale)
        parts = [apart(x_RHK, self.sizes, dim=0) for x_RHK in (q_RHK, k_RHK, v_RHK)]
        attending = Attending(heads, scale, cap, room)
        for each, q, *kv in zip(self.stretches, *parts, strict=True):
            found = self._read(each, attending, q, kv)
            if len(self.stretches) == 1:
                return found
            if found.data_ptr() != q.data_ptr():
                q.copy_(torch.unflatten(found, 1, q.shape[1:]))
        return q_RHK.flatten(1)

    @staticmethod
    def _read(each: Stretch, attending: Attending, q_RHK: Tensor, kv: Sequence[Tensor]) -> Tensor:
        """Do that for one of them."""
        cache, room = attending.heads.cache, attending.room
        q_BHSK, k_BHSK, v_BHSK = [torch.unflatten(x, 0, (each.count, each.size)).transpose(1, 2) for x in (q_RHK, *kv)]
        first, end = each.start, each.start + each.size

        def find(some: slice, keys: slice) -> Tensor:
            sequences = slice(each.sequence + some.start, each.sequence + some.stop)
            k, v = [some_of(some_of(x, some, dim=0), keys, dim=1) for x in (k_BHSK, v_BHSK)]
            k_BHTK, v_BHTK, window = cache.extend(sequences, keys, first, k, v, room=room)
            left = room.less(cache.head_bytes(first, end) * k.shape[:2].numel())
            q = some_of(q_BHSK, some, dim=0)
            return attending.found(keys, q, k_BHTK, v_BHTK, room=left, window=window, recurs=each.is_full)

        def narrow(sequence: int, head: int, queries: slice, steps: Steps) -> None:
            of, keys = slice(each.sequence + sequence, each.sequence + sequence + 1), slice(head, head + 1)
            k, v = (x[sequence : sequence + 1, keys] for x in (k_BHSK, v_BHSK))
            keep = partial(cache.keep, of, keys, first, k, v, room=Room(room.size_bytes // 4))
            fits = cache.fits(end)
            if fits:
                keep()
            for some in slices(0, each.size, steps.queries):
                start, stop = first + some.start, first + some.stop
                seen = max(0, start - cache.window + 1) if cache.window else 0
                kept = cache.parts(of, keys, slice(seen, stop if fits else first), steps.keys)
                news = slices(max(0, seen - first), 0 if fits else some.stop, steps.keys)
                new = ((k[:, :, part], v[:, :, part], first + part.start) for part in news)
                parts = _behind(chain(kept, new), start, stop - start, cache.window)
                attending.weigh(q_BHSK[sequence, queries, some], parts)
            if not fits:
                keep()

        pieces = attending.pieces(q_RHK, each.count, first, end)
        return attending.in_pieces(q_RHK, each.count, pieces, find, narrow)


@frozen
class Decode:
    """One token of each sequence; no shape depends on a value, and nothing waits, so that a graph can do it.

    Attributes:
        held: see :class:`Prefill`.
        angles: by device.
        where: in caches of some length the tokens go, by device and length.
    """

    held: Mapping[int, int]
    angles: Mapping[int, Angles]
    where: Mapping[int, Mapping[int, Where]]
    fixed = True

    def attention(
        self,
        device: int,
        heads: Heads,
        q_RHK: Tensor,
        k_RHK: Tensor,
        v_RHK: Tensor,
        *,
        scale: float,
        cap: float | None,
        room: Room,
    ) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find; see :meth:`Prefill.attention`."""
        where, cache = self.where[device][heads.cache.length], heads.cache
        cache.put(where.sequences, where.places, k_RHK, v_RHK, room=room)
        attending = Attending(heads, scale, cap, room)

        def find(some: slice, keys: slice) -> Tensor:
            q_BHSK, mask = q_RHK[some, :, None], None if where.mask is None else where.mask[some]
            k_BHTK, v_BHTK = cache.read(some, keys, slice(0, where.span))
            left = room.less(cache.head_bytes(0, where.span) * k_BHTK.shape[:2].numel())
            return attending.found(keys, q_BHSK, k_BHTK, v_BHTK, mask, recurs=True, room=left)

        def narrow(sequence: int, head: int, queries: slice, steps: Steps) -> None:
            some, keys = slice(sequence, sequence + 1), slice(head, head + 1)
            parts = (
                (k_BHTK[0, 0], v_BHTK[0, 0], where.seen(some, places))
                for places in slices(0, where.span, steps.keys)
                for k_BHTK, v_BHTK in [cache.read(some, keys, places)]
            )
            attending.weigh(q_RHK[sequence, queries, None], parts)

        pieces = [] if where.mask is None else attending.pieces(q_RHK, len(q_RHK), 0, where.span, masked=True)
        return attending.in_pieces(q_RHK, len(q_RHK), pieces, find, narrow)


Pass = Prefill | Decode


def _behind(parts: Iterable[tuple[Tensor, Tensor, int]], start: int, count: int, window: int) -> Iterator[Part]:
    """Yield keys and values of some tokens, and which of them the queries of others see.

    Args:
        parts: of one sequence and head, and the positions with which they begin.
        start: position of the first query.
        count: of queries.
        window: tokens that a query sees, itself included; 0 for all.
    """
    for k_BHTK, v_BHTK, first in parts:
        keys = torch.arange(first, first + k_BHTK.shape[2], device=k_BHTK.device)
        queries = torch.arange(start, start + count, device=k_BHTK.device)[:, None]
        seen_ST = keys <= queries
        if window:
            seen_ST &= keys > queries - window
        yield k_BHTK[0, 0], v_BHTK[0, 0], seen_ST
        del k_BHTK, v_BHTK, keys, seen_ST  # room for the next
