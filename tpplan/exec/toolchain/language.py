"""What kernels are written in. Needs numba-cuda, but no GPU, and takes a second to import."""

from __future__ import annotations

from llvmlite import ir
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic

__all__ = ["FLOAT32", "INT32", "INT64", "UINT32", "UINT64", "cuda", "intrinsic", "ir", "libdevice", "types"]

#: Called, they convert a number to that type.
INT32, INT64, UINT32, UINT64, FLOAT32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
