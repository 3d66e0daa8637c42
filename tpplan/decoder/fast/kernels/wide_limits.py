"""Numbers that the kernels for 17 (on sm_90: 9) to 64 rows by codes are made for, and those who launch them know."""

from __future__ import annotations

from typing import Final

#: Matrix rows of a warp, a strip; lanes that have the same four of them.
STRIP: Final = 32
LANES: Final = 4
#: Of each kernel: rows, and warps that a multiprocessor has registers for; and the fewest of a block.
WARPS: Final = {32: 16, 48: 12, 64: 8}
FEWEST: Final = {32: 6, 48: 6, 64: 8}
#: The same where four warps multiply together. With more than 16 rows they take so many registers that no second block
#: of eight warps finds room, which some multiprocessors would get and others not.
GROUP_WARPS: Final = {16: 16, 32: 8, 48: 8, 64: 8}
GROUP_FEWEST: Final = 8
#: Bytes of a vector, and those that the lanes of a warp read together.
VECTOR: Final = 16
OF_LANES: Final = 32 * VECTOR
#: Bytes of a warp in a stage of shared memory: codes, then scales in words, and as many zeros.
CODES: Final = LANES * OF_LANES
SCALES: Final = 4 * STRIP
OF_WARP: Final = CODES + 2 * SCALES


def stage_bytes(rows: int, step: int, warps: int) -> int:
    """Return the bytes of shared memory that a block needs for each step that it has there.

    Args:
        rows: that the kernel is for.
        step: columns of a step.
        warps: of the block.
    """
    return 2 * rows * step + warps * OF_WARP
