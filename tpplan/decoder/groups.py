"""Rows of a pass that attend at once: those of several prompts, however long, where there is a kernel for that.

Shapes: R rows, H heads, K elements of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.decoder.layers import takes_flash, together
from tpplan.decoder.prompts import Stretch
from tpplan.exec.torch_shims import flash_attention_of_several

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads


@frozen
class Beginnings:
    """Rows that are the first tokens of several sequences, on a device.

    Attributes:
        sequences: of each row.
        places: of each row.
        bounds: the row with which each sequence begins, and the number of rows, in 32 bits.
        longest: rows of a sequence at most.
    """

    sequences: Tensor
    places: Tensor
    bounds: Tensor
    longest: int

    def attention(self, heads: Heads, q_RHK: Tensor, k_RHK: Tensor, v_RHK: Tensor, *, scale: float) -> Tensor | None:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H × K]``.

        None, and nothing is kept, if there is no kernel for that, or if what they see is not just what they are given:
        because of a window, or as the cache rounds it.
        """
        runs = [(q_RHK[:, run.queries], k_RHK[:, run.keys], v_RHK[:, run.keys]) for run in heads.runs]
        sees_all = self.longest <= heads.cache.length and heads.cache.is_plain
        if not sees_all or not all(takes_flash(*(x[None].transpose(1, 2) for x in run)) for run in runs):
            return None
        heads.cache.put(self.sequences, self.places, k_RHK, v_RHK)
        found = [flash_attention_of_several(*run, self.bounds, self.longest, scale=scale) for run in runs]
        return together([out_RHK.flatten(1) for out_RHK in found], dim=1)


@frozen
class Group:
    """Successive rows of a pass: a stretch, or several that begin their sequences.

    Attributes:
        stretches: in the order of their rows.
        beginnings: by device, if there are several.
        sizes: rows of each stretch.
    """

    stretches: Sequence[Stretch]
    beginnings: Mapping[int, Beginnings]
    sizes: list[int] = field(init=False)

    @sizes.default
    def _count(self) -> list[int]:
        return [each.count * each.size for each in self.stretches]


def groups_of(
    stretches: Sequence[Stretch],
    devices: Sequence[int],
    positions: Sequence[Tensor],
    sequences: Sequence[Tensor],
    before: Sequence[Tensor],
) -> list[Group]:
    """Put those stretches of a pass together that follow each other and begin their sequences.

    Args:
        stretches: of all rows.
        devices: on which there are numbers of all rows, see :func:`tpplan.decoder.prompts.numbers_of`.
        positions: on each device.
        sequences: on each device.
        before: on each device.
    """
    groups: list[Group] = []
    first = 0
    for begins, several in groupby(stretches, lambda each: each.start == 0):
        for some in [[*several]] if begins else [[each] for each in several]:
            rows, end = slice(some[0].rows.start, some[-1].rows.stop), first + sum(each.count for each in some)
            longest = max(each.size for each in some)
            beginnings = {
                device: Beginnings(s[rows], p[rows], _bounds(b[rows], first, end), longest)
                for device, p, s, b in zip(devices, positions, sequences, before, strict=True)
                if len(some) > 1
            }
            groups.append(Group(some, beginnings))
            first = end
    return groups


def _bounds(before: Tensor, first: int, end: int) -> Tensor:
    """Return with which row each of the sequences ``first`` to ``end`` of a pass begins, and the number of rows."""
    counts = torch.arange(first, end + 1, device=before.device)
    return torch.searchsorted(before.contiguous(), counts, out_int32=True)
