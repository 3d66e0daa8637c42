"""Numba's intrinsics on the CPU: what one writes for LLVM is kept once, as steps that each call of it does.

Global memory is the CPU's, of which kernels may touch what tests allow.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from functools import cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from llvmlite import ir
from numba.cuda import types

from tests.instructions import Kind, doing
from tests.warps import address_of
from tpplan.exec.kernels import ptx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    #: Does an intrinsic, given what finds memory, and values.
    _Doing = Callable[[Callable[[Any, int], Any], Sequence[Any]], Any]


@frozen
class Value:
    """What LLVM has, as far as writers of instructions ask.

    Attributes:
        register: which of the steps' numbers it is.
    """

    register: int
    type = ir.IntType(64)


@frozen
class Tuple:
    """Several of them, or of tuples.

    Attributes:
        parts: these.
    """

    parts: Sequence[Any]

    @property
    def type(self) -> Any:
        """Its kind, which knows how many there are."""
        return SimpleNamespace(count=len(self.parts))


class Steps:
    """A builder of LLVM's that keeps what is written with it.

    Attributes:
        values: that the steps are given.
    """

    def __init__(self, shapes: Sequence[Any]) -> None:
        """Begin, for values of these shapes: of a tuple those of its parts, of others None."""
        self._registers: list[Any] = [None]  # the first is what finds memory
        self._steps: list[tuple[Callable[..., Any], list[int], int | slice]] = []
        self.values = [self._given(shape) for shape in shapes]
        self._count = len(self._registers)

    def _given(self, shape: Any) -> Any:
        return self._new() if shape is None else Tuple([self._given(each) for each in shape])

    def _new(self, number: Any = None) -> Value:
        self._registers.append(number)
        return Value(len(self._registers) - 1)

    def _place(self, value: Any) -> int:
        """Return the register of a value, or of a constant."""
        return (self._new(_number(value)) if isinstance(value, ir.Constant) else value).register

    def _do(self, run: Callable[..., Any], *values: Any) -> Value:
        places, found = [self._place(value) for value in values], self._new()
        self._steps.append((run, places, found.register))
        return found

    def __getattr__(self, name: str) -> Callable[..., Value]:
        """Keep an operation on numbers."""
        return partial(self._do, _OPERATIONS[name])

    def icmp_unsigned(self, way: str, a: Any, b: Any) -> Value:
        """Keep a comparison."""
        return self._do({"==": operator.eq, "<": operator.lt}[way], a, b)

    def gep(self, array: Any, indices: Sequence[Any]) -> Value:
        """Keep where an element of an array is."""
        return self._do(lambda array, index: (array, int(index)), array, *indices)

    @staticmethod
    def extract_value(value: Tuple, index: int) -> Any:
        """Return a part."""
        return value.parts[index]

    def call(self, function: Any, values: Sequence[Any], attrs: Any = ()) -> Any:  # noqa: ARG002
        """Keep an instruction."""
        run, kind = partial(_call, doing(function.asm)), function.type
        if not isinstance(kind, ir.LiteralStructType):
            return self._do(run, Value(0), *values)
        places, found = [self._place(value) for value in values], [self._new() for _ in kind.elements]
        self._steps.append((run, [0, *places], slice(found[0].register, found[-1].register + 1)))
        return Tuple(found)

    def ended(self, found: Any) -> _Doing:
        """Return what does the steps, and returns something of them, if anything."""
        parts = found.parts if isinstance(found, Tuple) else [] if found is None else [found]
        wanted = [self._place(each) for each in parts]
        if len(self._steps) == 1:
            (run, places, to), all_given = self._steps[0], [*range(self._count)]
            whole = [to] if isinstance(to, int) else [*range(to.start, to.stop)]
            if isinstance(run, partial) and places == all_given and wanted in ([], whole):
                return run.args[0]  # type: ignore[no-any-return]
        return partial(_done, self._registers, self._steps, tuple if isinstance(found, Tuple) else _only, wanted)


#: What is done with numbers, which have LLVM's types.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "shl": operator.lshift,
    "lshr": operator.rshift,
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "fadd": operator.add,
    "fsub": operator.sub,
    "fmul": operator.mul,
    "select": lambda which, one, other: one if which else other,
    "store": lambda value, to: to[0].__setitem__(to[1], value),
}


def _number(constant: Any) -> Any:
    """Return a constant."""
    kind = {16: np.uint16, 32: np.uint32, 64: np.uint64}.get(getattr(constant.type, "width", 0), np.float32)
    return np.array(constant.constant).astype(kind)[()]


def _call(run: _Doing, memory: Any, *values: Any) -> Any:
    return run(memory, values)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what is in tuples, and in tuples of them."""
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _only(found: Iterator[Any]) -> Any:
    """Return one value, or None."""
    return next(found, None)


def _done(  # noqa: PLR0917
    registers: Sequence[Any],
    steps: Sequence[Any],
    make: Callable[[Iterator[Any]], Any],
    wanted: Sequence[int],
    memory: Any,
    values: Sequence[Any],
) -> Any:
    """Do steps, and make something of the registers that are wanted."""
    given, numbers = [memory, *_flat(values)], [*registers]
    numbers[: len(given)] = given
    get = numbers.__getitem__
    for run, places, to in steps:
        numbers[to] = run(*map(get, places))
    return make(map(get, wanted))


_CONTEXT = SimpleNamespace(
    get_dummy_value=lambda: None,
    make_tuple=lambda _builder, _kind, values: Tuple(values),
    make_array=lambda _kind: lambda _context, _builder, value: SimpleNamespace(data=value),
)


@cache
def _steps_of(intrinsic: Any, shapes: tuple[Any, ...]) -> _Doing:
    """Return what does an intrinsic with values of these shapes."""
    kinds, codegen = intrinsic._defn(None, *[Kind()] * len(shapes))
    steps = Steps(shapes)
    return steps.ended(codegen(_CONTEXT, steps, kinds, steps.values))


def _shape(value: Any) -> Any:
    return tuple(map(_shape, value)) if isinstance(value, tuple) else None


@cache
def _doing(intrinsic: Any) -> _Doing:
    """Return what does an intrinsic."""
    count = len(signature(intrinsic._defn).parameters) - 1
    kinds, _ = intrinsic._defn(None, *[Kind()] * count)
    if all(isinstance(each, types.Number) for each in kinds.args[:count]):
        return _steps_of(intrinsic, (None,) * count)
    return lambda memory, values: _steps_of(intrinsic, tuple(map(_shape, values)))(memory, values)


def done(intrinsic: Any, allowed: Sequence[range]) -> Callable[..., Any]:
    """Return what does an intrinsic, given its arguments, in a kernel that may touch these addresses."""
    if intrinsic is ptx.shared_address:
        return address_of
    run, memory = _doing(intrinsic), _memory(allowed)
    return lambda *values: run(memory, values)


def _memory(allowed: Sequence[range]) -> Callable[[Any, int], Any]:
    """Return what finds memory by an address and a number of bytes."""
    known = [(some.start, some.stop, _bytes(some)) for some in allowed]

    def find(address: Any, size: int) -> Any:
        start = int(address)
        assert not start % size, "not at a multiple"
        for first, end, memory in known:
            if first <= start and start + size <= end:
                return memory[start - first : start - first + size].view(_WORDS.get(size, np.uint32))
        raise AssertionError("not the kernel's")

    return find


#: Of memory, by bytes that are wanted.
_WORDS = {1: np.uint8, 2: np.uint16}


def _bytes(some: range) -> Any:
    """Return the memory at these addresses."""
    memory: Any = (ctypes.c_char * len(some)).from_address(some.start)
    return np.frombuffer(memory, np.uint8)
