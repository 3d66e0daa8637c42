"""What the instructions of kernels do, told by the text of their PTX, on the CPU."""

from __future__ import annotations

import re
from functools import cache, partial
from inspect import signature
from struct import pack
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.cuda import types

from tests.warps import (
    ME,
    add_word,
    copy_words,
    end_copies,
    moved,
    multiplied,
    multiplied_by_groups,
    told,
    wait_for_copies,
    words_at,
    write_words,
)
from tpplan.exec.kernels import ptx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    #: Finds memory by an address and a number of bytes.
    _Memory = Callable[[Any, int], Any]
    _Doing = Callable[[_Memory, Sequence[Any]], Any]

#: Bits by which the halves of a word are moved to become the high ones of two.
_HALVES = np.array([16, 0], np.uint32)


def _of_bf16(words: Any) -> Any:
    """Return the two floats of each word."""
    return (np.asarray(words, np.uint32)[..., None] << _HALVES & np.uint32(0xFFFF0000)).view(np.float32)


def _of_f16(words: Any) -> Any:
    """Return the two floats of each word."""
    return np.asarray(words, np.uint32)[..., None].view(np.float16).astype(np.float32)


#: The floats of all halves of a word; as numbers of Python's, whose arithmetic is that of 64 bits; and as numpy's.
_BF16 = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
_F16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
_PYTHON_BF16, _PYTHON_F16 = _BF16.tolist(), _F16.tolist()
_NUMPY_BF16, _NUMPY_F16 = [*_BF16], [*_F16]


def _low_bf16(word: Any) -> Any:
    return _NUMPY_BF16[int(word) & 0xFFFF]


def _high_bf16(word: Any) -> Any:
    return _NUMPY_BF16[int(word) >> 16]


def _low_f16(word: Any) -> Any:
    return _NUMPY_F16[int(word) & 0xFFFF]


def _high_f16(word: Any) -> Any:
    return _NUMPY_F16[int(word) >> 16]


def _bits_of_bf16(value: float) -> int:
    try:
        bits = int.from_bytes(pack("<f", value), "little")
    except OverflowError:
        return 0x7F80 if value > 0 else 0xFF80
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16  # to nearest, ties to even


def _bits_of_f16(value: float) -> int:
    try:
        return int.from_bytes(pack("<e", value), "little")
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def _to_bf16(low: Any, high: Any) -> Any:
    return np.uint32(_bits_of_bf16(low) | _bits_of_bf16(high) << 16)


def _to_f16(low: Any, high: Any) -> Any:
    return np.uint32(_bits_of_f16(low) | _bits_of_f16(high) << 16)


def _of_pairs(floats: Sequence[float], bits_of: Callable[[float], int], run: Callable[..., float]) -> _Doing:
    """Return what does something with the low halves of words, and with the high ones."""

    def both(_: _Memory, values: Sequence[Any]) -> Any:
        words = [*map(int, values)]
        low, high = run(*[floats[word & 0xFFFF] for word in words]), run(*[floats[word >> 16] for word in words])
        return np.uint32(bits_of(low) | bits_of(high) << 16)

    return both


@cache
def doing(text: str) -> _Doing:
    """Return what does an instruction, given what finds memory, and values."""
    name = text.partition(" ")[0].replace(".L2::128B", "")  # what may be fetched besides
    if name.startswith("mma.sync"):
        floats = _of_bf16 if ".bf16." in name else _of_f16
        return lambda _, values: multiplied(floats, values)
    if name == "cp.async.wait_group":
        groups = int(text.removeprefix(name).removesuffix(";"))
        return lambda *_: wait_for_copies(groups)
    if name in _DONE:
        return _DONE[name]
    if found := _of_groups(text) or _conditional(text):
        return found
    if ".global." not in text:
        return _computing(name, text)
    access = _access(name, text)
    return _polling(access) if "ld.volatile." in text or name.startswith("ld.acquire.") else access


def _of_groups(text: str) -> _Doing | None:
    """Return what does instructions of four warps."""
    if group := _GROUP.match(text):
        eights, floats = int(group[1]) // 8, _of_bf16 if group[2] == "bf16" else _of_f16
        return lambda _, values: multiplied_by_groups(floats, eights, values)
    return (lambda _, values: tuple(values)) if text.startswith("wgmma.wait_group") else None


def _conditional(text: str) -> _Doing | None:
    """Return what does an instruction under a condition."""
    if below := _BELOW.fullmatch(text):
        run, first = doing(below[2]), int(below[1])
        return lambda memory, values: run(memory, values[:first]) if values[first] < values[first + 1] else None
    if given := _IF.fullmatch(text):
        poll = doing(given[1])
        return lambda memory, values: poll(memory, values[:1]) if values[1] else (np.uint32(0),) * 4
    return None


def _polling(access: _Doing) -> _Doing:
    """Return what lets others run before it does the same: somebody else may have to write what it reads."""

    def poll(memory: _Memory, values: Sequence[Any]) -> Any:
        ME.block.turns.pause(again=ME.polled == values[0])
        ME.polled = values[0]
        return access(memory, values)

    return poll


def _access(name: str, text: str) -> _Doing:
    """Return what does an access of global memory."""
    if vector := _VECTOR.fullmatch(name):
        return partial(_vector, 4 * int(vector[1]), np.float32 if name.endswith("f32") else np.uint32)
    if name == "atom.global.inc.u32":
        return _increment
    if name in _SIZES:
        return partial(_load if name.startswith("ld") else _store, _SIZES[name])
    if guarded := _GUARDED.search(text):
        return partial(_guarded, int(guarded[1]), 16 if guarded[2] else 0)
    assert ".volatile.global.u64 " in text, text
    return _halves


def _vector(size: int, kind: Any, memory: _Memory, values: Sequence[Any]) -> Any:
    at = memory(values[0], size).view(kind)
    at[: len(values) - 1] = values[1:]
    return tuple(at)


def _prefetch(memory: _Memory, values: Sequence[Any]) -> None:
    """Touch memory that may be read, in multiples of 16 bytes."""
    assert values[1] % 16 == 0 < values[1]
    memory(values[0], 16)
    memory(values[0] + values[1] - 16, 16)


def _increment(memory: _Memory, values: Sequence[Any]) -> Any:
    counter = memory(values[0], 4)
    found = counter[0]
    counter[0] = 0 if found >= values[1] else found + 1
    return found


def _load(size: int, memory: _Memory, values: Sequence[Any]) -> Any:
    return memory(values[0], size)[0]


def _store(size: int, memory: _Memory, values: Sequence[Any]) -> None:
    memory(values[0], size)[0] = values[1]


def _guarded(bits: int, otherwise: int, memory: _Memory, values: Sequence[Any]) -> Any:
    size = (bits if values[1] else otherwise) // 8
    return np.uint32(memory(values[0], size)[0] if size else 0)


def _filled(memory: _Memory, address: Any, count: Any = 4) -> Any:
    """Return a word of which so many bytes are read, and the others are zeros."""
    assert not int(address) % 4, "not at a multiple"
    found = [int(memory(int(address) + i, 1)[0]) for i in range(int(count))]
    return np.array([sum(byte << 8 * i for i, byte in enumerate(found))], np.uint32)


def _vector_or_zeros(memory: _Memory, address: Any, count: Any = 16) -> Any:
    """Return four words, of which all are read, or none."""
    assert count in {0, 16}
    return memory(address, 16) if count else np.zeros(4, np.uint32)


def _halves(memory: _Memory, values: Sequence[Any]) -> Any:
    both = memory(values[0], 8).view(np.uint64)
    both[: len(values) // 2] = sum(int(value) << 32 * i for i, value in enumerate(values[1:]))
    found = int(both[0])
    return np.uint32(found & 0xFFFFFFFF), np.uint32(found >> 32)


def _computing(name: str, text: str) -> _Doing:
    """Return what computes something of values."""
    if permuted := _PERMUTED.fullmatch(text):
        return partial(_permuted, [int(each, 16) for each in reversed(permuted[1])])
    if name in _OF_PAIRS:
        return _OF_PAIRS[name]
    assert name.startswith(("griddepcontrol", ".pragma", "fence")), text
    return lambda *_: None


def _permuted(chosen: Sequence[int], _: _Memory, values: Sequence[Any]) -> Any:
    given = b"".join(int(value).to_bytes(4, "little") for value in values) + bytes(4)
    found = bytes(given[each] if each < 8 else given[each & 7] // 128 * 255 for each in chosen)
    return np.uint32(int.from_bytes(found, "little"))


#: Products of four warps, of so many rows, which lie in shared memory, and of a kind of floats.
_GROUP = re.compile(r"wgmma\.fence\S+ .* wgmma\.mma_async\S+\.m64n(\d+)k16\.f32\.(\w+)\.")
#: Accesses of several words.
_VECTOR = re.compile(r"(?:ld|st)\.(?:global|volatile\.global)[\w.:]*\.v([24])\.[uf]32")
#: What is done with shared memory; what a cache is asked for; and waiting for the kernel before.
_DONE: dict[str, _Doing] = {
    "ld.shared.u32": lambda _, values: words_at(values[0], 1)[0],
    "ld.shared.v4.u32": lambda _, values: tuple(words_at(values[0])),
    "atom.shared.add.u32": lambda _, values: add_word(*values),
    "st.volatile.shared.u32": lambda _, values: write_words(values[0], values[1:]),
    "st.shared.v4.u32": lambda _, values: write_words(values[0], values[1:]),
    "cp.async.cg.shared.global": lambda memory, values: copy_words(values[0], _vector_or_zeros(memory, *values[1:])),
    "cp.async.ca.shared.global": lambda memory, values: copy_words(values[0], _filled(memory, *values[1:])),
    "div.full.f32": lambda _, values: values[0] / values[1],
    "cp.async.commit_group;": lambda *_: end_copies(),
    "cp.async.wait_all;": lambda *_: wait_for_copies(),
    "cp.async.bulk.prefetch.L2.global": _prefetch,
    "griddepcontrol.wait;": lambda *_: ME.block.waiting.wait() if ME.block.waiting else None,
}
#: Loads of some bits if something is there, and maybe of 16 if not.
_GUARDED = re.compile(r"@p ld\.global\.u(\d+) \$0, \[\$1\];( @!p ld\.global\.u16)?")
#: An instruction for some values, if the next is below the last.
_BELOW = re.compile(r"\{ \.reg \.pred p; setp\.lt\.u32 p, \$(\d), \$\d; @p (.*;) \}")
#: A load of four words if a number is not 0; else these are zeros.
_IF = re.compile(r"\{ \.reg \.pred p; setp\.ne\.u64 p, \$5, 0; (?:mov\.b32 \$\d, 0; ){4}@p (ld.*v4.*;) \}")
#: Which bytes of two words make one, the highest first; of those of a number from 8 on the first bit, eight times.
_PERMUTED = re.compile(r"prmt\.b32 \$0, \$1, (?:\$2|0), 0x([0-9a-f]{4});")
#: Bytes of accesses.
_SIZES = {
    f"{way}{kind}.global.u{8 * size}": size for way in ("ld", "st") for kind in ("", ".volatile") for size in (1, 2, 4)
} | {"ld.acquire.sys.global.u32": 4}
#: What is done with each of two 16-bit floats, exactly.
_OF_PAIRS: dict[str, _Doing] = {
    "fma.rn.bf16x2": _of_pairs(_PYTHON_BF16, _bits_of_bf16, lambda a, b, c: a * b + c),
    "fma.rn.f16x2": _of_pairs(_PYTHON_F16, _bits_of_f16, lambda a, b, c: a * b + c),
    "add.rn.f16x2": _of_pairs(_PYTHON_F16, _bits_of_f16, lambda a, b: a + b),
}
#: What intrinsics of one instruction compute of their values alone.
_BITS: dict[str, Callable[..., Any]] = {
    "low_bf16": _low_bf16,
    "high_bf16": _high_bf16,
    "two_bf16": _to_bf16,
    "low_f16": _low_f16,
    "high_f16": _high_f16,
    "two_f16": _to_f16,
    "bits_of": moved,  # and float_of
    "exp2": np.exp2,
    "inverse": np.reciprocal,
    "larger": np.fmax,
    "active": lambda: np.uint32(0xFFFFFFFF),
    "of_first": lambda value: told(value)[0],
    "shifted": lambda bits, count: np.uint32(int(bits) >> int(count) % 32),
    "vector_at": lambda index, start: np.uint64(16 * int(index) + int(start)),
    "largest_of_warp": lambda value: max(told(value)),
    "nanoseconds": lambda: np.uint64(monotonic_ns()),
    "word": lambda index: ME.words[int(index)],
}


class Kind(types.Type):  # type: ignore[misc]  # untyped
    """A type of numba's, of which nothing is wanted; one of its own, else types take it for a value to convert."""

    return_type = None
    args = (None,) * 9

    def __init__(self) -> None:
        """Have a name, as types do."""
        super().__init__("kind")

    def __call__(self, *_: Any) -> Kind:
        """Be the signature of an intrinsic too."""
        return self


class _Reader:
    """Finds the text of an intrinsic's instruction."""

    @staticmethod
    def call(function: Any, values: Any, attrs: Any = ()) -> Any:  # noqa: ARG004
        raise _FoundError(function.asm)


class _FoundError(Exception):
    """Has the text."""


def _text_of(intrinsic: Any) -> str:
    _, codegen = intrinsic._defn(None, *[Kind()] * (len(signature(intrinsic._defn).parameters) - 1))
    try:
        codegen(None, _Reader(), None, ())
    except _FoundError as found:
        return str(found)
    raise AssertionError


#: The same, by the instruction's text.
PLAIN = {_text_of(getattr(ptx, name)): run for name, run in _BITS.items()}
