"""Choosing tokens from logits: the likeliest on the devices, or one sampled at random on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.axes import Axis
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.decoder.plain import Plain
    from tpplan.exec.context import TPContext


@frozen
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divisor of the logits before sampling; 0 takes the likeliest token.
        top_p: sample only from the fewest likeliest tokens whose probabilities add up to this (nucleus sampling,
            Holtzman et al., arXiv 1904.09751).
        seed: seed of the random generator.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.temperature < torch.inf:
            raise RequestError(f"the temperature is {self.temperature}", "choose one from 0, which draws nothing")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top-p is {self.top_p}", "choose a probability above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"the seed is {self.seed}", "choose one from 0 to 2^63 - 1")

    def draw(self, logits_BV: Tensor, generator: torch.Generator) -> Tensor:
        """Sample a token for each row of logits in host memory."""
        below_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True)  # 0 is the likeliest at any temperature
        probabilities, order = (below_BV / self.temperature).softmax(-1).sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        chosen = probabilities.masked_fill(before >= self.top_p, 0).multinomial(1, generator=generator)
        return order.gather(-1, chosen).squeeze(-1)


def best_of(logits_BV: Tensor, start: int, place: int, places: int) -> Tensor:
    """Return each row's largest logit and its token, in two columns of an otherwise zero ``[B, 2 × places]``.

    Args:
        logits_BV: logits of a range of tokens.
        start: the first token of the range.
        place: which pair of columns to fill.
        places: number of pairs.
    """
    best_B, token_B = logits_BV.max(-1)
    found = logits_BV.new_zeros(len(logits_BV), 2 * places, dtype=torch.float32)
    found[:, 2 * place] = best_B
    torch.add(token_B, start, out=found[:, 2 * place + 1])
    return found


def likeliest(context: TPContext, logits: Sequence[Tensor], steps: Mapping[int, Plain]) -> tuple[Tensor, ...]:
    """Return the likeliest tokens ``[B]`` on every device in use.

    Each device finds its own best token. One small all-reduce collects these, as every device has columns of its own.
    float32 holds every token number exactly, and all devices choose by the same bits.

    Args:
        context: the compiled plan.
        logits: ``[B, V]`` on each device that holds a part of the vocabulary.
        steps: the computation steps of each device.
    """
    parts = context.split(Axis.VC)
    bests = [
        steps[part.device].best(logits_BV, part.start, i, len(parts))
        for i, (part, logits_BV) in enumerate(zip(parts, logits, strict=True))
    ]
    found = context.all_reduce(bests, axis=Axis.VC)
    return tuple(x[:, 1::2].gather(1, x[:, ::2].argmax(1, keepdim=True)).squeeze(1).long() for x in found)
