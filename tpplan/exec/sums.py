"""Copies and sums on CUDA devices: by the copy engines, and by kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import runtime
from cuda.core import LaunchConfig, Stream, launch

from tpplan.errors import ExecutionError
from tpplan.exec import kernel_cache
from tpplan.exec.binding import pitch
from tpplan.exec.kernel_cache import MOST_SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_NAMES = {torch.bfloat16: "sum_bf16", torch.float16: "sum_f16", torch.float32: "sum_f32"}
#: What a thread of a kernel reads at once.
_VECTOR_BYTES = 16
_THREADS = 256
_MOST_BLOCKS = 264


def copy(stream: int, target: Tensor, sources: Sequence[Tensor]) -> None:
    """Copy the only source, ``[rows, columns]``, to a target on whatever device.

    Raises:
        ExecutionError: the driver refuses.
    """
    (source,) = sources
    rows, columns = target.shape
    (result,) = runtime.cudaMemcpy2DAsync(
        target.data_ptr(),
        pitch(target),
        source.data_ptr(),
        pitch(source),
        columns * target.element_size(),
        rows,
        runtime.cudaMemcpyKind.cudaMemcpyDefault,
        stream,
    )
    if result != runtime.cudaError_t.cudaSuccess:
        message = f"a copy from {source.device} to {target.device} failed: {result.name}"
        raise ExecutionError(message, "earlier work on these devices may have failed")


class Sums:
    """Launches sums.

    Attributes:
        kernels: by dtype and device; one is loaded when a device first adds up a dtype.
    """

    def __init__(self) -> None:
        self.kernels: dict[tuple[torch.dtype, torch.device], Any] = {}

    def add(self, stream: int, target: Tensor, sources: Sequence[Tensor]) -> None:
        """Add up the sources, ``[rows, columns]`` each, in float32, in order, on the target's device; round once."""
        item, (rows, columns) = target.element_size(), target.shape
        width = columns * item
        places = [(tensor.data_ptr(), pitch(tensor)) for tensor in (target, *sources)]
        vectors = not any(number % _VECTOR_BYTES for number in (width, *(n for place in places for n in place)))
        (address, step), *rest = places
        threads = rows * width // (_VECTOR_BYTES if vectors else item)
        config = LaunchConfig(grid=min(_MOST_BLOCKS, -(-threads // _THREADS)), block=_THREADS)
        arguments = [n for place in rest for n in place] + [0] * (2 * (MOST_SOURCES - len(rest)))
        kernel = self._kernel(target.dtype, target.device)
        launch(
            Stream.from_handle(stream), config, kernel, address, step, rows, width, vectors * 1, len(rest), *arguments
        )

    def _kernel(self, dtype: torch.dtype, device: torch.device) -> Any:
        key = (dtype, device)
        if key not in self.kernels:
            self.kernels[key] = kernel_cache.load(_NAMES[dtype], torch.cuda.get_device_capability(device))
        return self.kernels[key]
