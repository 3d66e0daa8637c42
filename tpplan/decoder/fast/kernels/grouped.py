"""Kernels that multiply rows, grouped by their experts, by these experts' matrices of codes, which stay where they are.

Tensor cores multiply, as in :mod:`tpplan.decoder.fast.kernels.wide`: a warp has 32 matrix rows, which are a strip, and
all rows of a tile, and makes a code a float once for all of these. A block has a tile of rows and as many strips as
warps, and all columns. Codes and rows are copied into shared memory without registers, while steps before are
multiplied; scales and zeros are in registers one step ahead, as each lane has its own.

Rows are read where they are, and results go to where their pairs are, so that nothing has to be put in order. What a
row becomes does not depend on its place in a tile.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tpplan.decoder.fast.kernels import packed_codes, tiles
from tpplan.decoder.fast.kernels.finishing import ADD, SWIGLU_OAI, activation, limited_plus_one
from tpplan.decoder.fast.kernels.grouped_limits import BLOCKS, OWN, STAGES, TABLE, TILE_BYTES, WARPS
from tpplan.decoder.fast.kernels.grouped_loads import NONE, ask_codes, rows_by
from tpplan.decoder.fast.kernels.grouped_scales import Scaling, by_exponents, by_nothing, by_numbers
from tpplan.decoder.fast.kernels.wide_limits import CODES, LANES, VECTOR
from tpplan.decoder.fast.kernels.wide_products import products_of
from tpplan.decoder.fast.kernels.wide_sums import PER_EIGHT, turned
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import Kernel, copied_function, device_function
from tpplan.exec.toolchain.language import cuda, types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: Rows of an instruction.
_EIGHT = 8
#: By dtype: what multiplies pairs and adds others.
_FMA = {"bf16": ptx.emit_fma_bf16, "f16": ptx.emit_fma_f16}
_NAME = re.compile("GROUPED_(?P<kind>(?P<dtype>BF16|F16)_(?P<codes>4|8|E4M3|E2M1|WHOLE))_(?P<rows>16|32|64|128)")
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


def _finishing(kind: Codes, factor: int) -> tuple[Any, Any]:
    """Make what reads the biases of a lane's matrix rows, and what stores what becomes of its sums for a row."""
    first, both = kind.floats.first, kind.floats.both

    @copied_function
    def bias_at(address: Any) -> Any:
        return first(_BITS(ptx.load_16(address)))

    @copied_function
    def biases_of(biases: Any, expert: Any, column: Any) -> Any:
        bias, of_bias, step, half = biases
        if bias == _WORD(0):
            return _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0)
        at = bias + _WORD(expert) * of_bias + _WORD(column) * step
        other = at + half
        return bias_at(at), bias_at(at + step), bias_at(other), bias_at(other + step)

    @copied_function
    def rounded(s: Any, t: Any) -> Any:
        found = both(s, t)
        return first(found), first(_BITS(found >> _BITS(16)))

    @device_function
    def store(a: Any, b: Any, c: Any, d: Any, biases: Any, at: Any, mode: Any) -> None:
        """Store four sums, or two gates times what these are for; all of these are rounded."""
        by = _FLOAT(factor)
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
        unit = _BITS(_BITS(k * _BITS(LANES)) + t)
        return unit if unit < units else _BITS(0)

    @device_function
    def multiply(  # noqa: C901, PLR0915
        y: Any, y_pitch: Any, x: Any, x_units: Any, matrix: Any, tiles_at: Any, order: Any, many: Any, size: Any,
        width: Any, biases: Any, mode: Any, more: Any,
    ) -> None:  # fmt: skip
        room = cuda.shared.array(0, _BITS, alignment=128)
        ptx.after_earlier_with_next()
        expert, start, count, _ = ptx.load_128(tiles_at + _WORD(cuda.blockIdx.y) * _WORD(TILE_BYTES))
        if count == _BITS(0):
            return
        thread, one = _BITS(cuda.threadIdx.x), _BITS(1)
        if thread < count:
            pair = ptx.load_32(order + _WORD(_BITS(start + thread)) * _WORD(4))
            room[thread] = _BITS(_BITS(pair // _BITS(many)) * _BITS(x_units))
        elif thread < _BITS(TABLE // 4):
            room[thread] = _BITS(NONE)
        lane, warp = _BITS(thread & _BITS(31)), ptx.of_first(_BITS(thread >> _BITS(5)))
        g, t = _BITS(lane >> _BITS(2)), _BITS(lane & _BITS(3))
        own = _BITS(OWN) if mode == ADD else _BITS(OWN // 2)  # of its matrix rows, those that results are of
        strip = _BITS(_BITS(_BITS(cuda.blockIdx.x) * _BITS(warps)) + warp)
        column = _BITS(_BITS(_BITS(strip * _BITS(_EIGHT)) + g) * own)
        row = min(column, _BITS(_BITS(size) - own))
        codes, of_expert, pitch, half = matrix
        its_rows = codes + _WORD(expert) * of_expert + _WORD(row) * pitch, pitch, half
        number = _BITS(_BITS(expert * _BITS(size)) + row)
        units, limit = _BITS(_BITS(_BITS(width) * _BITS(LANES)) // _BITS(step)), _BITS(_BITS(width) << one)
        steps = _BITS(_BITS(_BITS(width) + _BITS(step - 1)) // _BITS(step))
        table = _BITS(ptx.shared_address(room))
        begin, codes_at = _BITS(table + _BITS(TABLE)), _BITS(_BITS(of_rows) + _BITS(warp * _BITS(CODES)))
        codes_at, found_rows = _BITS(codes_at + _BITS(lane * _BITS(VECTOR))), find_rows(table)
        end = _BITS(begin + _BITS(STAGES * stage))
        even = _BITS(
            _BITS(g * _BITS(row_bytes)) + _BITS(_BITS(_BITS(g & one) * _BITS(swapped)) + _BITS(t * _BITS(VECTOR)))
        )
        kept_mask = _BITS(_BITS(~ptx.active()) + _BITS(mask))  # a register, of which the compiler makes no constants
        cuda.syncthreads()
        k, to = _BITS(0), begin
        while k < _BITS(STAGES - 1):
            ptx.roll()
            if k < steps:
                ask_codes(its_rows, unit_of(k, t, units), _BITS(to + codes_at))
                ask_rows(found_rows, k, to, x, limit)
            ptx.end_copies()
            k, to = _BITS(k + one), _BITS(to + _BITS(stage))
        asked = ask_scales(its_rows, number, unit_of(_BITS(0), t, units), more)
        k, here, sums = _BITS(0), begin, zeros_of()
        while k < steps:
            ptx.roll()
            ptx.copied_but_one()
            cuda.syncthreads()  # all have copied what they do of this step, and read what is written over now
            scales, less = made(asked, more)
            asked = ask_scales(its_rows, number, unit_of(_BITS(k + one), t, units), more)
            ahead = _BITS(k + _BITS(STAGES - 1))
            if ahead < steps:
                ask_codes(its_rows, unit_of(ahead, t, units), _BITS(to + codes_at))
                ask_rows(found_rows, ahead, to, x, limit)
            ptx.end_copies()
            at = _BITS(here + even)
            sums = products(sums, _BITS(here + codes_at), at, _BITS(at ^ _BITS(64)), scales, less, kept_mask)
            k, here = _BITS(k + one), _BITS(here + _BITS(stage))
            here, to = here if here < end else begin, _BITS(to + _BITS(stage))
            to = to if to < end else begin
        if column < _BITS(size):
            added = biases_of(biases, expert, column)
            y += _WORD(column) * _WORD(2)
            place, last = _BITS(t << one), _BITS(count)
            while place < last:
                ptx.roll()
                at_order = order + _WORD(_BITS(start + place)) * _WORD(4)
                to_row = y + _WORD(ptx.load_32(at_order)) * y_pitch
                store(sums[0], sums[2], sums[4], sums[6], added, to_row, mode)
                if _BITS(place + one) < last:
                    to_row = y + _WORD(ptx.load_32(at_order + _WORD(4))) * y_pitch
                    store(sums[1], sums[3], sums[5], sums[7], added, to_row, mode)
                sums, place = turned(sums), _BITS(place + _BITS(_EIGHT))

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
        pitch = width >> _WORD(per_byte)
        of_scales = scales, scales_half, form, _BITS(groups), _BITS(ahead), row, inverse
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
