"""How a lane of the kernels by codes asks for its codes and rows, and where codes are until they are needed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.exec.kernels import ptx
from tpplan.exec.kernels.kernel import device_function
from tpplan.exec.toolchain.language import types

if TYPE_CHECKING:
    from tpplan.decoder.fast.kernels.packed_codes import Codes

#: In shared memory: bytes of a warp's step, of one of a lane's two matrix rows in it, and words of all steps of a warp.
_STEP_BYTES, _ROW_BYTES, WARP_WORDS = 1024, 512, 1024
_WORD, _BITS = types.uint64, types.uint32


@frozen
class Way:
    """How a lane's codes of a step are asked for, and where they are until they are needed.

    All take where the warp's are in shared memory, and the number of a step among those on their way.

    Attributes:
        first: asks for those of a step, before all else, given its first column and whether a warp has so many.
        ask: the same later, if there is such a step, in the place of those asked for before.
        take: returns those asked for.
    """

    first: Any
    ask: Any
    take: Any


@cache
def by_registers(kind: Codes, tall: int) -> Way:
    """Return how codes of two matrix rows, or four, come into registers.

    Args:
        kind: of codes.
        tall: times that a tile has 16 matrix rows.
    """
    halvings = kind.halvings

    def loading(load: Any) -> Any:
        @device_function
        def two(at: Any, column: Any) -> Any:
            to = _WORD(column) >> _WORD(halvings)
            return load(at[0] + to) + load(at[1] + to)

        @device_function
        def four(at: Any, column: Any) -> Any:
            to = _WORD(column) >> _WORD(halvings)
            return load(at[0] + to) + load(at[1] + to) + load(at[2] + to) + load(at[3] + to)

        return {1: two, 2: four}[tall]

    load_now, load = loading(ptx.poll_128), loading(ptx.stream_128)

    @device_function
    def first(_: Any, number: Any, at: Any, column: Any, is_there: Any) -> Any:  # noqa: ARG001
        return load_now(at, column)

    @device_function
    def ask(_: Any, number: Any, at: Any, column: Any, is_there: Any, codes: Any) -> Any:  # noqa: ARG001
        return load(at, column) if is_there else codes

    @device_function
    def take(_: Any, number: Any, codes: Any) -> Any:  # noqa: ARG001
        return codes

    return Way(first, ask, take)


@cache
def by_shared_memory(kind: Codes) -> Way:
    """Return how codes of two matrix rows are copied into shared memory, by each lane what it needs itself.

    The assembler moves loads into registers behind all products of the tile before, so that nothing is on its way
    during these. On an H200 a gate of 28,672 x 4,096 takes 33 us by registers and 27 by shared memory, of e4m3 52 and
    37; but of whole numbers of 8 bits 42 and 44.
    """
    halvings = kind.halvings

    @device_function
    def first(room: Any, number: Any, at: Any, column: Any, is_there: Any) -> Any:
        if is_there:
            to, place = _WORD(column) >> _WORD(halvings), room + _WORD(_STEP_BYTES * number)
            ptx.copy_128(_BITS(place), at[0] + to)
            ptx.copy_128(_BITS(place + _WORD(_ROW_BYTES)), at[1] + to)
        ptx.end_copies()
        return number

    @device_function
    def ask(room: Any, number: Any, at: Any, column: Any, is_there: Any, codes: Any) -> Any:
        first(room, number, at, column, is_there)
        return codes

    @device_function
    def take(room: Any, number: Any, _: Any) -> Any:
        ptx.copied_but_three()
        place = room + _WORD(_STEP_BYTES * number)
        return ptx.shared_load_128(place) + ptx.shared_load_128(place + _WORD(_ROW_BYTES))

    return Way(first, ask, take)


@device_function
def _two_vectors(at: Any) -> Any:
    return ptx.load_128(at) + ptx.load_128(at + _WORD(16))


@device_function
def _four_vectors(at: Any) -> Any:
    first, second = ptx.load_128(at) + ptx.load_128(at + _WORD(16)), ptx.load_128(at + _WORD(32))
    return first + second + ptx.load_128(at + _WORD(48))


@cache
def looking_at(kind: Codes, eights: int) -> Any:
    """Make what asks for what a lane has of its rows, one of each eight."""
    quarter = {8: _two_vectors, 16: _four_vectors}[kind.part]

    @device_function
    def look_at_one(at: Any, column: Any) -> Any:
        return quarter(at[0] + _WORD(column) * _WORD(2))

    @device_function
    def look_at_two(at: Any, column: Any) -> Any:
        return quarter(at[0] + _WORD(column) * _WORD(2)) + quarter(at[1] + _WORD(column) * _WORD(2))

    return {1: look_at_one, 2: look_at_two}[eights]
