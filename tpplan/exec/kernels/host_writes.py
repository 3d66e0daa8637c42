"""The kernel by which a device writes its columns straight into the host's memory, and says that they are there.

The flag is a word in the host's memory: how many such kernels of the device are complete, in 32 bits. The device counts
them itself, so that a kernel is told the same every time that it is launched on the same memory.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda

#: What a thread moves at once where everything is aligned to it, and where in the device's counter blocks take turns.
_VECTOR_BYTES, _TURNS = 16, 64


@device_function
def _copy_piece(target: Any, source: Any, piece: Any) -> None:
    """Copy 1, 2, 4 or 8 bytes."""
    if piece == 8:  # noqa: PLR2004
        low, high = ptx.load_64(source)
        ptx.store_64(target, low, high)
    elif piece == 4:  # noqa: PLR2004
        ptx.store_32(target, ptx.load_32(source))
    elif piece == 2:  # noqa: PLR2004
        ptx.store_16(target, ptx.load_16(source))
    else:
        ptx.store_8(target, ptx.load_8(source))


def _move(target, pitch, source, source_pitch, rows, width, piece, counter, flag):  # type: ignore[no-untyped-def]
    thread, number = UINT32(cuda.threadIdx.x), UINT32(0)
    if thread == UINT32(0):
        number = ptx.load_32(counter)  # while the columns are read
    per_row = UINT32(width) // UINT32(piece)
    index, step, total = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1)), rows * UINT64(per_row)
    if piece == _VECTOR_BYTES:
        while index + UINT64(3) * step < total:
            i1, i2, i3 = index + step, index + UINT64(2) * step, index + UINT64(3) * step
            r0, r1 = UINT64(UINT32(index) // per_row), UINT64(UINT32(i1) // per_row)
            r2, r3 = UINT64(UINT32(i2) // per_row), UINT64(UINT32(i3) // per_row)
            c0, c1 = (index - r0 * UINT64(per_row)) * UINT64(16), (i1 - r1 * UINT64(per_row)) * UINT64(16)
            c2, c3 = (i2 - r2 * UINT64(per_row)) * UINT64(16), (i3 - r3 * UINT64(per_row)) * UINT64(16)
            w0, w1, w2, w3 = ptx.load_128(source + r0 * source_pitch + c0)
            x0, x1, x2, x3 = ptx.load_128(source + r1 * source_pitch + c1)
            y0, y1, y2, y3 = ptx.load_128(source + r2 * source_pitch + c2)
            z0, z1, z2, z3 = ptx.load_128(source + r3 * source_pitch + c3)
            ptx.store_128(target + r0 * pitch + c0, w0, w1, w2, w3)
            ptx.store_128(target + r1 * pitch + c1, x0, x1, x2, x3)
            ptx.store_128(target + r2 * pitch + c2, y0, y1, y2, y3)
            ptx.store_128(target + r3 * pitch + c3, z0, z1, z2, z3)
            index += UINT64(4) * step
        while index < total:
            row = UINT64(UINT32(index) // per_row)
            column = (index - row * UINT64(per_row)) * UINT64(16)
            w0, w1, w2, w3 = ptx.load_128(source + row * source_pitch + column)
            ptx.store_128(target + row * pitch + column, w0, w1, w2, w3)
            index += step
    else:
        while index < total:
            row = index // UINT64(per_row)  # in 64 bits, for there may be many small pieces
            column = (index - row * UINT64(per_row)) * piece
            _copy_piece(target + row * pitch + column, source + row * source_pitch + column, piece)
            index += step
    cuda.syncthreads()
    if thread == UINT32(0):
        ptx.fence()
        last = UINT32(cuda.gridDim.x) - UINT32(1)
        if last > UINT32(0):  # the last one of all blocks raises the flag
            if ptx.next_turn(counter + UINT64(_TURNS), last) != last:
                return
            ptx.fence()
        number = UINT32(number + UINT32(1))
        ptx.post_32(flag, number)
        ptx.store_32(counter, number)


LANDING_MOVE = Kernel("landing_move", _move, 9)
