"""Products of up to sixteen rows on a real GPU, rounded where torch rounds."""

from __future__ import annotations

import pytest
import torch

from tests.decoder.fast.test_gemv_cuda import check_plain
from tests.gate_cases import rounded_gate
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.skinny import MOST_JOINT, SkinnyGemm
from tpplan.decoder.weights.row_kernels import GATES

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
SIZES = [(1536, 4096), (4096, 3584), (1, 8), (5, 16), (7, 264), (130, 896), (1001, 2304), (34, 14336), (4104, 512)]


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize(("size", "width"), SIZES)
def test_products(size: int, width: int, rows: int, dtype: torch.dtype) -> None:
    """Plain ones, with a bias, and added to what is there; rows may be parts of longer ones."""
    torch.manual_seed(size + rows)
    x_RK = torch.randn(rows, width + 8, device="cuda").to(dtype)[:, :width]
    weight_NK = (torch.randn(size, width, device="cuda") / width**0.5).to(dtype)
    bias_N = torch.randn(size, device="cuda").to(dtype)
    run = SkinnyGemm(torch.device("cuda", 0), dtype)
    assert run.adds_up(x_RK, weight_NK) == (rows <= MOST_JOINT)
    exact = (x_RK.double() @ weight_NK.double().mT).float()
    check_plain(run, x_RK, weight_NK, bias_N, exact)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("rows", [4, 8, 13])
@pytest.mark.parametrize(("size", "width"), [(7168, 4096), (2, 8), (6, 264), (130, 896), (1002, 2304)])
def test_gates(size: int, width: int, rows: int, name: str, dtype: torch.dtype) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    torch.manual_seed(size + rows)
    x_RK = torch.randn(rows, width, device="cuda").to(dtype)
    weight_NK = (torch.randn(size, width, device="cuda") / width**0.5).to(dtype)
    bias_N = torch.randn(size, device="cuda").to(dtype)
    exact = (x_RK.double() @ weight_NK.double().mT).float() + bias_N
    gate, up = exact.to(dtype).chunk(2, dim=-1)
    expected = rounded_gate(name, gate, up)
    found = SkinnyGemm(torch.device("cuda", 0), dtype).gated(x_RK, weight_NK, name, bias_N)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found != expected).float().mean() < 0.25
