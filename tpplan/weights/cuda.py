"""Copies from pinned memory to a CUDA device, which cost the host little more than the driver does.

Several threads send, and each call of torch's lets go of Python's lock and waits for it again: here a copy is one call,
and the copy engine finds the columns that a device gets of a matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cuda.bindings import runtime

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.weights.reads import Move

_SUCCESS = runtime.cudaError_t.cudaSuccess
#: Addresses tell which memory they are of.
_ANY = runtime.cudaMemcpyKind.cudaMemcpyDefault
_HINT = "earlier work on the device may have failed"


class CudaSender:
    """What copies from one buffer to one device, on a stream of its own."""

    def __init__(self, buffer: Tensor, block: Tensor) -> None:
        """Make the stream.

        Args:
            buffer: pinned bytes.
            block: bytes of the device, which nothing else uses meanwhile.
        """
        self._kept = buffer, block
        self._source, self._target = buffer.data_ptr(), block.data_ptr()
        self._stream = torch.cuda.Stream(block.device)  # type: ignore[no-untyped-call]
        self._handle = self._stream.cuda_stream
        self._is_sending = False

    def send(self, move: Move) -> None:
        """Start to copy what a move says.

        Raises:
            ExecutionError: the driver refuses.
        """
        source, target = self._source + move.source, self._target + move.target
        self._is_sending = True
        if move.rows == 1:
            (error,) = runtime.cudaMemcpyAsync(target, source, move.width, _ANY, self._handle)
        else:
            size = move.width, move.rows
            (error,) = runtime.cudaMemcpy2DAsync(
                target, move.target_step, source, move.source_step, *size, _ANY, self._handle
            )
        if error != _SUCCESS:
            message = f"a copy of {move.rows} x {move.width} bytes to {self._kept[1].device} failed: {error.name}"
            raise ExecutionError(message, _HINT)

    def wait(self) -> None:
        """Return when everything that was sent has arrived.

        Raises:
            ExecutionError: the device failed meanwhile.
        """
        if self._is_sending:
            try:
                self._stream.synchronize()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise ExecutionError(f"copies to {self._kept[1].device} failed: {reason}", _HINT) from error
            self._is_sending = False
