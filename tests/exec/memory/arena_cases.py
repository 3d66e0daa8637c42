"""Arenas of virtual devices, and what tests see of their bytes."""

from __future__ import annotations

import torch

from tpplan.exec.memory.arena import Arena

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
)


def arena(size_bytes: int) -> Arena:
    """An arena on the CPU."""
    return Arena(size_bytes, "cpu", "device 0 (RTX 4090)")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)


def offset(owner: Arena, tensor: torch.Tensor) -> int:
    """Where a tensor starts in its arena."""
    assert owner._block is not None
    return tensor.data_ptr() - owner._block.data_ptr()
