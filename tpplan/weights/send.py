"""Putting pieces of tensors where they belong: at once on virtual devices, through pinned memory on CUDA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.weights.files import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Straight:
    """The way to a virtual device."""

    def send(self, piece: Sequence[Tensor], target: Tensor) -> None:
        """Copy rows that lie side by side into ``target``."""
        torch.cat(tuple(piece), 1, out=target)

    def finish(self) -> None:
        """Return when everything has arrived: it has."""


class Pinned:
    """The way to a CUDA device: two pinned buffers, one of which is filled while the other is sent."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the buffers, which have room for most pieces."""
        self._stream = torch.cuda.current_stream(device)
        self._buffers = [_pinned(CHUNK_BYTES) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, piece: Sequence[Tensor], target: Tensor) -> None:
        """Copy rows that lie side by side into ``target``, without waiting until they are there."""
        turn, self._turn = self._turn, 1 - self._turn
        self._sent[turn].synchronize()
        if target.nbytes > len(self._buffers[turn]):
            self._buffers[turn] = _pinned(target.nbytes)
        staged = self._buffers[turn][: target.nbytes].view(target.shape)
        torch.cat(tuple(piece), 1, out=staged)
        target.copy_(staged, non_blocking=True)
        self._sent[turn].record(self._stream)

    def finish(self) -> None:
        """Return when everything has arrived."""
        self._stream.synchronize()


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
