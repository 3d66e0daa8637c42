"""What warps and blocks find for eight queries of a token, each in a part of its places, and how kernels merge it.

Of a query that is the peak of its scores, the weight of all places, each ``2 ** (score - peak)``, and the sums of their
values so weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from attrs import frozen

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import cuda, types

#: Query heads of a block.
QUERIES = 8
#: The base-2 logarithm of e.
_LOG2_E = 1.4426950408889634

_WORD, _FLOAT, _HALF = types.uint64, types.float32, types.uint32
#: Floats between the rows of an array in shared memory, more than they have: four lanes write to four of them at once.
_APART = 4


@frozen
class Parts:
    """Where parts are, and what merges them.

    In shared memory warp w has row 8 w + i of three arrays for query i: peaks, totals, and sums, of which those of the
    even elements are before those of the odd ones, both in the order of lanes. A block leaves 8 rows of sums, in pairs
    of elements, and behind them 8 pairs of a peak and a weight.

    Attributes:
        width: floats of a query's sums: elements of a head and what fills up their last 64.
        pairs: half of them.
        pitch: floats from one row of sums to the next.
        rows: of the three arrays.
        block: bytes that a block leaves.
        merge: writes what warps have found, as rows of 16 bits or as a block's part.
        gather: puts what blocks have left where warps leave theirs.
    """

    width: int
    pairs: int
    pitch: int
    rows: int
    block: int
    merge: Callable[..., None]
    gather: Callable[..., None]


@device_function
def _times(sums: Any, share: Any) -> Any:
    return sums[0] * share, sums[1] * share, sums[2] * share, sums[3] * share


@device_function
def _plus_part(weight: Any, sums: Any, share: Any, other: Any, part: Any) -> Any:
    """Add what a block has found, which counts so much."""
    found = sums[0] + share * part[0], sums[1] + share * part[1], sums[2] + share * part[2], sums[3] + share * part[3]
    return weight + share * other, found


@device_function
def is_last(address: Any, turn: Any, ready: Any) -> Any:
    """Tell whether all other blocks have left their parts, which it then sees, as they see this block's."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        ptx.near_fence()  # for all threads of the block, whose barrier this one has passed
        turn[0] = ptx.next_turn(address, _HALF(ready - _WORD(1)))
        ptx.near_fence()
    cuda.syncthreads()
    return _WORD(turn[0]) == ready - _WORD(1)


@cache
def parts_of(  # noqa: C901, PLR0915 (of the functions in it)
    head_dim: int, warps: int, unit: float, rounded: Any, low: Any
) -> Parts:
    """Return how parts are merged.

    Args:
        head_dim: elements of a head: a multiple of 8.
        warps: of a block.
        unit: what weights of places are divided by.
        rounded: makes two numbers of 16 bits of two float32.
        low: makes float32 of a number of 16 bits.
    """
    size, width = 2 * head_dim, -(-head_dim // 64) * 64
    pairs, threads, pitch = width // 2, 32 * warps, width + _APART
    block = 4 * QUERIES * (width + 2)

    @device_function
    def store(row: Any, pair: Any, x: Any, y: Any) -> None:
        """Write two elements of a head."""
        at = pair // _WORD(32) * _WORD(128) + pair % _WORD(8) * _WORD(16) + pair // _WORD(8) % _WORD(4) * _WORD(4)
        if at < _WORD(size):
            ptx.store_32(row + at, rounded(x, y))

    @device_function
    def merge(found: Any, peaks: Any, totals: Any, used: Any, row: Any, sinks: Any, own: Any, count: Any) -> None:
        """Write what so many warps, or sets of them, have found for so many queries.

        It goes to the row, where the queries' sinks count if there are any, or if there is no row, as it is to the
        block's own part.
        """
        index = _WORD(cuda.threadIdx.x)
        while index < count * _WORD(pairs):
            which, pair = index // _WORD(pairs), index % _WORD(pairs)
            sink = ptx.load_16(sinks + which * _WORD(2)) if sinks else types.uint16(0)
            peak, weight, x, y = _FLOAT(float("-inf")), _FLOAT(0), _FLOAT(0), _FLOAT(0)
            for other in range(warps):
                if other < used:
                    peak = ptx.larger(peak, peaks[_WORD(other) * _WORD(QUERIES) + which])
            for other in range(warps):
                at = _WORD(other) * _WORD(QUERIES) + which
                there = other < used
                shrunk = ptx.exp2(peaks[at] - peak) if there else _FLOAT(0)
                weight += shrunk * totals[at] if there else _FLOAT(0)
                at = at * _WORD(pitch) + pair
                x += shrunk * found[at] if there else _FLOAT(0)
                y += shrunk * found[at + _WORD(pairs)] if there else _FLOAT(0)
            if row:
                if sinks:  # one that weighs more than all floats leaves nothing of the others
                    weight += ptx.exp2(low(_HALF(sink)) * _FLOAT(_LOG2_E) - peak) * _FLOAT(1 / unit)
                share = ptx.inverse(weight)
                store(row + which * _WORD(size), pair, x * share, y * share)
            else:
                ptx.store_64(own + index * _WORD(8), ptx.bits_of(x), ptx.bits_of(y))
                if pair == 0:
                    at = own + _WORD(4 * QUERIES * width) + which * _WORD(8)
                    ptx.store_64(at, ptx.bits_of(peak), ptx.bits_of(weight))
            index += _WORD(threads)

    @device_function
    def part(partial: Any, vector: Any, which: Any, other: Any, ready: Any) -> Any:
        """Return four floats that a block has found, and of their query its peak and its weight.

        It is the last block if there is none of this number, and then does not count.
        """
        first = partial + min(other, ready - _WORD(1)) * _WORD(block)
        a, b, c, d = ptx.load_128(first + vector * _WORD(16))
        peak, weight = ptx.load_64(first + _WORD(4 * QUERIES * width) + which * _WORD(8))
        peak = ptx.float_of(peak) if other < ready else _FLOAT(float("-inf"))
        return peak, ptx.float_of(weight), (ptx.float_of(a), ptx.float_of(b), ptx.float_of(c), ptx.float_of(d))

    @device_function
    def gather(partial: Any, found: Any, peaks: Any, totals: Any, ready: Any, count: Any, ways: Any) -> None:
        """Add up what blocks have found, in so many ways of blocks, for which there may be more threads than vectors.

        What ways have found is left where warps leave theirs.
        """
        vectors = count * _WORD(width // 4)
        way = _WORD(_HALF(cuda.threadIdx.x) // _HALF(vectors))
        vector = _WORD(cuda.threadIdx.x) - way * vectors
        while vector < vectors and way < ways:
            which, other = vector // _WORD(width // 4), way
            peak, weight, sums = _FLOAT(float("-inf")), _FLOAT(0), (_FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0))
            while other < ready:
                p0, w0, s0 = part(partial, vector, which, other, ready)
                p1, w1, s1 = part(partial, vector, which, other + ways, ready)
                p2, w2, s2 = part(partial, vector, which, other + _WORD(2) * ways, ready)
                p3, w3, s3 = part(partial, vector, which, other + _WORD(3) * ways, ready)
                p4, w4, s4 = part(partial, vector, which, other + _WORD(4) * ways, ready)
                p5, w5, s5 = part(partial, vector, which, other + _WORD(5) * ways, ready)
                higher = ptx.larger(ptx.larger(ptx.larger(p0, p1), ptx.larger(p2, p3)), ptx.larger(p4, p5))
                higher = ptx.larger(peak, higher)
                shrunk = ptx.exp2(peak - higher)
                peak, weight, sums = higher, weight * shrunk, _times(sums, shrunk)
                weight, sums = _plus_part(weight, sums, ptx.exp2(p0 - peak), w0, s0)
                weight, sums = _plus_part(weight, sums, ptx.exp2(p1 - peak), w1, s1)
                weight, sums = _plus_part(weight, sums, ptx.exp2(p2 - peak), w2, s2)
                weight, sums = _plus_part(weight, sums, ptx.exp2(p3 - peak), w3, s3)
                weight, sums = _plus_part(weight, sums, ptx.exp2(p4 - peak), w4, s4)
                weight, sums = _plus_part(weight, sums, ptx.exp2(p5 - peak), w5, s5)
                other += _WORD(6) * ways
            row = way * _WORD(QUERIES) + which
            peaks[row], totals[row] = peak, weight  # which threads of a query have alike
            at = row * _WORD(pitch) + vector % _WORD(width // 4) * _WORD(2)
            found[at], found[at + _WORD(pairs)], found[at + _WORD(1)], found[at + _WORD(pairs + 1)] = sums
            vector += _WORD(threads)

    return Parts(width, pairs, pitch, warps * QUERIES, block, merge, gather)
