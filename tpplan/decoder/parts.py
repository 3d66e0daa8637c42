"""Attention where not even one KV head of one sequence can be made at a time: to some tokens after the others.

What queries find in some of the keys is added up, and scaled down when others turn out to match better (Milakov and
Gimelshein, arXiv 1805.02867). It is done in float32.

Shapes: G query heads that share a KV head, S queries, T keys, K elements of a head, R queries of all these heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.decoder.room import Room

#: Bytes of an element of queries, in float32 and of what becomes of them: scaled, found, added up and rounded.
_QUERY: Final = 24
#: Of a score: it, its weight, and what a capped one is made of.
_SCORE: Final = 12
#: Of a token that a query sees or not: what is compared, and the contrary.
_SEEN: Final = 6
#: Of a key and a value, in float32.
_PAIR: Final = 8
#: Of the number of a token, and of others made of it.
_NUMBER: Final = 24
#: More queries at a time would leave room for few keys.
_QUERIES: Final = 64


#: Keys and values ``[T, K]`` of some tokens, and which of them the queries see, ``[S, T]``.
Part = tuple[Tensor, Tensor, Tensor]


@frozen
class Steps:
    """How much is done at a time.

    Attributes:
        queries: tokens whose queries attend.
        keys: tokens that they attend to.
    """

    queries: int
    keys: int

    @classmethod
    def within(cls, room: Room, group: int, head_dim: int, pair_bytes: int) -> Steps:
        """Return what there is room for.

        Args:
            room: of one sequence and KV head.
            group: query heads that share it.
            head_dim: elements of a head.
            pair_bytes: of a key and a value as they are read.
        """
        query = group * head_dim * _QUERY
        queries = min(_QUERIES, room.less(room.size_bytes // 2).count(query))
        each = queries * (group * _SCORE + _SEEN) + 2 * pair_bytes + head_dim * _PAIR + _NUMBER
        return cls(queries, room.less(queries * query).count(each))


def weigh(q_GSK: Tensor, parts: Iterable[Part], *, scale: float, cap: float | None) -> Tensor:
    """Return the values, weighed by how well their keys match the queries: ``[G, S, K]``.

    Args:
        q_GSK: queries.
        parts: what they see.
        scale: of the scores.
        cap: see :class:`tpplan.decoder.settings.Settings`.
    """
    group, count, _ = q_GSK.shape
    q_RK = q_GSK.float().mul(scale).flatten(0, 1)
    found_RK, total_R1 = torch.zeros_like(q_RK), torch.zeros_like(q_RK[:, :1])
    most_R1 = torch.full_like(total_R1, torch.finfo(torch.float32).min)
    for k_TK, v_TK, seen_ST in parts:
        scores_RT = q_RK @ k_TK.float().mT
        if cap is not None:
            scores_RT.div_(cap).tanh_().mul_(cap)
        torch.unflatten(scores_RT, 0, (group, count)).masked_fill_(~seen_ST, -torch.inf)
        before_R1, most_R1 = most_R1, torch.maximum(most_R1, scores_RT.amax(-1, keepdim=True))
        scores_RT.sub_(most_R1).exp_()
        shrunk_R1 = before_R1.sub_(most_R1).exp_()
        total_R1.mul_(shrunk_R1).add_(scores_RT.sum(-1, keepdim=True))
        found_RK.mul_(shrunk_R1).add_(scores_RT @ v_TK.float())
        del k_TK, v_TK, seen_ST, scores_RT  # room for the next
    return torch.unflatten(found_RK.div_(total_R1).to(q_GSK.dtype), 0, (group, count))
