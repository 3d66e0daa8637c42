"""Kernels for the attention of a decoding step: one token of each of some sequences attends to its sequence's cache.

The places of a cache that a token sees are cut into tiles of 16. A block has successive tiles, which its warps take in
turns; eight query heads that read one KV head are the rows of their matrix instruction. Softmax is done on the way
(Milakov and Gimelshein, arXiv 1805.02867), in float32; weights go to the matrix instruction as a sum of two numbers of
16 bits, which is nearly as good as float32. What warps have found is merged in shared memory, and what blocks have
found by the last of them that is ready (Dao et al., Flash-Decoding, 2023). Two blocks share a multiprocessor, so that
one reads while the other begins or ends: queries lie in shared memory, for registers are what keeps tiles on their way.
How many blocks have something to do depends on how many places the token sees, which is in the device's memory.
Caches of 8 bits become float16 in registers, see :mod:`tpplan.exec.cache_tiles`, and so do the queries then.
"""

from __future__ import annotations

import re
from typing import Any

from numba import cuda
from numba.cuda import types

from tpplan.exec import cache_tiles, ptx, tiles
from tpplan.exec.kernels import Kernel, device_function

#: Query heads of a block.
QUERIES = 8
#: Places of a tile.
TILE = 16
#: Elements of the heads of which a block has 8 warps.
WIDE = 128

_NAME = re.compile("ATTENTION_(?P<dtype>BF16|F16)_(?P<size>[0-9]+)(_(?P<kind>Q8|FP8))?(?P<capped>_CAPPED)?")
_WORD, _FLOAT, _HALF = types.uint64, types.float32, types.uint32
_EVERY = 0xFFFFFFFF
#: Floats between the rows of an array in shared memory, more than they have: four lanes write to four of them at once.
_APART = 4
#: Words that a block keeps in shared memory.
_KEPT = 6


@device_function
def _of_row(value: Any, merge: Any) -> Any:
    """Return what the four lanes of a query have together."""
    value = merge(value, cuda.shfl_xor_sync(_EVERY, value, 1))
    return merge(value, cuda.shfl_xor_sync(_EVERY, value, 2))


@device_function
def _plus(x: Any, y: Any) -> Any:
    return x + y


@device_function
def _capped(x: Any, cap: Any) -> Any:
    """Return ``cap × tanh(x)``."""
    return cap - (cap + cap) * ptx.inverse(_FLOAT(1) + ptx.exp2(x * _FLOAT(2.8853900817779268)))  # 2 / ln 2


@device_function
def _at(elements: Any, scales: Any, offset: Any) -> Any:
    """Return where elements of a cache and their scales begin, behind so many bytes of the former."""
    return elements + offset, scales + offset // _WORD(cache_tiles.SHARING)


@device_function
def _times(sums: Any, share: Any) -> Any:
    return sums[0] * share, sums[1] * share, sums[2] * share, sums[3] * share


@device_function
def _plus_part(weight: Any, sums: Any, share: Any, other: Any, part: Any) -> Any:
    """Add what a block has found, which counts so much."""
    found = sums[0] + share * part[0], sums[1] + share * part[1], sums[2] + share * part[2], sums[3] + share * part[3]
    return weight + share * other, found


def attention(  # noqa: C901, PLR0915 (of the functions in it)
    name: str, head_dim: int, reader: cache_tiles.Reader, warps: int, *, ahead: bool, capped: bool
) -> Kernel:
    """Make a kernel.

    Its grid: as many blocks as share a token's places, KV heads × eights of the query heads of each, tokens. Its words:

    - q, its pitch: address, and bytes from one token to the next; heads are side by side.
    - k, v, their pitch: addresses, and bytes from one sequence to the next; heads and places are side by side.
    - their scales: addresses, if they have any.
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
        reader: of the cache's rows.
        warps: of a block; its shared memory is as many times 32 bytes for each element of a head.
        ahead: whether a warp asks for its next tile while it has one, for which wide heads leave too few registers.
        capped: whether scores have a cap.
    """
    dtype = name.split("_")[1]
    size, row_size, vector, unit = 2 * head_dim, reader.size, reader.vector, reader.unit
    low, high, both, multiply = _OF_KINDS[dtype if row_size == size else "f16"]
    rounded = _OF_KINDS[dtype][2]
    load_queries = tiles.loads(size, 64, clear=True)
    read_keys, read_values, wide, of_queries = reader.keys, reader.values, reader.wide, reader.queries
    width = -(-head_dim // 64) * 64
    scores, weighed, zeros = tiles.scores(multiply), tiles.weighed(multiply), tiles.zeros(width // 4)
    pairs, threads, pitch = width // 2, 32 * warps, width + _APART
    rows, block = warps * QUERIES, 4 * QUERIES * (width + 2)
    floats = rows * pitch

    @device_function
    def row_of(place: Any, last: Any) -> Any:
        """Return a place's row, the last one's if the token does not see it."""
        return _WORD(min(_HALF(place), last))

    @device_function
    def keys_of(base: Any, place: Any, last: Any, t: Any) -> Any:
        """Return a lane's part of the keys of 16 places, of which the first is at its row."""
        start = t * _WORD(vector)
        first = read_keys(base, row_of(place, last), start, _WORD(0))
        return first, read_keys(base, row_of(place + _HALF(8), last), start, _WORD(0))

    @device_function
    def values_of(base: Any, place: Any, last: Any, g: Any) -> Any:
        """Return a lane's part of the values of 16 places, two pairs of them."""
        start, second = g * _WORD(vector), g // _WORD(4)
        v0 = read_values(base, row_of(place, last), start, second)
        v1 = read_values(base, row_of(place + _HALF(1), last), start, second)
        v2 = read_values(base, row_of(place + _HALF(8), last), start, second)
        return v0, v1, v2, read_values(base, row_of(place + _HALF(9), last), start, second)

    @device_function
    def store(row: Any, pair: Any, x: Any, y: Any) -> None:
        """Write two elements of a head."""
        at = pair // _WORD(32) * _WORD(128) + pair % _WORD(8) * _WORD(16) + pair // _WORD(8) % _WORD(4) * _WORD(4)
        if at < _WORD(size):
            ptx.store_32(row + at, rounded(x, y))

    @device_function
    def walk(query: Any, own: Any, k: Any, v: Any, tile: Any, end: Any, last: Any, factor: Any, cap: Any) -> Any:
        """Attend to every tile of a warp, of which there is one at least, and return its peak, weight and sums.

        Queries are kept in shared memory, at the lane's own address.
        """
        lane = _WORD(cuda.threadIdx.x) % _WORD(32)
        g, t = lane // _WORD(4), lane % _WORD(4)
        k = k[0] + t * _WORD(vector), k[1]
        v = v[0] + g * _WORD(vector), v[1] + g // _WORD(4) * _WORD(2)
        peak, weight, sums = _FLOAT(float("-inf")), _FLOAT(0), zeros()
        first = _HALF(tile * _HALF(TILE))
        k0, k1 = keys_of(k, first + _HALF(g), last, t)
        if ahead:
            v0, v1, v2, v3 = values_of(v, first + _HALF(2 * t), last, g)
        tiles.put(own, of_queries(query))
        while True:
            x0, x1, x2, x3 = scores(own, wide(k0), wide(k1))
            following = _HALF(tile + _HALF(warps))
            if ahead and following < end:
                k0, k1 = keys_of(k, following * _HALF(TILE) + _HALF(g), last, t)
            at = _HALF(tile * _HALF(TILE) + _HALF(2 * t))
            if not ahead:
                cuda.syncwarp()  # before which the assembler loads nothing, which would take more registers
                v0, v1, v2, v3 = values_of(v, at, last, g)
            x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
            if capped:
                x0, x1, x2, x3 = _capped(x0, cap), _capped(x1, cap), _capped(x2, cap), _capped(x3, cap)
            hidden = _FLOAT(float("-inf"))
            x0 = x0 if at <= last else hidden
            x1 = x1 if _HALF(at + _HALF(1)) <= last else hidden
            x2 = x2 if _HALF(at + _HALF(8)) <= last else hidden
            x3 = x3 if _HALF(at + _HALF(9)) <= last else hidden
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
            sums = tiles.scaled(sums, of_first, of_second)
            sums = weighed(sums, wide(v0), wide(v1), wide(v2), wide(v3), a, b, c, d)
            if following >= end:
                return peak, _of_row(weight, _plus) * _FLOAT(1 / unit), sums
            tile, at = following, _HALF(following * _HALF(TILE))
            if ahead:
                v0, v1, v2, v3 = values_of(v, at + _HALF(2 * t), last, g)
            else:
                k0, k1 = keys_of(k, at + _HALF(g), last, t)

    @device_function
    def merge(found: Any, peaks: Any, totals: Any, used: Any, row: Any, own: Any, count: Any) -> None:
        """Write what so many warps, or sets of them, have found for so many queries.

        It goes to the row, or if there is none, as it is to the block's own part.
        """
        index = _WORD(cuda.threadIdx.x)
        while index < count * _WORD(pairs):
            which, pair = index // _WORD(pairs), index % _WORD(pairs)
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

    def attend(  # type: ignore[no-untyped-def]
        q, q_pitch, k, v, kv_pitch, k_scales, v_scales, positions, out, out_pitch, partial, turns, length, group,
        factor, cap, least,
    ):  # fmt: skip
        ptx.after_earlier_with_next()
        found = cuda.shared.array(floats, _FLOAT, alignment=16)
        peaks, totals = cuda.shared.array(rows, _FLOAT), cuda.shared.array(rows, _FLOAT)
        kept, turn = cuda.shared.array(_KEPT, _WORD), cuda.shared.array(1, _HALF)
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
        row = q + token * q_pitch + column + min(g, count - _WORD(1)) * _WORD(size)
        query = load_queries(row + t * _WORD(16), t * _WORD(16))

        seen = min((_WORD(low_word) | _WORD(high_word) << _WORD(32)) + _WORD(1), length)
        total = (seen + _WORD(TILE - 1)) // _WORD(TILE)
        each = max(least, _WORD(_HALF(total + splits - _WORD(1)) // _HALF(splits)))
        tile, end = split * each, min((split + _WORD(1)) * each, total)
        if tile >= total:
            return
        used = min(end - tile, _WORD(warps))
        if thread == 0:  # where they take no registers from the walk
            kept[0], kept[1], kept[2], kept[3] = used, total, each, count
            kept[4], kept[5] = out + token * out_pitch + column, token * _WORD(cuda.gridDim.y) + number
        if warp < used:
            base = token * kv_pitch + head * length * _WORD(row_size)
            keys, values = _at(k, k_scales, base), _at(v, v_scales, base)
            factor, cap = ptx.float_of(_HALF(factor)) * _FLOAT(unit), ptx.float_of(_HALF(cap))
            own = _HALF(ptx.shared_address(found) + warp * _WORD(4 * QUERIES * pitch) + lane * _WORD(16))
            first, last = _HALF(tile + warp), _HALF(seen - _WORD(1))
            peak, weight, sums = walk(query, own, keys, values, first, _HALF(end), last, factor, cap)
            cuda.syncwarp()  # after which queries are no longer needed
            at = warp * _WORD(QUERIES)
            tiles.keep(found, sums, (at + _WORD(2) * t) * _WORD(pitch) + g, _WORD(pitch), _WORD(pairs))
            if t == 0:
                peaks[at + g], totals[at + g] = peak, weight
        cuda.syncthreads()

        used, total, each, count, row, number = kept[0], kept[1], kept[2], kept[3], kept[4], kept[5]
        ready = _WORD(_HALF(total + each - _WORD(1)) // _HALF(each))
        partial += number * _WORD(cuda.gridDim.x) * _WORD(block)
        own = partial + _WORD(cuda.blockIdx.x) * _WORD(block)
        merge(found, peaks, totals, used, row if ready == 1 else _WORD(0), own, count)
        if ready == 1:
            return
        if is_last(turns + number * _WORD(4), turn, ready):
            vectors = count * _WORD(width // 4)
            ways = min(max(_WORD(_HALF(threads) // _HALF(vectors)), _WORD(1)), _WORD(warps))
            gather(partial, found, peaks, totals, ready, count, ways)
            cuda.syncthreads()
            merge(found, peaks, totals, ways, row, own, count)

    return Kernel(name, attend, 17, bounds=(threads, 2))


_OF_KINDS = {
    "bf16": (ptx.low_bf16, ptx.high_bf16, ptx.two_bf16, ptx.emit_multiply_bf16),
    "f16": (ptx.low_f16, ptx.high_f16, ptx.two_f16, ptx.emit_multiply_f16),
}
_READERS = {"Q8": cache_tiles.q8_reader, "FP8": cache_tiles.fp8_reader}


def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype, a size of heads and a kind of cache, such as ``ATTENTION_BF16_128_Q8``.

    It is one for caches of 16 bits without a kind. With a cap it is ``…_CAPPED``.
    """
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    size, kind, dtype = int(found["size"]), found["kind"], found["dtype"].lower()
    reader = _READERS[kind](size, dtype) if kind else cache_tiles.plain_reader(size)
    warps, ahead = (8, True) if size <= WIDE else (4, kind is not None)
    return attention(name.lower(), size, reader, warps, ahead=ahead, capped=found["capped"] is not None)
