"""What a GPU does with a kernel's Python source, done on the CPU: a thread for each lane, block after block.

Inline PTX is told by its text. Global memory is the CPU's, of which kernels may touch what tests allow. In shared
memory nothing may depend on which thread is first.
"""

from __future__ import annotations

import ctypes
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from inspect import signature
from threading import Barrier, BrokenBarrierError, local
from time import monotonic_ns, sleep
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from attrs import define, field
from llvmlite import ir
from numba import cuda
from numba.cuda import libdevice

from tpplan.exec import ptx
from tpplan.exec.exchange_table import MOST_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import torch

    from tpplan.exec.kernels import Kernel

_LANES = 32
#: Seconds that a lane sleeps which reads the same again.
_PAUSE = 0.01
_ME = local()


@define
class _Block:
    """Threads that share an array.

    Attributes:
        number: of it, in two dimensions.
        size: threads.
        count: blocks that there are, likewise.
        everybody: where they meet.
        warps: where the lanes of each meet, and what they bring and get.
        arrays: in shared memory.
    """

    number: tuple[int, int]
    size: int
    count: tuple[int, int]
    everybody: Barrier = field(init=False)
    warps: list[_Warp] = field(init=False)
    arrays: dict[int, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.everybody = Barrier(self.size)
        self.warps = [_Warp() for _ in range(self.size // _LANES)]

    def abort(self) -> None:
        """Let nobody wait."""
        self.everybody.abort()
        for warp in self.warps:
            warp.abort()


class _Warp:
    """Lanes that multiply matrices together, or tell each other something."""

    def __init__(self) -> None:
        """Bring nothing yet."""
        self.barrier, self._everybody = Barrier(_LANES, self._multiply), Barrier(_LANES)
        self.floats: Callable[[Any], tuple[Any, Any]] = _of_bf16
        self.brought: list[Any] = [None] * _LANES
        self.found: Any = None

    def told(self, lane: int, value: Any) -> list[Any]:
        """Return what all lanes tell."""
        self.brought[lane] = value
        self._everybody.wait()
        found = list(self.brought)
        self._everybody.wait()
        return found

    def abort(self) -> None:
        """Let nobody wait."""
        self.barrier.abort()
        self._everybody.abort()

    def _multiply(self) -> None:
        left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for lane, values in enumerate(self.brought):
            g, t = divmod(lane, 4)
            for i, word in enumerate(values[:4]):
                column = 2 * t + 8 * (i // 2)
                left[g + 8 * (i % 2), column : column + 2] = self.floats(word)
            for i, word in enumerate(values[4:6]):
                right[2 * t + 8 * i : 2 * t + 8 * i + 2, g] = self.floats(word)
            sums[g, 2 * t : 2 * t + 2], sums[g + 8, 2 * t : 2 * t + 2] = values[6:8], values[8:10]
        self.found = (sums + left @ right).astype(np.float32)


def _of_bf16(word: Any) -> tuple[Any, Any]:
    low, high = np.array([int(word) << 16 & 0xFFFFFFFF, int(word) & 0xFFFF0000], np.uint32).view(np.float32)
    return low, high


def _of_f16(word: Any) -> tuple[Any, Any]:
    low, high = np.array([word], np.uint32).view(np.float16).astype(np.float32)
    return low, high


def _to_bf16(low: Any, high: Any) -> Any:
    bits = np.array([low, high], np.float32).view(np.uint32).astype(np.uint64)
    a, b = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)  # to nearest, ties to even
    return np.uint32(int(a) | int(b) << 16)


def _to_f16(low: Any, high: Any) -> Any:
    return np.array([low, high], np.float32).astype(np.float16).view(np.uint32)[0]


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


class _Kind:
    """A type of numba's, of which nothing is wanted."""

    return_type = None
    args = (None,) * 9

    def __call__(self, *_: Any) -> _Kind:
        return self


def _raw(value: Any) -> Any:
    return value.constant if isinstance(value, ir.Constant) else value.raw


class _Builder:
    """Does at once what is written with it."""

    def __init__(self, allowed: Sequence[range]) -> None:
        self._allowed = allowed

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
        return _Value(self._run(function.asm, [_raw(value) for value in values]))

    def _at(self, address: Any, size: int) -> Any:
        start = int(address)
        assert not start % size, "not at a multiple"
        assert any(start in some and start + size - 1 in some for some in self._allowed), "not the kernel's"
        memory: Any = (ctypes.c_char * size).from_address(start)
        return np.frombuffer(memory, {1: np.uint8, 2: np.uint16}.get(size, np.uint32))

    def _run(self, text: str, values: list[Any]) -> Any:
        name, _, _ = text.partition(" ")
        if name.startswith("ld.volatile"):
            if _ME.polled == values[0]:
                sleep(_PAUSE)  # somebody else has to write it
            _ME.polled = values[0]
        if name.startswith("mma.sync"):
            return _multiplied(_of_bf16 if ".bf16." in name else _of_f16, values)
        if vector := _VECTOR.fullmatch(name):
            count = int(vector[1])
            at = self._at(values[0], 4 * count)
            at[: len(values) - 1] = values[1:]
            return tuple(at)
        if name in _SIZES:
            at = self._at(values[0], _SIZES[name])
            at[: len(values) - 1] = values[1:]
            return at[0]
        if ".volatile.global.u64 " in text:
            both = self._at(values[0], 8).view(np.uint64)
            both[: len(values) // 2] = sum(int(value) << 32 * i for i, value in enumerate(values[1:]))
            found = int(both[0])  # once, as others may write meanwhile
            return np.uint32(found & 0xFFFFFFFF), np.uint32(found >> 32)
        for each, run in _BITS.items():
            if text == _TEXTS[each]:
                return run(*values)
        assert name.startswith(("griddepcontrol", ".pragma")), text
        return None


#: Accesses of several words.
_VECTOR = re.compile(r"(?:ld|st)\.(?:global|volatile\.global)[\w.:]*\.v([24])\.u32")
#: Bytes of accesses.
_SIZES = {
    f"{way}{kind}.global.u{8 * size}": size for way in ("ld", "st") for kind in ("", ".volatile") for size in (1, 2, 4)
}
#: Of others.
_BITS: dict[str, Callable[..., Any]] = {
    "low_bf16": lambda word: _of_bf16(word)[0],
    "high_bf16": lambda word: _of_bf16(word)[1],
    "two_bf16": _to_bf16,
    "low_f16": lambda word: _of_f16(word)[0],
    "high_f16": lambda word: _of_f16(word)[1],
    "two_f16": _to_f16,
    "bits_of": lambda value: np.array(value).view(np.uint32 if isinstance(value, np.floating) else np.float32)[()],
    "float_of": lambda word: np.array([word], np.uint32).view(np.float32)[0],
    "active": lambda: np.uint32(0xFFFFFFFF),
    "of_first": lambda value: _told(value)[0],
    "of_quarter": lambda value, lane: _told(value)[_ME.thread % _LANES & ~3 | int(lane)],
    "shifted": lambda bits, count: np.uint32(int(bits) >> int(count) % 32),
    "largest_of_warp": lambda value: max(_told(value)),
    "nanoseconds": lambda: np.uint64(monotonic_ns()),
    "word": lambda index: _ME.words[int(index)],
}


class _Reader:
    """Finds the text of an intrinsic's instruction."""

    @staticmethod
    def call(function: Any, values: Any, attrs: Any = ()) -> Any:  # noqa: ARG004
        raise _FoundError(function.asm)


class _FoundError(Exception):
    """Has the text."""


def _text_of(intrinsic: Any) -> str:
    _, codegen = intrinsic._defn(None, *[_Kind()] * (len(signature(intrinsic._defn).parameters) - 1))
    try:
        codegen(None, _Reader(), None, ())
    except _FoundError as found:
        return str(found)
    raise AssertionError


def _defined(intrinsic: Any, count: int) -> Any:
    try:
        return intrinsic._defn(None, *[_Kind()] * count)
    except TypeError:
        return intrinsic._defn(None, *[_Kind()] * (count + 1))


_TEXTS = {name: _text_of(getattr(ptx, name)) for name in _BITS}


def _told(value: Any) -> list[Any]:
    """Return what the lanes of a warp have."""
    warp, lane = _ME.block.warps[_ME.thread // _LANES], _ME.thread % _LANES
    found: list[Any] = warp.told(lane, value)
    return found


def _multiplied(floats: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    warp, lane = _ME.block.warps[_ME.thread // _LANES], _ME.thread % _LANES
    warp.floats, warp.brought[lane] = floats, values
    warp.barrier.wait()
    g, t = divmod(lane, 4)
    return (*warp.found[g, 2 * t : 2 * t + 2], *warp.found[g + 8, 2 * t : 2 * t + 2])


_CONTEXT = SimpleNamespace(
    get_dummy_value=lambda: None,
    make_tuple=lambda _builder, _kind, values: _Value(
        tuple(np.float32(_raw(v)) if isinstance(v, ir.Constant) else _raw(v) for v in values)
    ),
    make_array=lambda _kind: lambda _context, _builder, value: SimpleNamespace(data=value),
)


class _Shared:
    """An array in shared memory, whose threads must meet between what one writes and what another reads or writes."""

    def __init__(self, count: int, kind: Any) -> None:
        self._values: Any = np.full(count * kind().nbytes, 0xFF, np.uint8).view(kind)  # NaN
        self._written, self._read = ([(-1, -1)] * count for _ in range(2))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        me, index = (_ME.met, _ME.thread), int(index)
        self._read[index] = me
        assert not _is_race(self._written[index], me), "read beside a write"
        return self._values[index]

    def __setitem__(self, index: int, value: Any) -> None:
        me, index = (_ME.met, _ME.thread), int(index)
        others, self._written[index] = (self._written[index], self._read[index]), me
        assert not any(_is_race(other, me) for other in others), "written beside a read or a write"
        self._values[index] = value


def _is_race(other: tuple[int, int], me: tuple[int, int]) -> bool:
    """Tell whether two threads have met as often: nobody knows who is first."""
    return other[0] == me[0] and other[1] != me[1]


def _shared_array(count: int, dtype: Any, alignment: int = 0) -> Any:
    _ME.arrays += 1
    return _ME.block.arrays.setdefault(_ME.arrays, _Shared(count, type(dtype(0))))


def _meet() -> None:
    _ME.block.everybody.wait()
    _ME.met += 1


class _Index:
    """Number of a thread or block, or how many there are."""

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read

    @property
    def x(self) -> int:
        return self._read()[0]

    @property
    def y(self) -> int:
        return self._read()[1]


def _patches(allowed: Sequence[range]) -> Iterator[Any]:
    builder = _Builder(allowed)

    def intrinsic(self: Any, *values: Any) -> Any:
        signature, codegen = _defined(self, len(values))
        got = codegen(_CONTEXT, builder, signature, [_Value(value) for value in values])
        return None if got is None else got.raw

    for name, read in {
        "threadIdx": lambda: (_ME.thread, 0),
        "blockIdx": lambda: _ME.block.number,
        "blockDim": lambda: (_ME.block.size, 1),
        "gridDim": lambda: _ME.block.count,
    }.items():
        yield patch.object(cuda, name, _Index(read))
    yield patch.object(cuda, "grid", lambda _: _ME.block.number[0] * _ME.block.size + _ME.thread)
    yield patch.object(cuda, "gridsize", lambda _: _ME.block.count[0] * _ME.block.size)
    yield patch.object(cuda, "shared", SimpleNamespace(array=_shared_array))
    yield patch.object(cuda, "syncthreads", _meet)
    yield patch.object(cuda, "shfl_xor_sync", lambda _, value, bit: _told(value)[_ME.thread % _LANES ^ bit])
    yield patch.object(libdevice, "expf", np.exp)
    yield patch.object(libdevice, "tanhf", np.tanh)
    yield patch.object(libdevice, "erff", lambda x: np.float32(math.erf(x)))
    yield patch.object(type(ptx.load_16), "__call__", intrinsic)
    device = type(cuda.jit(device=True)(_shared_array))
    yield patch.object(device, "__call__", lambda self, *values: self.py_func(*values))


def run(
    kernel: Kernel, blocks: int | tuple[int, int], threads: int, words: Sequence[int], allowed: Sequence[torch.Tensor]
) -> None:
    """Run a kernel.

    Args:
        kernel: of which what is asked here is known.
        blocks: how many, in one dimension or two; the last one comes first, as the first ones may wait for others.
        threads: of each, whole warps.
        words: that it is told, or that are in the array which it is told.
        allowed: what it may read and write, where it is in memory; all else fails.
    """
    count = (blocks, 1) if isinstance(blocks, int) else blocks
    with _running(threads, allowed) as start:
        for number in reversed([*np.ndindex(count)]):
            _end(start(kernel, _Block(number, threads, count), words))


def run_together(
    kernels: Sequence[Kernel], threads: int, words: Sequence[Sequence[int]], allowed: Sequence[torch.Tensor]
) -> None:
    """Run a block of a kernel on each of several devices at the same time.

    Args:
        kernels: one for each.
        threads: of a block, whole warps.
        words: that each is told.
        allowed: what they may read and write.
    """
    with _running(threads * len(kernels), allowed) as start:
        _end(
            [
                future
                for kernel, told in zip(kernels, words, strict=True)
                for future in start(kernel, _Block((0, 0), threads, (1, 1)), told)
            ]
        )


@contextmanager
def _running(threads: int, allowed: Sequence[torch.Tensor]) -> Iterator[Callable[..., list[Future[None]]]]:
    """Yield what starts the lanes of a block, of so many at a time."""
    ranges = [range(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in allowed]

    def lane(kernel: Kernel, block: _Block, thread: int, numbers: list[Any]) -> None:
        _ME.block, _ME.thread, _ME.arrays, _ME.met, _ME.words, _ME.polled = block, thread, 0, 0, numbers, None
        try:
            kernel.function(*numbers[: kernel.arguments])
        except BaseException:
            block.abort()
            raise

    with ExitStack() as stack:
        for each in _patches(ranges):
            stack.enter_context(each)
        pool = stack.enter_context(ThreadPoolExecutor(threads))

        def start(kernel: Kernel, block: _Block, words: Sequence[int]) -> list[Future[None]]:
            assert len(words) == (kernel.arguments if kernel.arguments > 1 else MOST_WORDS)
            numbers = [np.uint64(word) for word in words]
            return [pool.submit(lane, kernel, block, thread, numbers) for thread in range(block.size)]

        yield start


def _end(lanes: Sequence[Future[None]]) -> None:
    """Wait for lanes, and raise what one of them has raised first."""
    errors = [error for each in lanes if (error := each.exception())]
    for error in sorted(errors, key=lambda each: isinstance(each, BrokenBarrierError)):
        raise error
