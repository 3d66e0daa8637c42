"""The tokens of a step on their way to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.prompts import NO_TOKEN

if TYPE_CHECKING:
    from tpplan.decoder.layer.stack import Stack


@frozen(eq=False)
class ReadBack:
    """The tokens of a step on their way to the host.

    Attributes:
        tokens: the tokens ``[B]`` in host memory.
        copied: recorded once they are there; None if they come from host memory.
        positions: the position of each sequence in the step, if it was launched ahead.
    """

    tokens: Tensor
    copied: torch.cuda.Event | None
    positions: tuple[int, ...] = ()

    @classmethod
    def of(cls, like: Tensor) -> Self:
        """Allocate memory for tokens like those of a device."""
        host = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
        return cls(host, torch.cuda.Event() if like.is_cuda else None)  # type: ignore[no-untyped-call]

    def copy(self, tokens: Tensor) -> None:
        """Copy the tokens of a device behind what its current stream has to do."""
        self.tokens.copy_(tokens, non_blocking=True)
        if self.copied:
            self.copied.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        """Wait for the tokens and return them."""
        if self.copied:
            self.copied.synchronize()
        found: list[int] = self.tokens.tolist()
        return found

    def clear_up(self, stack: Stack) -> None:
        """Clear what a step that nobody checks has added to the caches, where its numbers are not finite."""
        for sequence, (token, position) in enumerate(zip(self.read(), self.positions, strict=True)):
            if token == NO_TOKEN:
                stack.clear_position(sequence, position)
