"""Sums of a lane, of four matrix rows and all rows: how they begin, are left for others, and are handed on.

There are eight for every eight rows: of the first two matrix rows those of the first and of rows 2 t and 2 t + 1, then
those of the second; then the same of the other two.
"""

from __future__ import annotations

from typing import Any

from tpplan.decoder.fast.kernels.tiles import all_of
from tpplan.exec.kernels import ptx
from tpplan.exec.toolchain.language import intrinsic, ir, types

#: Sums of every eight rows, and rows that lie between those of a lane.
PER_EIGHT, _EIGHT = 8, 8
#: Registers of a vector, and bytes of a warp's.
_VECTOR, _WARP = 4, 512


def begun(eights: int, low: ptx.Emitter, high: ptx.Emitter) -> Any:
    """Return an intrinsic that reads what sums begin with.

    It takes an address, the bytes of a row, a lane's first row, the last row there is, which stands for those behind
    it, and the bytes from a row's beginning to its two elements for the first matrix rows, and for the others.

    Args:
        eights: of rows.
        low: writes what makes a float32 of the first of two floats.
        high: of the second.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start, pitch, first, last, *columns = values

        def pairs_of(row: Any) -> list[Any]:
            is_there = builder.icmp_unsigned("<", row, last)
            at = builder.add(start, builder.mul(builder.select(is_there, row, last), pitch))
            return [ptx.emit_load_32(builder, [builder.add(at, each)])[0] for each in columns]

        rows = [
            [pairs_of(builder.add(first, ir.Constant(first.type, _EIGHT * j + e))) for e in range(2)]
            for j in range(eights)
        ]  # all of them are asked for before one is looked at
        found = [
            emit(builder, [pairs[e][i]])[0]
            for pairs in rows
            for i in range(2)
            for emit in (low, high)
            for e in range(2)
        ]
        return context.make_tuple(builder, signature.return_type, found)

    word = types.uint64
    signature = types.UniTuple(types.float32, PER_EIGHT * eights)(*[word] * 6)
    return intrinsic(lambda typingctx, start, pitch, first, last, low, high: (signature, codegen))  # noqa: ARG005


@intrinsic  # type: ignore[untyped-decorator]
def turned(typingctx: Any, sums: Any) -> Any:  # noqa: ARG001
    """Return sums with the first eight behind the others."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = all_of(builder, values[0])
        return context.make_tuple(builder, signature.return_type, found[PER_EIGHT:] + found[:PER_EIGHT])

    return sums(sums), codegen


@intrinsic  # type: ignore[untyped-decorator]
def leave(typingctx: Any, address: Any, sums: Any) -> Any:  # noqa: ARG001
    """Write sums to a lane's own address, 16 bytes there and every 512 bytes from there."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        address, found = values[0], all_of(builder, values[1])
        for i in range(0, len(found), _VECTOR):
            at = builder.add(address, ir.Constant(address.type, i // _VECTOR * _WARP))
            ptx.emit_store_floats(builder, [at, *found[i : i + _VECTOR]])
        return context.get_dummy_value()

    return types.void(address, sums), codegen


def _with_left(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """Add what is at addresses to sums; all of it is asked for before one is looked at."""

    def left(address: Any, i: int) -> list[Any]:
        return ptx.emit_load_floats(builder, [builder.add(address, ir.Constant(address.type, i // _VECTOR * _WARP))])

    found = all_of(builder, values[0])
    parts = [[each for i in range(0, len(found), _VECTOR) for each in left(at, i)] for at in values[1:]]
    for part in parts:
        found = [builder.fadd(each, other) for each, other in zip(found, part, strict=True)]
    return context.make_tuple(builder, signature.return_type, found)


@intrinsic  # type: ignore[untyped-decorator]
def with_left(typingctx: Any, sums: Any, first: Any, second: Any) -> Any:  # noqa: ARG001
    """Return sums with what :func:`leave` has written to two addresses added, one after the other."""
    return sums(sums, first, second), _with_left


@intrinsic  # type: ignore[untyped-decorator]
def with_last(typingctx: Any, sums: Any, address: Any) -> Any:  # noqa: ARG001
    """Return sums with what it has written to one address added."""
    return sums(sums, address), _with_left


def stored(eights: int, both: ptx.Emitter) -> Any:
    """Return an intrinsic that writes sums, rounded, where there are rows.

    It takes them, the address of a lane's two elements for the first matrix rows in its first row, and the bytes to
    those for the others; the bytes of a row; the lane's first row; how many rows there are for the first matrix rows,
    and for the others.

    Args:
        eights: of rows.
        both: writes what makes 32 bits of two float32.
    """

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        sums, start, offset, pitch, first, *rows = values
        found = all_of(builder, sums)
        for j in range(eights):
            for e in range(2):
                number = ir.Constant(first.type, _EIGHT * j + e)
                at = builder.add(start, builder.mul(pitch, ir.Constant(pitch.type, _EIGHT * j + e)))
                for i, where in enumerate((at, builder.add(at, offset))):
                    k = PER_EIGHT * j + 4 * i + e
                    (two,) = both(builder, [found[k], found[k + 2]])
                    ptx.emit_store_32_below(builder, [where, two, builder.add(first, number), rows[i]])
        return context.get_dummy_value()

    word, bits = types.uint64, types.uint32
    signature = types.void(types.UniTuple(types.float32, PER_EIGHT * eights), word, word, word, bits, bits, bits)
    return intrinsic(lambda typingctx, sums, start, offset, pitch, first, low, high: (signature, codegen))  # noqa: ARG005
