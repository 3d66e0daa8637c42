"""Products of few rows on a real GPU: what torch computes in several kernels, rounded where torch rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gate_cases import rounded_gate
from tpplan.decoder.fast.launches.gemv import Gemv
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.norms import Norm
from tpplan.decoder.math import rms_norm
from tpplan.decoder.weights.row_kernels import GATES

if TYPE_CHECKING:
    from tpplan.decoder.weights.quantised import Matrix
    from tpplan.decoder.weights.row_kernels import RowKernels

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
EPS = 1e-5
_FEW = 64
SIZES = [(1536, 4096), (4096, 3584), (4, 8), (5, 16), (7, 264), (130, 896), (1001, 2304), (34, 14336), (2053, 256)]


def kernels(dtype: torch.dtype) -> Gemv:
    """Return those of the first GPU."""
    return Gemv(torch.device("cuda", 0), dtype)


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare with a result that is not rounded: a step of 16 bits of the largest, as roundings between may make.

    Of many elements most are nearer; of few, one may be as far off as rounding once may put it.
    """
    assert found.isfinite().all()
    step = torch.finfo(found.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= step
    assert (found - exact).abs().mean() <= step / (4 if found.numel() > _FEW else 2)


def check_plain(
    run: RowKernels[Any], x_RK: torch.Tensor, weight_NK: Matrix, bias_N: torch.Tensor, exact: torch.Tensor
) -> None:
    """Compare products, twice the same, with a bias, and added to the middle of longer rows."""
    rows, size = exact.shape
    found = run.linear(x_RK, weight_NK)
    check(found, exact)
    assert torch.equal(found, run.linear(x_RK, weight_NK))
    check(run.linear(x_RK, weight_NK, bias_N), exact + bias_N)
    to_RN = torch.randn(rows, size + 3, device="cuda").to(x_RK.dtype)
    before = to_RN.clone()
    run.add(to_RN[:, 1:-2], x_RK, weight_NK)
    check(to_RN[:, 1:-2], before[:, 1:-2] + exact)
    assert torch.equal(to_RN[:, 0], before[:, 0])
    assert torch.equal(to_RN[:, -2:], before[:, -2:])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("size", "width"), SIZES)
def test_products(size: int, width: int, rows: int, dtype: torch.dtype) -> None:
    """Plain ones, with a bias, added to what is there, and behind a norm; rows may be parts of longer ones."""
    torch.manual_seed(size + rows)
    x_RK = torch.randn(rows, width + 8, device="cuda").to(dtype)[:, :width]
    weight_NK = (torch.randn(size, width, device="cuda") / width**0.5).to(dtype)
    bias_N, gain_K = (torch.randn(count, device="cuda").to(dtype) for count in (size, width))
    run = kernels(dtype)
    assert run.takes(x_RK, weight_NK)
    exact = x_RK.float() @ weight_NK.float().mT
    check_plain(run, x_RK, weight_NK, bias_N, exact)
    if run.takes_normed(x_RK, weight_NK, Norm(gain_K, EPS)):
        for offset in (0.0, 1.0):
            normed_RK = rms_norm(x_RK, gain_K, EPS, offset)
            check(run.normed(x_RK, weight_NK, Norm(gain_K, EPS, offset)), normed_RK.float() @ weight_NK.float().mT)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("size", "width"), [(7168, 4096), (4, 8), (6, 264), (130, 896), (1002, 2304)])
def test_gates(size: int, width: int, rows: int, name: str, dtype: torch.dtype) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    torch.manual_seed(size + rows)
    x_RK = torch.randn(rows, width, device="cuda").to(dtype)
    weight_NK = (torch.randn(size, width, device="cuda") / width**0.5).to(dtype)
    bias_N, gain_K = (torch.randn(count, device="cuda").to(dtype) for count in (size, width))
    run = kernels(dtype)
    normed_RK = rms_norm(x_RK, gain_K, EPS, 1.0)
    for rows_RK, found in (
        (x_RK, run.gated(x_RK, weight_NK, name, bias_N)),
        (normed_RK, run.normed_gated(x_RK, weight_NK, name, Norm(gain_K, EPS, 1.0), bias_N)),
    ):
        exact = rows_RK.float() @ weight_NK.float().mT + bias_N
        gate, up = exact.to(dtype).chunk(2, dim=-1)
        expected = rounded_gate(name, gate, up)
        assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
        assert (found != expected).float().mean() < 0.25


def test_norms_are_those_of_torch(dtype: torch.dtype) -> None:
    """Through a matrix of ones on the diagonal the norm comes out, to the bit."""
    x_RK = 3 * torch.randn(2, 4096, device="cuda").to(dtype)
    gain_K, one_KK = torch.randn(4096, device="cuda").to(dtype), torch.eye(4096, device="cuda").to(dtype)
    for offset in (0.0, 1.0):
        found = kernels(dtype).normed(x_RK, one_KK, Norm(gain_K, EPS, offset))
        assert (found == rms_norm(x_RK, gain_K, EPS, offset)).float().mean() > 0.999
