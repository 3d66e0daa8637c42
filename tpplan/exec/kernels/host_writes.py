"""The kernel by which a device writes its columns straight into the host's memory, and says that they are there.

The flag is a word in the host's memory: how many such kernels of the device are complete, in 32 bits. The device counts
them itself, so that a kernel is told the same every time that it is launched on the same memory.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import cuda, types

_WORD = types.uint64
_HALF = types.uint32
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
    thread, number = _HALF(cuda.threadIdx.x), _HALF(0)
    if thread == _HALF(0):
        number = ptx.load_32(counter)  # while the columns are read
    per_row = _HALF(width) // _HALF(piece)
    index, step, total = _WORD(cuda.grid(1)), _WORD(cuda.gridsize(1)), rows * _WORD(per_row)
    if piece == _VECTOR_BYTES:
        while index + _WORD(3) * step < total:
            i1, i2, i3 = index + step, index + _WORD(2) * step, index + _WORD(3) * step
            r0, r1 = _WORD(_HALF(index) // per_row), _WORD(_HALF(i1) // per_row)
            r2, r3 = _WORD(_HALF(i2) // per_row), _WORD(_HALF(i3) // per_row)
            c0, c1 = (index - r0 * _WORD(per_row)) * _WORD(16), (i1 - r1 * _WORD(per_row)) * _WORD(16)
            c2, c3 = (i2 - r2 * _WORD(per_row)) * _WORD(16), (i3 - r3 * _WORD(per_row)) * _WORD(16)
            w0, w1, w2, w3 = ptx.load_128(source + r0 * source_pitch + c0)
            x0, x1, x2, x3 = ptx.load_128(source + r1 * source_pitch + c1)
            y0, y1, y2, y3 = ptx.load_128(source + r2 * source_pitch + c2)
            z0, z1, z2, z3 = ptx.load_128(source + r3 * source_pitch + c3)
            ptx.store_128(target + r0 * pitch + c0, w0, w1, w2, w3)
            ptx.store_128(target + r1 * pitch + c1, x0, x1, x2, x3)
            ptx.store_128(target + r2 * pitch + c2, y0, y1, y2, y3)
            ptx.store_128(target + r3 * pitch + c3, z0, z1, z2, z3)
            index += _WORD(4) * step
        while index < total:
            row = _WORD(_HALF(index) // per_row)
            column = (index - row * _WORD(per_row)) * _WORD(16)
            w0, w1, w2, w3 = ptx.load_128(source + row * source_pitch + column)
            ptx.store_128(target + row * pitch + column, w0, w1, w2, w3)
            index += step
    else:
        while index < total:
            row = index // _WORD(per_row)  # in 64 bits, for there may be many small pieces
            column = (index - row * _WORD(per_row)) * piece
            _copy_piece(target + row * pitch + column, source + row * source_pitch + column, piece)
            index += step
    cuda.syncthreads()
    if thread == _HALF(0):
        ptx.fence()
        last = _HALF(cuda.gridDim.x) - _HALF(1)
        if last > _HALF(0):  # the last one of all blocks raises the flag
            if ptx.next_turn(counter + _WORD(_TURNS), last) != last:
                return
            ptx.fence()
        number = _HALF(number + _HALF(1))
        ptx.post_32(flag, number)
        ptx.store_32(counter, number)


LANDING_MOVE = Kernel("landing_move", _move, 9)
