"""What tests of kernels share: the generations of GPUs that these are compiled for, and what they become."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.kept import digest_of, kept
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

compiler = pytest.importorskip("numba.cuda.compiler", reason="needs numba-cuda: pip install '.[cu13]'")
functions = pytest.importorskip("numba.core.types.functions", reason="needs numba-cuda: pip install '.[cu13]'")
errors = pytest.importorskip("numba.core.errors", reason="needs numba-cuda: pip install '.[cu13]'")
LINKER = pytest.importorskip("cuda.bindings.nvjitlink", reason="needs nvJitLink: pip install '.[cu13]'")

NEWEST = (12, 0) if LINKER.version() >= (12, 8) else (9, 0)  # that the linker here knows
CAPABILITIES = tuple(each for each in ((8, 0), (9, 0), (12, 0)) if each <= NEWEST)


#: Of what compiles here: it takes minutes in all, of which the next run needs none.
_OWN = digest_of(Path(__file__).read_bytes(), sys.version)


def ptx(name: str, capability: tuple[int, int]) -> str:
    """Return a kernel's PTX, from disk if its sources and the compilers are as they were."""
    sources = kernel_cache.digest(kernel_cache._module(name))
    name_on_disk = digest_of("ptx", name, capability, sources, _OWN)
    return kept(name_on_disk, lambda: made_ptx(name, capability).encode()).decode()


def made_ptx(name: str, capability: tuple[int, int]) -> str:
    """Compile a kernel; what numba makes of its source is the same for all generations, and made once."""
    made_once = patch.object(compiler, "_compile_pyfunc_with_fixup", _made_once)
    with _uncounted(), made_once, patch.object(functions.BaseFunction, "get_call_type", _typed_once):
        return kernel_cache.ptx(name, capability)


_make, _made = compiler._compile_pyfunc_with_fixup, dict[Any, Any]()


def _made_once(function: Any, *signature: Any, **options: Any) -> Any:
    """Return what numba makes of a function, before NVVM compiles it for a generation."""
    key = function, str(signature), str({**options, "cc": None})
    if key not in _made:
        _made[key] = _make(function, *signature, **options)
    return _made[key]


_type, _typed = functions.BaseFunction.get_call_type, dict[Any, Any]()


def _typed_once(function: Any, context: Any, args: Any, kws: Any) -> Any:
    """Return the signature of a call; numba tries dozens for each operator, which takes a quarter of its time."""
    if kws or getattr(function.typing_key, "__module__", "") != "_operator":
        return _type(function, context, args, kws)
    key = function, context, tuple(args)
    if key not in _typed:
        try:
            _typed[key] = _type(function, context, args, kws)
        except errors.TypingError as error:
            _typed[key] = error.with_traceback(None)
    if isinstance(_typed[key], errors.TypingError):
        raise _typed[key]
    return _typed[key]


@contextmanager
def _uncounted() -> Iterator[None]:
    """Let nobody count the lines that the compiler runs, which takes longer than these."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


def in_order(text: str) -> str:
    """Return a kernel's PTX, with what runs later further behind: compilers put blocks anywhere.

    What follows a loop comes behind all of the loop.
    """
    body = text[text.index("{", text.index(".entry")) : text.rindex("}")]
    blocks, ends = [""], False
    for line in body.splitlines(keepends=True):
        if ends or line.startswith("$L"):
            blocks.append("")
        blocks[-1] += line
        ends = bool(_BRANCH.search(line))
    numbers = {block.partition(":")[0]: i for i, block in enumerate(blocks) if block.startswith("$L")}
    following = [_following(i, block, numbers) for i, block in enumerate(blocks)]
    seen, ended = set[int](), list[int]()

    def visit(i: int) -> None:
        seen.add(i)
        for j in sorted(following[i], key=lambda j: i in _reached(j, following)):  # out of a loop first
            if j not in seen:
                visit(j)
        ended.append(i)

    visit(0)
    return "".join(blocks[i] for i in reversed(ended))


#: The end of a block that is a branch.
_BRANCH = re.compile(r"\bbra(?P<always>\.uni)?\s+(?P<to>\$L\w+);\s*\Z|^\s*ret;\s*\Z", re.MULTILINE)


def _following(i: int, block: str, numbers: dict[str, int]) -> list[int]:
    """Return the numbers of the blocks that may follow one."""
    last = _BRANCH.search(block)
    if not last:
        return [i + 1]
    to = [numbers[last["to"]]] if last["to"] else []
    return [*to, i + 1] if last["to"] and not last["always"] else to


def _reached(i: int, following: list[list[int]]) -> set[int]:
    """Return the numbers of the blocks that may run after one has begun."""
    found, left = {i}, [i]
    while left:
        new = set(following[left.pop()]) - found
        found |= new
        left += new
    return found


def assembled(text: str, capability: tuple[int, int]) -> str:
    """Return what the assembler says of a kernel that it can make machine code of.

    The kernel has no arrays in local memory, and computes with no floats of 64 bits.
    """
    assert ".local" not in text
    assert ".f64" not in text

    def make() -> bytes:
        code, log = kernel_cache.assemble(text, capability)
        assert code[:4] == b"\x7fELF"
        return log.encode()

    return kept(digest_of("log", text, capability, LINKER.version(), _OWN), make).decode()


def check_code(text: str, capability: tuple[int, int]) -> str:
    """Return the same of a kernel that leaves nothing in memory."""
    log = assembled(text, capability)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    return log


def registers(log: str) -> int:
    """Return how many registers a thread has, of as many as are given out at a time."""
    found = re.search(r"Used (\d+) registers", log)
    assert found
    return -(-int(found[1]) // 8) * 8
