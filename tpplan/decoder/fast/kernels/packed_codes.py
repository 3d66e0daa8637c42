"""Codes of matrices, and how kernels make 16-bit floats of them, in pairs, for tensor cores.

What is made of a code is exact, but for a base that is added to it and a power of two that it is to be multiplied by,
both of which are made good where sums are multiplied by scales:

=====  ====  ==================================================  ===========  ======
codes  rows  pairs                                               base         factor
=====  ====  ==================================================  ===========  ======
4      bf16  the lowest bits of 128                              128          1
4      f16   the lowest bits of 64, from 2 ** -4 on              64           1
8      bf16  seven bits as those of 128, less 256 or 128         -128         1
8      f16   the lowest bits of 1024, less 1152                  -128         1
e4m3   bf16  all bits where bfloat16 has them, times 2 ** 120    none         1
e4m3   f16   all bits where float16 has them                     none         256
e2m1   bf16  all bits where bfloat16 has them                    none         2**126
=====  ====  ==================================================  ===========  ======

Exponents of e4m3 begin at 2 ** -6 and those of e2m1 at 1, where those of 16 bits begin at 2 ** -126 and 2 ** -14,
subnormals with them. Scales of e2m1 are powers of two, which make the factor good: no instruction takes their floats as
they are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from tpplan.exec.kernels import ptx
from tpplan.exec.toolchain.language import ir

#: Bytes of codes that a lane has of a matrix row in a step, and lanes that share the row.
_VECTOR, _LANES = 16, 4
_INT = ir.IntType(32)


@frozen
class Floats:
    """Rows in 16 bits.

    Attributes:
        name: of the dtype, in instructions.
        one: a pair of ones.
        multiply: writes the instruction.
        first: makes a float32 of the first element in 32 bits.
        second: the same of the second.
        both: makes 32 bits of two float32.
    """

    name: str
    one: int
    multiply: ptx.Emitter
    first: Any
    second: Any
    both: Any


@frozen
class Codes:
    """What kernels know of codes.

    Attributes:
        floats: the rows that they are multiplied with.
        bits: of a code.
        pairs: writes what makes pairs of neighbouring columns of a word, given the builder, the word, and the mask.
        mask: a number that this takes from a register; 0 if none.
        base: what floats are larger by than codes; None of floats, which have no zeros either.
        factor: what they are to be multiplied by.
    """

    floats: Floats
    bits: int
    pairs: Callable[[Any, Any, Any], list[Any]]
    mask: int = 0
    base: int | None = None
    factor: int = 1

    @property
    def step(self) -> int:
        """Columns of a step: those of a lane are 16 bytes, those of three others follow."""
        return _LANES * _VECTOR * 8 // self.bits

    @property
    def part(self) -> int:
        """Registers of what a lane has of a row in a step."""
        return self.step // _LANES // 2

    @property
    def halvings(self) -> int:
        """How often columns are halved to be bytes."""
        return (8 // self.bits).bit_length() - 1


def _pair(bits: int) -> Any:
    """Return twice the same 16 bits."""
    return ir.Constant(_INT, bits << 16 | bits)


def _nibbles(shifts: tuple[int, ...], base: int) -> Callable[[Any, Any, Any], list[Any]]:
    """Make what makes pairs of nibbles.

    Args:
        shifts: to the right, that bring two codes to where they add up to the base, for the four pairs of a word.
        base: its bits.
    """

    def pairs(builder: Any, word: Any, mask: Any) -> list[Any]:
        found = []
        for shift in shifts:
            move = builder.lshr if shift > 0 else builder.shl
            moved = move(word, ir.Constant(_INT, abs(shift))) if shift else word
            code = builder.and_(moved, mask)
            found.append(builder.or_(code, _pair(base)))
        return found

    return pairs


def _before(builder: Any, word: Any, byte: int) -> list[Any]:
    """Return pairs of bytes, each below the same one."""
    above = ir.Constant(_INT, byte * 0x01010101)
    return [*ptx.emit_first_bytes(builder, [word, above]), *ptx.emit_last_bytes(builder, [word, above])]


def _bytes_bf16(builder: Any, word: Any, _: Any) -> list[Any]:
    """Return codes less 128: of seven bits s and the first one f, it is 128 + s - 256 + 128 f.

    A byte of 0x3C before s makes (128 + s) / 2 ** 14; there all bits but f inverted make -256 or -128.
    """
    found = []
    for both in _before(builder, word, 0x3C):
        seven = builder.and_(both, _pair(0xFF7F))
        rest = builder.xor(builder.or_(both, _pair(0x007F)), _pair(0xFFFF))
        found += ptx.emit_fma_bf16(builder, [seven, _pair(0x4680), rest])  # 2 ** 14
    return found


def _bytes_f16(builder: Any, word: Any, _: Any) -> list[Any]:
    """Return codes less 128."""
    return [
        each
        for both in _before(builder, word, 0x64)
        for each in ptx.emit_add_f16(builder, [both, _pair(0xE480)])  # -1152
    ]


def _signed(builder: Any, word: Any, bits: int) -> list[Any]:
    """Return pairs of bytes: the first bit of each where it belongs, the others so many bits above the end.

    The first bit is put above each eight times before all is moved; the mask has one of these, and nothing of the other
    half of the word.
    """
    mask, by = _pair(0x8000 | 0x7F << bits), ir.Constant(_INT, bits)
    pairs = [*ptx.emit_first_signed(builder, [word]), *ptx.emit_last_signed(builder, [word])]
    return [builder.and_(builder.shl(both, by), mask) for both in pairs]


def _e4m3_bf16(builder: Any, word: Any, _: Any) -> list[Any]:
    """Return the floats; tensor cores may take subnormals for zeros, a multiplication with an addition does not."""
    return [
        each
        for both in _signed(builder, word, 4)
        for each in ptx.emit_fma_bf16(builder, [both, _pair(0x7B80), _pair(0x8000)])
    ]


def _e4m3_f16(builder: Any, word: Any, _: Any) -> list[Any]:
    """Return a 256th of each float; tensor cores take subnormals of 16 bits as they are."""
    return _signed(builder, word, 7)


def _e2m1_bf16(builder: Any, word: Any, _: Any) -> list[Any]:
    """Return floats of pairs of codes, which are a byte each: its lower half becomes the first.

    Multiplied by a sum of two powers of two, a byte is in both halves of a word: where signs belong, or other bits.
    """
    found = []
    for emit in ptx.emit_one_byte:
        (byte,) = emit(builder, [word])
        signs = builder.and_(builder.mul(byte, ir.Constant(_INT, 1 << 12 | 1 << 24)), _pair(0x8000))
        others = builder.and_(builder.mul(byte, ir.Constant(_INT, 1 << 6 | 1 << 18)), _pair(0x01C0))
        found.append(builder.or_(signs, others))
    return found


_BF16 = Floats("bf16", 0x3F803F80, ptx.emit_multiply_bf16, ptx.low_bf16, ptx.high_bf16, ptx.two_bf16)
_F16 = Floats("f16", 0x3C003C00, ptx.emit_multiply_f16, ptx.low_f16, ptx.high_f16, ptx.two_f16)

BF16_4 = Codes(_BF16, 4, _nibbles((0, 4, 8, 12), 0x4300), 0x000F000F, 128)
F16_4 = Codes(_F16, 4, _nibbles((-4, 0, 4, 8), 0x5400), 0x00F000F0, 64)
BF16_8 = Codes(_BF16, 8, _bytes_bf16, base=-128)
F16_8 = Codes(_F16, 8, _bytes_f16, base=-128)
BF16_E4M3 = Codes(_BF16, 8, _e4m3_bf16)
F16_E4M3 = Codes(_F16, 8, _e4m3_f16, factor=256)
BF16_E2M1 = Codes(_BF16, 4, _e2m1_bf16)
# Elements of 16 bits are what they are.
BF16_WHOLE = Codes(_BF16, 16, lambda _builder, word, _mask: [word])
F16_WHOLE = Codes(_F16, 16, lambda _builder, word, _mask: [word])
