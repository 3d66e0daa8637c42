"""Sources of kernels as functions of Python: the same code, where functions and types of numba's are Python's."""

from __future__ import annotations

import math
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.dispatcher import CUDADispatcher

from tests.intrinsics import done
from tests.warps import LANES, ME, meet, meet_in_warp, meet_with, shared_array, told
from tpplan.exec.kernels import ptx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Index:
    """Number of a thread or block, or how many there are."""

    def __init__(self, read: Callable[[], tuple[int, int, int]]) -> None:
        self._read = read

    @property
    def x(self) -> int:
        return self._read()[0]

    @property
    def y(self) -> int:
        return self._read()[1]

    @property
    def z(self) -> int:
        return self._read()[2]


#: What kernels ask of a GPU.
_CUDA = SimpleNamespace(
    threadIdx=_Index(lambda: (ME.thread, 0, 0)),
    blockIdx=_Index(lambda: ME.block.number),
    blockDim=_Index(lambda: (ME.block.size, 1, 1)),
    gridDim=_Index(lambda: ME.block.count),
    grid=lambda _: ME.block.number[0] * ME.block.size + ME.thread,
    gridsize=lambda _: ME.block.count[0] * ME.block.size,
    shared=SimpleNamespace(array=shared_array),
    syncthreads=meet,
    syncthreads_or=meet_with,
    syncwarp=meet_in_warp,
    shfl_sync=lambda _, value, lane: told(value)[int(lane)],
    shfl_xor_sync=lambda _, value, bit: told(value)[ME.thread % LANES ^ bit],
)
_LIBDEVICE = SimpleNamespace(
    expf=np.exp,
    log1pf=np.log1p,
    tanhf=np.tanh,
    erff=lambda x: np.float32(math.erf(x)),
    rsqrtf=lambda x: np.float32(1) / np.sqrt(x),
)


class Sources:
    """Functions of kernels that may touch some addresses."""

    def __init__(self, allowed: Sequence[range]) -> None:
        """Have none yet."""
        self._allowed = allowed
        self._known: dict[int, Any] = {id(cuda): _CUDA, id(libdevice): _LIBDEVICE}  # modules and numba's live on

    def function(self, source: Any) -> Any:
        """Return a function with what it uses replaced, as far as it is numba's."""
        code, known = source.__code__, source.__globals__
        used = {name: self._of(known[name]) for name in code.co_names if name in known}
        cells = tuple(CellType(self._of(cell.cell_contents)) for cell in source.__closure__ or ())
        return FunctionType(code, used, source.__name__, source.__defaults__, cells)

    def _of(self, thing: Any) -> Any:
        """Return what stands for something."""
        if isinstance(thing, CUDADispatcher):
            return self._once(thing, lambda: self.function(thing.py_func))
        if isinstance(thing, type(ptx.load_16)):
            return self._once(thing, lambda: done(thing, self._allowed))
        if isinstance(thing, ModuleType):
            return self._once(thing, lambda: _Module(thing, self._of))
        return getattr(np, thing.name) if isinstance(thing, types.Number) else thing

    def _once(self, thing: Any, make: Callable[[], Any]) -> Any:
        if id(thing) not in self._known:
            self._known[id(thing)] = make()
        return self._known[id(thing)]


class _Module:
    """What stands for what a module has."""

    def __init__(self, module: ModuleType, stand_in: Callable[[Any], Any]) -> None:
        self._module, self._stand_in = module, stand_in

    def __getattr__(self, name: str) -> Any:
        """Find it the first time."""
        found = self._stand_in(getattr(self._module, name))
        setattr(self, name, found)
        return found
