"""Kernels for the gated delta rule on real GPUs, beside torch, in the sizes of Qwen3.5."""

from __future__ import annotations

import pytest
import torch

from tests.decoder.delta_cases import Layer
from tpplan.decoder.fast.launches.delta import Delta
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.weights.linear import BY_HEAD, ONE_BEHIND_THE_OTHER


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(16, 3), (16, 2), (5, 1), (1, 4)])
@pytest.mark.parametrize("joined", [ONE_BEHIND_THE_OTHER, BY_HEAD])
def test_as_torch(joined: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Prompts of one piece and many, and steps of many sequences."""
    torch.manual_seed(5)
    with torch.device("cuda", 0) as place:
        layer = Layer(joined, sizes, 19, dtype, Delta(place, dtype).of)
        layer.check_texts(1100, 19)
        for _ in range(20):  # blocks take turns in other orders
            layer.check(19, lambda each, rows: each.step(rows, torch.arange(19) % 3 != 1))
