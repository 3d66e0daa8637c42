"""The two kinds of pass through a model: the next tokens of one sequence, and one token of each sequence.

Shapes: R rows of the pass, B batch, S queries, T keys, H heads, K elements of a head, W columns of a RoPE table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.layers import attend

if TYPE_CHECKING:
    from tpplan.decoder.heads import Heads

#: Sines and cosines of the rows' positions, ``[R, W]`` each.
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
        return torch.cat(parts, dim=1)[0].transpose(0, 1)


@frozen
class Decode:
    """One token of each sequence; no shape depends on a value, and nothing waits, so that a graph can do it.

    Attributes:
        angles: by device.
        positions: of the tokens, ``[B]`` by device.
        masks: by device and places of a cache, which of the places a sequence sees, ``[B, 1, 1, T]``.
        span: places of a sequence that may be in use.
    """

    angles: Mapping[int, Angles]
    positions: Mapping[int, Tensor]
    masks: Mapping[int, Mapping[int, Tensor]]
    span: int
    fixed = True

    def attention(
        self, device: int, heads: Heads, q_RHK: Tensor, k_RHK: Tensor, v_RHK: Tensor, *, scale: float, cap: float | None
    ) -> Tensor:
        """Keep the rows' keys and values, and return what their queries find, ``[R, H, K]``."""
        k_BHTK, v_BHTK = heads.cache.append(self.positions[device], k_RHK, v_RHK, self.span)
        mask = self.masks[device][k_BHTK.shape[2]]
        parts = []
        for run in heads.runs:  # the queries that share a KV head stand where those of several tokens would
            q_BHSK = torch.unflatten(q_RHK[:, run.queries], 1, (-1, run.group))
            parts.append(
                attend(q_BHSK, k_BHTK[:, run.keys], v_BHTK[:, run.keys], mask, scale=scale, cap=cap).flatten(1, 2)
            )
        return torch.cat(parts, dim=1)


Pass = Prefill | Decode
