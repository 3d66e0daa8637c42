"""The ways in which models stretch RoPE beyond the context that they were trained with.

Every kind turns a base θ and a rotary dimension d into ⌈d/2⌉ inverse frequencies, in radians per position, and one
factor for sines and cosines alike. Unscaled, the i-th is θ^(-2i/d) (Su et al., "RoFormer", arXiv 2104.09864).

The results equal those of transformers' ``modeling_rope_utils`` to the bit. That is why the order of operations is what
it is here, and why some of them are done in Python's float and some in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor


class Scaling(Protocol):
    """A kind of RoPE with its parameters."""

    @property
    def attention(self) -> float:
        """What sines and cosines are multiplied by."""

    def frequencies(self, theta: float, dim: int, positions: int) -> Tensor:
        """Return the inverse frequencies for a sequence of ``positions`` tokens.

        Args:
            theta: the base θ.
            dim: the rotary dimension d.
            positions: how long the sequence is.

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
    """RoPE as it is."""

    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return θ^(-2i/d)."""
        return 1.0 / _powers(theta, dim)


@frozen
class Linear:
    """Position interpolation (Chen et al., arXiv 2306.15595): every frequency divided by the factor.

    Attributes:
        factor: how many times longer the context becomes.
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
        factor: the weight of the growth.
        max_position_embeddings: the context up to which nothing is scaled, in tokens.
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
class Llama3:
    """Llama 3.1 (``rope_scaling`` in meta-llama/llama-models): long waves divided by the factor, short ones kept.

    Attributes:
        factor: of the waves longer than ``original_max_position_embeddings / low_freq_factor``.
        low_freq_factor: how many turns in the original context make a wave long enough to scale it wholly.
        high_freq_factor: how many make it short enough to keep it; between the two it is scaled in part.
        original_max_position_embeddings: the context before stretching, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return the frequencies, blended by how often each turns within the original context."""
        plain = 1.0 / _powers(theta, dim)
        context, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / plain
        kept = (context / wavelengths - low) / (high - low)
        blended = (1 - kept) * plain / self.factor + kept * plain
        short_or_blended = torch.where(wavelengths < context / high, plain, blended)
        return torch.where(wavelengths > context / low, plain / self.factor, short_or_blended)


@frozen
class Yarn:
    """YaRN (Peng et al., arXiv 2309.00071): interpolation for slow pairs, none for fast ones, a ramp between.

    Attributes:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: the context before stretching, in tokens.
        attention_factor: for sines and cosines; None: from ``factor``, by the paper's 0.1 · ln(factor) + 1.
        beta_fast: turns in the original context from which on a pair is kept; None or 0: 32.
        beta_slow: turns up to which a pair is interpolated wholly; None or 0: 1.
        mscale: with the next, the weights of a quotient of two such attention factors (DeepSeek).
        mscale_all_dim: of its denominator; None or 0 for either of them: the paper's.
        truncate: whether the ramp starts and ends at whole pairs.
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
        """The given attention factor, or the paper's, or DeepSeek's."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._attention(self.mscale) / self._attention(self.mscale_all_dim)
        return self._attention(1)

    def _attention(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, theta: float, dim: int, _positions: int) -> Tensor:
        """Return the frequencies, each between θ^(-2i/d) and that over the factor."""
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
        """Return which pair, as a fraction, turns so often within the original context."""
        context = self.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


@frozen
class LongRope:
    """LongRoPE (Ding et al., arXiv 2402.13753): searched factors of the pairs, others in long sequences than in short.

    Attributes:
        short_factor: of each pair, in sequences within the original context.
        long_factor: of each pair, in longer ones.
        factor: how many times longer the context becomes.
        original_max_position_embeddings: the context before stretching, in tokens.
        attention_factor: for sines and cosines; None: √(1 + ln(factor) / ln(original context)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None

    @property
    def attention(self) -> float:
        """The given attention factor, or the paper's; whatever the length of the sequence."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def frequencies(self, theta: float, dim: int, positions: int) -> Tensor:
        """Return θ^(-2i/d) over the factor of pair i."""
        factors = self.long_factor if positions > self.original_max_position_embeddings else self.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * _powers(theta, dim))
