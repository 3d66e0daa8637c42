"""The two kinds of pass through a model: the next tokens of some sequences, and one token of each sequence.

Shapes: R rows of the pass, B batch, S queries, T keys, H heads, K elements of a head, W columns of a RoPE table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.cache import Where
from tpplan.decoder.layers import attend, together
from tpplan.decoder.prompts import Stretch

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads, Run

#: Sines and cosines of the rows' positions, from :func:`tpplan.decoder.layers.angles`.
Angles = tuple[Tensor, Tensor]


@frozen
class Prefill:
    """The next tokens of some sequences; shapes depend on how many there are, and the host may wait for devices.

    Attributes:
        angles: by device.
        stretches: whose the rows are, in their order.
    """

    angles: Mapping[int, Angles]
    stretches: Sequence[Stretch]
    fixed = False

    def attention(
        self, _: int, heads: Heads, q_RHK: Tensor, k_RHK: Tensor, v_RHK: Tensor, *, scale: float, cap: float | None
    ) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H, K]``."""
        found = []
        for each in self.stretches:
            shape = (each.count, each.size)
            q_BSHK, *kv = (torch.unflatten(x_RHK[each.rows], 0, shape) for x_RHK in (q_RHK, k_RHK, v_RHK))
            attending = partial(attend, scale=scale, cap=cap, recurs=each.is_full)
            found.append(self._read(each, heads, q_BSHK, kv, attending))
        return together(found, dim=0)

    @staticmethod
    def _read(
        each: Stretch, heads: Heads, q_BSHK: Tensor, kv: Sequence[Tensor], attending: Callable[..., Tensor]
    ) -> Tensor:
        """Do that for some of the rows."""

        def find(some: slice, keys: slice) -> Tensor:
            sequences = slice(each.sequence + some.start, each.sequence + some.stop)
            k_BHSK, v_BHSK = (x_BSHK[some, :, keys].transpose(1, 2) for x_BSHK in kv)
            k_BHTK, v_BHTK, window = heads.cache.extend(sequences, keys, each.start, k_BHSK, v_BHSK)
            behind = partial(attending, window=window)
            return _found(heads.runs_of(keys), q_BSHK[some], k_BHTK, v_BHTK, behind)

        return heads.cache.in_pieces(each.count, each.start, each.start + each.size, find)


@frozen
class Decode:
    """One token of each sequence; no shape depends on a value, and nothing waits, so that a graph can do it.

    Attributes:
        angles: by device.
        where: in caches of some length the tokens go, by device and length.
    """

    angles: Mapping[int, Angles]
    where: Mapping[int, Mapping[int, Where]]
    fixed = True

    def attention(
        self, device: int, heads: Heads, q_RHK: Tensor, k_RHK: Tensor, v_RHK: Tensor, *, scale: float, cap: float | None
    ) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H, K]``."""
        where = self.where[device][heads.cache.length]
        heads.cache.append(where, k_RHK, v_RHK)
        count, span = where.mask.shape[0], where.mask.shape[-1]

        attending = partial(attend, scale=scale, cap=cap, recurs=True)

        def find(some: slice, keys: slice) -> Tensor:
            q_BSHK = q_RHK[some, :, None].transpose(1, 2)
            k_BHTK, v_BHTK = heads.cache.read(some, keys, span)
            return _found(heads.runs_of(keys), q_BSHK, k_BHTK, v_BHTK, partial(attending, mask=where.mask[some]))

        return heads.cache.in_pieces(count, 0, span, find)


Pass = Prefill | Decode


def _found(
    runs: Iterable[Run], q_BSHK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, attending: Callable[..., Tensor]
) -> Tensor:
    """Return what the queries find that read some KV heads, ``[R, H, K]``."""
    parts = []
    for run in runs:
        q_BHGSK = torch.unflatten(q_BSHK[:, :, run.queries], 2, (-1, run.group)).permute(0, 2, 3, 1, 4)
        out_BHGSK = attending(q_BHGSK, k_BHTK[:, run.keys], v_BHTK[:, run.keys])
        parts.append(out_BHGSK.flatten(1, 2).transpose(1, 2).flatten(0, 1))
    return together(parts, dim=1)
