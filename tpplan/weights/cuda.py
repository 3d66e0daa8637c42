"""Copies from pinned memory to a CUDA device, with little host time beyond the driver's.

Several threads send, and each torch call releases and reacquires the GIL. Here a copy is a single call, and the copy
engine gathers the columns of a matrix that a device gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.toolchain.bindings import runtime

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.weights.reads import Move

_SUCCESS = runtime.cudaError_t.cudaSuccess
#: The driver infers the direction from the addresses.
_ANY = runtime.cudaMemcpyKind.cudaMemcpyDefault
_HINT = "earlier work on the device may have failed"


class CudaSender:
    """Asynchronous copies from one buffer to one CUDA device, on a stream of their own."""

    def __init__(self, buffer: Tensor, block: Tensor) -> None:
        """Create the stream.

        Args:
            buffer: pinned bytes.
            block: bytes on the device, not used by anything else meanwhile.
        """
        self._kept = buffer, block
        self._source, self._target = buffer.data_ptr(), block.data_ptr()
        self._stream = torch.cuda.Stream(block.device)  # type: ignore[no-untyped-call]
        self._handle = self._stream.cuda_stream
        self._is_sending = False

    def send(self, move: Move) -> None:
        """Start the copy of a move.

        Raises:
            ExecutionError: the driver reports an error.
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
        """Wait until all copies are complete.

        Raises:
            ExecutionError: the device failed.
        """
        if self._is_sending:
            try:
                self._stream.synchronize()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise ExecutionError(f"copies to {self._kept[1].device} failed: {reason}", _HINT) from error
            self._is_sending = False
