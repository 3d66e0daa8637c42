"""Numbers that the kernels for 17 to 64 rows by codes are made for, and those who launch them know."""

from __future__ import annotations

from typing import Final

#: Matrix rows of a warp, a strip.
STRIP: Final = 32
#: Of each kernel: rows, and warps that a multiprocessor has registers for.
WARPS: Final = {32: 16, 48: 12, 64: 8}
