"""What limits kernels that apply a norm before they multiply; whoever launches them need not load numba for it."""

from __future__ import annotations

from typing import Final

#: Bytes of rows that such a kernel keeps in shared memory, at most.
MOST_BYTES: Final = 2**15
