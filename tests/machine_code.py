"""What tests of kernels share: the generations of GPUs that these are compiled for, and what they become."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tpplan.exec.gpu import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("numba.cuda", reason="needs numba-cuda: pip install 'tpplan[cu13]'")
LINKER = pytest.importorskip("cuda.bindings.nvjitlink", reason="needs nvJitLink: pip install 'tpplan[cu13]'")

NEWEST = (12, 0) if LINKER.version() >= (12, 8) else (9, 0)  # that the linker here knows
CAPABILITIES = tuple(each for each in ((8, 0), (9, 0), (12, 0)) if each <= NEWEST)


def ptx(name: str, capability: tuple[int, int]) -> str:
    """Return a kernel's PTX."""
    with _uncounted():
        return kernel_cache.ptx(name, capability)


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
    """Return a kernel's PTX, with each block behind those that run before it: compilers put blocks anywhere."""
    body = text[text.index("{", text.index(".entry")) : text.rindex("}")]
    found = re.split(r"^(\$L\w+):", body, flags=re.MULTILINE)
    names, blocks = ["", *found[1::2]], found[::2]
    seen, ended = set[int](), list[int]()

    def visit(i: int) -> None:
        seen.add(i)
        following = [names.index(name) for name in re.findall(r"\bbra(?:\.uni)?\s+(\$L\w+);", blocks[i])]
        if not re.search(r"^\s*(bra\.uni\s|ret;)", blocks[i], flags=re.MULTILINE):
            following.append(i + 1)
        for j in following:
            if j not in seen:
                visit(j)
        ended.append(i)

    visit(0)
    return "".join(f"{names[i]}:{blocks[i]}" for i in reversed(ended))


def assembled(text: str, capability: tuple[int, int]) -> str:
    """Return what the assembler says of a kernel that it can make machine code of."""
    code, log = kernel_cache.assemble(text, capability)
    assert code[:4] == b"\x7fELF"
    return log


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
