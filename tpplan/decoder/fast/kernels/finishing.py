"""What kernels make of sums: they add a bias, a residual or what other devices have, or multiply one by another's gate.

Sums are float32; they are rounded where torch rounds, whose kernels each do less.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.channel import first_element, sum_of_parts
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import FLOAT32, UINT64, libdevice, types

#: What becomes of a sum: it is stored, or its activation is multiplied by another.
ADD, SILU, GELU, GELU_TANH, SWIGLU_OAI = range(5)

#: As in :data:`tpplan.decoder.model.gates.SWIGLU_OAI`.
_ALPHA, _LIMIT = 1.702, 7.0

#: As in torch's GELU.
_ROOT_OF_HALF, _TANH_SCALE, _TANH_CUBE = 0.7071067811865476, 0.7978845608028654, 0.044715


@device_function
def silu(x: Any) -> Any:
    """Return ``x × sigmoid(x)``."""
    return ptx.divided(x, FLOAT32(1) + libdevice.expf(-x))


@device_function
def gelu(x: Any) -> Any:
    """Return ``x`` times the normal distribution's function of it."""
    return x * FLOAT32(0.5) * (FLOAT32(1) + libdevice.erff(x * FLOAT32(_ROOT_OF_HALF)))


@device_function
def gelu_tanh(x: Any) -> Any:
    """Return nearly that, by a hyperbolic tangent."""
    inner = FLOAT32(_TANH_SCALE) * (x + FLOAT32(_TANH_CUBE) * (x * x * x))
    return FLOAT32(0.5) * x * (FLOAT32(1) + libdevice.tanhf(inner))


@device_function
def limited_silu(x: Any) -> Any:
    """Return ``x × sigmoid(1.702 x)``, where x is 7 at most."""
    x = min(x, FLOAT32(_LIMIT))
    return ptx.divided(x, FLOAT32(1) + libdevice.expf(FLOAT32(-_ALPHA) * x))


@device_function
def limited_plus_one(x: Any) -> Any:
    """Return what that is multiplied by: a number from -7 to 7, and 1."""
    return min(max(x, FLOAT32(-_LIMIT)), FLOAT32(_LIMIT)) + FLOAT32(1)


@device_function
def activation(x: Any, mode: Any) -> Any:
    """Return the activation that a mode tells."""
    if mode == SILU:
        return silu(x)
    if mode == GELU:
        return gelu(x)
    if mode == SWIGLU_OAI:
        return limited_silu(x)
    return gelu_tanh(x)


@cache
def finish_of(first: Any, both: Any) -> Any:
    """Make what stores what becomes of one sum or two.

    It takes the sums, of which the second counts for a gate only; the row and the column of the result; where this is,
    and what is added first, if anything is: each an address and a pitch in bytes; the result's columns, which those
    that are added to second sums lie behind; and the mode.

    Args:
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
    """

    @device_function
    def load_one(address: Any) -> Any:
        return first(types.uint32(ptx.load_16(address)))

    @device_function
    def bits_of(value: Any) -> Any:
        return both(value, value) & types.uint32(0xFFFF)

    @device_function
    def rounded(value: Any) -> Any:
        return first(bits_of(value))

    @device_function
    def finish(
        s: Any, t: Any, row: Any, column: Any, y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, size: Any, mode: Any
    ) -> None:
        if plus != UINT64(0):
            at = plus + row * plus_pitch + column * UINT64(2)
            s += load_one(at)
            if mode != ADD:
                t += load_one(at + size * UINT64(2))
        if mode != ADD:
            t = rounded(t)
            s = rounded(activation(rounded(s), mode)) * (limited_plus_one(t) if mode == SWIGLU_OAI else t)
        ptx.store_16(y + row * y_pitch + column * UINT64(2), types.uint16(bits_of(s)))

    return finish


@cache
def add_up_of(first: Any, both: Any) -> Any:
    """Make what adds up the parts of all devices, and what is there, and stores the sums.

    It takes where the result goes and what is added, each an address, or 0, and a pitch in bytes; columns and rows of
    the result, of which the parts are numbered row by row; and the number of the sum.

    Args:
        first: makes a float32 of the first element in 32 bits.
        both: makes 32 bits of two float32.
    """

    @device_function
    def add_up(y: Any, y_pitch: Any, plus: Any, plus_pitch: Any, size: Any, rows: Any, number: Any) -> None:
        element, step = first_element()
        while element < rows * size:
            row = UINT64(types.uint32(element) // types.uint32(size))
            n = element - row * size
            more = first(types.uint32(ptx.load_16(plus + row * plus_pitch + n * UINT64(2)))) if plus else FLOAT32(-0.0)
            s = sum_of_parts(element, number) + more
            ptx.store_16(y + row * y_pitch + n * UINT64(2), types.uint16(both(s, s) & types.uint32(0xFFFF)))
            element += step

    return add_up
