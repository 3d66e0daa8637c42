"""Kernels that exchange small messages through slots, one running on each device.

A message is cut into packets of 8 bytes, row by row. In a slot a packet takes 16 bytes: 4 of data, the number of the
message, 4 of data, the number again. It is stored at once and loaded at once: whoever finds the number has the data,
and needs no other flag. Every block of threads has packets, counters and a part of each slot of its own, the same on
all devices, so that the blocks of a kernel need not wait for each other.

What a kernel exchanges is in its table; see :mod:`tpplan.exec.slot_table`.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec import ptx
from tpplan.exec.kernels import Kernel, none, only
from tpplan.exec.slot_table import (
    COUNTER_BYTES,
    CREDITS,
    DATA_BYTES,
    FETCHED,
    LOCALS,
    MOST_COUNTERS,
    MOST_WORDS,
    OWN,
    PACKET_BYTES,
    RECEIVES,
    REGION,
    SENDS,
    SEQUENCES,
    STRIDE,
    WIDTH,
)

_WORD = types.uint64
_HALF = types.uint32
#: How often a thread polls before it looks at the clock.
_PATIENCE = 0xFFF


def _device(function: Any) -> Any:
    """Make a function of kernels, without a call."""
    return cuda.jit(device=True, inline="always")(function)


@_device
def _load(address: Any, size: Any) -> Any:
    """Return 1, 2, 4 or 8 bytes."""
    if size == 8:  # noqa: PLR2004
        low, high = ptx.load_64(address)
        return _WORD(low) | _WORD(high) << _WORD(32)
    if size == 4:  # noqa: PLR2004
        return _WORD(ptx.load_32(address))
    if size == 2:  # noqa: PLR2004
        return _WORD(ptx.load_16(address))
    return _WORD(ptx.load_8(address))


@_device
def _store(address: Any, value: Any, size: Any) -> None:
    """Write 1, 2, 4 or 8 bytes."""
    if size == 8:  # noqa: PLR2004
        ptx.store_64(address, _HALF(value), _HALF(value >> _WORD(32)))
    elif size == 4:  # noqa: PLR2004
        ptx.store_32(address, _HALF(value))
    elif size == 2:  # noqa: PLR2004
        ptx.store_16(address, types.uint16(value))
    else:
        ptx.store_8(address, types.uint16(value))


@_device
def _gather(address: Any, pitch: Any, width: Any, total: Any, packet: Any, piece: Any) -> Any:
    """Return the 8 bytes of a packet from the rows of a matrix, in pieces that it is aligned to."""
    at, end, shift, value = packet * _WORD(8), packet * _WORD(8) + _WORD(8), _WORD(0), _WORD(0)
    while at < min(end, total):
        row = at // width
        value |= _load(address + row * pitch + (at - row * width), piece) << shift
        at += piece
        shift += piece * _WORD(8)
    return value


@_device
def _scatter(
    address: Any, pitch: Any, message: Any, skip: Any, width: Any, total: Any, packet: Any, value: Any, piece: Any
) -> None:
    """Write the bytes of a packet that fall into the wanted columns of a message."""
    at, end = packet * _WORD(8), packet * _WORD(8) + _WORD(8)
    while at < min(end, total):
        row = at // message
        column = at - row * message
        if skip <= column < skip + width:
            _store(address + row * pitch + (column - skip), value, piece)
        value >>= piece * _WORD(8)  # of a whole packet nothing is left, whatever a shift by 64 gives
        at += piece


@_device
def _receive(address: Any, number: Any, start: Any, deadline: Any, status: Any) -> Any:
    """Return the data of a packet as soon as it is there; garbage after the deadline, which the status tells."""
    low, first, high, second = ptx.poll_128(address)
    polls = _HALF(0)
    while first != number or second != number:
        polls += _HALF(1)
        if polls & _HALF(_PATIENCE) == 0 and ptx.cycles() - start > deadline:
            ptx.post_32(status, _HALF(1))
            break
        low, first, high, second = ptx.poll_128(address)
    return _WORD(low) | _WORD(high) << _WORD(32)


@_device
def _counter(counters: Any, number: Any) -> Any:
    """Return the address of the block's part of a counter."""
    return counters + _WORD(COUNTER_BYTES) * _WORD(number) + _WORD(4) * _WORD(cuda.blockIdx.x)


@_device
def _read(table: Any, words: Any, address: Any, counts: Any, counters: Any, count: Any) -> None:
    """Fetch the table and all of the device's counters into shared memory, at the same time."""
    thread, threads = _WORD(cuda.threadIdx.x), _WORD(cuda.blockDim.x)
    if thread < count:
        counts[thread] = ptx.poll_32(_counter(counters, thread))
    index = thread
    while index < words:
        table[index] = ptx.load_word(address + _WORD(8) * _WORD(index))
        index += threads
    cuda.syncthreads()


@_device
def _await_credits(table: Any, counts: Any, start: Any, deadline: Any, status: Any) -> None:
    """Wait until the slots that are to be filled were read by all their receivers."""
    thread = _WORD(cuda.threadIdx.x)  # as what it is compared with, or numba compares in float64
    if thread < table[CREDITS]:
        entry = table[CREDITS + 1] + _WORD(3) * _WORD(thread)
        number, address = counts[table[entry]] + _HALF(1), table[entry + 2] + _WORD(4) * _WORD(cuda.blockIdx.x)
        freed = counts[table[entry + 1] - _WORD(1)] if table[entry + 1] else ptx.poll_32(address)
        polls = _HALF(0)
        while _HALF(number - freed) > _HALF(2):
            polls += _HALF(1)
            if polls & _HALF(_PATIENCE) == 0 and ptx.cycles() - start > deadline:
                ptx.post_32(status, _HALF(2))
                break
            freed = ptx.poll_32(address)
    cuda.syncthreads()


@_device
def _send(table: Any, counts: Any, rows: Any, x: Any, pitch: Any, piece: Any) -> None:
    """Write every message into its slots."""
    block, thread = _WORD(cuda.blockIdx.x), _WORD(cuda.threadIdx.x)
    step = _WORD(cuda.gridDim.x) * _WORD(cuda.blockDim.x)
    for k in range(table[SENDS]):
        entry = table[SENDS + 1] + _WORD(4) * _WORD(k)
        first, width, lanes, lane = table[entry], table[entry + 1], table[entry + 2], table[entry + 3]
        total = rows * width
        packet = block * _WORD(cuda.blockDim.x) + thread
        offset = block * table[REGION] + thread * _WORD(PACKET_BYTES)
        while packet * _WORD(DATA_BYTES) < total:
            value = _gather(x + first, pitch, width, total, packet, piece)
            low, high = _HALF(value), _HALF(value >> _WORD(32))
            index = lane
            while index < lane + _WORD(2) * lanes:
                number = _HALF(counts[table[index + 1]] + _HALF(1))
                slot = table[index] + _WORD(number & _HALF(1)) * table[STRIDE]
                ptx.post_128(slot + offset, low, number, high, number)
                index += _WORD(2)
            packet += step
            offset += _WORD(cuda.blockDim.x) * _WORD(PACKET_BYTES)


@_device
def _finish(table: Any, counts: Any, counters: Any, words: Any, sequence: Any, credit: Any) -> None:
    """Count the messages, and free the slots that were read.

    Args:
        table: of the kernel.
        counts: of messages, before.
        counters: address of the device's.
        words: of each entry of what is received.
        sequence: which of them is the counter.
        credit: which of them is the address of the credit; 0 where there is none.
    """
    cuda.syncthreads()
    thread = _WORD(cuda.threadIdx.x)  # as what it is compared with, or numba compares in float64
    if thread < table[SEQUENCES]:
        number = table[table[SEQUENCES + 1] + _WORD(thread)]
        ptx.store_32(_counter(counters, number), _HALF(counts[number] + _HALF(1)))
    if thread < table[RECEIVES]:
        entry = table[RECEIVES + 1] + _WORD(words) * _WORD(thread)
        if table[entry + _WORD(credit)]:
            freed = _HALF(counts[table[entry + _WORD(sequence)]] + _HALF(1))
            ptx.post_32(table[entry + _WORD(credit)] + _WORD(4) * _WORD(cuda.blockIdx.x), freed)


def _move(  # type: ignore[no-untyped-def]
    address, words, counters, count, rows, x, x_pitch, x_piece, out, out_pitch, out_piece, deadline, status
):
    table, counts = cuda.shared.array(MOST_WORDS, _WORD), cuda.shared.array(MOST_COUNTERS, _HALF)
    start = ptx.cycles()
    _read(table, words, address, counts, counters, count)
    _await_credits(table, counts, start, deadline, status)
    _send(table, counts, rows, x, x_pitch, x_piece)
    block, thread = _WORD(cuda.blockIdx.x), _WORD(cuda.threadIdx.x)
    step = _WORD(cuda.gridDim.x) * _WORD(cuda.blockDim.x)
    for k in range(table[LOCALS]):
        entry = table[LOCALS + 1] + _WORD(3) * _WORD(k)
        width = table[entry + 2]
        packet = block * _WORD(cuda.blockDim.x) + thread
        while packet * _WORD(DATA_BYTES) < rows * width:
            value = _gather(x + table[entry], x_pitch, width, rows * width, packet, x_piece)
            target = out + table[entry + 1]
            _scatter(target, out_pitch, width, _WORD(0), width, rows * width, packet, value, out_piece)
            packet += step
    for k in range(table[RECEIVES]):
        entry = table[RECEIVES + 1] + _WORD(7) * _WORD(k)
        number, message = _HALF(counts[table[entry + 1]] + _HALF(1)), table[entry + 3]
        slot = table[entry] + _WORD(number & _HALF(1)) * table[STRIDE]
        packet = block * _WORD(cuda.blockDim.x) + thread
        offset = block * table[REGION] + thread * _WORD(PACKET_BYTES)
        while packet * _WORD(DATA_BYTES) < rows * message:
            value = _receive(slot + offset, number, start, deadline, status)
            target = out + table[entry + 6]
            skip, width = table[entry + 4], table[entry + 5]
            _scatter(target, out_pitch, message, skip, width, rows * message, packet, value, out_piece)
            packet += step
            offset += _WORD(cuda.blockDim.x) * _WORD(PACKET_BYTES)
    _finish(table, counts, counters, 7, 1, 2)


def _sum(name: str, first: Any, second: Any, both: Any) -> Kernel:
    """Make a kernel in which every device sends its part and adds up all parts in float32, in order."""

    def add(  # type: ignore[no-untyped-def]
        address, words, counters, count, rows, x, x_pitch, x_piece, r, r_pitch, r_piece, out, out_pitch, out_piece,
        deadline, status,
    ):  # fmt: skip
        table, counts = cuda.shared.array(MOST_WORDS, _WORD), cuda.shared.array(MOST_COUNTERS, _HALF)
        start = ptx.cycles()
        _read(table, words, address, counts, counters, count)
        _await_credits(table, counts, start, deadline, status)
        _send(table, counts, rows, x, x_pitch, x_piece)
        block, thread = _WORD(cuda.blockIdx.x), _WORD(cuda.threadIdx.x)
        packet = block * _WORD(cuda.blockDim.x) + thread
        offset = block * table[REGION] + thread * _WORD(PACKET_BYTES)
        width, total = table[WIDTH], rows * table[WIDTH]
        while packet * _WORD(DATA_BYTES) < total and table[RECEIVES] > 0:
            s0 = s1 = t0 = t1 = types.float32(0)
            for k in range(table[RECEIVES]):
                entry = table[RECEIVES + 1] + _WORD(4) * _WORD(k)
                if table[entry] == FETCHED:
                    number = _HALF(counts[table[entry + 2]] + _HALF(1))
                    slot = table[entry + 1] + _WORD(number & _HALF(1)) * table[STRIDE]
                    value = _receive(slot + offset, number, start, deadline, status)
                elif table[entry] == OWN:
                    value = _gather(x, x_pitch, width, total, packet, x_piece)
                else:
                    value = _gather(r, r_pitch, width, total, packet, r_piece)
                low, high = _HALF(value), _HALF(value >> _WORD(32))
                if k == 0:  # which keeps the sign of a zero
                    s0, t0, s1, t1 = first(low), second(low), first(high), second(high)
                else:
                    s0, t0, s1, t1 = s0 + first(low), t0 + second(low), s1 + first(high), t1 + second(high)
            value = _WORD(both(s0, t0)) | _WORD(both(s1, t1)) << _WORD(32)
            _scatter(out, out_pitch, width, _WORD(0), width, total, packet, value, out_piece)
            packet += _WORD(cuda.gridDim.x) * _WORD(cuda.blockDim.x)
            offset += _WORD(cuda.blockDim.x) * _WORD(PACKET_BYTES)
        _finish(table, counts, counters, 4, 2, 3)

    return Kernel(name, add, 16)


SLOT_MOVE = Kernel("slot_move", _move, 13)
SLOT_SUM_BF16 = _sum("slot_sum_bf16", ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
SLOT_SUM_F16 = _sum("slot_sum_f16", ptx.low_f16, ptx.high_f16, ptx.two_f16)
SLOT_SUM_F32 = _sum("slot_sum_f32", ptx.float_of, none, only)
