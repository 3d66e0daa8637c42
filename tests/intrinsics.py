"""Numba's intrinsics, done at once on the CPU instead of being written for LLVM.

Global memory is the CPU's, of which kernels may touch what tests allow.
"""

from __future__ import annotations

import ctypes
import operator
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from llvmlite import ir

from tests.instructions import Kind, doing
from tests.warps import address_of
from tpplan.exec.kernels import ptx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@define
class _Value:
    """What LLVM has, as far as writers of instructions ask.

    Attributes:
        raw: the number or numbers.
    """

    raw: Any

    @property
    def type(self) -> Any:
        """Its kind, which knows how many numbers there are."""
        return _Several(len(self.raw)) if isinstance(self.raw, tuple) else ir.IntType(64)


@define
class _Several:
    """A kind of tuples.

    Attributes:
        count: of elements.
    """

    count: int


def _raw(value: Any) -> Any:
    return value.constant if isinstance(value, ir.Constant) else value.raw


class _Builder:
    """Does at once what is written with it."""

    def __init__(self, allowed: Sequence[range]) -> None:
        self._allowed = [(some, _bytes(some)) for some in allowed]

    @staticmethod
    def extract_value(value: _Value, index: int) -> _Value:
        return _Value(value.raw[index])

    @staticmethod
    def add(a: Any, b: Any) -> _Value:
        return _Value(np.uint64(int(_raw(a)) + int(_raw(b))))

    @staticmethod
    def shl(a: Any, b: Any) -> _Value:
        return _Value(np.uint32(int(_raw(a)) << int(_raw(b)) & 0xFFFFFFFF))

    @staticmethod
    def lshr(a: Any, b: Any) -> _Value:
        return _Value(np.uint32(int(_raw(a)) >> int(_raw(b))))

    @staticmethod
    def and_(a: Any, b: Any) -> _Value:
        return _Value(np.uint32(int(_raw(a)) & int(_raw(b))))

    @staticmethod
    def or_(a: Any, b: Any) -> _Value:
        return _Value(np.uint32(int(_raw(a)) | int(_raw(b))))

    @staticmethod
    def mul(a: Any, b: Any) -> _Value:
        return _Value(np.uint64(int(_raw(a)) * int(_raw(b))))

    @staticmethod
    def icmp_unsigned(way: str, a: Any, b: Any) -> _Value:
        return _Value({"==": operator.eq, "<": operator.lt}[way](int(_raw(a)), int(_raw(b))))

    @staticmethod
    def select(which: _Value, one: _Value, other: _Value) -> _Value:
        return one if which.raw else other

    @staticmethod
    def xor(a: Any, b: Any) -> _Value:
        return _Value(np.uint32(int(_raw(a)) ^ int(_raw(b))))

    @staticmethod
    def fadd(a: Any, b: Any) -> _Value:
        return _Value(np.float32(_raw(a)) + np.float32(_raw(b)))

    @staticmethod
    def fsub(a: Any, b: Any) -> _Value:
        return _Value(np.float32(_raw(a)) - np.float32(_raw(b)))

    @staticmethod
    def fmul(a: Any, b: Any) -> _Value:
        return _Value(np.float32(_raw(a)) * np.float32(_raw(b)))

    @staticmethod
    def gep(array: _Value, indices: Sequence[_Value]) -> tuple[Any, int]:
        return array.raw, int(indices[0].raw)

    @staticmethod
    def store(value: _Value, to: tuple[Any, int]) -> None:
        array, index = to
        assert 0 <= index < len(array)
        array[index] = _raw(value)

    def call(self, function: Any, values: Sequence[Any], attrs: Any = ()) -> _Value:  # noqa: ARG002
        return _Value(doing(function.asm)(self._at, [_raw(value) for value in values]))

    def _at(self, address: Any, size: int) -> Any:
        start = int(address)
        assert not start % size, "not at a multiple"
        for some, memory in self._allowed:
            if start in some and start + size <= some.stop:
                here = start - some.start
                return memory[here : here + size].view({1: np.uint8, 2: np.uint16}.get(size, np.uint32))
        raise AssertionError("not the kernel's")


def _bytes(some: range) -> Any:
    """Return the memory at these addresses."""
    memory: Any = (ctypes.c_char * len(some)).from_address(some.start)
    return np.frombuffer(memory, np.uint8)


@cache
def _defined(intrinsic: Any, count: int) -> Any:
    """Return the signature of an intrinsic with so many arguments, and what writes it."""
    try:
        return intrinsic._defn(None, *[Kind()] * count)
    except TypeError:
        return intrinsic._defn(None, *[Kind()] * (count + 1))


_CONTEXT = SimpleNamespace(
    get_dummy_value=lambda: None,
    make_tuple=lambda _builder, _kind, values: _Value(
        tuple(np.float32(_raw(v)) if isinstance(v, ir.Constant) else _raw(v) for v in values)
    ),
    make_array=lambda _kind: lambda _context, _builder, value: SimpleNamespace(data=value),
)


def doer(allowed: Sequence[range]) -> Callable[..., Any]:
    """Return what does an intrinsic, given it and its arguments, in a kernel that may touch these addresses."""
    builder = _Builder(allowed)

    def do(intrinsic: Any, *values: Any) -> Any:
        if intrinsic is ptx.shared_address:
            return address_of(*values)
        signature, codegen = _defined(intrinsic, len(values))
        got = codegen(_CONTEXT, builder, signature, [_Value(value) for value in values])
        return None if got is None else got.raw

    return do
