"""A kernel as a launcher knows it, and the functions that kernels are made of.

Kernels take 64-bit addresses and sizes, so that any launcher can run them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from tpplan.exec.toolchain.language import UINT64, cuda, types


def device_function(function: Any) -> Any:
    """Make a function of kernels; NVVM inlines it, after numba has compiled it once.

    What makes such functions for some kernels keeps them, so that those of the same process compile them once.
    """
    return cuda.jit(device=True, forceinline=True)(function)


def copied_function(function: Any) -> Any:
    """Make a function of kernels that numba inlines, and compiles anew for every call.

    That takes longer, and gives NVVM another order of instructions. Products by codes are faster with it: on an H200, a
    step of FP8 in a batch of 64 takes a fifth more time without.
    """
    return cuda.jit(device=True, inline="always")(function)


@frozen
class Kernel:
    """A function for numba.

    Attributes:
        name: of it.
        function: its source; all its arguments are 64-bit integers.
        arguments: how many.
        bounds: threads of its blocks, and how many of these a multiprocessor must have registers for, if it matters.
    """

    name: str
    function: Callable[..., None]
    arguments: int
    bounds: tuple[int, int] | None = None

    @property
    def signature(self) -> Any:
        """Numba's type of it."""
        return types.void(*[UINT64] * self.arguments)
