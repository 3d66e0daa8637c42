"""Dot products of one or two rows and four matrix rows at a time, by warps that share out the columns."""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import cuda, types

_WORD, _FLOAT, _EVERY = types.uint64, types.float32, 0xFFFFFFFF


@cache
def mapped(count: int, function: Any) -> Any:
    """Make what calls a function for one pair or for each of two, with a third argument for all."""

    @device_function
    def of_one(a: Any, b: Any, c: Any) -> Any:
        return (function(a[0], b[0], c),)

    @device_function
    def of_two(a: Any, b: Any, c: Any) -> Any:
        return function(a[0], b[0], c), function(a[1], b[1], c)

    return of_one if count == 1 else of_two


@cache
def offsets_of(count: int) -> Any:
    """Make what tells where one row starts, or each of two."""

    @device_function
    def of_one(_: Any) -> Any:
        return (_WORD(0),)

    @device_function
    def of_two(pitch: Any) -> Any:
        return _WORD(0), pitch

    return of_one if count == 1 else of_two


@device_function
def zeros() -> Any:
    """Return sums of nothing, for four matrix rows."""
    return _FLOAT(0), _FLOAT(0), _FLOAT(0), _FLOAT(0)


@device_function
def dot(total: Any, f: Any, x: Any) -> Any:
    """Add the products of eight pairs."""
    total = total + f[0] * x[0]
    total = total + f[1] * x[1]
    total = total + f[2] * x[2]
    total = total + f[3] * x[3]
    total = total + f[4] * x[4]
    total = total + f[5] * x[5]
    total = total + f[6] * x[6]
    return total + f[7] * x[7]


@device_function
def _fold(a: Any, b: Any, bit: Any, lane: Any) -> Any:
    """Add two numbers of two lanes; the lane whose bit is set has the second's sum, the other the first's."""
    if lane & bit:
        keep, send = b, a
    else:
        keep, send = a, b
    return keep + cuda.shfl_xor_sync(_EVERY, send, bit)


@device_function
def spread(totals: Any, lane: Any) -> Any:
    """Add four numbers over lanes that differ in their two highest bits, which tell whose sum a lane has."""
    return _fold(_fold(totals[0], totals[2], 16, lane), _fold(totals[1], totals[3], 16, lane), 8, lane)


@device_function
def over_eight(total: Any) -> Any:
    """Return the sum over lanes that have the same two highest bits, in each of them."""
    total += cuda.shfl_xor_sync(_EVERY, total, 4)
    total += cuda.shfl_xor_sync(_EVERY, total, 2)
    return total + cuda.shfl_xor_sync(_EVERY, total, 1)


@cache
def collected(count: int) -> Any:
    """Make what adds up four numbers of each row over a warp; the highest bits of a lane tell whose sum it has."""

    @device_function
    def of_one(totals: Any, lane: Any) -> Any:
        return over_eight(spread(totals[0], lane))

    @device_function
    def of_two(totals: Any, lane: Any) -> Any:
        s = _fold(spread(totals[0], lane), spread(totals[1], lane), 4, lane)
        s += cuda.shfl_xor_sync(_EVERY, s, 2)
        return s + cuda.shfl_xor_sync(_EVERY, s, 1)

    return of_one if count == 1 else of_two


@device_function
def over_warp(total: Any) -> Any:
    """Return the sum over all lanes, in all lanes."""
    total += cuda.shfl_xor_sync(_EVERY, total, 16)
    total += cuda.shfl_xor_sync(_EVERY, total, 8)
    total += cuda.shfl_xor_sync(_EVERY, total, 4)
    total += cuda.shfl_xor_sync(_EVERY, total, 2)
    return total + cuda.shfl_xor_sync(_EVERY, total, 1)


@cache
def asking_by(load: Any) -> Any:
    """Make what asks for 16 bytes of each of four matrix rows."""

    @device_function
    def ask(address: Any, step: Any, half: Any) -> Any:
        w0, w1, w2, w3 = load(address)
        w4, w5, w6, w7 = load(address + step)
        w8, w9, wa, wb = load(address + half)
        wc, wd, we, wf = load(address + half + step)
        return (w0, w1, w2, w3), (w4, w5, w6, w7), (w8, w9, wa, wb), (wc, wd, we, wf)

    return ask


#: The latter where the compiler must not do so later.
ask, ask_now = asking_by(ptx.stream_128), asking_by(ptx.poll_128)


def eight_of(first: Any, second: Any) -> Any:
    """Make what returns the eight floats of 16 bytes, by what makes a float of each half of 32 bits."""

    @device_function
    def eight(w: Any) -> Any:
        a, b, c, d = w
        return first(a), second(a), first(b), second(b), first(c), second(c), first(d), second(d)

    return eight


@cache
def products_of(count: int, eight: Any, *, normed: bool) -> tuple[Any, Any]:
    """Make what returns sums of nothing, and what adds to them the products of rows and 16 bytes of four matrix rows.

    Args:
        count: of rows.
        eight: makes floats of 16 bytes.
        normed: whether the rows are in shared memory.
    """

    @device_function
    def adds(totals: Any, offset: Any, given: Any) -> Any:
        """Add the products of a row and four matrix rows."""
        at, f = given
        x = eight(ptx.shared_load_128(at + offset) if normed else ptx.load_128(at + offset))
        return dot(totals[0], f[0], x), dot(totals[1], f[1], x), dot(totals[2], f[2], x), dot(totals[3], f[3], x)

    @device_function
    def starts(_: Any, __: Any, ___: Any) -> Any:
        return zeros()

    add = mapped(count, adds)

    @device_function
    def use(totals: Any, w: Any, x: Any, offsets: Any, column: Any, width: Any) -> Any:
        if column < width:
            f = eight(w[0]), eight(w[1]), eight(w[2]), eight(w[3])
            return add(totals, offsets, (x + column * _WORD(2), f))
        return totals

    return mapped(count, starts), use
