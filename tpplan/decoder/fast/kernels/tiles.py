"""Tiles of matrices in the registers of a warp, for its matrix instruction: tuples of any length, each a register.

Lane 4 g + t of a warp holds in four registers 16 bytes of row g of a tile, of 16 bits an element: those at 64 j + 16 t,
for every j. Two of them are what it holds of the left or the right matrix of 16 columns: sums do not mind in which
order columns are added, if it is the same on both sides.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tpplan.exec.kernels.ptx import Emitter, emit_highs, emit_lows, emitter
from tpplan.exec.toolchain.language import intrinsic, ir, types

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_TYPES = {types.uint32: _INT, types.float32: _FLOAT}
#: Registers of 16 bytes, and bytes that a warp's vectors have.
_VECTOR, _WARP = 4, 512

#: Of vectors that the kernel before may have written, by their bytes; the wide ones are read once.
_LOADS = {
    16: emitter("ld.global.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u64", memory=True),
    8: emitter("ld.global.L1::no_allocate.v2.u32 {$0,$1}, [$2];", "u32 u32", "u64", memory=True),
    2: emitter("ld.global.u16 $0, [$1];", "u32", "u64", memory=True),
}
_shared_load_128 = emitter("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "u32", memory=True)


def all_of(builder: Any, values: Any) -> list[Any]:
    """Return what is in a tuple, where an intrinsic writes instructions."""
    return [builder.extract_value(values, i) for i in range(values.type.count)]


@cache
def zeros(count: int, of: Any = types.float32) -> Any:
    """Return an intrinsic that returns so many zeros, of float32 or uint32."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return context.make_tuple(builder, signature.return_type, [ir.Constant(_TYPES[of], 0)] * count)

    return intrinsic(lambda typingctx: (types.UniTuple(of, count)(), codegen))  # noqa: ARG005


def loads(limit: int, step: int, *, vector: int = 16) -> Any:
    """Return an intrinsic that reads vectors at ``start``, ``start + step`` and so on, of a row.

    It takes the first vector's address and the start, which is less than the step, and returns a register for every
    four bytes of each vector, or for all of it.
    What would be behind the row is anything that the row has.

    Args:
        limit: bytes of a row, a multiple of those of a vector.
        step: from one vector to the next, in bytes.
        vector: its bytes: 16, 8 or 2.
    """
    word, count, load, registers = types.uint64, -(-limit // step), _LOADS[vector], max(1, vector // 4)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first, start = values
        found = []
        for j in range(count):
            if (j + 1) * step <= limit:
                found += load(builder, [builder.add(first, ir.Constant(start.type, j * step))])
                continue
            at = builder.add(start, ir.Constant(start.type, j * step))
            inside = builder.icmp_unsigned("<", at, ir.Constant(start.type, limit))
            at = builder.select(inside, at, ir.Constant(start.type, limit - vector))
            found += load(builder, [builder.add(first, builder.sub(at, start))])
        return context.make_tuple(builder, signature.return_type, found)

    signature = types.UniTuple(types.uint32, registers * count)(word, word)
    return intrinsic(lambda typingctx, first, start: (signature, codegen))  # noqa: ARG005


def scores(multiply: Emitter) -> Any:
    """Return an intrinsic for the products of eight queries and sixteen keys.

    It takes the address where the queries are in shared memory, as lanes hold tiles: a lane's 16 bytes at its own
    address (of query g), and its next ones every 512 bytes. And it takes a lane's registers of eight keys and of eight
    more (row g is the key). It returns the products of query g and keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, *keys = values[0], *(all_of(builder, each) for each in values[1:])
        nothing, sums = ir.Constant(_INT, 0), [[ir.Constant(_FLOAT, 0.0)] * 4 for _ in range(2)]
        for i in range(0, len(keys[0]), _VECTOR):
            at = builder.add(address, ir.Constant(address.type, i // _VECTOR * _WARP))
            a, b, c, d = _shared_load_128(builder, [at])
            for j, left in enumerate(([a, nothing, b, nothing], [c, nothing, d, nothing])):
                for k, right in enumerate(keys):
                    sums[k] = multiply(builder, [*left, *right[i + 2 * j : i + 2 * j + 2], *sums[k]])
        return context.make_tuple(builder, signature.return_type, sums[0][:2] + sums[1][:2])

    four = types.UniTuple(types.float32, 4)
    return intrinsic(lambda typingctx, address, first, second: (four(address, first, second), codegen))  # noqa: ARG005


def weighed(multiply: Emitter) -> Any:
    """Return an intrinsic that adds values, weighed for eight queries.

    It takes the sums so far, the registers of the values of places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (16 bytes at
    128 j + 16 g, for every j), and two registers of weights of these places for query g, of 16 bits, twice: what the
    second ones are is added too.
    For every j the sums are, in this order, of the vector's elements: 0 for query 2 t, 0 for query 2 t + 1, 1 for
    query 2 t, and so on.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums, *places = (all_of(builder, each) for each in values[:5])
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

    def typer(typingctx, sums, v0, v1, v2, v3, a0, a1, b0, b1):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return sums(sums, v0, v1, v2, v3, a0, a1, b0, b1), codegen

    return intrinsic(typer)


@intrinsic  # type: ignore[untyped-decorator]
def scaled(typingctx: Any, sums: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
    """Return the sums of :func:`weighed`, multiplied by one factor for query 2 t and by another for query 2 t + 1."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = [builder.fmul(each, values[1 + i % 2]) for i, each in enumerate(all_of(builder, values[0]))]
        return context.make_tuple(builder, signature.return_type, found)

    return sums(sums, first, second), codegen


@intrinsic  # type: ignore[untyped-decorator]
def keep(
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
        for i, each in enumerate(all_of(builder, values[1])):
            at = builder.add(start, ir.Constant(start.type, i // 4 * 8))
            at = builder.add(at, query) if i % 2 else at
            at = builder.add(at, element) if i // 2 % 2 else at
            builder.store(each, builder.gep(data, [at]))
        return context.get_dummy_value()

    return types.void(array, sums, start, query, element), codegen
