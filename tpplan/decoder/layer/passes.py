"""The two kinds of pass: prefill, over the next tokens of some sequences, and decode, over one token of each.

Shapes: R rows of the pass, B batch, S queries, T keys, H heads, K elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.decoder.cache.heads import attend_by_runs
from tpplan.decoder.cache.store import CachePlaces
from tpplan.decoder.layer.attention import Group
from tpplan.decoder.math import attend, attend_in_parts, causal_mask, concat, slice_of, split_rows
from tpplan.decoder.model.ropes import Angles
from tpplan.decoder.prompts import PromptSlice, pieces

if TYPE_CHECKING:
    from tpplan.decoder.cache.heads import Heads
    from tpplan.decoder.layer.delta import GatedDelta
    from tpplan.decoder.layer.recurrence import Rows
    from tpplan.decoder.layer.steps import NormAndRope, Plain
    from tpplan.decoder.math import Scoring


@frozen
class Prefill:
    """A prefill pass: shapes depend on the number of tokens, and the host may wait for devices.

    Attributes:
        angles: RoPE angles of the rows, by device.
        groups: the grouping of all rows for a single attention call, by device; empty if they are one prompt slice.
        prompt_slices: the prompt slices of all rows, in order; empty if all rows are sure to attend in a single call.
        places: sequence and position of each row, by device; left out if no kernel writes to the cache.
        sizes: rows of each prompt slice.
    """

    angles: Mapping[int, Angles]
    groups: Mapping[int, Group]
    prompt_slices: Sequence[PromptSlice] = ()
    places: Mapping[int, tuple[Tensor, Tensor]] = field(factory=dict)
    sizes: list[int] = field(init=False)
    fixed = False

    @sizes.default
    def _count(self) -> list[int]:
        return [each.count * each.size for each in self.prompt_slices]

    def attention(  # noqa: PLR0917 (what a layer has on a device)
        self, steps: Plain, heads: Heads, qkv_RHK: Tensor, norm_rope: NormAndRope, scoring: Scoring, device: int
    ) -> Tensor:
        """Write the rows' keys and values to the cache, and return the attention output ``[R, H × K]``.

        Args:
            steps: the computation steps of the device.
            heads: the attention heads of a layer on the device.
            qkv_RHK: queries, keys and values; overwritten.
            norm_rope: the norms and rotation applied to queries and keys first.
            scoring: how scores become weights.
            device: index of the device.
        """
        group = self.groups.get(device)
        if group and heads.attend_at_once(group.pass_shape, scoring.cap):
            return group.attention(steps, heads, qkv_RHK, norm_rope, scoring)
        # In a ring buffer, rows may overwrite what others still see.
        has_room = all(each.start + each.size <= heads.cache.length for each in self.prompt_slices)
        is_written = steps.norm_and_rope(qkv_RHK, heads, norm_rope, self.places.get(device) if has_room else None)
        merge = steps.merge_within_room(qkv_RHK, heads)
        parts = [split_rows(x_RHK, self.sizes) for x_RHK in heads.split_qkv(qkv_RHK)]
        found = []
        for each, *own in zip(self.prompt_slices, *parts, strict=True):
            q_BHSK, *kv = [torch.unflatten(x_RHK, 0, (each.count, each.size)).transpose(1, 2) for x_RHK in own]
            attending = partial(attend, recurs=each.is_full, merge=merge)
            found.append(self._read(each, heads, q_BHSK, () if is_written else kv, scoring, attending))
        return concat(found, dim=0)

    def pieces(
        self, most: int, whole: Callable[[PromptSlice], bool]
    ) -> Iterator[tuple[slice, Prefill, PromptSlice | None]]:
        """Yield slices of the rows, passes over them, whose angles are the whole pass's, and what is to stay whole.

        Args:
            most: maximum rows of a slice, unless it is to stay whole.
            whole: tells whether the rows of a prompt slice are to stay together, whatever they are.
        """
        if sum(self.sizes) <= most and not any(map(whole, self.prompt_slices)):
            yield slice(None), self, None
            return
        for each in pieces(self.prompt_slices, most, whole):
            yield each.rows, Prefill(self.angles, {}, (each,)), each if whole(each) else None

    @staticmethod
    def _read(  # noqa: PLR0917 (what a layer has on a device)
        each: PromptSlice,
        heads: Heads,
        q_BHSK: Tensor,
        kv: Sequence[Tensor],
        scoring: Scoring,
        attending: partial[Tensor],
    ) -> Tensor:
        """Return the attention output of a prompt slice, whose keys and values the cache has if they are not given."""
        mixed_BHSK, end = heads.cache.mix_queries(q_BHSK), each.start + each.size

        def find(some: slice, keys: slice) -> Tensor:
            sequences = slice(each.sequence + some.start, each.sequence + some.stop)
            own_BHSK = slice_of(mixed_BHSK, some, dim=0)
            if not kv:
                k_BHTK, v_BHTK = heads.cache.read(sequences, keys, end)
                return attend_by_runs(heads.runs_of(keys), own_BHSK, k_BHTK, v_BHTK, attending, scoring=scoring)
            k_BHSK, v_BHSK = [slice_of(slice_of(x_BHSK, some, dim=0), keys, dim=1) for x_BHSK in kv]
            if heads.cache.takes_parts(end):
                heads.cache.append(sequences, each.start, k_BHSK)
                read = heads.cache.parts(sequences, end, heads.queries * each.size)
                new = slice(each.start, end)
                parts = ((k, v, causal_mask(new, places, q_BHSK)) for places, k, v in read)
                found_BHSK = attend_in_parts(own_BHSK, parts, scoring=scoring)
                return found_BHSK.transpose(1, 2).flatten(2).flatten(0, 1)
            k_BHTK, v_BHTK, window = heads.cache.extend(sequences, keys, each.start, k_BHSK, v_BHSK)
            windowed = partial(attending, window=window)
            return attend_by_runs(heads.runs_of(keys), own_BHSK, k_BHTK, v_BHTK, windowed, scoring=scoring)

        return heads.cache.in_pieces(each.count, each.start, end, find)

    def recur(self, linear: GatedDelta, rows: Rows, device: int) -> Tensor:  # noqa: ARG002 (a step has its own there)
        """Update the states of linear attention, and return its outputs; see :meth:`GatedDelta.read`."""
        return linear.read(rows, self.prompt_slices)


@frozen
class Decode:
    """A decode step; it can be captured as a graph, as no shape depends on a value and the host does not wait.

    Attributes:
        angles: RoPE angles of the rows, by device.
        places: where the tokens go in the caches, by device and cache length.
        goes_on: whether tokens of each sequence come before, ``[B]``, by device; empty if no layer has states.
    """

    angles: Mapping[int, Angles]
    places: Mapping[int, Mapping[int, CachePlaces]]
    goes_on: Mapping[int, Tensor] = field(factory=dict)
    fixed = True

    def attention(  # noqa: PLR0917 (what a layer has on a device)
        self, steps: Plain, heads: Heads, qkv_RHK: Tensor, norm_rope: NormAndRope, scoring: Scoring, device: int
    ) -> Tensor:
        """Write to the cache and attend; see :meth:`Prefill.attention`."""
        return steps.attend(qkv_RHK, heads, norm_rope, self.places[device][heads.cache.length], scoring)

    def recur(self, linear: GatedDelta, rows: Rows, device: int) -> Tensor:
        """Update the states of linear attention, and return its outputs; see :meth:`GatedDelta.step`."""
        return linear.step(rows, self.goes_on[device])

    def pieces(
        self,
        most: int,
        whole: Callable[[PromptSlice], bool],  # noqa: ARG002 (a step has one row of each sequence)
    ) -> Iterator[tuple[slice, Decode, None]]:
        """Yield slices of the rows and steps of them; see :meth:`Prefill.pieces`."""
        count = next(len(each.places) for own in self.places.values() for each in own.values())
        if count <= most:
            yield slice(None), self, None
            return
        for start in range(0, count, most):
            some = slice(start, min(start + most, count))
            places = {
                device: {length: each.of_rows(some) for length, each in own.items()}
                for device, own in self.places.items()
            }
            yield some, Decode(self.angles, places), None


Pass = Prefill | Decode
