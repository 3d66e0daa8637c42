"""Kernels for those exchanges through slots that decoding consists of: one message to send at most, in whole packets.

They do what :mod:`tpplan.exec.kernels.slot` does where everything is at a multiple of a packet's bytes, with half the
instructions: these exchanges take about as long as those to be fetched.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.messages import answered, begin, peek, receive, region
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.slot import load_packet, row, store_packet
from tpplan.exec.kernels.sums import none, only
from tpplan.exec.protocol.slots import (
    COLUMN,
    DATA_BYTES,
    FILLED,
    LOCAL,
    PACKET_BYTES,
    RECEIVE_WORDS,
    RECEIVES,
    RECEIVES_AT,
    SOURCE_WORDS,
    WIDTH,
)
from tpplan.exec.protocol.words import MOST_QUEUES, OUT, OWN, RESIDUAL, RESIDUE, ROWS, X
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types


@device_function
def _address(matrix: Any, column: Any, width: Any, at: Any) -> Any:
    """Return the address of a byte of the columns of a matrix that are ``width`` bytes wide."""
    start, pitch = word(matrix) + column + at, word(matrix + 1)
    return start if pitch == width else start + row(at, width) * (pitch - width)


@device_function
def _first() -> Any:
    """Return where in a message the first packet of this thread is, and how far it is from there to its next."""
    return UINT64(DATA_BYTES) * UINT64(cuda.grid(1)), UINT64(DATA_BYTES) * UINT64(cuda.gridsize(1))


@device_function
def _send(counts: Any, slots: Any, place: Any, value: Any) -> None:
    """Write a packet into every slot that is to be filled."""
    low, high, k = UINT32(value), UINT32(value >> UINT64(32)), UINT32(0)
    while k < UINT32(word(FILLED)):
        ptx.roll()
        slot, number = slots[k], counts[k]
        if slot:
            ptx.post_128(slot + place, low, number, high, number)
        k = UINT32(k + UINT32(1))


def _move(_words):  # type: ignore[no-untyped-def]
    counts, slots = cuda.shared.array(MOST_QUEUES, UINT32), cuda.shared.array(MOST_QUEUES, UINT64)
    peeked = peek()
    first, step = _first()
    turn = UINT64(cuda.blockDim.x) * UINT64(PACKET_BYTES)
    width = word(WIDTH)
    total, value = word(ROWS) * width, UINT64(0)
    if first < total:  # read while counters are
        value = load_packet(_address(X, word(COLUMN), width, first))
    begin(counts, slots, peeked)
    at, place = first, region()
    while at < total:
        _send(counts, slots, place, value)
        if word(LOCAL):
            store_packet(_address(OUT, word(LOCAL) - UINT64(1), width, at), value)
        at += step
        place += turn
        if at < total:
            value = load_packet(_address(X, word(COLUMN), width, at))
    k = UINT32(0)
    while k < UINT32(word(RECEIVES)):
        ptx.roll()
        entry = word(RECEIVES_AT) + UINT64(RECEIVE_WORDS) * UINT64(k)
        queue, width, column = word(entry), word(entry + UINT64(2)), word(entry + UINT64(3))
        source, at, total = slots[queue] + region(), first, word(ROWS) * width
        while at < total:
            store_packet(_address(OUT, column, width, at), receive(source, counts[queue]))
            at += step
            source += turn
        if first < total:
            answered(counts, entry + UINT64(1))
        k = UINT32(k + UINT32(1))


def _sum(name: str, first: Any, second: Any, both: Any) -> Kernel:
    """Make a kernel in which every device sends its part and adds up all parts in float32, in order."""

    def add(_words):  # type: ignore[no-untyped-def]
        counts, slots = cuda.shared.array(MOST_QUEUES, UINT32), cuda.shared.array(MOST_QUEUES, UINT64)
        peeked = peek()
        at, step = _first()
        width = word(WIDTH)
        total = word(ROWS) * width
        own, residue = _own(at, total, width)  # read while counters are
        begin(counts, slots, peeked)
        place = region()
        while at < total:
            _send(counts, slots, place, own)
            s0 = s1 = t0 = t1 = types.float32(-0.0)  # which added to keeps the sign of a zero
            k = UINT32(0)
            while k < UINT32(word(RECEIVES)):
                ptx.roll()
                entry = word(RECEIVES_AT) + UINT64(SOURCE_WORDS) * UINT64(k)
                queue = word(entry)
                value = residue if queue == RESIDUE else own
                if queue < OWN:
                    value = receive(slots[queue] + place, counts[queue])
                    answered(counts, entry + UINT64(1))
                low, high = UINT32(value), UINT32(value >> UINT64(32))
                s0, t0, s1, t1 = s0 + first(low), t0 + second(low), s1 + first(high), t1 + second(high)
                k = UINT32(k + UINT32(1))
            if word(RECEIVES):
                value = UINT64(both(s0, t0)) | UINT64(both(s1, t1)) << UINT64(32)
                store_packet(_address(OUT, UINT64(0), width, at), value)
            at += step
            place += UINT64(cuda.blockDim.x) * UINT64(PACKET_BYTES)
            own, residue = _own(at, total, width)

    return Kernel(name, add, 1)


@device_function
def _own(at: Any, total: Any, width: Any) -> Any:
    """Return a packet's data of the device's own part of a sum, and of its residual, if it has them."""
    own = residue = UINT64(0)
    if at < total:
        if word(X):
            own = load_packet(_address(X, UINT64(0), width, at))
        if word(RESIDUAL):
            residue = load_packet(_address(RESIDUAL, UINT64(0), width, at))
    return own, residue


PACKET_MOVE = Kernel("packet_move", _move, 1)
PACKET_SUM_BF16 = _sum("packet_sum_bf16", ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
PACKET_SUM_F16 = _sum("packet_sum_f16", ptx.low_f16, ptx.high_f16, ptx.two_f16)
PACKET_SUM_F32 = _sum("packet_sum_f32", ptx.float_of, none, only)
