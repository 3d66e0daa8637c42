"""How tokens are chosen, and sampling them at random from logits on the host."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.errors import RequestError

if TYPE_CHECKING:
    from torch import Generator, Tensor

#: Stands for the next token where the largest logit is NaN or infinite: devices go on, and the host raises an error.
NO_TOKEN: Final = -1


@frozen
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divisor of the logits before sampling; 0 is greedy: it takes the token with the largest logit.
        top_p: sample only from the fewest likeliest tokens whose probabilities add up to this (nucleus sampling,
            Holtzman et al., arXiv:1904.09751).
        seed: seed of the random generator.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise RequestError(f"the temperature is {self.temperature}", "choose one from 0, which draws nothing")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top-p is {self.top_p}", "choose a probability above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"the seed is {self.seed}", "choose one from 0 to 2^63 - 1")

    def draw(self, logits_BV: Tensor, generator: Generator) -> Tensor:
        """Sample a token for each row of logits in host memory; ``NO_TOKEN`` where the largest logit is not finite."""
        best_B1 = logits_BV.amax(-1, keepdim=True)  # NaN if any logit is
        is_finite_B1 = best_B1.abs() < inf
        below_BV = (logits_BV.double() - best_B1).masked_fill(~is_finite_B1, 0)  # 0 is the likeliest at any temperature
        probabilities, order = (below_BV / self.temperature).softmax(-1).sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        chosen = probabilities.masked_fill(before >= self.top_p, 0).multinomial(1, generator=generator)
        return order.gather(-1, chosen).masked_fill(~is_finite_B1, NO_TOKEN).squeeze(-1)
