"""The two kinds of pass through a model: the next tokens of some sequences, and one token of each sequence.

Shapes: R rows of the pass, B batch, S queries, T keys, H heads, K elements of a head, W columns of a RoPE table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.cache import Where
from tpplan.decoder.layers import attend, together
from tpplan.decoder.prompts import Stretch

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads

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
            q_BSHK, k_BSHK, v_BSHK = (torch.unflatten(x_RHK[each.rows], 0, shape) for x_RHK in (q_RHK, k_RHK, v_RHK))
            sequences = slice(each.sequence, each.sequence + each.count)
            k_BHTK, v_BHTK, mask_11ST = heads.cache.extend(
                sequences, each.start, k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2)
            )
            parts = []
            for run in heads.runs:
                q_BHGSK = torch.unflatten(q_BSHK[:, :, run.queries], 2, (-1, run.group)).permute(0, 2, 3, 1, 4)
                k_BhTK, v_BhTK = k_BHTK[:, run.keys], v_BHTK[:, run.keys]
                out_BHGSK = attend(q_BHGSK, k_BhTK, v_BhTK, mask_11ST, scale=scale, cap=cap, recurs=each.is_full)
                parts.append(out_BHGSK.flatten(1, 2).transpose(1, 2).flatten(0, 1))
            found.append(together(parts, dim=1))
        return together(found, dim=0)


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
        where, found = self.where[device][heads.cache.length], []
        for some, k_BHTK, v_BHTK in heads.cache.append(where, k_RHK, v_RHK):
            parts = []
            for run in heads.runs:
                q_BHGK = torch.unflatten(q_RHK[some, run.queries], 1, (-1, run.group))
                k_BhTK, v_BhTK = k_BHTK[:, run.keys], v_BHTK[:, run.keys]
                mask = where.mask[some]
                out_BHG1K = attend(q_BHGK[..., None, :], k_BhTK, v_BhTK, mask, scale=scale, cap=cap, recurs=True)
                parts.append(out_BHG1K.flatten(1, 3))
            found.append(together(parts, dim=1))
        return together(found, dim=0)


Pass = Prefill | Decode
