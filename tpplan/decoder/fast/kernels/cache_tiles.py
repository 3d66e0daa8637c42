"""Tiles of a cache in the registers of a warp, in 16 bits for its matrix instruction, whatever they are kept in.

A cache has its elements in 16 bits, or in 8: as whole numbers from -127 to 127 of which 32 share a scale (``q8``), or
as floats (``fp8``, e4m3). Where a lane holds 16 bytes of a row of 16 bits, see
:mod:`tpplan.decoder.fast.kernels.tiles`, it holds 8 of a row of 8 bits, of the same elements. It makes them float16
with a few instructions that every generation of GPUs has: whole numbers times their scale, rounded once, and floats
exactly. Scales have a row of their own for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from attrs import frozen

from tpplan.decoder.fast.kernels import tiles
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.kernels.ptx import Emitter, emitter
from tpplan.exec.toolchain.language import UINT64, intrinsic, types

#: Registers of 8 bytes, which share a scale.
_VECTOR = 2
#: Bytes of elements for each byte of scales.
SHARING = 16

#: What elements of fp8 are more than the float16 that :data:`_of_floats` makes of them, whose exponents begin lower.
_FLOAT8_UNIT = 256.0

#: Of four whole numbers and a scale, twice: their products. With 128 more, a number is the low half of a float16 that
#: is 1,024 more still.
_of_whole = emitter(
    "{ .reg .b32 x, y, c; xor.b32 x, $2, 0x80808080; mov.b32 c, 0xe480e480; "
    "prmt.b32 y, x, 0x64646464, 0x4342; prmt.b32 x, x, 0x64646464, 0x4140; "
    "add.rn.f16x2 x, x, c; add.rn.f16x2 y, y, c; mul.rn.f16x2 x, x, $3; mul.rn.f16x2 y, y, $3; "
    "mov.b32 $0, x; mov.b32 $1, y; }",
    "u32 u32",
    "u32 u32",
)
#: Of four floats: 1/256 of them. A sign is added to itself, and so goes ahead of another bit of an exponent. NaN, which
#: no finite number becomes in a cache, is 480 here.
_of_floats = emitter(
    "{ .reg .b32 x, y, s; prmt.b32 x, $2, 0, 0x4140; prmt.b32 y, $2, 0, 0x4342; "
    "and.b32 s, x, 0x00800080; add.u32 x, x, s; and.b32 s, y, 0x00800080; add.u32 y, y, s; "
    "shl.b32 x, x, 7; shl.b32 y, y, 7; mov.b32 $0, x; mov.b32 $1, y; }",
    "u32 u32",
    "u32",
)
_twice = emitter("prmt.b32 $0, $1, 0, 0x1010;", "u32", "u32")
_f16_of_bf16 = emitter(
    "{ .reg .b32 l, h; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, h, l; }", "u32", "u32"
)


@frozen
class Reader:
    """How a lane reads a row of a cache, of which the first is at a pair of addresses: of elements, and of scales.

    Attributes:
        size: bytes of a row, without its scales.
        vector: bytes of a row that a lane has side by side.
        unit: what the elements are times what is made of them.
        keys: reads a lane's part of keys, given the pair and the number of the row.
        values: the same of values. Half of the lanes have elements that begin with a row's second scale.
        wide: makes 16 bits of what these return.
        queries: makes of a lane's registers of queries what the keys are multiplied by.
    """

    size: int
    vector: int
    unit: float
    keys: Callable[..., Any]
    values: Callable[..., Any]
    wide: Callable[..., Any]
    queries: Callable[..., Any]


@cache
def plain_reader(head_dim: int) -> Reader:
    """Return how rows of 16 bits are read, which stay as they are."""
    size = 2 * head_dim
    keys, values = (_rows(size, tiles.loads(size, step)) for step in (64, 128))
    return Reader(size, 16, 1.0, keys, values, _same, _same)


@cache
def q8_reader(head_dim: int, kind: str) -> Reader:
    """Return how rows of whole numbers are read, for queries of a kind, ``bf16`` or ``f16``."""
    scales = head_dim // SHARING
    key_scales, value_scales = (tiles.loads(scales, step, vector=2) for step in (2, 4))
    keys = _scaled_rows(head_dim, tiles.loads(head_dim, 32, vector=8), key_scales)
    values = _scaled_rows(head_dim, tiles.loads(head_dim, 64, vector=8), value_scales)
    return Reader(head_dim, 8, 1.0, keys, values, _wide_whole, _QUERIES[kind])


@cache
def fp8_reader(head_dim: int, kind: str) -> Reader:
    """Return how rows of floats are read, for queries of a kind, ``bf16`` or ``f16``."""
    keys, values = (_rows(head_dim, tiles.loads(head_dim, step, vector=8)) for step in (32, 64))
    return Reader(head_dim, 8, _FLOAT8_UNIT, keys, values, _wide_floats, _QUERIES[kind])


def _rows(size: int, load: Any) -> Callable[..., Any]:
    """Make what reads a row; ``start`` is where in it the lane begins."""

    @device_function
    def read(base: Any, row: Any, start: Any, second: Any) -> Any:  # noqa: ARG001 (scales may begin later)
        return load(base[0] + row * UINT64(size), start)

    return read  # type: ignore[no-any-return]


def _scaled_rows(size: int, load: Any, load_scales: Any) -> Callable[..., Any]:
    """Make what reads a row and its scales, of which it begins with the first or the second."""

    @device_function
    def read(base: Any, row: Any, start: Any, second: Any) -> Any:
        numbers = load(base[0] + row * UINT64(size), start)
        return numbers, load_scales(base[1] + row * UINT64(size // SHARING), second * UINT64(2))

    return read  # type: ignore[no-any-return]


@device_function
def _same(registers: Any) -> Any:
    return registers


def _each(emit: Emitter, count: int) -> Any:
    """Return an intrinsic that makes so many registers of each."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = []
        for i in range(signature.args[0].count):
            found += emit(builder, [builder.extract_value(values[0], i)])
        return context.make_tuple(builder, signature.return_type, found)

    def typer(typingctx, registers):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return types.UniTuple(types.uint32, count * registers.count)(registers), codegen

    return intrinsic(typer)


_wide_floats = _each(_of_floats, 2)
_QUERIES = {"bf16": _each(_f16_of_bf16, 1), "f16": _same}


@intrinsic  # type: ignore[untyped-decorator]
def _wide_whole(typingctx: Any, row: Any) -> Any:  # noqa: ARG001
    """Return two registers for each of a row's whole numbers, which come with a scale for every two registers."""
    count = row[0].count

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers, scales = (builder.extract_value(values[0], i) for i in range(2))
        found = []
        for i in range(0, count, _VECTOR):
            scale = _twice(builder, [builder.extract_value(scales, i // _VECTOR)])
            for j in range(i, i + _VECTOR):
                found += _of_whole(builder, [builder.extract_value(numbers, j), *scale])
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.uint32, 2 * count)(row), codegen
