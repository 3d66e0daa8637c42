"""Kinds of scales, as kernels of quantised matrices are told them. Nothing here imports torch, nor do kernels."""

from __future__ import annotations

from typing import Final

#: The first 16 bits of a float32, a float16, and a whole float32.
BF16, F16, F32 = range(3)
#: By what torch calls a dtype: ``FORMS[str(scales.dtype)]``.
FORMS: Final = {"torch.bfloat16": BF16, "torch.float16": F16, "torch.float32": F32}
