"""What kernels are written in. Needs numba-cuda, but no GPU, and takes a second to import."""

from __future__ import annotations

from llvmlite import ir
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic

__all__ = ["cuda", "intrinsic", "ir", "libdevice", "types"]
