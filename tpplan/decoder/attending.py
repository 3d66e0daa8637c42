"""How a device's heads attend in the room that there is: all at once, some sequences or heads at a time, or less.

Shapes: R rows, B batch, H heads, S queries, T keys, K elements of a head, G query heads that share a KV head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.decoder.cache import slices
from tpplan.decoder.heads import Heads
from tpplan.decoder.layers import attend, hiding_bytes, numbers_bytes, scores_bytes, some_of, together
from tpplan.decoder.parts import Steps, weigh
from tpplan.decoder.room import MOST, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from tpplan.decoder.parts import Part


@frozen
class Attending:
    """How heads attend.

    Attributes:
        heads: of a layer on a device.
        scale: of the scores.
        cap: see :class:`tpplan.decoder.settings.Settings`.
        room: for what they find, and all that is made to find it.
    """

    heads: Heads
    scale: float
    cap: float | None
    room: Room

    def in_pieces(
        self,
        q_RHK: Tensor,
        sequences: int,
        pieces: list[tuple[slice, slice]],
        find: Callable[[slice, slice], Tensor],
        narrow: Callable[[int, int, slice, Steps], None],
    ) -> Tensor:
        """Put together what queries find, ``[R, H × K]``: where the queries were, unless they find it all at once.

        Args:
            q_RHK: queries, of equally many rows of each sequence.
            sequences: how many there are.
            pieces: of sequences and KV heads; none if there is too little room for one of each.
            find: returns what the queries of some sequences find in some KV heads.
            narrow: writes over the queries of one sequence what they find in one KV head: of these heads, by steps.
        """
        size, heads = len(q_RHK) // sequences, self.heads
        for some, keys in pieces:
            out = find(some, keys)
            if len(pieces) == 1:
                return out
            queries = [run.queries for run in heads.runs_of(keys)]
            of_keys = slice(queries[0].start, queries[-1].stop)
            to = q_RHK[some.start * size : some.stop * size, of_keys]
            to.copy_(torch.unflatten(out, 1, to.shape[1:]))
            del out
        for head in range(0 if pieces else heads.keys):
            (run,) = heads.runs_of(slice(head, head + 1))
            steps = Steps.within(self.room, run.group, q_RHK.shape[2], heads.cache.pair_bytes)
            for sequence in range(sequences):
                narrow(sequence, head, run.queries, steps)
        return q_RHK.flatten(1)

    def found(
        self,
        keys: slice,
        q_BHSK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        mask: Tensor | None = None,
        *,
        window: int = 0,
        recurs: bool,
        room: Room,
    ) -> Tensor:
        """Return what the queries find that read some KV heads, ``[R, H × K]``; see :func:`attend`."""
        parts = []
        for run in self.heads.runs_of(keys):
            k, v = (some_of(x_BHTK, run.keys, dim=1) for x_BHTK in (k_BHTK, v_BHTK))
            q = q_BHSK[:, run.queries]
            out_BHSK = attend(q, k, v, mask, scale=self.scale, cap=self.cap, window=window, recurs=recurs, room=room)
            parts.append(out_BHSK.transpose(1, 2).flatten(2).flatten(0, 1))
        return together(parts, dim=1)

    def weigh(self, q_GSK: Tensor, parts: Iterable[Part]) -> None:
        """Write over queries what they find in parts of what they see."""
        q_GSK.copy_(weigh(q_GSK, parts, scale=self.scale, cap=self.cap))

    def pieces(
        self, q_RHK: Tensor, sequences: int, start: int, end: int, *, masked: bool = False
    ) -> list[tuple[slice, slice]]:
        """Cut sequences and KV heads into as many at a time as there is room for; none if there is for less than one.

        Args:
            q_RHK: queries, of equally many rows of each sequence.
            sequences: how many there are.
            start: of the new tokens of each.
            end: of these.
            masked: whether there is a mask for them.
        """
        cache, dtype, heads, room = self.heads.cache, q_RHK.dtype, self.heads.keys, self.room
        is_alone = self.heads.attend_at_once and self.cap is None and cache.fits(end) and not masked
        if is_alone and 2 * q_RHK.nbytes <= room.size_bytes:  # mostly: a kernel that makes nothing but what is found
            return [(slice(0, sequences), slice(0, heads))]
        kv, seen = cache.head_bytes(start, end), cache.seen(start, end)
        group = max(run.group for run in self.heads.runs)
        head, sequence = kv + 2 * group * q_RHK[: len(q_RHK) // sequences, 0].nbytes, 0
        if not is_alone:
            scores = scores_bytes(group * seen, dtype, self.cap)  # of one query at least
            head += scores if self.cap is not None else 0
            sequence = scores + (0 if masked else hiding_bytes(seen, dtype))
            room = room.less(0 if masked else numbers_bytes(seen))
        most = min(room.size_bytes // 2, MOST) // kv if kv else heads * sequences
        whole = min(room.size_bytes // (heads * head + sequence), most // heads)
        if whole > 0:
            return [(some, slice(0, heads)) for some in slices(0, sequences, whole)]
        part = min((room.size_bytes - sequence) // head, most)
        return [(slice(i, i + 1), keys) for i in range(sequences if part > 0 else 0) for keys in slices(0, heads, part)]
