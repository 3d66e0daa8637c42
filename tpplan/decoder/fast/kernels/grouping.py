"""Kernels around products of rows that are grouped by their experts: what groups them, and what adds up the products.

A row and one of its experts are a pair. Pairs of an expert, so many at a time, are a tile.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.grouped_limits import GROUPING_THREADS, MOST_EXPERTS, TILE_BYTES
from tpplan.decoder.fast.kernels.pair_products import FORMATS, Format
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import cuda, types

_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32
_FLOAT_BYTES, _HALF = 4, 32
#: Length of an array in shared memory.
_SUMS = 2 * MOST_EXPERTS
#: Columns of a thread, and experts whose products it asks for at a time.
_COLUMNS, _AT_ONCE = 8, 4


@device_function
def _expert_of(pair: Any, choices: Any, chosen: Any) -> Any:
    row = _BITS(pair // chosen)
    # Before it are the pairs that are, weights of all rows up to this one, and numbers of the rows before.
    place = _WORD(row) * _WORD(chosen) + _WORD(pair) + _WORD(chosen)
    return _BITS(ptx.float_of(ptx.load_32(choices + place * _WORD(_FLOAT_BYTES))))


def _group(name: str) -> Kernel:  # noqa: C901 (the kernel)
    """Make a kernel that finds the pairs of each expert. Its only block has 1024 threads.

    Its words:

    - choices, chosen: of each row the weights of its experts, then their numbers, which there must be, all in float32.
    - pairs: how many there are.
    - rows: of a tile, at most.
    - tiles, most: where what is known of each goes: its expert, the first of its pairs in their order, and how many it
      has, which may be none; and how many there may be.
    - order: where the pairs' numbers go, by expert, in 32 bits.

    The order of an expert's pairs differs from time to time.
    """

    def group(  # type: ignore[no-untyped-def]  # noqa: C901
        choices, chosen, pairs, rows, tiles, most, order
    ):
        ptx.after_earlier_with_next()
        counts = cuda.shared.array(MOST_EXPERTS, _BITS)
        sums = cuda.shared.array(_SUMS, _WORD)  # of pairs, and above them of tiles
        thread, pairs, chosen, rows = _BITS(cuda.threadIdx.x), _BITS(pairs), _BITS(chosen), _BITS(rows)
        at = _BITS(ptx.shared_address(counts))
        if thread < _BITS(MOST_EXPERTS):
            counts[thread] = _BITS(0)
        cuda.syncthreads()
        pair = thread
        while pair < pairs:
            ptx.shared_add_32(_BITS(at + _BITS(_expert_of(pair, choices, chosen) << _BITS(2))), _BITS(1))
            pair = _BITS(pair + _BITS(GROUPING_THREADS))
        cuda.syncthreads()
        own, own_tiles = _BITS(0), _BITS(0)
        if thread < _BITS(MOST_EXPERTS):
            own = _BITS(counts[thread])
            own_tiles = _BITS(_BITS(own + rows - _BITS(1)) // rows)
            sums[thread] = _WORD(own) | (_WORD(own_tiles) << _WORD(_HALF))
        cuda.syncthreads()
        apart, source = _BITS(1), _BITS(0)
        while apart < _BITS(MOST_EXPERTS):
            if thread < _BITS(MOST_EXPERTS):
                found = _WORD(sums[_BITS(source + thread)])
                if thread >= apart:
                    found += _WORD(sums[_BITS(source + thread - apart)])
                sums[_BITS(_BITS(_BITS(MOST_EXPERTS) - source) + thread)] = found
            apart, source = _BITS(apart << _BITS(1)), _BITS(_BITS(MOST_EXPERTS) - source)
            cuda.syncthreads()
        if thread < _BITS(MOST_EXPERTS):
            found = _WORD(sums[_BITS(source + thread)])
            start, tile = _BITS(_BITS(found) - own), _BITS(_BITS(found >> _WORD(_HALF)) - own_tiles)
            counts[thread] = start  # where its next pair goes
            while own > _BITS(0):
                count = min(own, rows)
                ptx.store_128(tiles + _WORD(tile) * _WORD(TILE_BYTES), thread, start, count, _BITS(0))
                tile, start, own = _BITS(tile + _BITS(1)), _BITS(start + count), _BITS(own - count)
        tile = _BITS(_BITS(_WORD(sums[_BITS(source + _BITS(MOST_EXPERTS - 1))]) >> _WORD(_HALF)) + thread)
        while tile < _BITS(most):
            ptx.store_128(tiles + _WORD(tile) * _WORD(TILE_BYTES), _BITS(0), _BITS(0), _BITS(0), _BITS(0))
            tile = _BITS(tile + _BITS(GROUPING_THREADS))
        cuda.syncthreads()
        pair = thread
        while pair < pairs:
            place = _BITS(at + _BITS(_expert_of(pair, choices, chosen) << _BITS(2)))
            ptx.store_32(order + _WORD(ptx.shared_add_32(place, _BITS(1))) * _WORD(4), pair)
            pair = _BITS(pair + _BITS(GROUPING_THREADS))

    return Kernel(name, group, 7, bounds=(GROUPING_THREADS, 1))


def _sum(name: str, rows: Format) -> Kernel:
    """Make a kernel that adds up what the experts of rows have made of them, each times its weight.

    Its words:

    - parts, pitch: those of pairs, one behind the other; bytes from one to the next.
    - choices, chosen: see :func:`_group`.
    - out, its pitch: where the sums go.
    - plus, its pitch: what is added; the former may be 0.
    - units: eights of columns.

    Blocks of threads have rows in the second dimension, columns in the first.
    """
    first, both = rows.first, rows.both

    @device_function
    def floats(words: Any) -> Any:
        a, b, c, d = words
        move = _BITS(16)
        e, f, g, h = _BITS(a >> move), _BITS(b >> move), _BITS(c >> move), _BITS(d >> move)
        return (first(a), first(b), first(c), first(d)), (first(e), first(f), first(g), first(h))

    @device_function
    def times(sums: Any, by: Any, words: Any) -> Any:
        """Add floats, so many times."""
        (a, b, c, d), (e, f, g, h) = sums
        (i, j, k, l), (m, n, o, p) = floats(words)  # noqa: E741
        return (a + by * i, b + by * j, c + by * k, d + by * l), (e + by * m, f + by * n, g + by * o, h + by * p)

    @device_function
    def weight_at(weights: Any, index: Any, chosen: Any) -> Any:
        """Return a weight; of an expert that there is not, nothing."""
        found = ptx.float_of(ptx.load_32(weights + _WORD(min(index, _BITS(chosen - _BITS(1)))) * _WORD(_FLOAT_BYTES)))
        return found if index < chosen else _FLOAT(0)

    @device_function
    def part_at(parts: Any, index: Any, chosen: Any, pitch: Any) -> Any:
        return ptx.load_128(parts + _WORD(min(index, _BITS(chosen - _BITS(1)))) * pitch)

    def add_up(  # type: ignore[no-untyped-def]
        parts, pitch, choices, chosen, out, out_pitch, plus, plus_pitch, units
    ):
        ptx.after_earlier_with_next()
        unit = _BITS(cuda.blockIdx.x) * _BITS(cuda.blockDim.x) + _BITS(cuda.threadIdx.x)
        if unit < _BITS(units):
            row, column, chosen = _WORD(cuda.blockIdx.y), _WORD(unit) * _WORD(2 * _COLUMNS), _BITS(chosen)
            weights = choices + row * _WORD(chosen) * _WORD(2 * _FLOAT_BYTES)
            parts += row * _WORD(chosen) * pitch + column
            nothing = _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0)
            sums = floats(ptx.load_128(plus + row * plus_pitch + column)) if plus != _WORD(0) else (nothing, nothing)
            i = _BITS(0)
            while i < chosen:
                j, k, l = _BITS(i + _BITS(1)), _BITS(i + _BITS(2)), _BITS(i + _BITS(3))  # noqa: E741
                a, b = part_at(parts, i, chosen, pitch), part_at(parts, j, chosen, pitch)
                c, d = part_at(parts, k, chosen, pitch), part_at(parts, l, chosen, pitch)
                sums = times(sums, weight_at(weights, i, chosen), a)
                sums = times(sums, weight_at(weights, j, chosen), b)
                sums = times(sums, weight_at(weights, k, chosen), c)
                sums = times(sums, weight_at(weights, l, chosen), d)
                i = _BITS(i + _BITS(_AT_ONCE))
            (a, b, c, d), (e, f, g, h) = sums
            ptx.store_128(out + row * out_pitch + column, both(a, e), both(b, f), both(c, g), both(d, h))

    return Kernel(name, add_up, 9)


GROUPING_TILES = _group("grouping_tiles")
GROUPING_SUM_BF16 = _sum("grouping_sum_bf16", FORMATS["bf16"])
GROUPING_SUM_F16 = _sum("grouping_sum_f16", FORMATS["f16"])
