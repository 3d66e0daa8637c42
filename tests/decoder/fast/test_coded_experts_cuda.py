"""Experts of few rows whose matrices are codes on a real GPU: what torch computes with copies of them."""

from __future__ import annotations

import pytest
import torch

from tests.decoder.fast.experts_cases import Case, check_gates, check_products, chosen_of
from tpplan.decoder.fast.launches.experts import ExpertGemv
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.weights.row_kernels import GATES

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
CASES = [
    Case("4", 8, 4096, 3584, (1, 128), torch.float16, 1),
    Case("4", 128, 2048, 192, (1, 64), torch.bfloat16),
    Case("4", 64, 2048, 768, (1, 128), torch.float16, 0),
    Case("4", 9, 96, 160, (1, 32), torch.float32, 1),
    Case("4", 40, 544, 1056, (1, 96), torch.bfloat16, 0),
    Case("4", 8, 64, 4992, (1, 4992), torch.float16),
    Case("8", 8, 4096, 1792, (1, 128), torch.float16, 1),
    Case("8", 128, 2048, 192, (1, 2048), torch.bfloat16),
    Case("8", 9, 80, 144, (1, 16), torch.float32, 0),
    Case("e4m3", 128, 2048, 768, (128, 128), torch.bfloat16),
    Case("e4m3", 8, 4096, 3584, (3584, 4096), torch.float32),
    Case("e4m3", 40, 544, 1056, (1, 1056), torch.float16),
    Case("e4m3", 9, 80, 144, (5, 48), torch.float32),
    Case("e2m1", 32, 2880, 2880, (1, 32), torch.uint8),
    Case("e2m1", 9, 96, 160, (1, 32), torch.uint8),
]


def kernels(dtype: torch.dtype, case: Case, activation: str = "silu") -> ExpertGemv:
    """Return those of the first GPU."""
    return ExpertGemv(torch.device("cuda", 0), dtype, activation, (case.kind,))


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (1, 8), (2, 4), (8, 1), (2, 3)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, rows: int, chosen: int, dtype: torch.dtype) -> None:
    """Of each row with its own experts, which rows may share; rows and results may be parts of longer ones."""
    torch.manual_seed(case.hidden + rows)
    x_RD = torch.randn(rows, case.hidden + 8, device="cuda").to(dtype)[:, : case.hidden]
    check_products(kernels(dtype, case), case.matrices("cuda"), x_RD, chosen_of(rows, chosen, case.count).cuda())


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("kind", ["4", "8", "e4m3", "e2m1"])
def test_gates(kind: str, name: str, dtype: torch.dtype) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    torch.manual_seed(3)
    case = Case(kind, 16, 512, 256, (1, 128), torch.float16)
    gate_EID, up_EID, _ = case.matrices("cuda")
    check_gates(kernels(dtype, case, name), name, gate_EID, up_EID, dtype)
