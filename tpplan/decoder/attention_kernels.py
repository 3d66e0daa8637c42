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


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def _of_row(value: Any, merge: Any) -> Any:
    """Return what the four lanes of a query have together."""
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 1))
    return merge(value, cuda.shfl_xor_sync(_EVERY, value, 2))


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def _of_warp(value: Any, merge: Any) -> Any:
    """Return what all lanes have together."""
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 16))
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 8))
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 4))
    return _of_row(value, merge)


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def _plus(x: Any, y: Any) -> Any:
    return x + y


@cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
def _capped(x: Any, cap: Any) -> Any:
    """Return ``cap × tanh(x)``."""
    return cap - (cap + cap) * ptx.inverse(_FLOAT(1) + ptx.exp2(x * _FLOAT(2.8853900817779268)))  # 2 / ln 2


def attention(name: str, head_dim: int, warps: int, *, ahead: bool, capped: bool) -> Kernel:
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

    @cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
    def keys_of(base: Any, place: Any, last: Any, t: Any) -> Any:
        """Return a lane's part of the keys of 16 places, of which the first is at its row."""
        first = load_keys(base + min(place, last) * _WORD(size), t * _WORD(16))
        return first, load_keys(base + min(place + _WORD(8), last) * _WORD(size), t * _WORD(16))

    @cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
    def values_of(base: Any, place: Any, last: Any, g: Any) -> Any:
        """Return a lane's part of the values of 16 places, two pairs of them."""
        v0 = load_values(base + min(place, last) * _WORD(size), g * _WORD(16))
        v1 = load_values(base + min(place + _WORD(1), last) * _WORD(size), g * _WORD(16))
        v2 = load_values(base + min(place + _WORD(8), last) * _WORD(size), g * _WORD(16))
        return v0, v1, v2, load_values(base + min(place + _WORD(9), last) * _WORD(size), g * _WORD(16))

    @cuda.jit(device=True, inline="always")  # type: ignore[untyped-decorator]
    def store(row: Any, pair: Any, x: Any, y: Any) -> None:
        """Write two elements of a head."""
        at = pair // _WORD(32) * _WORD(128) + pair % _WORD(8) * _WORD(16) + pair // _WORD(8) % _WORD(4) * _WORD(4)
        if at < _WORD(size):
            ptx.store_32(row + at, both(x, y))

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
        factor, cap = ptx.float_of(_HALF(factor)), ptx.float_of(_HALF(cap))

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
        tile += warp
        base = token * kv_pitch + head * length * _WORD(size)
        k, v, last = k + base, v + base, seen - _WORD(1)

        peak, weight, sums = _FLOAT(float("-inf")), _FLOAT(0), zeros()
        if tile < end:
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
                    break
                tile, at = following, following * _WORD(TILE)
                if ahead:
                    v0, v1, v2, v3 = values_of(v, at + _WORD(2) * t, last, g)
                else:
                    k0, k1 = keys_of(k, at + g, last, t)
            weight = _of_row(weight, _plus)
            if t == 0:
                peaks[warp * _WORD(QUERIES) + g] = peak
                totals[warp * _WORD(QUERIES) + g] = weight
            if _WORD(2) * t < count:
                start = (warp * _WORD(QUERIES) + _WORD(2) * t) * _WORD(pitch) + g
                tiles.keep(found, sums, start, _WORD(pitch), _WORD(pairs))
        cuda.syncthreads()

        row = out + token * out_pitch + column
        partial += (token * _WORD(cuda.gridDim.y) + number) * splits * _WORD(block)
        own = partial + split * _WORD(block)
        index = thread
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
            if ready == 1:
                share = ptx.inverse(weight)
                store(row + which * _WORD(size), pair, x * share, y * share)
            else:
                ptx.store_64(own + index * _WORD(8), ptx.bits_of(x), ptx.bits_of(y))
                if pair == 0:
                    at = own + _WORD(4 * QUERIES * width) + which * _WORD(8)
                    ptx.store_64(at, ptx.bits_of(peak), ptx.bits_of(weight))
            index += _WORD(threads)
        if ready == 1:
            return

        cuda.threadfence()
        cuda.syncthreads()
        if thread == 0:
            at = turns + (token * _WORD(cuda.gridDim.y) + number) * _WORD(4)
            turn[0] = ptx.next_turn(at, _HALF(ready - _WORD(1)))
            cuda.threadfence()
        cuda.syncthreads()
        if _WORD(turn[0]) != ready - _WORD(1):
            return

        which = warp
        while which < count:
            at = partial + _WORD(4 * QUERIES * width) + which * _WORD(8)
            peak = _FLOAT(float("-inf"))
            other = lane
            while other < ready:
                p, w = ptx.load_64(at + other * _WORD(block))
                peak = ptx.larger(peak, ptx.float_of(p))
                other += _WORD(32)
            peak, weight = _of_warp(peak, ptx.larger), _FLOAT(0)
            other = lane
            while other < ready:
                p, w = ptx.load_64(at + other * _WORD(block))
                shrunk = ptx.exp2(ptx.float_of(p) - peak)
                weight += shrunk * ptx.float_of(w)
                shares[other * _WORD(QUERIES) + which] = shrunk
                other += _WORD(32)
            weight = _of_warp(weight, _plus)
            if lane == 0:
                totals[which] = weight
            which += _WORD(warps)
        cuda.syncthreads()
        index = thread
        while index < count * _WORD(pairs):
            which, pair = index // _WORD(pairs), index % _WORD(pairs)
            at, x, y = partial + index * _WORD(8), _FLOAT(0), _FLOAT(0)
            for other in range(ready):
                p, w = ptx.load_64(at)
                share = shares[_WORD(other) * _WORD(QUERIES) + which]
                x += share * ptx.float_of(p)
                y += share * ptx.float_of(w)
                at += _WORD(block)
            share = ptx.inverse(totals[which])
            store(row + which * _WORD(size), pair, x * share, y * share)
            index += _WORD(threads)

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
