"""Kernels that multiply rows, grouped by their experts, by these experts' matrices of codes, which stay where they are.

Tensor cores multiply, as in :mod:`tpplan.decoder.fast.kernels.wide`: a warp has 32 matrix rows, which are a strip, and
all rows of a tile, and makes a code a float once for all of these. A block has a tile of rows and as many strips as
warps, and all columns. Codes and rows are copied into shared memory without registers, while steps before are
multiplied; scales and zeros are in registers one step ahead, as each lane has its own.

Rows are read where they are, and results go to where their pairs are, so that nothing has to be put in order. What a
row becomes does not depend on its place in a tile.

A stage of shared memory has what a block needs for a step: rows, then codes, both as in
:mod:`tpplan.decoder.fast.kernels.wide`. Before all stages there is a table of where the rows are: of each its distance
from the first one there is, in 16 bytes. The last step may have columns that there are not: what is copied there of
rows is zeros, of codes it is the first ones. Scales and zeros are in registers, of each lane its own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.decoder.fast.kernels import packed_codes, tiles
from tpplan.decoder.fast.kernels.expert_scales import SCALES_OF, scales_at, times
from tpplan.decoder.fast.kernels.finishing import ADD, SWIGLU_OAI, activation, limited_plus_one
from tpplan.decoder.fast.kernels.grouped_limits import BLOCKS, OWN, STAGES, TABLE, TILE_BYTES, WARPS
from tpplan.decoder.fast.kernels.lane_products import scale_of
from tpplan.decoder.fast.kernels.wide_limits import CODES, LANES, OF_LANES, VECTOR
from tpplan.decoder.fast.kernels.wide_products import products_of
from tpplan.decoder.fast.kernels.wide_sums import PER_EIGHT, turned
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, copied_function, device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT32, UINT64, cuda, intrinsic, ir, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes


#: Of e2m1: the largest exponent of a scale, what is added to make its float a number of 16 bits times the factor of
#: floats, and what this leaves too small.
_LARGEST, _LESS, _SMALLER = 160, 94, 2**32


@frozen
class Scaling:
    """What makes scales and zeros of a lane's four matrix rows.

    Attributes:
        ask: asks for those of 16 bytes of codes, given the address of the first row, bytes to the second, and from
            these two to the others; the number of the first row, the number of 16 bytes, and what the kernel is told.
        made: returns scales, and what is added to codes' floats, each twice in 32 bits, given what was asked for, and
            what the kernel is told. Floats have nothing to add: scales stand in its place.
        factor: what sums are to be multiplied by.
    """

    ask: Any
    made: Any
    factor: int = 1


def by_numbers(kind: Codes, codes: str) -> Scaling:
    """Return what does it of scales of 16 or 32 bits; the kernel is told of them, and of zeros."""
    numbers, ask_zeros, zeros_of = SCALES_OF[codes]
    both, factor, base, has_zeros = kind.floats.both, kind.factor, max(kind.base or 0, 0), kind.base is not None

    @copied_function
    def ask(_: Any, place: Any, unit: Any, more: Any) -> Any:
        of_scales, of_zeros = more
        indexes = numbers(place, times(unit, of_scales[6]), of_scales)
        return scales_at(indexes, of_scales), ask_zeros(indexes, of_zeros)

    @copied_function
    def twice(bits: Any, form: Any) -> Any:
        scale = scale_of(bits, form) * FLOAT32(factor)
        return both(scale, scale)

    @copied_function
    def less(zero: Any) -> Any:
        found = -(FLOAT32(base) + zero)
        return both(found, found)

    @copied_function
    def made(found: Any, more: Any) -> Any:
        (a, b, c, d), zeros = found
        form = more[0][2]
        scales = twice(a, form), twice(b, form), twice(c, form), twice(d, form)
        if not has_zeros:
            return scales, scales
        e, f, g, h = zeros_of(zeros, more[1], more[0])
        return scales, (less(e), less(f), less(g), less(h))

    return Scaling(ask, made)


def by_exponents() -> Scaling:
    """Return what does it of e2m1, whose scales are where :mod:`tpplan.decoder.fast.kernels.coded_experts` has them."""

    @copied_function
    def exponent_at(address: Any, scales: Any) -> Any:
        return UINT32(ptx.load_8(scales + (address >> UINT64(4))))

    @copied_function
    def ask(rows: Any, _: Any, unit: Any, scales: Any) -> Any:
        row, pitch, half = rows
        first = row + UINT64(UINT32(unit * UINT32(VECTOR)))
        second = first + half
        one, other = exponent_at(first, scales), exponent_at(first + pitch, scales)
        return one, other, exponent_at(second, scales), exponent_at(second + pitch, scales)

    @copied_function
    def twice(exponent: Any) -> Any:
        return UINT32(UINT32(min(exponent, UINT32(_LARGEST)) + UINT32(_LESS)) * UINT32(0x00800080))

    @copied_function
    def made(found: Any, _: Any) -> Any:
        scales = twice(found[0]), twice(found[1]), twice(found[2]), twice(found[3])
        return scales, scales

    return Scaling(ask, made, _SMALLER)


def by_nothing() -> Scaling:
    """Return what does it of elements of 16 bits, which have none."""

    @copied_function
    def ask(_: Any, __: Any, ___: Any, ____: Any) -> Any:
        return UINT32(0)

    @copied_function
    def made(found: Any, _: Any) -> Any:
        return (found, found, found, found), (found, found, found, found)

    return Scaling(ask, made)


#: What the table has of rows that there are not, which are not copied.
NONE = 2**32 - 1


def rows_by(kind: Codes, rows: int, threads: int) -> tuple[Any, Any]:
    """Return what finds a thread's vectors in rows, and what copies those of a step.

    The first takes the address of the table, which has none for rows behind those of a tile. It returns where in it the
    row of the first vector is, this one's first byte in a row, and where in a stage it goes. The second takes these, a
    step, a stage, where rows are, and the bytes of one.

    Args:
        kind: of codes.
        rows: of a tile.
        threads: of a block.
    """
    row_bytes = 2 * kind.step
    chunks = row_bytes // VECTOR
    chunk_bits, per_lane, apart = chunks.bit_length() - 1, chunks // LANES, threads // chunks
    copy = _copies(-(-rows // apart), 4 * apart, row_bytes * apart)
    swapped = LANES if chunks > LANES else 0  # of odd rows, so that eight lanes read all banks

    @copied_function
    def find(table: Any) -> Any:
        thread = UINT32(cuda.threadIdx.x)
        row, place = UINT32(thread >> UINT32(chunk_bits)), UINT32(thread & UINT32(chunks - 1))
        chunk = UINT32(UINT32(UINT32(place & UINT32(LANES - 1)) * UINT32(per_lane)) + UINT32(place >> UINT32(2)))
        other = UINT32(place ^ UINT32(UINT32(row & UINT32(1)) * UINT32(swapped)))
        to = UINT32(UINT32(row * UINT32(row_bytes)) + UINT32(other * UINT32(VECTOR)))
        return UINT32(table + UINT32(row << UINT32(2))), UINT32(chunk * UINT32(VECTOR)), to

    @copied_function
    def ask(found: Any, k: Any, stage: Any, x: Any, limit: Any) -> None:
        entry, column, to = found
        column = UINT32(column + UINT32(k * UINT32(row_bytes)))
        is_there = column < limit
        count = UINT32(VECTOR) if is_there else UINT32(0)
        copy(entry, x + UINT64(column if is_there else UINT32(0)), UINT32(to + stage), count)

    return find, ask


def _copies(count: int, apart: int, to_apart: int) -> Any:
    """Return an intrinsic that copies vectors of so many rows.

    It takes where in the table the first one is, the vector's address if it were of the first row there is, where it
    goes, and how many bytes of it are read.

    Args:
        count: of rows.
        apart: bytes of the table from one row to the next.
        to_apart: the same of a stage.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        entry, x, to, size = values
        for i in range(count):
            (row,) = ptx.emit_shared_load_32(builder, [builder.add(entry, ir.Constant(entry.type, i * apart))])
            (at,) = ptx.emit_vector_at(builder, [row, x])
            goes = builder.add(to, ir.Constant(to.type, i * to_apart))
            ptx.emit_copy_128_filled_below(builder, [goes, at, size, row, ir.Constant(row.type, NONE)])
        return context.get_dummy_value()

    word, bits = types.uint64, types.uint32
    return intrinsic(lambda typingctx, entry, x, to, size: (types.void(bits, word, bits, bits), codegen))  # noqa: ARG005


@copied_function
def ask_codes(place: Any, unit: Any, to: Any) -> None:
    """Ask for a lane's codes of a step.

    Args:
        place: address of the first of four matrix rows, bytes to the second, and from these two to the others.
        unit: number of 16 bytes in a row.
        to: where in shared memory they go.
    """
    row, pitch, half = place
    first = row + UINT64(UINT32(unit * UINT32(VECTOR)))
    second = first + half
    ptx.copy_128(to, first)
    ptx.copy_128(UINT32(to + UINT32(OF_LANES)), first + pitch)
    ptx.copy_128(UINT32(to + UINT32(2 * OF_LANES)), second)
    ptx.copy_128(UINT32(to + UINT32(3 * OF_LANES)), second + pitch)


#: Rows of an instruction.
_EIGHT = 8
#: By dtype: what multiplies pairs and adds others.
_FMA = {"bf16": ptx.emit_fma_bf16, "f16": ptx.emit_fma_f16}
_NAME = re.compile("GROUPED_(?P<kind>(?P<dtype>BF16|F16)_(?P<codes>4|8|E4M3|E2M1|WHOLE))_(?P<rows>16|32|64|128)")


def _finishing(kind: Codes, factor: int) -> tuple[Any, Any]:
    """Make what reads the biases of a lane's matrix rows, and what stores what becomes of its sums for a row."""
    first, both = kind.floats.first, kind.floats.both

    @copied_function
    def bias_at(address: Any) -> Any:
        return first(UINT32(ptx.load_16(address)))

    @copied_function
    def biases_of(biases: Any, expert: Any, column: Any) -> Any:
        bias, of_bias, step, half = biases
        if bias == UINT64(0):
            return FLOAT32(0), FLOAT32(0), FLOAT32(0), FLOAT32(0)
        at = bias + UINT64(expert) * of_bias + UINT64(column) * step
        other = at + half
        return bias_at(at), bias_at(at + step), bias_at(other), bias_at(other + step)

    @copied_function
    def rounded(s: Any, t: Any) -> Any:
        found = both(s, t)
        return first(found), first(UINT32(found >> UINT32(16)))

    @device_function
    def store(a: Any, b: Any, c: Any, d: Any, biases: Any, at: Any, mode: Any) -> None:
        """Store four sums, or two gates times what these are for; all of these are rounded."""
        by = FLOAT32(factor)
        a, b, c, d = a * by + biases[0], b * by + biases[1], c * by + biases[2], d * by + biases[3]
        if mode == ADD:
            ptx.store_64(at, both(a, b), both(c, d))
        else:
            a, b = rounded(a, b)
            c, d = rounded(c, d)
            a, b = rounded(activation(a, mode), activation(b, mode))
            if mode == SWIGLU_OAI:
                c, d = limited_plus_one(c), limited_plus_one(d)
            ptx.store_32(at, both(a * c, b * d))

    return biases_of, store


def _grouped(kind: Codes, rows: int, fma: ptx.Emitter, scaling: Scaling) -> Any:  # noqa: C901, PLR0915 (the kernel)
    """Make what multiplies a tile of rows by strips of its expert's matrix.

    Its grid: strips of as many matrix rows as a block has in the first dimension, tiles in the second. Its arguments:

    - y, y_pitch: where results of pairs go: address, a multiple of 8, and bytes from one to the next.
    - x, x_units: address of rows, a multiple of 16, and 16 bytes of these from one to the next.
    - codes, of_expert, pitch, half: address of the matrices; bytes from one to the next, from one row of it to the
      next, and to the second two rows of four, which are those that gates are for, or the next.
    - tiles, order: see :mod:`tpplan.decoder.fast.kernels.grouping`.
    - many: pairs of each row of x.
    - size, width: rows of each matrix, a multiple of four; columns, a multiple of those of 16 bytes.
    - biases: address, or 0; bytes from one expert's to the next, from one to the next, and to the second two of four.
    - mode: what becomes of sums, see :mod:`tpplan.decoder.fast.kernels.finishing`.
    - more: what the kernel is told of scales.

    Args:
        kind: of codes.
        rows: of a tile.
        fma: writes what multiplies pairs and adds others.
        scaling: makes scales and zeros.
    """
    warps, step, row_bytes = WARPS[rows], kind.step, 2 * kind.step
    of_rows, eights = rows * row_bytes, rows // _EIGHT
    stage, swapped = of_rows + warps * CODES, LANES * VECTOR if row_bytes > LANES * VECTOR else 0
    products, zeros_of = products_of(kind, fma, eights), tiles.zeros(PER_EIGHT * eights)
    find_rows, ask_rows = rows_by(kind, rows, 32 * warps)
    biases_of, store = _finishing(kind, scaling.factor)
    ask_scales, made, mask = scaling.ask, scaling.made, kind.mask

    @copied_function
    def unit_of(k: Any, t: Any, units: Any) -> Any:
        """Return which 16 bytes of a matrix row a lane has in a step; where there are none, the first."""
        unit = UINT32(UINT32(k * UINT32(LANES)) + t)
        return unit if unit < units else UINT32(0)

    @device_function
    def multiply(  # noqa: C901, PLR0915
        y: Any, y_pitch: Any, x: Any, x_units: Any, matrix: Any, tiles_at: Any, order: Any, many: Any, size: Any,
        width: Any, biases: Any, mode: Any, more: Any,
    ) -> None:  # fmt: skip
        room = cuda.shared.array(0, UINT32, alignment=128)
        ptx.after_earlier_with_next()
        expert, start, count, _ = ptx.load_128(tiles_at + UINT64(cuda.blockIdx.y) * UINT64(TILE_BYTES))
        if count == UINT32(0):
            return
        thread, one = UINT32(cuda.threadIdx.x), UINT32(1)
        if thread < count:
            pair = ptx.load_32(order + UINT64(UINT32(start + thread)) * UINT64(4))
            room[thread] = UINT32(UINT32(pair // UINT32(many)) * UINT32(x_units))
        elif thread < UINT32(TABLE // 4):
            room[thread] = UINT32(NONE)
        lane, warp = UINT32(thread & UINT32(31)), ptx.of_first(UINT32(thread >> UINT32(5)))
        g, t = UINT32(lane >> UINT32(2)), UINT32(lane & UINT32(3))
        own = UINT32(OWN) if mode == ADD else UINT32(OWN // 2)  # of its matrix rows, those that results are of
        strip = UINT32(UINT32(UINT32(cuda.blockIdx.x) * UINT32(warps)) + warp)
        column = UINT32(UINT32(UINT32(strip * UINT32(_EIGHT)) + g) * own)
        row = min(column, UINT32(UINT32(size) - own))
        codes, of_expert, pitch, half = matrix
        its_rows = codes + UINT64(expert) * of_expert + UINT64(row) * pitch, pitch, half
        number = UINT32(UINT32(expert * UINT32(size)) + row)
        units, limit = UINT32(UINT32(UINT32(width) * UINT32(LANES)) // UINT32(step)), UINT32(UINT32(width) << one)
        steps = UINT32(UINT32(UINT32(width) + UINT32(step - 1)) // UINT32(step))
        table = UINT32(ptx.shared_address(room))
        begin, codes_at = UINT32(table + UINT32(TABLE)), UINT32(UINT32(of_rows) + UINT32(warp * UINT32(CODES)))
        codes_at, found_rows = UINT32(codes_at + UINT32(lane * UINT32(VECTOR))), find_rows(table)
        end = UINT32(begin + UINT32(STAGES * stage))
        even = UINT32(
            UINT32(g * UINT32(row_bytes))
            + UINT32(UINT32(UINT32(g & one) * UINT32(swapped)) + UINT32(t * UINT32(VECTOR)))
        )
        kept_mask = UINT32(UINT32(~ptx.active()) + UINT32(mask))  # a register, of which the compiler makes no constants
        cuda.syncthreads()
        k, to = UINT32(0), begin
        while k < UINT32(STAGES - 1):
            ptx.roll()
            if k < steps:
                ask_codes(its_rows, unit_of(k, t, units), UINT32(to + codes_at))
                ask_rows(found_rows, k, to, x, limit)
            ptx.end_copies()
            k, to = UINT32(k + one), UINT32(to + UINT32(stage))
        asked = ask_scales(its_rows, number, unit_of(UINT32(0), t, units), more)
        k, here, sums = UINT32(0), begin, zeros_of()
        while k < steps:
            ptx.roll()
            ptx.copied_but_one()
            cuda.syncthreads()  # all have copied what they do of this step, and read what is written over now
            scales, less = made(asked, more)
            asked = ask_scales(its_rows, number, unit_of(UINT32(k + one), t, units), more)
            ahead = UINT32(k + UINT32(STAGES - 1))
            if ahead < steps:
                ask_codes(its_rows, unit_of(ahead, t, units), UINT32(to + codes_at))
                ask_rows(found_rows, ahead, to, x, limit)
            ptx.end_copies()
            at = UINT32(here + even)
            sums = products(sums, UINT32(here + codes_at), at, UINT32(at ^ UINT32(64)), scales, less, kept_mask)
            k, here = UINT32(k + one), UINT32(here + UINT32(stage))
            here, to = here if here < end else begin, UINT32(to + UINT32(stage))
            to = to if to < end else begin
        if column < UINT32(size):
            added = biases_of(biases, expert, column)
            y += UINT64(column) * UINT64(2)
            place, last = UINT32(t << one), UINT32(count)
            while place < last:
                ptx.roll()
                at_order = order + UINT64(UINT32(start + place)) * UINT64(4)
                to_row = y + UINT64(ptx.load_32(at_order)) * y_pitch
                store(sums[0], sums[2], sums[4], sums[6], added, to_row, mode)
                if UINT32(place + one) < last:
                    to_row = y + UINT64(ptx.load_32(at_order + UINT64(4))) * y_pitch
                    store(sums[1], sums[3], sums[5], sums[7], added, to_row, mode)
                sums, place = turned(sums), UINT32(place + UINT32(_EIGHT))

    return multiply


def _of_numbers(name: str, kind: Codes, codes: str, rows: int, fma: ptx.Emitter) -> Kernel:
    """Make a kernel for codes with scales of 16 or 32 bits.

    Its words are those of :func:`_grouped`, with rows of each matrix in place of ``of_expert`` and ``pitch``, as
    matrices lie one below the other; and behind them what :mod:`tpplan.decoder.fast.kernels.expert_scales` has of
    scales, then of zeros.
    """
    multiply, per_byte = _grouped(kind, rows, fma, by_numbers(kind, codes)), kind.halvings

    def grouped(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_units, codes, _, half, tiles_at, order, many, size, width, bias, of_bias, bias_step,
        bias_half, mode, scales, scales_half, form, groups, ahead, row, inverse, zeros, zeros_half, offset,
    ):  # fmt: skip
        pitch = width >> UINT64(per_byte)
        of_scales = scales, scales_half, form, UINT32(groups), UINT32(ahead), row, inverse
        multiply(
            y, y_pitch, x, x_units, (codes, size * pitch, pitch, half), tiles_at, order, many, size, width,
            (bias, of_bias, bias_step, bias_half), mode, (of_scales, (zeros, zeros_half, offset)),
        )  # fmt: skip

    return Kernel(name, grouped, 27, bounds=(32 * WARPS[rows], BLOCKS[rows]))


def _of_exponents(name: str, kind: Codes, rows: int, fma: ptx.Emitter) -> Kernel:
    """Make a kernel for e2m1, whose words are those of :func:`_grouped`; the last is where scales are.

    Scales above 2 ** 33 count as that, and below 2 ** -93 as nothing.
    """
    multiply = _grouped(kind, rows, fma, by_exponents())

    def grouped(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_units, codes, of_expert, pitch, half, tiles_at, order, many, size, width, bias, of_bias,
        bias_step, bias_half, mode, scales,
    ):  # fmt: skip
        multiply(
            y, y_pitch, x, x_units, (codes, of_expert, pitch, half), tiles_at, order, many, size, width,
            (bias, of_bias, bias_step, bias_half), mode, scales,
        )  # fmt: skip

    return Kernel(name, grouped, 19, bounds=(32 * WARPS[rows], BLOCKS[rows]))


def _of_elements(name: str, kind: Codes, rows: int, fma: ptx.Emitter) -> Kernel:
    """Make a kernel for elements of 16 bits, whose words are those of :func:`_grouped`; there are no scales."""
    multiply = _grouped(kind, rows, fma, by_nothing())

    def grouped(  # type: ignore[no-untyped-def]
        y, y_pitch, x, x_units, codes, of_expert, pitch, half, tiles_at, order, many, size, width, bias, of_bias,
        bias_step, bias_half, mode,
    ):  # fmt: skip
        multiply(
            y, y_pitch, x, x_units, (codes, of_expert, pitch, half), tiles_at, order, many, size, width,
            (bias, of_bias, bias_step, bias_half), mode, (),
        )  # fmt: skip

    return Kernel(name, grouped, 18, bounds=(32 * WARPS[rows], BLOCKS[rows]))


def __getattr__(name: str) -> Kernel:
    """Return the kernel of a dtype of rows, a kind of codes and rows of a tile, such as ``GROUPED_BF16_E4M3_64``."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    kind, codes, rows = getattr(packed_codes, found["kind"]), found["codes"].lower(), int(found["rows"])
    fma = _FMA[found["dtype"].lower()]
    if codes == "e2m1":
        return _of_exponents(name.lower(), kind, rows, fma)
    if codes == "whole":
        return _of_elements(name.lower(), kind, rows, fma)
    return _of_numbers(name.lower(), kind, codes, rows, fma)
