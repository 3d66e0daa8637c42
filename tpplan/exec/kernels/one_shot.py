"""Kernels that add up all devices' tensors on every device, and hold the sum in registers until all have read.

They go through the tables of :mod:`tpplan.exec.protocol.direct` as direct kernels do, where everything is at a multiple
of 16 bytes. What a device reads of others crosses its link once, and nothing but flags is written to others: that takes
less time than dividing the sum as long as links are not full, and on two devices moves no more.

A block may overwrite the device's tensors once the blocks of the same index have read them: these have the same vectors
of all tensors, as all devices have the same numbers of blocks and threads.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.direct import PLACES, adding, begin, learn, operand, pitch, signal, tell, wait_for_reads
from tpplan.exec.kernels.exchange import counter
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.sums import none, only
from tpplan.exec.protocol.direct import STEPS, THREADS, VECTOR_BYTES
from tpplan.exec.protocol.words import ALONE, MOST_SEQUENCES, ROWS
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types


@device_function
def _place(places: Any, entry: Any, index: Any, per_row: Any) -> Any:
    """Return the address of a vector of an operand."""
    down, width = pitch(places, entry), UINT64(per_row) * UINT64(VECTOR_BYTES)
    start = operand(places, entry, UINT64(0)) + UINT64(VECTOR_BYTES) * UINT64(index)
    return start if down == width else start + UINT64(index // per_row) * (down - width)


def _sum(name: str, first: Any, second: Any, both: Any) -> Kernel:  # noqa: PLR0915 (four vectors, as arrays are no registers)
    """Make a kernel that adds up in float32, in order, and rounds once."""
    plus, rounded = adding(first, second, both)

    def run(_words):  # type: ignore[no-untyped-def]  # noqa: PLR0915
        counts = cuda.shared.array(MOST_SEQUENCES, UINT32)
        places = cuda.shared.array(PLACES, UINT64)
        seen = cuda.shared.array(THREADS, UINT32)
        ptx.after_earlier()
        if word(STEPS) == UINT64(0):
            return
        alone = ptx.poll_32(counter(ALONE))
        begin(counts, places)
        at = tell(counts, word(STEPS + 1))
        if alone:  # see tpplan.exec.cuda.programmatic_launch
            ptx.let_next_begin()
        if learn(counts, places, at):
            return
        at += UINT64(2) + UINT64(4) * word(at + UINT64(1))
        per_row = UINT32(word(at + UINT64(1))) // UINT32(VECTOR_BYTES)
        total, step = UINT32(word(ROWS)) * per_row, UINT32(cuda.gridsize(1))
        i0 = UINT32(cuda.grid(1))
        i1, i2, i3 = UINT32(i0 + step), UINT32(i0 + UINT32(2) * step), UINT32(i0 + UINT32(3) * step)
        h0, h1, h2, h3 = UINT64(i0 < total), UINT64(i1 < total), UINT64(i2 < total), UINT64(i3 < total)
        entries = at + UINT64(7)  # of a single target, in the context's memory, which registers stand in for
        source, sources, k = entries + UINT64(1), UINT32(word(entries)), UINT32(0)
        zero = types.float32(-0.0)  # which added to keeps the sign of a zero
        a = b = c = d = (zero, zero, zero, zero, zero, zero, zero, zero)
        while UINT32(k + UINT32(1)) < sources:  # two at a time, for one of them may be far away
            ptx.roll()
            other = source + UINT64(2)
            w0 = ptx.poll_128_if(_place(places, source, i0, per_row), h0)
            w1 = ptx.poll_128_if(_place(places, source, i1, per_row), h1)
            w2 = ptx.poll_128_if(_place(places, source, i2, per_row), h2)
            w3 = ptx.poll_128_if(_place(places, source, i3, per_row), h3)
            x0 = ptx.poll_128_if(_place(places, other, i0, per_row), h0)
            x1 = ptx.poll_128_if(_place(places, other, i1, per_row), h1)
            x2 = ptx.poll_128_if(_place(places, other, i2, per_row), h2)
            x3 = ptx.poll_128_if(_place(places, other, i3, per_row), h3)
            a, b, c, d = plus(plus(a, w0), x0), plus(plus(b, w1), x1), plus(plus(c, w2), x2), plus(plus(d, w3), x3)
            source += UINT64(4)
            k = UINT32(k + UINT32(2))
        if k < sources:
            w0 = ptx.poll_128_if(_place(places, source, i0, per_row), h0)
            w1 = ptx.poll_128_if(_place(places, source, i1, per_row), h1)
            w2 = ptx.poll_128_if(_place(places, source, i2, per_row), h2)
            w3 = ptx.poll_128_if(_place(places, source, i3, per_row), h3)
            a, b, c, d = plus(a, w0), plus(b, w1), plus(c, w2), plus(d, w3)
            source += UINT64(2)
        w0, w1, w2, w3 = rounded(a), rounded(b), rounded(c), rounded(d)
        # Whatever was read has come before any flag says so: a store of all of it waits for it.
        bits = w0[0] ^ w0[1] ^ w0[2] ^ w0[3] ^ w1[0] ^ w1[1] ^ w1[2] ^ w1[3]
        bits = bits ^ w2[0] ^ w2[1] ^ w2[2] ^ w2[3] ^ w3[0] ^ w3[1] ^ w3[2] ^ w3[3]
        ptx.shared_store_32(ptx.shared_address(seen) + UINT64(4) * UINT64(cuda.threadIdx.x), bits)
        at = signal(counts, source, UINT32(0))
        if wait_for_reads(counts, at):
            return
        target = at + UINT64(2) + UINT64(3) * word(at + UINT64(1)) + UINT64(7)
        _store(_place(places, target, i0, per_row), w0, h0)
        _store(_place(places, target, i1, per_row), w1, h1)
        _store(_place(places, target, i2, per_row), w2, h2)
        _store(_place(places, target, i3, per_row), w3, h3)

    return Kernel(name, run, 1)


@device_function
def _store(address: Any, words: Any, is_there: Any) -> None:
    if is_there:
        ptx.store_128(address, words[0], words[1], words[2], words[3])


ONE_SHOT_SUM_BF16 = _sum("one_shot_sum_bf16", ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
ONE_SHOT_SUM_F16 = _sum("one_shot_sum_f16", ptx.low_f16, ptx.high_f16, ptx.two_f16)
ONE_SHOT_SUM_F32 = _sum("one_shot_sum_f32", ptx.float_of, none, only)
