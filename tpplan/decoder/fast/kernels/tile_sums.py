"""What the warps of a block have found for a tile of matrix rows, each for some columns: added up, in a fixed order.

The sums of a warp are in shared memory, those of a matrix row side by side. There is room for two tiles, since not all
threads may have read the one when a warp is done with the next.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import frozen

from tpplan.decoder.fast.kernels import tiles
from tpplan.decoder.fast.kernels.finishing import ADD, finish_of
from tpplan.exec.kernels.channel import send_part
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT64, cuda

#: Matrix rows of a tile: the left side of an instruction; of a gate half of them are what is gated.
TILE = 16

_HALF = TILE // 2


@cache
def rows_of(eights: int) -> Any:
    """Make what returns the addresses of a lane's rows, one of each eight; a row that there is not is the last one.

    It takes the first one's, the bytes of a row, the lane's number among eight, and how many rows there are.

    Args:
        eights: of rows: 1 or 2.
    """

    @device_function
    def row_of(x: Any, pitch: Any, g: Any, rows: Any) -> Any:
        return x + min(g, rows - UINT64(1)) * pitch

    @device_function
    def of_eight(x: Any, pitch: Any, g: Any, rows: Any) -> Any:
        return (row_of(x, pitch, g, rows),)

    @device_function
    def of_sixteen(x: Any, pitch: Any, g: Any, rows: Any) -> Any:
        return row_of(x, pitch, g, rows), row_of(x, pitch, g + UINT64(_HALF), rows)

    return {1: of_eight, 2: of_sixteen}[eights]


@frozen
class TileSums:
    """Where sums are, and what becomes of them.

    Attributes:
        warp: float32 from the sums of one warp to those of the next.
        half: float32 from those of one tile to those of the next.
        keep: writes a warp's sums; takes the array, the sums, where the warp's begin, and the lane's g and t.
        finish: adds up what is for a tile, and stores what becomes of it, or sends it.
    """

    warp: int
    half: int
    keep: Any
    finish: Any

    @property
    def floats(self) -> int:
        """All float32 of the array."""
        return 2 * self.half


@cache
def tile_sums(  # noqa: C901 (what kernels inline)
    first: Any, both: Any, eights: int, warps: int, *, tall: int = 1, joint: bool = False
) -> TileSums:
    """Return them for up to so many warps of a block.

    Args:
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
        eights: of rows: 1 or 2.
        warps: of a block, at most.
        tall: times that a tile has 16 matrix rows: 1 or 2.
        joint: whether what is added up is sent, for the products of all devices to be added up.
    """
    pitch = 8 * eights + 1  # so that lanes are in different banks
    kept, finish, middle = tall * TILE * pitch, finish_of(first, both), 4 * eights

    @device_function
    def keep_one(sums: Any, totals: Any, start: Any, g: Any, t: Any) -> None:
        to = start + g * UINT64(pitch) + t * UINT64(2)
        tiles.keep(sums, totals, to, UINT64(1), UINT64(_HALF * pitch))

    @device_function
    def keep_two(sums: Any, totals: Any, start: Any, g: Any, t: Any) -> None:
        keep_one(sums, totals[:middle], start, g, t)
        keep_one(sums, totals[middle:], start + UINT64(TILE * pitch), g, t)

    @device_function
    def finish_all(
        sums: Any, buffer: Any, start: Any, y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, size: Any, rows: Any,
        mode: Any, number: Any,
    ) -> None:  # fmt: skip
        bits = UINT64(3 + tall) if mode == ADD else UINT64(2 + tall)
        index, total = UINT64(cuda.threadIdx.x), rows << bits
        while index < total:
            row = index >> bits
            member = index - (row << bits)
            at = member
            if tall > 1 and mode != ADD:  # eight gates, what these gate, and so on
                at = member + (member & UINT64(_HALF))
            place = buffer + at * UINT64(pitch) + row
            s = t = FLOAT32(0)
            end = place + (UINT64(cuda.blockDim.x) >> UINT64(5)) * UINT64(kept)
            while place < end:
                s += sums[place]
                if mode != ADD:
                    t += sums[place + UINT64(_HALF * pitch)]
                place += UINT64(kept)
            if joint:
                if start + member < size:
                    send_part(row * size + start + member, s, number)
            elif start + member < size:
                finish(s, t, row, start + member, y, y_pitch, plus, plus_pitch, size, mode)
            index += UINT64(cuda.blockDim.x)

    return TileSums(kept, warps * kept, keep_one if tall == 1 else keep_two, finish_all)
