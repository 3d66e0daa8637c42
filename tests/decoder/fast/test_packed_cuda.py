"""Products of few rows and a matrix of codes on a real GPU, rounded where torch rounds."""

from __future__ import annotations

import pytest
import torch

from tests.decoder.fast.test_gemv_cuda import check, check_plain
from tests.packed_cases import gates_of, matrix_of
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.norms import MOST_BYTES, Norm
from tpplan.decoder.fast.launches.packed import MOST_JOINT, STEPS, QuantisedSkinnyGemm
from tpplan.decoder.math import rms_norm
from tpplan.decoder.weights.row_kernels import GATES

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
#: Codes, rows and columns of a matrix, columns that share a scale, the scales' dtype; what is added to stored zeros, or
#: the rows that share a scale too.
CASES = [
    ("4", 1536, 4096, 128, torch.bfloat16, None),
    ("4", 4096, 3584, 128, torch.float16, 1),
    ("4", 512, 128, 128, torch.float16, 0),
    ("4", 333, 1408, 128, torch.float32, 1),
    ("4", 1001, 2304, 256, torch.float16, 0),
    ("4", 34, 14336, 14336, torch.float32, None),
    ("4", 4104, 512, 512, torch.bfloat16, 1),
    ("8", 1536, 4096, 128, torch.float16, 1),
    ("8", 333, 1344, 64, torch.float32, 0),
    ("8", 1001, 64, 64, torch.bfloat16, None),
    ("8", 34, 14336, 14336, torch.float32, None),
    ("e4m3", 1536, 4096, 128, torch.float32, 128),
    ("e4m3", 333, 1344, 128, torch.bfloat16, 16),
    ("e4m3", 1001, 2304, 2304, torch.float32, 1),
    ("e4m3", 34, 14336, 14336, torch.float32, 34),
    ("e4m3", 4104, 64, 64, torch.float16, 1),
]


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("case", CASES)
def test_products(case: tuple[str, int, int, int, torch.dtype, int | None], rows: int, dtype: torch.dtype) -> None:
    """Plain ones, with a bias, and added to what is there; rows may be parts of longer ones."""
    kind, size, width, *_ = case
    torch.manual_seed(size + rows)
    matrix = matrix_of(*case, device="cuda")
    x_RK = torch.randn(rows, width + 8, device="cuda").to(dtype)[:, :width]
    bias_N = torch.randn(size, device="cuda").to(dtype)
    run = QuantisedSkinnyGemm(torch.device("cuda", 0), dtype, [kind])
    assert run.takes(x_RK, matrix)
    assert run.adds_up(x_RK, matrix) == (rows <= MOST_JOINT)
    exact = (x_RK.double() @ matrix.dense(0, size, torch.float32).double().mT).float()
    check_plain(run, x_RK, matrix, bias_N, exact)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "4"])
def test_products_behind_a_norm(
    case: tuple[str, int, int, int, torch.dtype, int | None], rows: int, dtype: torch.dtype
) -> None:
    """Bit for bit those of rows that another kernel has normed, but where it rounds another way; with a gate too."""
    kind, size, width, *_ = case
    torch.manual_seed(size + rows)
    matrix = matrix_of(*case, device="cuda")
    x_RK = torch.randn(rows, width + 8, device="cuda").to(dtype)[:, :width]
    gain_K, bias_N = (torch.randn(count, device="cuda").to(dtype) for count in (width, size))
    run = QuantisedSkinnyGemm(torch.device("cuda", 0), dtype, [kind])
    for offset in (0.0, 1.0):
        norm = Norm(gain_K, 1e-5, offset)
        assert run.takes_normed(x_RK, matrix, norm) == (2 * x_RK.numel() <= min(MOST_BYTES, run._room))
        if 2 * x_RK.numel() > min(MOST_BYTES, run._room):
            continue
        normed_RK = rms_norm(x_RK, gain_K, 1e-5, offset)
        exact = (normed_RK.double() @ matrix.dense(0, size, torch.float32).double().mT).float()
        check(run.normed(x_RK, matrix, norm), exact)
        check(run.normed(x_RK, matrix, norm, bias_N), exact + bias_N)
        if not size % 2:
            gated = run.normed_gated(x_RK, matrix, "silu", norm)
            expected = run.gated(normed_RK, matrix, "silu")
            torch.testing.assert_close(gated, expected, atol=0.03 * float(expected.abs().max()), rtol=0.05)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("rows", [1, 8, 13])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("size", "width"), [(7168, 4096), (6, 384), (1002, 2304)])
def test_gates(  # noqa: PLR0917
    size: int, width: int, kind: str, rows: int, name: str, dtype: torch.dtype
) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    kernels = QuantisedSkinnyGemm(torch.device("cuda", 0), dtype, [kind])
    found, expected = gates_of(kernels, size, width, kind, rows, name, dtype)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found != expected).float().mean() < 0.25
