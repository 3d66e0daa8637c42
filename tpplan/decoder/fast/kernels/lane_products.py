"""Products of 16 bytes of each of four matrix rows and a row's columns, which a lane has, as kernels write them.

An element becomes a float32 in two or three instructions, and is multiplied and added in another one:

| kind | columns | what an element becomes | by |
|---|---|---|---|
| 16 bits | 8 | itself | a shift, a mask or a conversion |
| 4 bits | 32 | its code | the bits of a base above it, which is taken off |
| 8 bits | 16 | its code less 128 | the same |
| e4m3 | 16 | a 256th of it | the bits of a float16, whose exponent begins one further on, and a conversion |
| e2m1 | 32 | 2 ** -14 of it | the same, made of four codes at a time |

All is exact but the sums, which are float32 and in the order of the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from tpplan.decoder.fast.kernels.scale_kinds import BF16, F16
from tpplan.exec.kernels import ptx
from tpplan.exec.toolchain.language import intrinsic, ir, types

#: Matrix rows; words of each; columns of 16 bytes of a row; bits of 16 bytes.
ROWS, _WORDS, _EIGHT, _BITS = 4, 4, 8, 128
#: Floats whose bits of the value 1 are where the first five nibbles begin, and their bits.
BASES = tuple(2.0**power for power in (23, 19, 15, 11, 7))
BITS_OF_BASES = 0x4B000000, 0x49000000, 0x47000000, 0x45000000, 0x43000000
#: From the sixth nibble to the third, as from the eighth to the fifth.
_FURTHER = 12
#: What the codes of 8 bits are less.
MIDDLE = 128

_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _word(number: int) -> Any:
    return ir.Constant(_INT, number)


@frozen
class Elements:
    """What elements of matrix rows are, and what makes float32 of them.

    Attributes:
        bits: of one.
        floats: writes those of a word, in the order of columns, given the builder, the word and what a kernel keeps.
        sums: whether the row's columns are added up as well, times which zeros are taken off.
        factor: a power of two that the floats are too small by.
    """

    bits: int
    floats: Callable[[Any, Any, Any], list[Any]]
    sums: bool = False
    factor: int = 1

    @property
    def columns(self) -> int:
        """Those of a lane."""
        return _BITS // self.bits


def of_halves(first: ptx.Emitter, second: ptx.Emitter) -> Elements:
    """Return elements of 16 bits, given what makes a float32 of the first of a word, and of the second."""
    return Elements(16, lambda builder, word, _: first(builder, [word]) + second(builder, [word]))


def _nibbles(builder: Any, word: Any, kept: Any) -> list[Any]:
    """Write the codes of a word's eight columns, which lie as in :data:`tpplan.decoder.weights.quantised.ORDER`."""
    bases = [builder.extract_value(kept, i) for i in range(len(BASES))]
    further = builder.lshr(word, _word(_FURTHER))

    def code(bits: Any, i: int) -> Any:
        (found,) = ptx.emit_float_of(builder, [builder.or_(builder.and_(bits, _word(0xF << 4 * i)), bases[i])])
        return builder.fsub(found, ir.Constant(_FLOAT, BASES[i]))

    low, high = [code(word, i) for i in range(5)], [code(further, i) for i in (2, 3, 4)]
    return [low[0], low[4], low[1], high[0], low[2], high[1], low[3], high[2]]


def _bytes(builder: Any, word: Any, _: Any) -> list[Any]:
    """Write the codes of a word, less 128."""
    found = []
    for emit in ptx.emit_bytes:
        (number,) = ptx.emit_float_of(builder, emit(builder, [word, _word(BITS_OF_BASES[0])]))
        found.append(builder.fsub(number, ir.Constant(_FLOAT, BASES[0] + MIDDLE)))
    return found


def _floats_of_8_bits(builder: Any, word: Any, _: Any) -> list[Any]:
    """Write a 256th of the e4m3 of a word; what has all bits but the sign is 480."""
    found = []
    for pair in (builder.shl(word, _word(8)), word):  # the even ones, and the odd ones
        number = builder.and_(builder.lshr(pair, _word(1)), _word(0x3F803F80))
        found.append(builder.or_(number, builder.and_(pair, _word(0x80008000))))
    (a, b), (c, d) = ([emit(builder, [pair])[0] for pair in found] for emit in (ptx.emit_low_f16, ptx.emit_high_f16))
    return [a, b, c, d]


def _floats_of_4_bits(builder: Any, word: Any, _: Any) -> list[Any]:
    """Write 2 ** -14 of the e2m1 of a word: of a float16, whose other bits are 0, the first byte has all of one."""

    def bytes_of(signs: Any, others: Any) -> Any:
        return builder.or_(builder.and_(others, _word(0x0E0E0E0E)), builder.and_(signs, _word(0x80808080)))

    first = bytes_of(builder.shl(word, _word(4)), builder.shl(word, _word(1)))  # of two codes in a byte
    second = bytes_of(word, builder.lshr(word, _word(3)))
    pairs = [ptx.emit_even_bytes(builder, [each])[0] for each in (first, second)]
    pairs += [builder.and_(each, _word(0xFF00FF00)) for each in (first, second)]
    return [emit(builder, [pair])[0] for emit in (ptx.emit_low_f16, ptx.emit_high_f16) for pair in pairs]


#: Of codes, by what names of kernels say of them.
CODES = {
    "4": Elements(4, _nibbles, sums=True),
    "8": Elements(8, _bytes, sums=True),
    "e4m3": Elements(8, _floats_of_8_bits, factor=256),
    "e2m1": Elements(4, _floats_of_4_bits, factor=2**14),
}


def products_of(elements: Elements, first: ptx.Emitter, second: ptx.Emitter) -> Any:
    """Return an intrinsic that makes the sums of products of four matrix rows and a row, and maybe the row's sum.

    It takes the 16 bytes of each matrix row, the address of the row's columns, and what the kernel keeps for
    ``elements``.

    Args:
        elements: of the matrix rows.
        first: makes a float32 of the row's first element in 32 bits.
        second: the same of the second.
    """
    found = types.UniTuple(types.float32, ROWS + elements.sums)
    step = _WORDS * _EIGHT // elements.columns  # words of eight columns

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given, address, kept = values
        rows = [builder.extract_value(given, i) for i in range(ROWS)]
        totals = [ir.Constant(_FLOAT, 0.0)] * found.count
        for start in range(0, _WORDS, step):
            at = builder.add(address, ir.Constant(_LONG, 2 * _EIGHT * (start // step)))
            x = [emit(builder, [word])[0] for word in ptx.emit_load_128(builder, [at]) for emit in (first, second)]
            if elements.sums:
                parts = x
                while len(parts) > 1:
                    parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                totals[ROWS] = builder.fadd(totals[ROWS], parts[0])
            for i, row in enumerate(rows):
                words = [builder.extract_value(row, j) for j in range(start, start + step)]
                floats = [each for word in words for each in elements.floats(builder, word, kept)]
                for a, b in zip(floats, x, strict=True):
                    totals[i] = builder.fadd(totals[i], builder.fmul(a, b))
        return context.make_tuple(builder, signature.return_type, totals)

    def typer(typingctx, given, address, kept):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return found(given, address, kept), codegen

    return intrinsic(typer)


@intrinsic  # type: ignore[untyped-decorator]
def scale_of(typingctx: Any, bits: Any, form: Any) -> Any:  # noqa: ARG001
    """Return a scale of a kind in :mod:`tpplan.decoder.fast.kernels.scale_kinds`, given its bits, without a branch."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        word, form = values
        found, *others = (emit(builder, [word])[0] for emit in (ptx.emit_float_of, ptx.emit_low_bf16, ptx.emit_low_f16))
        for kind, other in zip((BF16, F16), others, strict=True):
            found = builder.select(builder.icmp_unsigned("==", form, ir.Constant(_LONG, kind)), other, found)
        return found

    return types.float32(bits, form), codegen
