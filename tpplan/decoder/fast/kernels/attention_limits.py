"""What attention kernels can append to the cache, which those who launch them know, too. Nothing here imports numba."""

from __future__ import annotations


def can_append(head_dim: int, row_bytes: int) -> bool:
    """Tell whether a kernel applies norms and RoPE to new tokens, and writes their keys and values to the cache.

    It writes what it has turned, in 16 bits, by two vectors of 16 bytes at a time.

    Args:
        head_dim: elements of a head.
        row_bytes: bytes of a head of a token in the cache, without scales.
    """
    return row_bytes == 2 * head_dim and row_bytes % 32 == 0
