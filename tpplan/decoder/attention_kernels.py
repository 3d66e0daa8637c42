"""Kernels for the attention of a decoding step: one token of each of some sequences attends to its sequence's cache.

The places of a cache that a token sees are cut into tiles of 16. A block has successive tiles, which its warps take in
turns; eight query heads that read one KV head are the rows of their matrix instruction. Softmax is done on the way
(Milakov and Gimelshein, arXiv 1805.02867), in float32; weights go to the matrix instruction as a sum of two numbers of
16 bits, which is nearly as good as float32. What warps have found is merged in shared memory, and what blocks have
found by the last of them that is ready (Dao et al., Flash-Decoding, 2023).
How many blocks have something to do depends on how many places the token sees, which is in the device's memory.
"""

from __future__ import annotations

import re
from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec import ptx, tiles
from tpplan.exec.kernels import Kernel

#: Query heads of a block.
QUERIES = 8
#: Blocks that share the places of a token, at most.
MOST_SPLITS = 128
#: Places of a tile.
TILE = 16
#: Elements of the heads that leave registers for two tiles.
WIDE = 128

_NAME = re.compile("ATTENTION_(BF16|F16)_(?P<size>[0-9]+)(?P<capped>_CAPPED)?")
_WORD, _FLOAT, _HALF = types.uint64, types.float32, types.uint32
_EVERY = 0xFFFFFFFF
#: Floats between the rows of an array in shared memory, more than they have: four lanes write to four of them at once.
_APART = 4


def _inline(function: Any) -> Any:
    return cuda.jit(device=True, inline="always")(function)


@_inline
def _of_row(value: Any, merge: Any) -> Any:
    """Return what the four lanes of a query have together."""
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 1))
    return merge(value, cuda.shfl_xor_sync(_EVERY, value, 2))


@_inline
def _of_warp(value: Any, merge: Any) -> Any:
    """Return what all lanes have together."""
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 16))
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 8))
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 4))
    return _of_row(value, merge)


@_inline
def _plus(x: Any, y: Any) -> Any:
    return x + y


@_inline
def _capped(x: Any, cap: Any) -> Any:
    """Return ``cap × tanh(x)``."""
    return cap - (cap + cap) * ptx.inverse(_FLOAT(1) + ptx.exp2(x * _FLOAT(2.8853900817779268)))  # 2 / ln 2


@_inline
def _plus_part(sums: Any, part: Any, shares: Any, other: Any, which: Any, ready: Any) -> Any:
    """Add four floats that a block has found, if there is this block."""
    share = shares[min(other, ready - _WORD(1)) * _WORD(QUERIES) + which] if other < ready else _FLOAT(0)
    x, y = sums[0] + share * ptx.float_of(part[0]), sums[1] + share * ptx.float_of(part[1])
    return x, y, sums[2] + share * ptx.float_of(part[2]), sums[3] + share * ptx.float_of(part[3])


def attention(  # noqa: C901, PLR0915 (of the functions in it)
    name: str, head_dim: int, warps: int, *, ahead: bool, capped: bool
) -> Kernel:
    """Make a kernel.

    Its grid: as many blocks as share a token's places, KV heads × eights of the query heads of each, tokens. Its words:

    - q, its pitch: address, and bytes from one token to the next; heads are side by side.
    - k, v, their pitch: addresses, and bytes from one sequence to the next; heads and places are side by side.
    - positions: address; of 64 bits each, not negative.
    - out, its pitch: as of q.
    - partial: address of what blocks leave to the last: ``[tokens, grid's second size, splits, 8, width + 2]`` floats.
    - turns: address of 32 bits for each token and number of the grid's second size; zero, and zero again afterwards.
    - length: places of a sequence.
    - group: query heads per KV head.
    - factor, cap: bits of float32. The base-2 logarithm of a weight is ``score × factor``, or if they have a cap,
      ``cap × tanh(score × factor)``.
    - least: tiles that a block has, at least, unless there are none left.

    Args:
        name: of the kernel.
        head_dim: elements of a head: a multiple of 8.
        warps: of a block; its shared memory is as many times 32 bytes for each element of a head.
        ahead: whether a warp asks for its next tile while it has one, for which wide heads leave too few registers.
        capped: whether scores have a cap.
    """
    low, high, both, multiply = _OF_KINDS[name.split("_")[1]]
    size = 2 * head_dim
    load_queries = tiles.loads(size, 64, clear=True)
    load_keys, load_values = tiles.loads(size, 64), tiles.loads(size, 128)
    width = -(-head_dim // 64) * 64
    scores, weighed, zeros = tiles.scores(multiply), tiles.weighed(multiply), tiles.zeros(width // 4)
    pairs, threads, pitch = width // 2, 32 * warps, width + _APART
    rows, block = warps * QUERIES, 4 * QUERIES * (width + 2)
    floats, split_rows = rows * pitch, MOST_SPLITS * QUERIES

    @_inline
    def keys_of(base: Any, place: Any, last: Any, t: Any) -> Any:
        """Return a lane's part of the keys of 16 places, of which the first is at its row."""
        first = load_keys(base + min(place, last) * _WORD(size), t * _WORD(16))
        return first, load_keys(base + min(place + _WORD(8), last) * _WORD(size), t * _WORD(16))

    @_inline
    def values_of(base: Any, place: Any, last: Any, g: Any) -> Any:
        """Return a lane's part of the values of 16 places, two pairs of them."""
        v0 = load_values(base + min(place, last) * _WORD(size), g * _WORD(16))
        v1 = load_values(base + min(place + _WORD(1), last) * _WORD(size), g * _WORD(16))
        v2 = load_values(base + min(place + _WORD(8), last) * _WORD(size), g * _WORD(16))
        return v0, v1, v2, load_values(base + min(place + _WORD(9), last) * _WORD(size), g * _WORD(16))

    @_inline
    def part(first: Any, other: Any, ready: Any) -> Any:
        """Return four floats that a block has found, those of the last one if there is none of this number."""
        return ptx.load_128(first + min(other, ready - _WORD(1)) * _WORD(block))

    @_inline
    def store(row: Any, pair: Any, x: Any, y: Any) -> None:
        """Write two elements of a head."""
        at = pair // _WORD(32) * _WORD(128) + pair % _WORD(8) * _WORD(16) + pair // _WORD(8) % _WORD(4) * _WORD(4)
        if at < _WORD(size):
            ptx.store_32(row + at, both(x, y))

    @_inline
    def walk(query: Any, k: Any, v: Any, tile: Any, end: Any, last: Any, factor: Any, cap: Any) -> Any:
        """Attend to every tile of a warp, of which there is one at least, and return its peak, weight and sums."""
        lane = _WORD(cuda.threadIdx.x) % _WORD(32)
        g, t = lane // _WORD(4), lane % _WORD(4)
        peak, weight, sums = _FLOAT(float("-inf")), _FLOAT(0), zeros()
        at = tile * _WORD(TILE)
        k0, k1 = keys_of(k, at + g, last, t)
        if ahead:
            v0, v1, v2, v3 = values_of(v, at + _WORD(2) * t, last, g)
        while True:
            x0, x1 = scores(query, k0)
            x2, x3 = scores(query, k1)
            following = tile + _WORD(warps)
            if ahead and following < end:
                k0, k1 = keys_of(k, following * _WORD(TILE) + g, last, t)
            at = tile * _WORD(TILE) + _WORD(2) * t
            if not ahead:
                cuda.syncwarp()  # before which the assembler loads nothing, which would take more registers
                v0, v1, v2, v3 = values_of(v, at, last, g)
            x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
            if capped:
                x0, x1, x2, x3 = _capped(x0, cap), _capped(x1, cap), _capped(x2, cap), _capped(x3, cap)
            hidden = _FLOAT(float("-inf"))
            x0, x1 = x0 if at <= last else hidden, x1 if at + _WORD(1) <= last else hidden
            x2, x3 = x2 if at + _WORD(8) <= last else hidden, x3 if at + _WORD(9) <= last else hidden
            higher = _of_row(ptx.larger(ptx.larger(x0, x1), ptx.larger(x2, x3)), ptx.larger)
            higher = ptx.larger(peak, higher)
            shrunk = ptx.exp2(peak - higher)
            peak = higher
            x0, x1, x2, x3 = ptx.exp2(x0 - peak), ptx.exp2(x1 - peak), ptx.exp2(x2 - peak), ptx.exp2(x3 - peak)
            weight = weight * shrunk + ((x0 + x1) + (x2 + x3))
            a, b = both(x0, x1), both(x2, x3)
            c, d = both(x0 - low(a), x1 - high(a)), both(x2 - low(b), x3 - high(b))
            of_first = cuda.shfl_sync(_EVERY, shrunk, _HALF(t * _WORD(8)))
            of_second = cuda.shfl_sync(_EVERY, shrunk, _HALF(t * _WORD(8) + _WORD(4)))
            sums = weighed(tiles.scaled(sums, of_first, of_second), v0, v1, v2, v3, a, b, c, d)
            if following >= end:
                return peak, _of_row(weight, _plus), sums
            tile, at = following, following * _WORD(TILE)
            if ahead:
                v0, v1, v2, v3 = values_of(v, at + _WORD(2) * t, last, g)
            else:
                k0, k1 = keys_of(k, at + g, last, t)

    @_inline
    def merge_warps(found: Any, peaks: Any, totals: Any, used: Any, row: Any, own: Any, count: Any) -> None:
        """Write what a block has found for so many queries: to the row, or if it has none, as it is to its own part."""
        index = _WORD(cuda.threadIdx.x)
        while index < count * _WORD(pairs):
            which, pair = index // _WORD(pairs), index % _WORD(pairs)
            peak, weight, x, y = peaks[which], _FLOAT(0), _FLOAT(0), _FLOAT(0)
            for other in range(_WORD(1), used):
                peak = ptx.larger(peak, peaks[_WORD(other) * _WORD(QUERIES) + which])
            for other in range(used):
                at = _WORD(other) * _WORD(QUERIES) + which
                shrunk = ptx.exp2(peaks[at] - peak)
                weight += shrunk * totals[at]
                at = at * _WORD(pitch) + pair
                x += shrunk * found[at]
                y += shrunk * found[at + _WORD(pairs)]
            if row:
                share = ptx.inverse(weight)
                store(row + which * _WORD(size), pair, x * share, y * share)
            else:
                ptx.store_64(own + index * _WORD(8), ptx.bits_of(x), ptx.bits_of(y))
                if pair == 0:
                    at = own + _WORD(4 * QUERIES * width) + which * _WORD(8)
                    ptx.store_64(at, ptx.bits_of(peak), ptx.bits_of(weight))
            index += _WORD(threads)

    @_inline
    def share_out(partial: Any, shares: Any, totals: Any, ready: Any, count: Any) -> None:
        """Find what each of the blocks counts for each query, and what all weigh together."""
        lane, which = _WORD(cuda.threadIdx.x) % _WORD(32), _WORD(cuda.threadIdx.x) // _WORD(32)
        while which < count:
            at = partial + _WORD(4 * QUERIES * width) + which * _WORD(8)
            peak, weight, other = _FLOAT(float("-inf")), _FLOAT(0), lane
            while other < ready:
                p, w = ptx.load_64(at + other * _WORD(block))
                own, higher = ptx.float_of(p), ptx.larger(peak, ptx.float_of(p))
                weight = weight * ptx.exp2(peak - higher) + ptx.float_of(w) * ptx.exp2(own - higher)
                shares[other * _WORD(QUERIES) + which] = own
                peak = higher
                other += _WORD(32)
            highest, other = _of_warp(peak, ptx.larger), lane
            while other < ready:
                at = other * _WORD(QUERIES) + which
                shares[at] = ptx.exp2(shares[at] - highest)
                other += _WORD(32)
            weight = _of_warp(weight * ptx.exp2(peak - highest), _plus)
            if lane == 0:
                totals[which] = weight
            which += _WORD(warps)

    @_inline
    def merge_blocks(partial: Any, shares: Any, totals: Any, found: Any, ready: Any, row: Any, count: Any) -> None:
        """Write what all blocks have found; where there are more threads than vectors, they share out the blocks."""
        vectors = count * _WORD(width // 4)
        ways = max(_WORD(1), _WORD(_HALF(threads) // _HALF(vectors)))
        way = _WORD(_HALF(cuda.threadIdx.x) // _HALF(vectors)) if ways > 1 else _WORD(0)
        vector = _WORD(cuda.threadIdx.x) - way * vectors
        while vector < vectors and way < ways:
            sums = _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0)
            at, which, other = partial + vector * _WORD(16), vector // _WORD(width // 4), way
            while other < ready:
                w0, w1 = part(at, other, ready), part(at, other + ways, ready)
                w2, w3 = part(at, other + _WORD(2) * ways, ready), part(at, other + _WORD(3) * ways, ready)
                w4, w5 = part(at, other + _WORD(4) * ways, ready), part(at, other + _WORD(5) * ways, ready)
                w6, w7 = part(at, other + _WORD(6) * ways, ready), part(at, other + _WORD(7) * ways, ready)
                sums = _plus_part(sums, w0, shares, other, which, ready)
                sums = _plus_part(sums, w1, shares, other + ways, which, ready)
                sums = _plus_part(sums, w2, shares, other + _WORD(2) * ways, which, ready)
                sums = _plus_part(sums, w3, shares, other + _WORD(3) * ways, which, ready)
                sums = _plus_part(sums, w4, shares, other + _WORD(4) * ways, which, ready)
                sums = _plus_part(sums, w5, shares, other + _WORD(5) * ways, which, ready)
                sums = _plus_part(sums, w6, shares, other + _WORD(6) * ways, which, ready)
                sums = _plus_part(sums, w7, shares, other + _WORD(7) * ways, which, ready)
                other += _WORD(8) * ways
            at = (way * vectors + vector) * _WORD(4)
            found[at], found[at + _WORD(1)], found[at + _WORD(2)], found[at + _WORD(3)] = sums
            vector += _WORD(threads)
        cuda.syncthreads()
        index = _WORD(cuda.threadIdx.x)
        while index < count * _WORD(pairs):
            which, pair = index // _WORD(pairs), index % _WORD(pairs)
            x = y = _FLOAT(0)
            for other in range(ways):
                at = _WORD(other) * vectors * _WORD(4) + index * _WORD(2)
                x += found[at]
                y += found[at + _WORD(1)]
            share = ptx.inverse(totals[which])
            store(row + which * _WORD(size), pair, x * share, y * share)
            index += _WORD(threads)

    def attend(  # type: ignore[no-untyped-def]
        q, q_pitch, k, v, kv_pitch, positions, out, out_pitch, partial, turns, length, group, factor, cap, least
    ):
        found = cuda.shared.array(floats, _FLOAT)
        peaks, totals = cuda.shared.array(rows, _FLOAT), cuda.shared.array(rows, _FLOAT)
        shares, turn = cuda.shared.array(split_rows, _FLOAT), cuda.shared.array(1, _HALF)
        thread, splits, split = _WORD(cuda.threadIdx.x), _WORD(cuda.gridDim.x), _WORD(cuda.blockIdx.x)
        token, number = _WORD(cuda.blockIdx.z), _WORD(cuda.blockIdx.y)
        lane, warp = thread % _WORD(32), thread // _WORD(32)
        g, t = lane // _WORD(4), lane % _WORD(4)

        low_word, high_word = ptx.load_64(positions + token * _WORD(8))
        parts = (group + _WORD(QUERIES - 1)) // _WORD(QUERIES)
        head = _WORD(_HALF(number) // _HALF(parts))
        first_query = (number - head * parts) * _WORD(QUERIES)
        count = min(group - first_query, _WORD(QUERIES))
        column = (head * group + first_query) * _WORD(size)
        query = load_queries(q + token * q_pitch + column + min(g, count - _WORD(1)) * _WORD(size), t * _WORD(16))

        seen = min((_WORD(low_word) | _WORD(high_word) << _WORD(32)) + _WORD(1), length)
        total = (seen + _WORD(TILE - 1)) // _WORD(TILE)
        each = max(least, _WORD(_HALF(total + splits - _WORD(1)) // _HALF(splits)))
        tile, end = split * each, min((split + _WORD(1)) * each, total)
        if tile >= total:
            return
        used = min(end - tile, _WORD(warps))
        ready = _WORD(_HALF(total + each - _WORD(1)) // _HALF(each))
        if warp < used:
            base = token * kv_pitch + head * length * _WORD(size)
            factor, cap = ptx.float_of(_HALF(factor)), ptx.float_of(_HALF(cap))
            peak, weight, sums = walk(query, k + base, v + base, tile + warp, end, seen - _WORD(1), factor, cap)
            if t == 0:
                peaks[warp * _WORD(QUERIES) + g] = peak
                totals[warp * _WORD(QUERIES) + g] = weight
            if _WORD(2) * t < count:
                start = (warp * _WORD(QUERIES) + _WORD(2) * t) * _WORD(pitch) + g
                tiles.keep(found, sums, start, _WORD(pitch), _WORD(pairs))
        cuda.syncthreads()

        row, number = out + token * out_pitch + column, token * _WORD(cuda.gridDim.y) + number
        partial += number * splits * _WORD(block)
        own = partial + split * _WORD(block)
        merge_warps(found, peaks, totals, used, row if ready == 1 else _WORD(0), own, count)
        if ready == 1:
            return
        cuda.threadfence()
        cuda.syncthreads()
        if thread == 0:
            turn[0] = ptx.next_turn(turns + number * _WORD(4), _HALF(ready - _WORD(1)))
            cuda.threadfence()
        cuda.syncthreads()
        if _WORD(turn[0]) == ready - _WORD(1):
            share_out(partial, shares, totals, ready, count)
            cuda.syncthreads()
            merge_blocks(partial, shares, totals, found, ready, row, count)

    return Kernel(name, attend, 15)


_OF_KINDS = {
    "bf16": (ptx.low_bf16, ptx.high_bf16, ptx.two_bf16, ptx.emit_multiply_bf16),
    "f16": (ptx.low_f16, ptx.high_f16, ptx.two_f16, ptx.emit_multiply_f16),
}


def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype and a size of heads, such as ``ATTENTION_BF16_128``; with a cap ``…_CAPPED``."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    narrow = int(found["size"]) <= WIDE
    return attention(
        name.lower(), int(found["size"]), 8 if narrow else 4, ahead=narrow, capped=found["capped"] is not None
    )
