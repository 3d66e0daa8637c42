"""Kernels for the attention of a decoding step: one token of each of some sequences attends to its sequence's cache.

The places of a cache that a token sees are cut into tiles of 16. A block has successive tiles, which its warps take in
turns; eight query heads that read one KV head are the rows of their matrix instruction. Softmax is done on the way
(Milakov and Gimelshein, arXiv 1805.02867), in float32; weights go to the matrix instruction as a sum of two numbers of
16 bits, which is nearly as good as float32. What warps have found is merged in shared memory, and what blocks have
found by the last of them that is ready (Dao et al., Flash-Decoding, 2023), see
:mod:`tpplan.decoder.fast.kernels.attention`. Two blocks share a multiprocessor, so that one reads while the other
begins or ends: queries lie in shared memory, for registers are what keeps tiles on their way. How many blocks have
something to do depends on how many places the token sees, which is in the device's memory. Before all that, blocks may
apply norms and RoPE to their queries and to the token's own key, and write that and its value to the cache: all blocks
do that have its place, several if a KV head has more than eight queries, and they write the same.
Caches of 8 bits become float16 in registers, see :mod:`tpplan.decoder.fast.kernels.cache_tiles`, and so do the queries
then.

Each warp and block has a part of a token's places, and finds for each of eight queries the peak of its scores, the
weight of all places, each ``2 ** (score - peak)``, and the sums of their values so weighed, which are merged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from attrs import frozen

from tpplan.decoder.fast.kernels import cache_tiles, tiles
from tpplan.decoder.fast.kernels.attention_limits import can_append
from tpplan.decoder.fast.kernels.turn import turned_by, vectors_of
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, types

#: Query heads of a block.
QUERIES = 8
#: The base-2 logarithm of e.
_LOG2_E = 1.4426950408889634

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
        turn[0] = ptx.next_turn(address, UINT32(ready - UINT64(1)))
        ptx.near_fence()
    cuda.syncthreads()
    return UINT64(turn[0]) == ready - UINT64(1)


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
        at = (
            pair // UINT64(32) * UINT64(128) + pair % UINT64(8) * UINT64(16) + pair // UINT64(8) % UINT64(4) * UINT64(4)
        )
        if at < UINT64(size):
            ptx.store_32(row + at, rounded(x, y))

    @device_function
    def merge(found: Any, peaks: Any, totals: Any, used: Any, row: Any, sinks: Any, own: Any, count: Any) -> None:
        """Write what so many warps, or sets of them, have found for so many queries.

        It goes to the row, where the queries' sinks count if there are any, or if there is no row, as it is to the
        block's own part.
        """
        index = UINT64(cuda.threadIdx.x)
        while index < count * UINT64(pairs):
            which, pair = index // UINT64(pairs), index % UINT64(pairs)
            sink = ptx.load_16(sinks + which * UINT64(2)) if sinks else types.uint16(0)
            peak, weight, x, y = FLOAT32(float("-inf")), FLOAT32(0), FLOAT32(0), FLOAT32(0)
            for other in range(warps):
                if other < used:
                    peak = ptx.larger(peak, peaks[UINT64(other) * UINT64(QUERIES) + which])
            for other in range(warps):
                at = UINT64(other) * UINT64(QUERIES) + which
                there = other < used
                shrunk = ptx.exp2(peaks[at] - peak) if there else FLOAT32(0)
                weight += shrunk * totals[at] if there else FLOAT32(0)
                at = at * UINT64(pitch) + pair
                x += shrunk * found[at] if there else FLOAT32(0)
                y += shrunk * found[at + UINT64(pairs)] if there else FLOAT32(0)
            if row:
                if sinks:  # one that weighs more than all floats leaves nothing of the others
                    weight += ptx.exp2(low(UINT32(sink)) * FLOAT32(_LOG2_E) - peak) * FLOAT32(1 / unit)
                share = ptx.inverse(weight)
                store(row + which * UINT64(size), pair, x * share, y * share)
            else:
                ptx.store_64(own + index * UINT64(8), ptx.bits_of(x), ptx.bits_of(y))
                if pair == 0:
                    at = own + UINT64(4 * QUERIES * width) + which * UINT64(8)
                    ptx.store_64(at, ptx.bits_of(peak), ptx.bits_of(weight))
            index += UINT64(threads)

    @device_function
    def part(partial: Any, vector: Any, which: Any, other: Any, ready: Any) -> Any:
        """Return four floats that a block has found, and of their query its peak and its weight.

        It is the last block if there is none of this number, and then does not count.
        """
        first = partial + min(other, ready - UINT64(1)) * UINT64(block)
        a, b, c, d = ptx.load_128(first + vector * UINT64(16))
        peak, weight = ptx.load_64(first + UINT64(4 * QUERIES * width) + which * UINT64(8))
        peak = ptx.float_of(peak) if other < ready else FLOAT32(float("-inf"))
        return peak, ptx.float_of(weight), (ptx.float_of(a), ptx.float_of(b), ptx.float_of(c), ptx.float_of(d))

    @device_function
    def gather(partial: Any, found: Any, peaks: Any, totals: Any, ready: Any, count: Any, ways: Any) -> None:
        """Add up what blocks have found, in so many ways of blocks, for which there may be more threads than vectors.

        What ways have found is left where warps leave theirs.
        """
        vectors = count * UINT64(width // 4)
        way = UINT64(UINT32(cuda.threadIdx.x) // UINT32(vectors))
        vector = UINT64(cuda.threadIdx.x) - way * vectors
        while vector < vectors and way < ways:
            which, other = vector // UINT64(width // 4), way
            peak, weight, sums = FLOAT32(float("-inf")), FLOAT32(0), (FLOAT32(0), FLOAT32(0), FLOAT32(0), FLOAT32(0))
            while other < ready:
                p0, w0, s0 = part(partial, vector, which, other, ready)
                p1, w1, s1 = part(partial, vector, which, other + ways, ready)
                p2, w2, s2 = part(partial, vector, which, other + UINT64(2) * ways, ready)
                p3, w3, s3 = part(partial, vector, which, other + UINT64(3) * ways, ready)
                p4, w4, s4 = part(partial, vector, which, other + UINT64(4) * ways, ready)
                p5, w5, s5 = part(partial, vector, which, other + UINT64(5) * ways, ready)
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
                other += UINT64(6) * ways
            row = way * UINT64(QUERIES) + which
            peaks[row], totals[row] = peak, weight  # which threads of a query have alike
            at = row * UINT64(pitch) + vector % UINT64(width // 4) * UINT64(2)
            found[at], found[at + UINT64(pairs)], found[at + UINT64(1)], found[at + UINT64(pairs + 1)] = sums
            vector += UINT64(threads)

    return Parts(width, pairs, pitch, warps * QUERIES, block, merge, gather)


#: Places of a tile.
TILE = 16
#: Elements of the heads of which a block has 8 warps.
WIDE = 128

_NAME = re.compile("ATTENTION_(?P<dtype>BF16|F16)_(?P<size>[0-9]+)(_(?P<kind>Q8|FP8))?(?P<capped>_CAPPED)?")
_EVERY = 0xFFFFFFFF
#: Bytes of keys, and of values, that a block brings to the L2 cache while it waits for the kernel before, in vectors.
_AHEAD, _VECTOR = 2**16, 16
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
    return cap - (cap + cap) * ptx.inverse(FLOAT32(1) + ptx.exp2(x * FLOAT32(2.8853900817779268)))  # 2 / ln 2


@device_function
def _at(elements: Any, scales: Any, offset: Any) -> Any:
    """Return where elements of a cache and their scales begin, behind so many bytes of the former."""
    return elements + offset, scales + offset // UINT64(cache_tiles.SHARING)


def attention(  # noqa: C901, PLR0915 (of the functions in it)
    name: str, head_dim: int, reader: cache_tiles.Reader, warps: int, *, ahead: bool, capped: bool
) -> Kernel:
    """Make a kernel.

    Its grid: as many blocks as share a token's places, KV heads × eights of the query heads of each, tokens. Its words:

    - q, its pitch: address, and bytes from one token to the next; heads are side by side.
    - k, v, their pitch: addresses, and bytes from one sequence to the next; heads and places are side by side.
    - their scales: addresses, if they have any.
    - positions: address; of 64 bits each, not negative, and below 2 ** 32 of tokens that are new to the cache.
    - sinks: address of one of the dtype for each query head; 0 if there are none.
    - out, its pitch: as of q.
    - partial: address of what blocks leave to the last: ``[tokens, grid's second size, splits, 8, width + 2]`` floats.
    - turns: address of 32 bits for each token and number of the grid's second size; zero, and zero again afterwards.
    - length: places of a sequence.
    - group: query heads per KV head.
    - factor, cap: bits of float32. The base-2 logarithm of a weight is ``score × factor``, or if they have a cap,
      ``cap × tanh(score × factor)``.
    - least: tiles that a block has, at least, unless there are none left.
    - new keys, new values: addresses of what the tokens add to the cache, which tokens have as far apart as queries; 0
      if the cache has it, and queries have been turned, as in caches of 8 bits.
    - turned, angles, their pitch, norms of queries and of keys, what is added to these, 1 / elements of a head, and
      epsilon: as in :mod:`tpplan.decoder.fast.kernels.turn`, whose results it has to the bit; 0 without new keys.

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
    low_of_row, high_of_row, rounded, _ = _OF_KINDS[dtype]
    turned_vectors = turned_by(low_of_row, high_of_row, rounded)
    read_keys, read_values, wide, of_queries = reader.keys, reader.values, reader.wide, reader.queries
    merging = parts_of(head_dim, warps, unit, rounded, low_of_row)
    merge, gather, rows, block = merging.merge, merging.gather, merging.rows, merging.block
    width, pairs, pitch = merging.width, merging.pairs, merging.pitch
    scores, weighed, zeros = tiles.scores(multiply), tiles.weighed(multiply), tiles.zeros(width // 4)
    threads, floats = 32 * warps, rows * pitch
    # Of a head: lanes that read it, two vectors each, and its bytes in shared memory, of which the last may be zeros.
    lanes, filled = -(-size // 32), -(-size // 64) * 64
    at_once = threads // lanes  # such heads
    words, appends = QUERIES * filled // 4, can_append(head_dim, row_size)

    @device_function
    def keep_query(queries: Any, which: Any, at: Any, w: Any) -> None:
        """Put a vector of a query where :func:`tpplan.decoder.fast.kernels.tiles.scores` finds it."""
        a, b, c, d = of_queries(w)
        at = at // UINT64(64) * UINT64(64 * QUERIES) + UINT64(which) * UINT64(64) + at % UINT64(64)
        ptx.shared_store_128(queries + at, a, b, c, d)

    @device_function
    def row_of(place: Any, last: Any) -> Any:
        """Return a place's row, the last one's if the token does not see it."""
        return UINT64(min(UINT32(place), last))

    @device_function
    def keys_of(base: Any, place: Any, last: Any, t: Any) -> Any:
        """Return a lane's part of the keys of 16 places, of which the first is at its row."""
        start = t * UINT64(vector)
        first = read_keys(base, row_of(place, last), start, UINT64(0))
        return first, read_keys(base, row_of(place + UINT32(8), last), start, UINT64(0))

    @device_function
    def values_of(base: Any, place: Any, last: Any, g: Any) -> Any:
        """Return a lane's part of the values of 16 places, two pairs of them."""
        start, second = g * UINT64(vector), g // UINT64(4)
        v0 = read_values(base, row_of(place, last), start, second)
        v1 = read_values(base, row_of(place + UINT32(1), last), start, second)
        v2 = read_values(base, row_of(place + UINT32(8), last), start, second)
        return v0, v1, v2, read_values(base, row_of(place + UINT32(9), last), start, second)

    @device_function
    def walk(own: Any, k: Any, v: Any, tile: Any, end: Any, last: Any, factor: Any, cap: Any) -> Any:
        """Attend to every tile of a warp, of which there is one at least, and return its peak, weight and sums.

        Queries are in shared memory, from the lane's own address on.
        """
        lane = UINT64(cuda.threadIdx.x) % UINT64(32)
        g, t = lane // UINT64(4), lane % UINT64(4)
        k = k[0] + t * UINT64(vector), k[1]
        v = v[0] + g * UINT64(vector), v[1] + g // UINT64(4) * UINT64(2)
        peak, weight, sums = FLOAT32(float("-inf")), FLOAT32(0), zeros()
        first = UINT32(tile * UINT32(TILE))
        k0, k1 = keys_of(k, first + UINT32(g), last, t)
        if ahead:
            v0, v1, v2, v3 = values_of(v, first + UINT32(2 * t), last, g)
        while True:
            x0, x1, x2, x3 = scores(own, wide(k0), wide(k1))
            following = UINT32(tile + UINT32(warps))
            if ahead and following < end:
                k0, k1 = keys_of(k, following * UINT32(TILE) + UINT32(g), last, t)
            at = UINT32(tile * UINT32(TILE) + UINT32(2 * t))
            if not ahead:
                cuda.syncwarp()  # before which the assembler loads nothing, which would take more registers
                v0, v1, v2, v3 = values_of(v, at, last, g)
            x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
            if capped:
                x0, x1, x2, x3 = _capped(x0, cap), _capped(x1, cap), _capped(x2, cap), _capped(x3, cap)
            hidden = FLOAT32(float("-inf"))
            x0 = x0 if at <= last else hidden
            x1 = x1 if UINT32(at + UINT32(1)) <= last else hidden
            x2 = x2 if UINT32(at + UINT32(8)) <= last else hidden
            x3 = x3 if UINT32(at + UINT32(9)) <= last else hidden
            higher = _of_row(ptx.larger(ptx.larger(x0, x1), ptx.larger(x2, x3)), ptx.larger)
            higher = ptx.larger(peak, higher)
            shrunk = ptx.exp2(peak - higher)
            peak = higher
            x0, x1, x2, x3 = ptx.exp2(x0 - peak), ptx.exp2(x1 - peak), ptx.exp2(x2 - peak), ptx.exp2(x3 - peak)
            weight = weight * shrunk + ((x0 + x1) + (x2 + x3))
            a, b = both(x0, x1), both(x2, x3)
            c, d = both(x0 - low(a), x1 - high(a)), both(x2 - low(b), x3 - high(b))
            of_first = cuda.shfl_sync(_EVERY, shrunk, UINT32(t * UINT64(8)))
            of_second = cuda.shfl_sync(_EVERY, shrunk, UINT32(t * UINT64(8) + UINT64(4)))
            sums = tiles.scaled(sums, of_first, of_second)
            sums = weighed(sums, wide(v0), wide(v1), wide(v2), wide(v3), a, b, c, d)
            if following >= end:
                return peak, _of_row(weight, _plus) * FLOAT32(1 / unit), sums
            tile, at = following, UINT32(following * UINT32(TILE))
            if ahead:
                v0, v1, v2, v3 = values_of(v, at + UINT32(2 * t), last, g)
            else:
                k0, k1 = keys_of(k, at + UINT32(g), last, t)

    def attend(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
        q, q_pitch, k, v, kv_pitch, k_scales, v_scales, positions, sinks, out, out_pitch, partial, turns, length,
        group, factor, cap, least, new_keys, new_values, turned, angles, angle_pitch, query_norm, key_norm, more,
        inverse, eps,
    ):  # fmt: skip
        found = cuda.shared.array(floats, FLOAT32, alignment=16)
        queries = ptx.shared_address(cuda.shared.array(words, UINT32, alignment=16))
        peaks, totals = cuda.shared.array(rows, FLOAT32), cuda.shared.array(rows, FLOAT32)
        kept, turn = cuda.shared.array(_KEPT, UINT64), cuda.shared.array(1, UINT32)
        thread, splits, split = UINT64(cuda.threadIdx.x), UINT64(cuda.gridDim.x), UINT64(cuda.blockIdx.x)
        token, number = UINT64(cuda.blockIdx.z), UINT64(cuda.blockIdx.y)
        lane, warp = thread % UINT64(32), thread // UINT64(32)
        g, t = lane // UINT64(4), lane % UINT64(4)
        # The kernel before may still run, but has waited for those before it: positions, angles and earlier tokens are
        # there.
        low_word, high_word = ptx.load_64(positions + token * UINT64(8))
        parts = (group + UINT64(QUERIES - 1)) // UINT64(QUERIES)
        head = UINT64(UINT32(number) // UINT32(parts))
        first_query = (number - head * parts) * UINT64(QUERIES)
        count = min(group - first_query, UINT64(QUERIES))
        column = (head * group + first_query) * UINT64(size)

        seen = min((UINT64(low_word) | UINT64(high_word) << UINT64(32)) + UINT64(1), length)
        total = (seen + UINT64(TILE - 1)) // UINT64(TILE)
        each = max(least, UINT64(UINT32(total + splits - UINT64(1)) // UINT32(splits)))
        tile, end = split * each, min((split + UINT64(1)) * each, total)
        if tile >= total:
            return
        used = min(end - tile, UINT64(warps))
        base = token * kv_pitch + head * length * UINT64(row_size)
        if row_size % _VECTOR == 0 and thread == 0:
            start = base + tile * UINT64(TILE * row_size)
            some = min(min(end * UINT64(TILE), length) - tile * UINT64(TILE), UINT64(_AHEAD // row_size))
            ptx.prefetch(k + start, UINT32(some * UINT64(row_size)))
            ptx.prefetch(v + start, UINT32(some * UINT64(row_size)))
        if not appends:
            new_keys = turned = query_norm = UINT64(0)
        lane_of_row, which = UINT32(thread) % UINT32(lanes), UINT32(thread) // UINT32(lanes)
        offset, half = vectors_of(lane_of_row, UINT64(size), turned, False)  # noqa: FBT003 (of a key)
        nothing = UINT32(0), UINT32(0), UINT32(0), UINT32(0)
        is_turned, cos, sin = offset < turned, nothing, nothing
        if is_turned:
            angle = angles + token * angle_pitch + offset
            cos, sin = ptx.load_128(angle), ptx.load_128(angle + half)
        if thread < UINT64(QUERIES * (filled - size) // 16):
            at = UINT64(size) + thread // UINT64(QUERIES) * UINT64(16)
            keep_query(queries, thread % UINT64(QUERIES), at, nothing)
        place, heads = UINT32(low_word) % UINT32(length), UINT32(QUERIES)
        if new_keys and tile <= UINT64(place // UINT32(TILE)) and UINT64(place // UINT32(TILE)) < end:
            heads = UINT32(QUERIES + 2)  # behind the queries the key, then the value
        if thread == 0:  # where they take no registers from the walk
            kept[0], kept[1], kept[2], kept[3] = used, total, each, count
            kept[4], kept[5] = out + token * out_pitch + column, token * UINT64(cuda.gridDim.y) + number
        ptx.after_earlier_with_next()
        first = UINT32(warp * UINT64(32)) // UINT32(lanes)
        while first < heads:  # for all lanes of a warp, or none
            is_value, is_new = which > UINT32(QUERIES), which >= UINT32(QUERIES) and which < heads
            source, norm = q + column + UINT64(min(which, UINT32(count) - UINT32(1))) * UINT64(size), query_norm
            if is_new:
                source, norm = (new_values if is_value else new_keys) + head * UINT64(size), key_norm
            source += token * q_pitch
            offset, half = vectors_of(lane_of_row, UINT64(size), turned, is_value)
            a, b = turned_vectors(
                source, offset, half, UINT32(lanes), is_value, is_turned and not is_value, sin, cos, norm, more,
                inverse, eps,
            )  # fmt: skip
            if which < UINT32(QUERIES):
                keep_query(queries, which, offset, a)
                keep_query(queries, which, offset + half, b)
            elif is_new:
                to = (v if is_value else k) + base + UINT64(place) * UINT64(size) + offset
                ptx.store_128(to, a[0], a[1], a[2], a[3])
                ptx.store_128(to + half, b[0], b[1], b[2], b[3])
            if at_once >= QUERIES + 2:  # a loop would take more registers
                break
            first, which = UINT32(first + UINT32(at_once)), UINT32(which + UINT32(at_once))
        cuda.syncthreads()  # before which no warp reads queries, nor what this block adds to the cache
        if warp < used:
            first, last = UINT32(tile + warp), UINT32(seen - UINT64(1))
            factor, cap = ptx.float_of(UINT32(factor)) * FLOAT32(unit), ptx.float_of(UINT32(cap))
            keys, values = _at(k, k_scales, base), _at(v, v_scales, base)
            own = UINT32(queries + lane * UINT64(16))
            peak, weight, sums = walk(own, keys, values, first, UINT32(end), last, factor, cap)
            at = warp * UINT64(QUERIES)
            tiles.keep(found, sums, (at + UINT64(2) * t) * UINT64(pitch) + g, UINT64(pitch), UINT64(pairs))
            if t == 0:
                peaks[at + g], totals[at + g] = peak, weight
        cuda.syncthreads()

        used, total, each, count, row, number = kept[0], kept[1], kept[2], kept[3], kept[4], kept[5]
        sinks += (row - out - token * out_pitch) // UINT64(head_dim) if sinks else UINT64(0)  # those of the queries
        ready = UINT64(UINT32(total + each - UINT64(1)) // UINT32(each))
        partial += number * UINT64(cuda.gridDim.x) * UINT64(block)
        own = partial + UINT64(cuda.blockIdx.x) * UINT64(block)
        merge(found, peaks, totals, used, row if ready == 1 else UINT64(0), sinks, own, count)
        if ready == 1:
            return
        if is_last(turns + number * UINT64(4), turn, ready):
            vectors = count * UINT64(width // 4)
            ways = min(max(UINT64(UINT32(threads) // UINT32(vectors)), UINT64(1)), UINT64(warps))
            gather(partial, found, peaks, totals, ready, count, ways)
            cuda.syncthreads()
            merge(found, peaks, totals, ways, row, sinks, own, count)

    return Kernel(name, attend, 28, bounds=(threads, 2))


_OF_KINDS = {
    "bf16": (ptx.low_bf16, ptx.high_bf16, ptx.two_bf16, ptx.emit_multiply_bf16),
    "f16": (ptx.low_f16, ptx.high_f16, ptx.two_f16, ptx.emit_multiply_f16),
}
_READERS = {"Q8": cache_tiles.q8_reader, "FP8": cache_tiles.fp8_reader}


@cache
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
