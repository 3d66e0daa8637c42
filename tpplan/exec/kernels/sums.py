"""Kernels that add up matrices of one device.

A matrix is an address and a pitch: the bytes from one row to the next. Rows are cut into vectors of 16 bytes where all
addresses and pitches allow it.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.kernel_cache import MOST_SOURCES
from tpplan.exec.toolchain.language import UINT64, cuda, types


def _sum(name: str, item: int, first: Any, second: Any, both: Any) -> Kernel:
    """Make a kernel that adds up matrices in float32, in order, and rounds once.

    Args:
        name: of the kernel.
        item: bytes per element: 2 or 4.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second, if there are two.
        both: makes 32 bits of as many float32 as they hold.
    """
    halves = item == 2  # noqa: PLR2004

    @device_function
    def load_one(address: Any) -> Any:
        return first(types.uint32(ptx.load_16(address))) if halves else first(ptx.load_32(address))

    @device_function
    def store_one(address: Any, value: Any) -> None:
        if halves:
            ptx.store_16(address, types.uint16(both(value, value) & types.uint32(0xFFFF)))
        else:
            ptx.store_32(address, both(value, value))

    def add(  # type: ignore[no-untyped-def]
        target, pitch, rows, width, vectors, count,
        a0, p0, a1, p1, a2, p2, a3, p3, a4, p4, a5, p5, a6, p6, a7, p7, a8, p8,
    ):  # fmt: skip
        table = cuda.shared.array(18, UINT64)
        if cuda.threadIdx.x == 0:
            table[0], table[1], table[2], table[3], table[4], table[5] = a0, p0, a1, p1, a2, p2
            table[6], table[7], table[8], table[9], table[10], table[11] = a3, p3, a4, p4, a5, p5
            table[12], table[13], table[14], table[15], table[16], table[17] = a6, p6, a7, p7, a8, p8
        cuda.syncthreads()
        step = UINT64(16) if vectors else UINT64(item)
        per_row = width // step
        index, stride, total = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1)), rows * per_row
        while index < total:
            row = index // per_row
            offset = (index - row * per_row) * step
            if vectors:
                w0, w1, w2, w3 = ptx.load_128(table[0] + row * table[1] + offset)
                s0, s1, s2, s3 = first(w0), first(w1), first(w2), first(w3)
                t0, t1, t2, t3 = second(w0), second(w1), second(w2), second(w3)
                k = UINT64(1)
                while k < count:
                    w0, w1, w2, w3 = ptx.load_128(table[2 * k] + row * table[2 * k + 1] + offset)
                    s0, s1, s2, s3 = s0 + first(w0), s1 + first(w1), s2 + first(w2), s3 + first(w3)
                    t0, t1, t2, t3 = t0 + second(w0), t1 + second(w1), t2 + second(w2), t3 + second(w3)
                    k += UINT64(1)
                ptx.store_128(target + row * pitch + offset, both(s0, t0), both(s1, t1), both(s2, t2), both(s3, t3))
            else:
                s0 = load_one(table[0] + row * table[1] + offset)
                k = UINT64(1)
                while k < count:
                    s0 = s0 + load_one(table[2 * k] + row * table[2 * k + 1] + offset)
                    k += UINT64(1)
                store_one(target + row * pitch + offset, s0)
            index += stride

    return Kernel(name, add, 6 + 2 * MOST_SOURCES)


@device_function
def only(value: Any, _: Any) -> Any:
    """Return the bits of the one float32 in 32 bits."""
    return ptx.bits_of(value)


@device_function
def none(_: Any) -> Any:
    """Return nothing: there is no second float32 in 32 bits."""
    return types.float32(0)


SUM_BF16 = _sum("sum_bf16", 2, ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
SUM_F16 = _sum("sum_f16", 2, ptx.low_f16, ptx.high_f16, ptx.two_f16)
SUM_F32 = _sum("sum_f32", 4, ptx.float_of, none, only)
