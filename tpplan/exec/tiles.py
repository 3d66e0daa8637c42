"""Tiles of matrices in the registers of a warp, for its matrix instruction: tuples of any length, each a register.

Lane 4 g + t of a warp holds in four registers 16 bytes of row g of a tile, of 16 bits an element: those at 64 j + 16 t,
for every j. Two of them are what it holds of the left or the right matrix of 16 columns: sums do not mind in which
order columns are added, if it is the same on both sides.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from tpplan.exec.ptx import Emitter, emit_highs, emit_lows, emit_stream_128

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
#: Registers of 16 bytes.
_VECTOR = 4


def _all_of(builder: Any, values: Any) -> list[Any]:
    return [builder.extract_value(values, i) for i in range(values.type.count)]


def zeros(count: int) -> Any:
    """Return an intrinsic that returns so many float32 zeros."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return context.make_tuple(builder, signature.return_type, [ir.Constant(_FLOAT, 0.0)] * count)

    return intrinsic(lambda typingctx: (types.UniTuple(types.float32, count)(), codegen))  # noqa: ARG005


def loads(limit: int, step: int, *, clear: bool = False) -> Any:
    """Return an intrinsic that reads 16 bytes at ``start``, ``start + step`` and so on, of a row.

    It takes the row's address and the start, which is less than the step, and returns four registers for each vector.
    What would be behind the row is zero, or anything that the row has.

    Args:
        limit: bytes of a row, a multiple of 16.
        step: from one vector to the next, in bytes.
        clear: whether what is behind the row is zero.
    """
    word, count = types.uint64, -(-limit // step)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        row, start = values
        found = []
        for j in range(count):
            at = builder.add(start, ir.Constant(start.type, j * step))
            if (j + 1) * step <= limit:
                found += emit_stream_128(builder, [builder.add(row, at)])
                continue
            inside = builder.icmp_unsigned("<", at, ir.Constant(start.type, limit))
            at = builder.select(inside, at, ir.Constant(start.type, limit - 16))
            got = emit_stream_128(builder, [builder.add(row, at)])
            found += [builder.select(inside, each, ir.Constant(_INT, 0)) for each in got] if clear else got
        return context.make_tuple(builder, signature.return_type, found)

    signature = types.UniTuple(types.uint32, _VECTOR * count)(word, word)
    return intrinsic(lambda typingctx, row, start: (signature, codegen))  # noqa: ARG005


def scores(multiply: Emitter) -> Any:
    """Return an intrinsic for the products of eight queries and eight keys.

    It takes registers of the queries (row g is the query) and of the keys (row g is the key), and returns the products
    of query g and keys 2 t and 2 t + 1.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        queries, keys = (_all_of(builder, each) for each in values)
        nothing, sums = ir.Constant(_INT, 0), [[ir.Constant(_FLOAT, 0.0)] * 4 for _ in range(2)]
        for i in range(0, len(keys), 2):
            left, right = [queries[i], nothing, queries[i + 1], nothing], keys[i : i + 2]
            chain = i // 2 % 2  # two of them, for each takes the time of its instructions
            sums[chain] = multiply(builder, [*left, *right, *sums[chain]])
        found = [builder.fadd(one, other) for one, other in zip(*(each[:2] for each in sums), strict=True)]
        return context.make_tuple(builder, signature.return_type, found)

    two = types.UniTuple(types.float32, 2)
    return intrinsic(lambda typingctx, queries, keys: (two(queries, keys), codegen))  # noqa: ARG005


def weighed(multiply: Emitter) -> Any:
    """Return an intrinsic that adds values, weighed for eight queries.

    It takes the sums so far, the registers of the values of places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (16 bytes at
    128 j + 16 g, for every j), and two registers of weights of these places for query g, of 16 bits, twice: what the
    second ones are is added too.
    For every j the sums are, in this order, of the vector's elements: 0 for query 2 t, 0 for query 2 t + 1, 1 for
    query 2 t, and so on.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums, *places = (_all_of(builder, each) for each in values[:5])
        found = []
        for j, (a, b, c, d) in enumerate(zip(*places, strict=True)):
            left = [
                emit(builder, pair)[0] for pair in ((a, b), (c, d)) for emit in (emit_lows, emit_highs)
            ]  # elements 2 j and 2 j + 1 of the first two places, then of the others
            four = sums[4 * j : 4 * j + 4]
            for i in range(5, 9, 2):
                four = multiply(builder, [*left, *values[i : i + 2], *four])
            found += four
        return context.make_tuple(builder, signature.return_type, found)

    def typer(typingctx, sums, v0, v1, v2, v3, a0, a1, b0, b1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001, PLR0917
        return sums(sums, v0, v1, v2, v3, a0, a1, b0, b1), codegen

    return intrinsic(typer)


@intrinsic
def scaled(typingctx: Any, sums: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
    """Return the sums of :func:`weighed`, multiplied by one factor for query 2 t and by another for query 2 t + 1."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = [builder.fmul(each, values[1 + i % 2]) for i, each in enumerate(_all_of(builder, values[0]))]
        return context.make_tuple(builder, signature.return_type, found)

    return sums(sums, first, second), codegen


@intrinsic
def keep(  # noqa: PLR0917
    typingctx: Any,  # noqa: ARG001
    array: Any,
    sums: Any,
    start: Any,
    query: Any,
    element: Any,
) -> Any:
    """Write the sums of :func:`weighed` into an array of float32.

    It takes the array, the sums, where those of query 2 t begin, and how much farther those of query 2 t + 1 and those
    of odd elements do. The lanes with the same t lie side by side.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        start, query, element = values[2:]
        for i, each in enumerate(_all_of(builder, values[1])):
            at = builder.add(start, ir.Constant(start.type, i // 4 * 8))
            at = builder.add(at, query) if i % 2 else at
            at = builder.add(at, element) if i // 2 % 2 else at
            builder.store(each, builder.gep(data, [at]))
        return context.get_dummy_value()

    return types.void(array, sums, start, query, element), codegen
