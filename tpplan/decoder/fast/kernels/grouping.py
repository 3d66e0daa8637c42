"""Kernels around products of rows that are grouped by their experts: what groups them, and what adds up the products.

A row and one of its experts are a pair. Pairs of an expert, so many at a time, are a tile.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.grouped_limits import GROUPING_THREADS, MOST_EXPERTS, TILE_BYTES
from tpplan.decoder.fast.kernels.pair_products import FORMATS, Format
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda

_FLOAT_BYTES, _HALF = 4, 32
#: Length of an array in shared memory.
_SUMS = 2 * MOST_EXPERTS
#: Columns of a thread, and experts whose products it asks for at a time.
_COLUMNS, _AT_ONCE = 8, 4


@device_function
def _expert_of(pair: Any, choices: Any, chosen: Any) -> Any:
    row = UINT32(pair // chosen)
    # Before it are the pairs that are, weights of all rows up to this one, and numbers of the rows before.
    place = UINT64(row) * UINT64(chosen) + UINT64(pair) + UINT64(chosen)
    return UINT32(ptx.float_of(ptx.load_32(choices + place * UINT64(_FLOAT_BYTES))))


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
        counts = cuda.shared.array(MOST_EXPERTS, UINT32)
        sums = cuda.shared.array(_SUMS, UINT64)  # of pairs, and above them of tiles
        thread, pairs, chosen, rows = UINT32(cuda.threadIdx.x), UINT32(pairs), UINT32(chosen), UINT32(rows)
        at = UINT32(ptx.shared_address(counts))
        if thread < UINT32(MOST_EXPERTS):
            counts[thread] = UINT32(0)
        cuda.syncthreads()
        pair = thread
        while pair < pairs:
            ptx.shared_add_32(UINT32(at + UINT32(_expert_of(pair, choices, chosen) << UINT32(2))), UINT32(1))
            pair = UINT32(pair + UINT32(GROUPING_THREADS))
        cuda.syncthreads()
        own, own_tiles = UINT32(0), UINT32(0)
        if thread < UINT32(MOST_EXPERTS):
            own = UINT32(counts[thread])
            own_tiles = UINT32(UINT32(own + rows - UINT32(1)) // rows)
            sums[thread] = UINT64(own) | (UINT64(own_tiles) << UINT64(_HALF))
        cuda.syncthreads()
        apart, source = UINT32(1), UINT32(0)
        while apart < UINT32(MOST_EXPERTS):
            if thread < UINT32(MOST_EXPERTS):
                found = UINT64(sums[UINT32(source + thread)])
                if thread >= apart:
                    found += UINT64(sums[UINT32(source + thread - apart)])
                sums[UINT32(UINT32(UINT32(MOST_EXPERTS) - source) + thread)] = found
            apart, source = UINT32(apart << UINT32(1)), UINT32(UINT32(MOST_EXPERTS) - source)
            cuda.syncthreads()
        if thread < UINT32(MOST_EXPERTS):
            found = UINT64(sums[UINT32(source + thread)])
            start, tile = UINT32(UINT32(found) - own), UINT32(UINT32(found >> UINT64(_HALF)) - own_tiles)
            counts[thread] = start  # where its next pair goes
            while own > UINT32(0):
                count = min(own, rows)
                ptx.store_128(tiles + UINT64(tile) * UINT64(TILE_BYTES), thread, start, count, UINT32(0))
                tile, start, own = UINT32(tile + UINT32(1)), UINT32(start + count), UINT32(own - count)
        tile = UINT32(UINT32(UINT64(sums[UINT32(source + UINT32(MOST_EXPERTS - 1))]) >> UINT64(_HALF)) + thread)
        while tile < UINT32(most):
            ptx.store_128(tiles + UINT64(tile) * UINT64(TILE_BYTES), UINT32(0), UINT32(0), UINT32(0), UINT32(0))
            tile = UINT32(tile + UINT32(GROUPING_THREADS))
        cuda.syncthreads()
        pair = thread
        while pair < pairs:
            place = UINT32(at + UINT32(_expert_of(pair, choices, chosen) << UINT32(2)))
            ptx.store_32(order + UINT64(ptx.shared_add_32(place, UINT32(1))) * UINT64(4), pair)
            pair = UINT32(pair + UINT32(GROUPING_THREADS))

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
        move = UINT32(16)
        e, f, g, h = UINT32(a >> move), UINT32(b >> move), UINT32(c >> move), UINT32(d >> move)
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
        found = ptx.float_of(
            ptx.load_32(weights + UINT64(min(index, UINT32(chosen - UINT32(1)))) * UINT64(_FLOAT_BYTES))
        )
        return found if index < chosen else FLOAT32(0)

    @device_function
    def part_at(parts: Any, index: Any, chosen: Any, pitch: Any) -> Any:
        return ptx.load_128(parts + UINT64(min(index, UINT32(chosen - UINT32(1)))) * pitch)

    def add_up(  # type: ignore[no-untyped-def]
        parts, pitch, choices, chosen, out, out_pitch, plus, plus_pitch, units
    ):
        ptx.after_earlier_with_next()
        unit = UINT32(cuda.blockIdx.x) * UINT32(cuda.blockDim.x) + UINT32(cuda.threadIdx.x)
        if unit < UINT32(units):
            row, column, chosen = UINT64(cuda.blockIdx.y), UINT64(unit) * UINT64(2 * _COLUMNS), UINT32(chosen)
            weights = choices + row * UINT64(chosen) * UINT64(2 * _FLOAT_BYTES)
            parts += row * UINT64(chosen) * pitch + column
            nothing = FLOAT32(0), FLOAT32(0), FLOAT32(0), FLOAT32(0)
            sums = floats(ptx.load_128(plus + row * plus_pitch + column)) if plus != UINT64(0) else (nothing, nothing)
            i = UINT32(0)
            while i < chosen:
                j, k, l = UINT32(i + UINT32(1)), UINT32(i + UINT32(2)), UINT32(i + UINT32(3))  # noqa: E741
                a, b = part_at(parts, i, chosen, pitch), part_at(parts, j, chosen, pitch)
                c, d = part_at(parts, k, chosen, pitch), part_at(parts, l, chosen, pitch)
                sums = times(sums, weight_at(weights, i, chosen), a)
                sums = times(sums, weight_at(weights, j, chosen), b)
                sums = times(sums, weight_at(weights, k, chosen), c)
                sums = times(sums, weight_at(weights, l, chosen), d)
                i = UINT32(i + UINT32(_AT_ONCE))
            (a, b, c, d), (e, f, g, h) = sums
            ptx.store_128(out + row * out_pitch + column, both(a, e), both(b, f), both(c, g), both(d, h))

    return Kernel(name, add_up, 9)


GROUPING_TILES = _group("grouping_tiles")
GROUPING_SUM_BF16 = _sum("grouping_sum_bf16", FORMATS["bf16"])
GROUPING_SUM_F16 = _sum("grouping_sum_f16", FORMATS["f16"])
