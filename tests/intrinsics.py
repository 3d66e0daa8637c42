"""Numba's intrinsics on the CPU: what one writes for LLVM is written once, as a function of Python's.

Global memory is the CPU's, of which kernels may touch what tests allow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from llvmlite import ir
from numba.cuda import types

from tests.instructions import PLAIN, Kind, doing
from tests.warps import address_of
from tpplan.exec.kernels import ptx

if TYPE_CHECKING:
    from collections.abc import Callable


@frozen
class Value:
    """What LLVM has, as far as writers of instructions ask.

    Attributes:
        name: its name in the function.
    """

    name: str
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
    """A builder of LLVM's that keeps what is written with it, as a function of Python.

    Attributes:
        values: that it is given.
    """

    def __init__(self, shapes: Sequence[Any]) -> None:
        """Begin, for values of these shapes: of a tuple those of its parts, of others None."""
        self._known: dict[str, Any] = {}
        self._lines: list[str] = []
        self._count = 0
        self.values = [self._given(shape) for shape in shapes]

    def _given(self, shape: Any) -> Any:
        return self._new() if shape is None else Tuple([self._given(each) for each in shape])

    def _new(self) -> Value:
        self._count += 1
        return Value(f"r{self._count}")

    def _knows(self, thing: Any) -> str:
        """Return the name of a number or function that the steps use."""
        name = f"k{len(self._known)}"
        self._known[name] = thing
        return name

    def _text(self, value: Any) -> str:
        """Return how a value is written, or a constant, or a tuple of them."""
        if isinstance(value, Tuple):
            return f"({''.join(f'{self._text(each)}, ' for each in value.parts)})"
        return self._knows(_number(value)) if isinstance(value, ir.Constant) else value.name

    def _do(self, step: str, *values: Any) -> Value:
        texts, found = [*map(self._text, values)], self._new()
        self._lines.append(f"{found.name} = {step.format(*texts)}")
        return found

    def __getattr__(self, name: str) -> Callable[..., Value]:
        """Keep an operation on numbers."""
        return partial(self._do, _OPERATIONS[name])

    def icmp_unsigned(self, way: str, a: Any, b: Any) -> Value:
        """Keep a comparison."""
        return self._do(f"{{}} {way} {{}}", a, b)

    def gep(self, array: Any, indices: Sequence[Any]) -> Value:
        """Keep where an element of an array is."""
        return self._do("({}, int({}))", array, *indices)

    @staticmethod
    def extract_value(value: Tuple, index: int) -> Any:
        """Return a part."""
        return value.parts[index]

    def call(self, function: Any, values: Sequence[Any], attrs: Any = ()) -> Any:  # noqa: ARG002
        """Keep an instruction."""
        given, kind = self._text(Tuple(values)), function.type
        if plain := PLAIN.get(function.asm):
            done = f"{self._knows(plain)}{given}"
        else:
            done = f"{self._knows(doing(function.asm))}(memory, {given})"
        several = isinstance(kind, ir.LiteralStructType)
        found = Tuple([self._new() for _ in kind.elements]) if several else self._new()
        self._lines.append(f"{self._text(found)} = {done}")
        return found

    def ended(self, found: Any) -> Callable[..., Any]:
        """Return what does the steps, given what finds memory, and values, and returns something of them."""
        given = [f"{self._text(each)} = v{i}" for i, each in enumerate(self.values)]
        result = "None" if found is None else self._text(found)
        arguments = "".join(f", v{i}" for i in range(len(self.values)))
        lines = [f"def run(memory{arguments}):", *given, *self._lines, f"return {result}"]
        exec("\n    ".join(lines), self._known)  # noqa: S102 (made above)
        run: Callable[..., Any] = self._known["run"]
        return run


#: What is done with numbers, which have LLVM's types.
_OPERATIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "shl": "{} << {}",
    "lshr": "{} >> {}",
    "and_": "{} & {}",
    "or_": "{} | {}",
    "xor": "{} ^ {}",
    "fadd": "{} + {}",
    "fsub": "{} - {}",
    "fmul": "{} * {}",
    "select": "{1} if {0} else {2}",
    "store": "{1}[0].__setitem__({1}[1], {0})",
}


def _number(constant: Any) -> Any:
    """Return a constant."""
    kind = {16: np.uint16, 32: np.uint32, 64: np.uint64}.get(getattr(constant.type, "width", 0), np.float32)
    return np.array(constant.constant).astype(kind)[()]


_CONTEXT = SimpleNamespace(
    get_dummy_value=lambda: None,
    make_tuple=lambda _builder, _kind, values: Tuple(values),
    make_array=lambda _kind: lambda _context, _builder, value: SimpleNamespace(data=value),
)


@cache
def _steps_of(intrinsic: Any, shapes: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what does an intrinsic with values of these shapes."""
    kinds, codegen = intrinsic._defn(None, *[Kind()] * len(shapes))
    steps = Steps(shapes)
    return steps.ended(codegen(_CONTEXT, steps, kinds, steps.values))


def _shape(value: Any) -> Any:
    if not isinstance(value, tuple):
        return None
    return tuple(map(_shape, value)) if tuple in map(type, value) else (None,) * len(value)


@cache
def _doing(intrinsic: Any) -> Callable[..., Any]:
    """Return what does an intrinsic, given what finds memory, and values."""
    count = len(signature(intrinsic._defn).parameters) - 1
    kinds, _ = intrinsic._defn(None, *[Kind()] * count)
    if all(isinstance(each, types.Number) for each in kinds.args[:count]):
        return _steps_of(intrinsic, (None,) * count)
    return lambda memory, *values: _steps_of(intrinsic, tuple(map(_shape, values)))(memory, *values)


def done(intrinsic: Any, allowed: Sequence[range]) -> Callable[..., Any]:
    """Return what does an intrinsic, given its arguments, in a kernel that may touch these addresses."""
    if intrinsic is ptx.shared_address:
        return address_of
    return partial(_doing(intrinsic), _memory(allowed))


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
