"""The two buffers in host memory of a TPContext of ExLlamaV2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.memory.pinning import refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BUFFERS = 2
_LARGER = "set a larger max_input_len, max_output_len or max_batch_size in the config"
_SMALLER = "set a smaller one of max_output_len, max_input_len and max_batch_size in the config"


class PinnedTemp:
    """Flat float16 buffers, each allocated when it is used for the first time: they are large, and few callers do.

    Attributes:
        size: elements of each.
    """

    def __init__(self, size: int, *, lock_pages: bool) -> None:
        """Allocate nothing yet.

        Args:
            size: elements of each.
            lock_pages: whether to pin them, which takes a driver.
        """
        self.size = size
        self._lock_pages = lock_pages
        self._flat: list[Tensor | None] = [None] * BUFFERS
        self._left: list[Tensor | None] = [None] * BUFFERS

    def flat(self, buffer: int) -> Tensor:
        """Return a buffer.

        Raises:
            ExecutionError: there is no room for it.
        """
        memory = self._flat[buffer]
        if memory is None:
            try:
                with torch.inference_mode(mode=False):  # or it could not be written outside of it
                    memory = torch.empty(self.size, dtype=torch.half, device="cpu", pin_memory=self._lock_pages)
            except RuntimeError as error:
                what = f"cannot allocate a host buffer of {self.size} float16"
                raise refused(what, self.size * torch.half.itemsize, error, _SMALLER) from error
            self._flat[buffer] = memory
            left, self._left[buffer] = self._left[buffer], None
            if left is not None:
                self.leave(buffer, left)
        return memory

    def view(self, buffer: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the start of a buffer.

        Raises:
            ExecutionError: it is too small, or see :meth:`flat`.
        """
        size, room = math.prod(shape) * dtype.itemsize, self.size * torch.half.itemsize
        if min(shape, default=0) < 0 or size > room:
            raise ExecutionError(f"a host buffer of {room} bytes has no room for {list(shape)} in {dtype}", _LARGER)
        return self.flat(buffer).view(torch.uint8)[:size].view(dtype).view(*shape)

    def leave(self, buffer: int, tensor: Tensor) -> None:
        """Leave a tensor in host memory at the start of a buffer, if it fits; at the latest when that is used."""
        if tensor.nbytes > self.size * torch.half.itemsize:
            return
        if self._flat[buffer] is None:
            self._left[buffer] = tensor
        else:
            self.view(buffer, tensor.shape, tensor.dtype).copy_(tensor)
