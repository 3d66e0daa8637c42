"""Scales and zeros of codes, as kernels for many rows have them: words in shared memory, and floats of 16 bits.

Lane 4 g + t copies those of one of the four matrix rows that lanes 4 g to 4 g + 3 have; all four read those of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.decoder.fast.kernels.packed_scales import mark_of_block, mark_of_row
from tpplan.decoder.fast.kernels.scale_kinds import BF16, F32
from tpplan.decoder.fast.kernels.wide_limits import SCALES
from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import copied_function
from tpplan.exec.toolchain.language import types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: Bits of a code, of which there are words.
_NIBBLE = 4
_WORD, _FLOAT, _BITS = types.uint64, types.float32, types.uint32


@frozen
class Scaling:
    """What kernels do with scales and zeros.

    Attributes:
        mark: returns the index of a matrix row's first scale, given the row, how many a row of blocks has, and the
            power of two that the rows of a block are, which matters of floats only.
        ask: copies the words that a scale and its zero are in, given where to, where all begin, its index, and the kind
            of scales.
        factors: returns four scales, and what is added to their codes' floats, each twice in 32 bits; given where in
            shared memory they are, the marks of their matrix rows, a group, the kind of scales, the base with what is
            added to zeros, and where all zeros begin. Floats have nothing to add: scales stand in its place.
    """

    mark: Any
    ask: Any
    factors: Any


@copied_function
def _ask_scale(to: Any, scales: Any, index: Any, form: Any) -> None:
    """Copy the word that a scale is in; of one in its first half, only that, as nothing may follow."""
    if form == _WORD(F32):
        ptx.copy_32(to, scales + _WORD(_BITS(index << _BITS(2))), _BITS(4))
    else:
        half = _BITS(index & _BITS(1))
        ptx.copy_32(
            to, scales + _WORD(_BITS(_BITS(index - half) << _BITS(1))), _BITS(_BITS(half + _BITS(1)) << _BITS(1))
        )


@copied_function
def _scales_of(words: Any, indices: Any, form: Any) -> Any:
    """Return four scales in float32."""
    a, b, c, d = words
    if form == _WORD(F32):
        return ptx.float_of(a), ptx.float_of(b), ptx.float_of(c), ptx.float_of(d)
    four = _BITS(4)
    a, b = ptx.shifted(a, _BITS(indices[0] << four)), ptx.shifted(b, _BITS(indices[1] << four))
    c, d = ptx.shifted(c, _BITS(indices[2] << four)), ptx.shifted(d, _BITS(indices[3] << four))
    if form == _WORD(BF16):
        return ptx.low_bf16(a), ptx.low_bf16(b), ptx.low_bf16(c), ptx.low_bf16(d)
    return ptx.low_f16(a), ptx.low_f16(b), ptx.low_f16(c), ptx.low_f16(d)


def scaling_of(kind: Codes) -> Scaling:
    """Return what kernels do with the scales and zeros of a kind of codes."""
    both, factor, has_zeros, bits = kind.floats.both, kind.factor, kind.base is not None, kind.bits
    per_word, by, all_bits = (32 // bits).bit_length() - 1, bits.bit_length() - 1, (1 << bits) - 1
    in_words = bits == _NIBBLE

    @copied_function
    def ask(to: Any, scales: Any, zeros: Any, index: Any, form: Any) -> None:
        _ask_scale(to, scales, index, form)
        if has_zeros and zeros != _WORD(0):
            # Zeros of 4 bits fill words; others may end at any byte.
            count = _BITS(4) if in_words else _BITS(_BITS(index & _BITS(3)) + _BITS(1))
            at = zeros + _WORD(_BITS(_BITS(index >> _BITS(per_word)) << _BITS(2)))
            ptx.copy_32(_BITS(to + _BITS(SCALES)), at, count)

    @copied_function
    def twice(scale: Any) -> Any:
        return both(scale * _FLOAT(factor), scale * _FLOAT(factor))

    @copied_function
    def less(word: Any, index: Any, base: Any) -> Any:
        found = -(base + _FLOAT(_BITS(ptx.shifted(word, _BITS(index << _BITS(by))) & _BITS(all_bits))))
        return both(found, found)

    @copied_function
    def factors(at: Any, marks: Any, group: Any, form: Any, base: Any, zeros: Any) -> Any:
        i, j = _BITS(marks[0] + group), _BITS(marks[1] + group)
        m, n = _BITS(marks[2] + group), _BITS(marks[3] + group)
        a, b, c, d = _scales_of(ptx.shared_load_128(_WORD(at)), (i, j, m, n), form)
        scales = twice(a), twice(b), twice(c), twice(d)
        if not has_zeros:
            return scales, scales
        if zeros == _WORD(0):
            same = both(-base, -base)
            return scales, (same, same, same, same)
        e, f, u, v = ptx.shared_load_128(_WORD(_BITS(at + _BITS(SCALES))))
        return scales, (less(e, i, base), less(f, j, base), less(u, m, base), less(v, n, base))

    return Scaling(mark_of_row if has_zeros else mark_of_block, ask, factors)
