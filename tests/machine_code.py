"""What tests of kernels share: the generations of GPUs that these are compiled for, and what they become."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tpplan.exec.gpu import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("numba.cuda", reason="needs numba-cuda: pip install 'tpplan[cu13]'")
LINKER = pytest.importorskip("cuda.bindings.nvjitlink", reason="needs nvJitLink: pip install 'tpplan[cu13]'")

from numba.cuda import compiler  # noqa: E402 (if there is one)

NEWEST = (12, 0) if LINKER.version() >= (12, 8) else (9, 0)  # that the linker here knows
CAPABILITIES = tuple(each for each in ((8, 0), (9, 0), (12, 0)) if each <= NEWEST)

#: What numba has made of the source of the last kernel, by its name.
_READ: dict[str, Any] = {}
_read = compiler._compile_pyfunc_with_fixup


def ptx(name: str, capability: tuple[int, int]) -> str:
    """Return a kernel's PTX.

    Nearly all of the time goes into reading its source, of which numba makes the same for all generations of GPUs. So
    that is done once for those of a kernel that are asked for in a row.
    """

    def read_once(*arguments: Any, **options: Any) -> Any:
        if name not in _READ:
            _READ.clear()
            _READ[name] = _read(*arguments, **options)
        return _READ[name]

    with _uncounted(), patch.object(compiler, "_compile_pyfunc_with_fixup", read_once):
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
