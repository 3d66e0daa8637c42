"""Kernels for the attention of a decoding step: one token of each of some sequences attends to its sequence's cache.

The places of a cache that a token sees are cut into tiles of 16. A block has successive tiles, which its warps take in
turns; eight query heads that read one KV head are the rows of their matrix instruction. Softmax is done on the way
(Milakov and Gimelshein, arXiv 1805.02867), in float32; weights go to the matrix instruction as a sum of two numbers of
16 bits, which is nearly as good as float32. What warps have found is merged in shared memory, and what blocks have
found by the last of them that is ready (Dao et al., Flash-Decoding, 2023), see
:mod:`tpplan.decoder.fast.kernels.attention_parts`. Two blocks share a multiprocessor, so that one reads while the other
begins or ends: queries lie in shared memory, for registers are what keeps tiles on their way. How many blocks have
something to do depends on how many places the token sees, which is in the device's memory.
Caches of 8 bits become float16 in registers, see :mod:`tpplan.decoder.fast.kernels.cache_tiles`, and so do the queries
then.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tpplan.decoder.fast.kernels import cache_tiles, tiles
from tpplan.decoder.fast.kernels.attention_parts import QUERIES, is_last, parts_of
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import cuda, types

#: Places of a tile.
TILE = 16
#: Elements of the heads of which a block has 8 warps.
WIDE = 128

_NAME = re.compile("ATTENTION_(?P<dtype>BF16|F16)_(?P<size>[0-9]+)(_(?P<kind>Q8|FP8))?(?P<capped>_CAPPED)?")
_WORD, _FLOAT, _HALF = types.uint64, types.float32, types.uint32
_EVERY = 0xFFFFFFFF
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


def attention(  # noqa: C901, PLR0915 (of the functions in it)
    name: str, head_dim: int, reader: cache_tiles.Reader, warps: int, *, ahead: bool, capped: bool
) -> Kernel:
    """Make a kernel.

    Its grid: as many blocks as share a token's places, KV heads × eights of the query heads of each, tokens. Its words:

    - q, its pitch: address, and bytes from one token to the next; heads are side by side.
    - k, v, their pitch: addresses, and bytes from one sequence to the next; heads and places are side by side.
    - their scales: addresses, if they have any.
    - positions: address; of 64 bits each, not negative.
    - sinks: address of one of the dtype for each query head; 0 if there are none.
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
    low_of_row, _, rounded, _ = _OF_KINDS[dtype]
    load_queries = tiles.loads(size, 64, clear=True)
    read_keys, read_values, wide, of_queries = reader.keys, reader.values, reader.wide, reader.queries
    merging = parts_of(head_dim, warps, unit, rounded, low_of_row)
    merge, gather, rows, block = merging.merge, merging.gather, merging.rows, merging.block
    width, pairs, pitch = merging.width, merging.pairs, merging.pitch
    scores, weighed, zeros = tiles.scores(multiply), tiles.weighed(multiply), tiles.zeros(width // 4)
    threads, floats = 32 * warps, rows * pitch

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

    def attend(  # type: ignore[no-untyped-def]
        q, q_pitch, k, v, kv_pitch, k_scales, v_scales, positions, sinks, out, out_pitch, partial, turns, length,
        group, factor, cap, least,
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
        query = load_queries(
            q + token * q_pitch + column + min(g, count - _WORD(1)) * _WORD(size) + t * _WORD(16), t * _WORD(16)
        )

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
        sinks += (row - out - token * out_pitch) // _WORD(head_dim) if sinks else _WORD(0)  # those of the queries
        ready = _WORD(_HALF(total + each - _WORD(1)) // _HALF(each))
        partial += number * _WORD(cuda.gridDim.x) * _WORD(block)
        own = partial + _WORD(cuda.blockIdx.x) * _WORD(block)
        merge(found, peaks, totals, used, row if ready == 1 else _WORD(0), sinks, own, count)
        if ready == 1:
            return
        if is_last(turns + number * _WORD(4), turn, ready):
            vectors = count * _WORD(width // 4)
            ways = min(max(_WORD(_HALF(threads) // _HALF(vectors)), _WORD(1)), _WORD(warps))
            gather(partial, found, peaks, totals, ready, count, ways)
            cuda.syncthreads()
            merge(found, peaks, totals, ways, row, sinks, own, count)

    return Kernel(name, attend, 18, bounds=(threads, 2))


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
