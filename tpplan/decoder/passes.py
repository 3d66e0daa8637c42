"""The two kinds of pass through a model: the next tokens of one sequence, and one token of each sequence.

Shapes: R rows of the pass, B batch, S queries, T keys, H heads, K elements of a head, W columns of a RoPE table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.cache import Where
from tpplan.decoder.layers import attend

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads

#: Sines and cosines of the rows' positions, from :func:`tpplan.decoder.layers.angles`.
Angles = tuple[Tensor, Tensor]


@frozen
class Prefill:
    """The next tokens of one sequence; shapes depend on how many there are, and the host may wait for devices.

    Attributes:
        angles: by device.
        sequence: its number.
        start: tokens that it has already.
    """

    angles: Mapping[int, Angles]
    sequence: int
    start: int
    fixed = False

    def attention(
        self, _: int, heads: Heads, q_RHK: Tensor, k_RHK: Tensor, v_RHK: Tensor, *, scale: float, cap: float | None
    ) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H, K]``."""
        k_HSK, v_HSK = k_RHK.transpose(0, 1), v_RHK.transpose(0, 1)
        k_HTK, v_HTK, mask_ST = heads.cache.extend(self.sequence, self.start, k_HSK, v_HSK)
        parts = []
        for run in heads.runs:
            k_1HTK, v_1HTK = (x[None, run.keys].repeat_interleave(run.group, dim=1) for x in (k_HTK, v_HTK))
            parts.append(
                attend(q_RHK[:, run.queries].transpose(0, 1)[None], k_1HTK, v_1HTK, mask_ST, scale=scale, cap=cap)
            )
        return _together(parts)[0].transpose(0, 1)


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
        k_BHTK, v_BHTK = heads.cache.append(where, k_RHK, v_RHK)
        parts = []
        for run in heads.runs:  # the queries that share a KV head stand where those of several tokens would
            q_BHSK = torch.unflatten(q_RHK[:, run.queries], 1, (-1, run.group))
            parts.append(
                attend(q_BHSK, k_BHTK[:, run.keys], v_BHTK[:, run.keys], where.mask, scale=scale, cap=cap).flatten(1, 2)
            )
        return _together(parts)


Pass = Prefill | Decode


def _together(parts: list[Tensor]) -> Tensor:
    """Return the heads of all runs; mostly there is one, which need not be copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
