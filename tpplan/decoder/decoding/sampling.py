"""How tokens are chosen, and sampling them at random from logits on the host."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real
from typing import TYPE_CHECKING, Final

from attrs import fields, frozen

from tpplan.core.sizes import counted
from tpplan.decoder.prompts import NO_TOKEN, shown
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor

#: Largest presence and frequency penalty, as in OpenAI's API.
_MOST_PENALTY: Final = 2.0


@frozen
class Sampling:
    """How tokens are chosen: penalties, temperature, top-k, top-p and min-p, applied in this order.

    Attributes:
        temperature: divisor of the logits before sampling; 0 is greedy: it takes the token with the largest logit.
        top_p: sample only from the fewest likeliest tokens whose probabilities add up to this (nucleus sampling,
            Holtzman et al., arXiv:1904.09751).
        seed: seed of the random generator.
        top_k: sample only from this many likeliest tokens, and those as likely as the last of them; 0 is all.
        min_p: sample only from tokens at least this times as probable as the likeliest (Nguyen et al.,
            arXiv:2407.01082).
        repetition_penalty: divisor of positive logits, and factor of negative ones, of tokens that the text has, its
            prompt included (Keskar et al., arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that were generated.
        frequency_penalty: subtracted from the logit of a token for each time that it was generated.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __attrs_post_init__(self) -> None:
        _check_numbers(self)
        if not 0 <= self.temperature < inf:
            raise RequestError(f"the temperature is {self.temperature}", "choose one from 0, which draws nothing")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top-p is {self.top_p}", "choose a probability above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"the seed is {self.seed}", "choose one from 0 to 2^63 - 1")
        if self.top_k < 0:
            raise RequestError(f"top-k is {self.top_k}", "choose a number of tokens, or 0 for all")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min-p is {self.min_p}", "choose a part of the largest probability, from 0 to 1")
        if not 0 < self.repetition_penalty < inf:
            what = f"the repetition penalty is {self.repetition_penalty}"
            raise RequestError(what, "choose one above 0, such as 1.1; 1 changes nothing")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -_MOST_PENALTY <= value <= _MOST_PENALTY:
                what = f"the {name} penalty is {value}"
                raise RequestError(what, f"choose one from {-_MOST_PENALTY:g} to {_MOST_PENALTY:g}; 0 changes nothing")

    @property
    def is_greedy(self) -> bool:
        """Whether the token is that of the largest logit as the model computes it, which devices find themselves."""
        return not self.temperature and not self._has_penalties

    @property
    def _has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    def draw(
        self,
        logits_BV: Tensor,
        generator: Generator,
        texts: Sequence[Sequence[int]] = (),
        new: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Sample a token for each row of logits in host memory; ``NO_TOKEN`` where the largest logit is not finite.

        Args:
            logits_BV: the logits.
            generator: draws random numbers.
            texts: all tokens of the text of each row, for penalties.
            new: those that were generated.
        """
        logits_BV = self.penalised(logits_BV, texts, new)
        best_B1 = logits_BV.amax(-1, keepdim=True)  # NaN if any logit is
        is_finite_B1 = best_B1.abs() < inf
        if self.temperature:
            below_BV = (logits_BV.double() - best_B1).masked_fill(~is_finite_B1, 0)  # 0 is the likeliest
            probabilities, order = self.probabilities(below_BV)
            chosen = order.gather(-1, probabilities.multinomial(1, generator=generator))
        else:
            chosen = logits_BV.argmax(-1, keepdim=True)
        return chosen.masked_fill(~is_finite_B1, NO_TOKEN).squeeze(-1)

    def penalised(self, logits_BV: Tensor, texts: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> Tensor:
        """Return logits after the penalties; see :meth:`draw`."""
        if not self._has_penalties:
            return logits_BV
        logits_BV = logits_BV.double()  # a copy, unless logits are of 64 bits, which no model has
        for logits_V, text, made in zip(logits_BV, texts, new, strict=True):
            there = logits_V.new_tensor(text).long()
            scores = logits_V[there]
            penalty = self.repetition_penalty
            logits_V[there] = (scores * penalty).where(scores < 0, scores / penalty)
            counts_V = logits_V.new_tensor(made).long().bincount(minlength=len(logits_V))
            logits_V.sub_(self.frequency_penalty * counts_V + self.presence_penalty * (counts_V > 0))
        return logits_BV

    def probabilities(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Return what tokens are drawn by, in descending order, and which tokens these are; 0 for what is cut off.

        Args:
            logits_BV: logits less the largest of each row, so that no quotient overflows, after penalties.
        """
        probabilities, order = (logits_BV / self.temperature).softmax(-1).sort(-1, descending=True)
        if self.top_k:
            last = min(self.top_k, probabilities.shape[-1]) - 1
            probabilities = probabilities.masked_fill(probabilities < probabilities[..., last, None], 0)
            probabilities /= probabilities.sum(-1, keepdim=True)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        return probabilities.masked_fill(probabilities < self.min_p * probabilities[..., :1], 0), order


def _check_numbers(sampling: Sampling) -> None:
    """Check that all of a sampling are numbers, and whole ones where they have to be.

    Raises:
        RequestError: one is not.
    """
    for field in fields(Sampling):
        value = getattr(sampling, field.name)
        kind, name = (Integral, "whole number") if isinstance(field.default, int) else (Real, "number")
        if type(value) is bool or not isinstance(value, kind):
            what = f"the {field.name.replace('_', ' ')} is {shown(value)}, expected a {name}"
            raise RequestError(what, "give one, or leave it out")


def samplings_of(sampling: Sampling | Sequence[Sampling], count: int) -> tuple[Sampling, ...]:
    """Return the one sampling of all texts, or one for each of so many.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(sampling, Sampling):
        return (sampling,)
    hint = "give one Sampling for all, such as Sampling(), or one for each"
    if not isinstance(sampling, (list, tuple)) or not all(isinstance(each, Sampling) for each in sampling):
        raise RequestError(f"sampling is {shown(sampling)}, which is no Sampling", hint)
    if len(sampling) != count:
        raise RequestError(f"{counted(len(sampling), 'sampling')} for {counted(count, 'prompt')}", hint)
    return tuple(sampling)


#: How tokens are chosen where nothing else is said.
GREEDY: Final = Sampling()
