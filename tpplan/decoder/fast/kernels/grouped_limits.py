"""Numbers that the kernels for rows grouped by their experts are made for, and those who launch them know."""

from __future__ import annotations

from typing import Final

from tpplan.decoder.fast.kernels.wide_limits import CODES, LANES, VECTOR

#: Experts that rows can choose from, and threads of the block that groups rows by them.
MOST_EXPERTS: Final = 512
GROUPING_THREADS: Final = 1024
#: Bytes of what is known of a tile.
TILE_BYTES: Final = 16
#: Warps of a block, and blocks that a multiprocessor has registers for, by rows of a tile.
WARPS: Final = {16: 4, 32: 4, 64: 8, 128: 8}
BLOCKS: Final = {16: 6, 32: 4, 64: 1, 128: 1}
#: Matrix rows of a warp, and of one of its lanes; those of gates are half of each.
STRIP: Final = 32
OWN: Final = 4
#: Steps that a block has in shared memory, and bytes of it that tell where its rows are.
STAGES: Final = 3
TABLE: Final = 512


def step_of(bits: int) -> int:
    """Return the columns of a step, of which each lane has 16 bytes of codes of so many bits."""
    return LANES * VECTOR * 8 // bits


def shared_bytes(rows: int, bits: int) -> int:
    """Return the bytes of shared memory of a block.

    Args:
        rows: of a tile.
        bits: of a code.
    """
    return TABLE + STAGES * (2 * rows * step_of(bits) + WARPS[rows] * CODES)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return how many tiles pairs may make.

    Args:
        pairs: of a row and one of its experts each.
        experts: that there are.
        rows: of a tile.
    """
    return min(pairs, experts + pairs // rows)
