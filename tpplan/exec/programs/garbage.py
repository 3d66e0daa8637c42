"""Garbage: random contents of memory that are wrong in every element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor

#: Minimum bytes of noise that garbage is made of.
_NOISE = 1 << 14


class Garbage:
    """Makes garbage from windows of the same noise, which is drawn again when it is too short."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._noise = torch.empty(0, dtype=torch.uint8, device="cpu")

    def unlike(self, right: Tensor) -> Tensor:
        """Return random integers, each different from that in the dense tensor ``right``."""
        count, size = right.numel(), right.element_size()
        if 2 * count * size > self._noise.shape[0]:
            drawn = bytearray(self._random.randbytes(max(2 * count * size, _NOISE)))
            self._noise = torch.frombuffer(drawn, dtype=torch.uint8) | 1
        noise = self._noise.view(right.dtype)
        start = int(self._random.random() * (noise.shape[0] - count))
        return right ^ noise.as_strided(right.shape, right.stride(), start)

    def spoil(self, block: Tensor) -> None:
        """Fill a dense tensor with garbage."""
        block.copy_(self.unlike(block))
