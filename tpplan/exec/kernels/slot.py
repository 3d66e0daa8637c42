"""Kernels that exchange small messages through slots, one running on each device.

A message is cut into packets of 8 bytes, row by row. In a slot a packet takes 16 bytes: 4 of data, the number of the
message, 4 of data, the number again. It is stored at once and loaded at once: whoever finds the number has the data,
and needs no other flag. Every block of threads has packets, counters and a part of each slot of its own, the same on
all devices, so that the blocks of a kernel need not wait for each other.

How messages are numbered and slots freed is in :mod:`tpplan.exec.kernels.messages`. What a kernel exchanges is in its
table; see :mod:`tpplan.exec.protocol.slots`.
"""

from __future__ import annotations

from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.kernels.messages import answered, begin, peek, receive, region
from tpplan.exec.kernels.ptx import word
from tpplan.exec.kernels.sums import none, only
from tpplan.exec.protocol.slots import (
    DATA_BYTES,
    LANES_AT,
    PACKET_BYTES,
    RECEIVE_WORDS,
    RECEIVES,
    RECEIVES_AT,
    SEND_WORDS,
    SENDS,
    SENDS_AT,
    SOURCE_WORDS,
    WIDTH,
)
from tpplan.exec.protocol.words import MOST_QUEUES, OUT, OWN, PIECE, RESIDUAL, RESIDUE, ROWS, X
from tpplan.exec.toolchain.language import UINT32, UINT64, cuda, types


@device_function
def load_packet(address: Any) -> Any:
    """Return a packet's data."""
    low, high = ptx.load_64(address)
    return UINT64(low) | UINT64(high) << UINT64(32)


@device_function
def store_packet(address: Any, value: Any) -> None:
    """Write a packet's data."""
    ptx.store_64(address, UINT32(value), UINT32(value >> UINT64(32)))


@device_function
def load_piece(address: Any, size: Any) -> Any:
    """Return 1, 2, 4 or 8 bytes."""
    if size == DATA_BYTES:
        return load_packet(address)
    if size == 4:  # noqa: PLR2004
        return UINT64(ptx.load_32(address))
    if size == 2:  # noqa: PLR2004
        return UINT64(ptx.load_16(address))
    return UINT64(ptx.load_8(address))


@device_function
def store_piece(address: Any, value: Any, size: Any) -> None:
    """Write 1, 2, 4 or 8 bytes."""
    if size == DATA_BYTES:
        store_packet(address, value)
    elif size == 4:  # noqa: PLR2004
        ptx.store_32(address, UINT32(value))
    elif size == 2:  # noqa: PLR2004
        ptx.store_16(address, types.uint16(value))
    else:
        ptx.store_8(address, types.uint16(value))


@device_function
def row(at: Any, width: Any) -> Any:
    """Return the row in which a byte of a message lies; messages are shorter than 4 GiB."""
    return UINT64(UINT32(at) // UINT32(width))


@device_function
def _gather(address: Any, pitch: Any, width: Any, total: Any, packet: Any, piece: Any) -> Any:
    """Return the bytes of a packet from a matrix of ``width`` bytes a row; a message may end within a packet."""
    at, end = packet * UINT64(DATA_BYTES), packet * UINT64(DATA_BYTES) + UINT64(DATA_BYTES)
    if piece == DATA_BYTES:  # and so is the width a multiple of it
        start = row(at, width) * (pitch - width) if pitch != width else UINT64(0)
        return load_packet(address + start + at)
    value, shift = UINT64(0), UINT64(0)
    while at < min(end, total):
        value |= load_piece(address + row(at, width) * (pitch - width) + at, piece) << shift
        shift += piece * UINT64(8)
        at += piece
    return value


@device_function
def _scatter(
    address: Any, pitch: Any, message: Any, skip: Any, width: Any, total: Any, packet: Any, value: Any, piece: Any
) -> None:
    """Write those bytes of a packet that belong to the wanted columns of a message."""
    at, end = packet * UINT64(DATA_BYTES), packet * UINT64(DATA_BYTES) + UINT64(DATA_BYTES)
    while at < min(end, total):
        line = row(at, message) if pitch != message or width != message else UINT64(0)
        column = at - line * message
        if skip <= column < skip + width or width == message:
            store_piece(address + line * pitch + (column - skip), value, piece)
        value >>= piece * UINT64(8)  # of a whole packet nothing is left, whatever a shift by 64 gives
        at += piece


@device_function
def _prefetch(packet: Any) -> Any:
    """Return the first packet that this thread sends, if it has one: it is read while counters are."""
    if word(SENDS) > 0:
        first, width = word(word(SENDS_AT)), word(word(SENDS_AT) + UINT64(1))
        if packet * UINT64(DATA_BYTES) < word(ROWS) * width:
            return _gather(word(X) + first, word(X + 1), width, word(ROWS) * width, packet, word(PIECE))
    return UINT64(0)


@device_function
def _send(counts: Any, slots: Any, packet: Any, step: Any, value: Any) -> None:
    """Write every message into its slots, and to the device's own output; the first packet is there already."""
    rows = word(ROWS)
    for k in range(word(SENDS)):
        entry = word(SENDS_AT) + UINT64(SEND_WORDS) * UINT64(k)
        width, local = word(entry + UINT64(1)), word(entry + UINT64(4))
        total, at, place = rows * width, packet, region()
        while at * UINT64(DATA_BYTES) < total:
            if k > 0 or at != packet:
                value = _gather(word(X) + word(entry), word(X + 1), width, total, at, word(PIECE))
            low, high = UINT32(value), UINT32(value >> UINT64(32))
            for lane in range(word(entry + UINT64(2)), word(entry + UINT64(3))):
                queue = word(word(LANES_AT) + UINT64(lane))
                ptx.post_128(slots[queue] + place, low, counts[queue], high, counts[queue])
            if local:
                target = word(OUT) + local - UINT64(1)
                _scatter(target, word(OUT + 1), width, UINT64(0), width, total, at, value, word(PIECE))
            at += step
            place += UINT64(cuda.blockDim.x) * UINT64(PACKET_BYTES)


def _move(_words):  # type: ignore[no-untyped-def]
    counts, slots = cuda.shared.array(MOST_QUEUES, UINT32), cuda.shared.array(MOST_QUEUES, UINT64)
    packet, step = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1))
    peeked = peek()
    value = _prefetch(packet)
    begin(counts, slots, peeked)
    _send(counts, slots, packet, step, value)
    rows = word(ROWS)
    for k in range(word(RECEIVES)):
        entry = word(RECEIVES_AT) + UINT64(RECEIVE_WORDS) * UINT64(k)
        queue, message, target = word(entry), word(entry + UINT64(2)), word(OUT) + word(entry + UINT64(3))
        skip, width = word(entry + UINT64(4)), word(entry + UINT64(5))
        source, at = slots[queue] + region(), packet
        while at * UINT64(DATA_BYTES) < rows * message:
            value = receive(source, counts[queue])
            _scatter(target, word(OUT + 1), message, skip, width, rows * message, at, value, word(PIECE))
            at += step
            source += UINT64(cuda.blockDim.x) * UINT64(PACKET_BYTES)
        if packet * UINT64(DATA_BYTES) < rows * message:
            answered(counts, entry + UINT64(1))


def _sum(name: str, first: Any, second: Any, both: Any) -> Kernel:
    """Make a kernel in which every device sends its part and adds up all parts in float32, in order."""

    def add(_words):  # type: ignore[no-untyped-def]
        counts, slots = cuda.shared.array(MOST_QUEUES, UINT32), cuda.shared.array(MOST_QUEUES, UINT64)
        packet, step = UINT64(cuda.grid(1)), UINT64(cuda.gridsize(1))
        peeked = peek()
        value = _prefetch(packet)
        begin(counts, slots, peeked)
        _send(counts, slots, packet, step, value)
        width, place = word(WIDTH), region()
        total = word(ROWS) * width
        while packet * UINT64(DATA_BYTES) < total and word(RECEIVES) > 0:
            own = residue = UINT64(0)  # read before anything is waited for
            if word(X):
                own = _gather(word(X), word(X + 1), width, total, packet, word(PIECE))
            if word(RESIDUAL):
                residue = _gather(word(RESIDUAL), word(RESIDUAL + 1), width, total, packet, word(PIECE))
            s0 = s1 = t0 = t1 = types.float32(-0.0)  # which added to keeps the sign of a zero
            for k in range(word(RECEIVES)):
                entry = word(RECEIVES_AT) + UINT64(SOURCE_WORDS) * UINT64(k)
                queue = word(entry)
                if queue == OWN:
                    value = own
                elif queue == RESIDUE:
                    value = residue
                else:
                    value = receive(slots[queue] + place, counts[queue])
                    answered(counts, entry + UINT64(1))
                low, high = UINT32(value), UINT32(value >> UINT64(32))
                s0, t0, s1, t1 = s0 + first(low), t0 + second(low), s1 + first(high), t1 + second(high)
            value = UINT64(both(s0, t0)) | UINT64(both(s1, t1)) << UINT64(32)
            _scatter(word(OUT), word(OUT + 1), width, UINT64(0), width, total, packet, value, word(PIECE))
            packet += step
            place += UINT64(cuda.blockDim.x) * UINT64(PACKET_BYTES)

    return Kernel(name, add, 1)


SLOT_MOVE = Kernel("slot_move", _move, 1)
SLOT_SUM_BF16 = _sum("slot_sum_bf16", ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
SLOT_SUM_F16 = _sum("slot_sum_f16", ptx.low_f16, ptx.high_f16, ptx.two_f16)
SLOT_SUM_F32 = _sum("slot_sum_f32", ptx.float_of, none, only)
