"""Kernels for those exchanges through slots that decoding consists of: one message to send at most, in whole packets.

They do what :mod:`tpplan.exec.slot_kernels` does where everything is at a multiple of a packet's bytes, with half the
instructions: these exchanges take about as long as those to be fetched.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec import ptx
from tpplan.exec.exchange_table import COUNTERS, ROWS
from tpplan.exec.kernels import Kernel, device_function, none, only
from tpplan.exec.messages import answered, begin, peek, receive, received, region
from tpplan.exec.ptx import word
from tpplan.exec.slot_kernels import load_packet, row, store_packet
from tpplan.exec.slot_table import (
    COLUMN,
    DATA_BYTES,
    FILLED,
    LOCAL,
    MOST_QUEUES,
    OUT,
    OWN,
    PACKET_BYTES,
    RECEIVE_WORDS,
    RECEIVES,
    RECEIVES_AT,
    RESIDUAL,
    RESIDUE,
    SOURCE_WORDS,
    WIDTH,
    X,
)

_WORD = types.uint64
_HALF = types.uint32


@device_function
def _address(matrix: Any, column: Any, width: Any, at: Any) -> Any:
    """Return the address of a byte of the columns of a matrix that are ``width`` bytes wide."""
    start, pitch = word(matrix) + column + at, word(matrix + 1)
    return start if pitch == width else start + row(at, width) * (pitch - width)


@device_function
def _first() -> Any:
    """Return where in a message the first packet of this thread is, and how far it is from there to its next."""
    return _WORD(DATA_BYTES) * _WORD(cuda.grid(1)), _WORD(DATA_BYTES) * _WORD(cuda.gridsize(1))


@device_function
def _send(counts: Any, slots: Any, place: Any, value: Any) -> None:
    """Write a packet into every slot that is to be filled."""
    low, high, k = _HALF(value), _HALF(value >> _WORD(32)), _HALF(0)
    while k < _HALF(word(FILLED)):
        ptx.roll()
        slot, number = slots[k], counts[k]
        if slot:
            ptx.post_128(slot + place, low, number, high, number)
        k = _HALF(k + _HALF(1))


@device_function
def _four(k: Any, count: Any, words: Any) -> Any:
    """Return the entries of four sources or messages from one on; of the last one again where there are fewer."""
    last = count - _WORD(1)
    start = word(RECEIVES_AT)
    e1, e2, e3 = min(k + _WORD(1), last), min(k + _WORD(2), last), min(k + _WORD(3), last)
    return start + words * k, start + words * e1, start + words * e2, start + words * e3


@device_function
def _first_of(slots: Any, entry: Any, first: Any) -> Any:
    """Return where this thread's first packet of a message is; somewhere else that it may read if it has none."""
    there = first < word(ROWS) * word(entry + _WORD(2))
    return slots[word(entry)] + region() if there else word(COUNTERS)


@device_function
def _take(counts: Any, entry: Any, found: Any, source: Any, first: Any, step: Any, turn: Any) -> None:
    """Store a message, of whose first packet something was found."""
    number, width, column = counts[word(entry)], word(entry + _WORD(2)), word(entry + _WORD(3))
    total = word(ROWS) * width
    if first < total:
        store_packet(_address(OUT, column, width, first), received(found, source, number))
        at = first + step
        while at < total:
            ptx.roll()
            source += turn
            store_packet(_address(OUT, column, width, at), receive(source, number))
            at += step
        answered(counts, entry + _WORD(1))


@device_function
def _packet_at(slots: Any, queue: Any, place: Any) -> Any:
    """Return where a source's packet of a sum is; somewhere else that it may read if it is in no queue."""
    return slots[queue] + place if queue < OWN else word(COUNTERS)


def _move(_words):  # type: ignore[no-untyped-def]
    counts, slots = cuda.shared.array(MOST_QUEUES, _HALF), cuda.shared.array(MOST_QUEUES, _WORD)
    peeked = peek()
    first, step = _first()
    turn = _WORD(cuda.blockDim.x) * _WORD(PACKET_BYTES)
    width = word(WIDTH)
    total, value = word(ROWS) * width, _WORD(0)
    if first < total:  # read while counters are
        value = load_packet(_address(X, word(COLUMN), width, first))
    begin(counts, slots, peeked)
    at, place = first, region()
    while at < total:
        _send(counts, slots, place, value)
        if word(LOCAL):
            store_packet(_address(OUT, word(LOCAL) - _WORD(1), width, at), value)
        at += step
        place += turn
        if at < total:
            value = load_packet(_address(X, word(COLUMN), width, at))
    k, count = _WORD(0), word(RECEIVES)
    while k < count:
        ptx.roll()
        e0, e1, e2, e3 = _four(k, count, _WORD(RECEIVE_WORDS))
        a0, a1, a2, a3 = (
            _first_of(slots, e0, first),
            _first_of(slots, e1, first),
            _first_of(slots, e2, first),
            (_first_of(slots, e3, first)),
        )
        p0, p1, p2, p3 = ptx.poll_128(a0), ptx.poll_128(a1), ptx.poll_128(a2), ptx.poll_128(a3)
        _take(counts, e0, p0, a0, first, step, turn)
        if k + _WORD(1) < count:
            _take(counts, e1, p1, a1, first, step, turn)
        if k + _WORD(2) < count:
            _take(counts, e2, p2, a2, first, step, turn)
        if k + _WORD(3) < count:
            _take(counts, e3, p3, a3, first, step, turn)
        k += _WORD(4)


def _sum(name: str, first: Any, second: Any, both: Any) -> Kernel:
    """Make a kernel in which every device sends its part and adds up all parts in float32, in order."""

    @device_function
    def plus(sums: Any, counts: Any, entry: Any, found: Any, address: Any, own: Any, residue: Any) -> Any:
        """Add a source, of whose packet something was found if it is in a queue."""
        queue = word(entry)
        value = residue if queue == RESIDUE else own
        if queue < OWN:
            value = received(found, address, counts[queue])
            answered(counts, entry + _WORD(1))
        low, high = _HALF(value), _HALF(value >> _WORD(32))
        return sums[0] + first(low), sums[1] + second(low), sums[2] + first(high), sums[3] + second(high)

    def add(_words):  # type: ignore[no-untyped-def]
        counts, slots = cuda.shared.array(MOST_QUEUES, _HALF), cuda.shared.array(MOST_QUEUES, _WORD)
        peeked = peek()
        at, step = _first()
        width = word(WIDTH)
        total = word(ROWS) * width
        own, residue = _own(at, total, width)  # read while counters are
        begin(counts, slots, peeked)
        place = region()
        while at < total:
            _send(counts, slots, place, own)
            zero = types.float32(-0.0)  # which added to keeps the sign of a zero
            sums = (zero, zero, zero, zero)
            k, count = _WORD(0), word(RECEIVES)
            while k < count:
                ptx.roll()
                e0, e1, e2, e3 = _four(k, count, _WORD(SOURCE_WORDS))
                q0, q1, q2, q3 = word(e0), word(e1), word(e2), word(e3)
                a0, a1 = _packet_at(slots, q0, place), _packet_at(slots, q1, place)
                a2, a3 = _packet_at(slots, q2, place), _packet_at(slots, q3, place)
                p0, p1, p2, p3 = ptx.poll_128(a0), ptx.poll_128(a1), ptx.poll_128(a2), ptx.poll_128(a3)
                sums = plus(sums, counts, e0, p0, a0, own, residue)
                if k + _WORD(1) < count:
                    sums = plus(sums, counts, e1, p1, a1, own, residue)
                if k + _WORD(2) < count:
                    sums = plus(sums, counts, e2, p2, a2, own, residue)
                if k + _WORD(3) < count:
                    sums = plus(sums, counts, e3, p3, a3, own, residue)
                k += _WORD(4)
            if count:
                value = _WORD(both(sums[0], sums[1])) | _WORD(both(sums[2], sums[3])) << _WORD(32)
                store_packet(_address(OUT, _WORD(0), width, at), value)
            at += step
            place += _WORD(cuda.blockDim.x) * _WORD(PACKET_BYTES)
            own, residue = _own(at, total, width)

    return Kernel(name, add, 1)


@device_function
def _own(at: Any, total: Any, width: Any) -> Any:
    """Return a packet's data of the device's own part of a sum, and of its residual, if it has them."""
    own = residue = _WORD(0)
    if at < total:
        if word(X):
            own = load_packet(_address(X, _WORD(0), width, at))
        if word(RESIDUAL):
            residue = load_packet(_address(RESIDUAL, _WORD(0), width, at))
    return own, residue


PACKET_MOVE = Kernel("packet_move", _move, 1)
PACKET_SUM_BF16 = _sum("packet_sum_bf16", ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
PACKET_SUM_F16 = _sum("packet_sum_f16", ptx.low_f16, ptx.high_f16, ptx.two_f16)
PACKET_SUM_F32 = _sum("packet_sum_f32", ptx.float_of, none, only)
