"""RoPE scaling methods, which extend a model beyond its trained context length.

Each computes ⌈d/2⌉ inverse frequencies, in radians per position, from a base θ and a rotary dimension d, and one
attention factor that multiplies both sines and cosines. Unscaled, the i-th is θ^(-2i/d)
(Su et al., "RoFormer", arXiv 2104.09864).

The results are bit-identical to those of transformers' ``modeling_rope_utils``. This determines the order of
operations, and which of them use Python's float and which float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor


class Scaling(Protocol):
    """A RoPE scaling method with its parameters."""

    @property
    def attention(self) -> float:
        """The factor that multiplies sines and cosines."""

    def frequencies(self, theta: float, dim: int, positions: int) -> Tensor:
        """Return the inverse frequencies for a sequence of ``positions`` tokens.

        Args:
            theta: the base θ.
            dim: the rotary dimension d.
            positions: length of the sequence, in tokens.

        Returns:
            A float32 tensor of shape [⌈dim / 2⌉], on the CPU.
        """


def _powers(theta: float | Tensor, dim: int) -> Tensor:
    """Return θ^(2i/d) for each pair i."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / dim
    powers: Tensor = theta**exponents
    return powers


@frozen
class Default:
    """Unscaled RoPE."""

    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return θ^(-2i/d)."""
        return 1.0 / _powers(theta, dim)


@frozen
class Linear:
    """Position interpolation (Chen et al., arXiv 2306.15595): divides all frequencies by the factor.

    Attributes:
        factor: ratio of the extended context length to the original one.
    """

    factor: float
    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return θ^(-2i/d) / factor."""
        return (1.0 / _powers(theta, dim)) / self.factor


@frozen
class Dynamic:
    """Dynamic NTK scaling (u/bloc97 and u/emozilla): the base grows with sequences beyond the trained context.

    Attributes:
        factor: weight of the growth.
        max_position_embeddings: the context length up to which nothing is scaled, in tokens.
    """

    factor: float
    max_position_embeddings: int
    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, positions: int) -> Tensor:
        """Return the frequencies of the base θ · (factor · length / context - (factor - 1))^(d / (d - 2))."""
        context = self.max_position_embeddings
        # Beyond the context, transformers computes the base from the length as a tensor, hence in float32.
        length = torch.tensor(positions, dtype=torch.float32, device="cpu") if positions > context else context
        growth = self.factor * length / context - (self.factor - 1)
        return 1.0 / _powers(theta * growth ** (dim / (dim - 2)), dim)


@frozen
class Ntk:
    """NTK-aware scaling (u/bloc97) with a fixed weight: a larger base for sequences of any length.

    Attributes:
        alpha: the weight.
    """

    alpha: float
    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return the frequencies of the base θ · alpha^(d / (d - 2))."""
        return 1.0 / _powers(theta * self.alpha ** (dim / (dim - 2)), dim)


@frozen
class Llama3:
    """Llama 3.1 (``rope_scaling`` in meta-llama/llama-models): divides the frequencies of long waves, keeps short ones.

    Attributes:
        factor: divisor for waves longer than ``original_max_position_embeddings / low_freq_factor``.
        low_freq_factor: turns within the original context below which a frequency is fully scaled.
        high_freq_factor: turns above which a frequency is kept; between the two it is partly scaled.
        original_max_position_embeddings: the original context length, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return the frequencies, blended by the number of turns of each within the original context."""
        plain = 1.0 / _powers(theta, dim)
        context, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / plain
        kept = (context / wavelengths - low) / (high - low)
        blended = (1 - kept) * plain / self.factor + kept * plain
        short_or_blended = torch.where(wavelengths < context / high, plain, blended)
        return torch.where(wavelengths > context / low, plain / self.factor, short_or_blended)


@frozen
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): interpolates slow pairs, keeps fast ones, with a ramp between.

    Attributes:
        factor: ratio of the extended context length to the original one.
        original_max_position_embeddings: the original context length, in tokens.
        attention_factor: attention factor; None for the paper's 0.1 · ln(factor) + 1, or DeepSeek's, see ``mscale``.
        beta_fast: turns within the original context from which a pair is kept; None or 0 means 32.
        beta_slow: turns up to which a pair is fully interpolated; None or 0 means 1.
        mscale: weight in the numerator of DeepSeek's attention factor, a quotient of two factors
            0.1 · weight · ln(factor) + 1; if this or the next is None or 0, the paper's factor is used.
        mscale_all_dim: weight in its denominator.
        truncate: whether the ends of the ramp are rounded to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def attention(self) -> float:
        """The given attention factor, else DeepSeek's if both weights are set, else the paper's."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._attention(self.mscale) / self._attention(self.mscale_all_dim)
        return self._attention(1)

    @property
    def of_scores(self) -> float:
        """The factor of attention scores beside it in DeepSeek's models, for elements of heads that RoPE leaves out."""
        return self._attention(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _attention(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return the frequencies, each between θ^(-2i/d) / factor and θ^(-2i/d)."""
        first, last = self._pair(self.beta_fast or 32, theta, dim), self._pair(self.beta_slow or 1, theta, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first if last != first else last + 0.001 - first
        ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
        kept = 1 - ramp
        powers = _powers(theta, dim)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _pair(self, turns: float, theta: float, dim: int) -> float:
        """Return the (fractional) index of the pair that makes ``turns`` turns within the original context."""
        context = self.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


@frozen
class LongRope:
    """LongRoPE (Ding et al., arXiv 2402.13753): searched divisors for each pair, for short and long sequences.

    Attributes:
        short_factor: divisor of each pair, for sequences within the original context.
        long_factor: divisor of each pair, for longer sequences.
        factor: ratio of the extended context length to the original one.
        original_max_position_embeddings: the original context length, in tokens.
        attention_factor: attention factor; None for √(1 + ln(factor) / ln(original context)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None

    @property
    def attention(self) -> float:
        """The given attention factor, else the paper's; it does not depend on the sequence length."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def frequencies(self, theta: float, dim: int, positions: int) -> Tensor:
        """Return θ^(-2i/d) divided by the divisor of pair i."""
        factors = self.long_factor if positions > self.original_max_position_embeddings else self.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * _powers(theta, dim))
