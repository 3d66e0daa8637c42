"""Products of many rows and a matrix of codes on a real GPU, rounded where torch rounds with a matrix of 16 bits."""

from __future__ import annotations

import pytest
import torch

from tests.decoder.fast.test_gemv_cuda import check
from tests.packed_cases import gates_of, matrix_of
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.wide import QuantisedGemm

pytestmark = pytest.mark.gpu
#: As those of few rows, and how many rows.
CASES = [
    (("4", 1536, 4096, 128, torch.bfloat16, None), 64),
    (("4", 4096, 3584, 128, torch.float16, 1), 17),
    (("4", 2, 128, 128, torch.float16, 0), 33),
    (("4", 332, 1408, 128, torch.float32, 1), 48),
    (("4", 34, 14336, 14336, torch.float32, None), 32),
    (("4", 14336, 4096, 128, torch.bfloat16, 1), 32),
    (("8", 332, 1344, 64, torch.float32, 0), 64),
    (("8", 1002, 2304, 256, torch.float16, 1), 32),
    (("e4m3", 332, 1344, 128, torch.bfloat16, 16), 49),
    (("e4m3", 4096, 4096, 128, torch.float32, 128), 24),
    (("4", 4096, 14336, 128, torch.bfloat16, None), 16),
    (("e4m3", 8448, 4096, 128, torch.bfloat16, 128), 9),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "rows"), CASES)
def test_products(case: tuple[str, int, int, int, torch.dtype, int | None], rows: int, dtype: torch.dtype) -> None:
    """Plain ones, the same every time, with a bias, and added to what is there; rows may be parts of longer ones."""
    kind, size, width, *_ = case
    torch.manual_seed(size + rows)
    matrix = matrix_of(*case, device="cuda")
    x_RK = torch.randn(rows, width + 8, device="cuda").to(dtype)[:, :width]
    bias_N = torch.randn(size, device="cuda").to(dtype)
    run = QuantisedGemm(torch.device("cuda", 0), dtype, [kind])
    is_few = rows < run.fewest_rows
    assert run.takes(x_RK, matrix) == ((case[4] is torch.float16 or dtype is not torch.float16) and not is_few)
    if is_few:
        return
    exact = (x_RK.double() @ matrix.dense(0, size, torch.float32).double().mT).float()
    found = run.linear(x_RK, matrix)
    check(found, exact)
    for _ in range(3):
        assert torch.equal(found, run.linear(x_RK, matrix))
    check(run.linear(x_RK, matrix, bias_N), exact + bias_N)
    to_RN = torch.randn(rows, size + 4, device="cuda").to(dtype)
    before, inside = to_RN.clone(), slice(2, size + 2)
    run.add(to_RN[:, inside], x_RK, matrix)
    check(to_RN[:, inside], before[:, inside] + exact)
    assert torch.equal(to_RN[:, :2], before[:, :2])
    assert torch.equal(to_RN[:, -2:], before[:, -2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "width", "kind", "rows", "name"),
    [(7168, 4096, "4", 17, "silu"), (4, 384, "8", 48, "gelu"), (1000, 2304, "e4m3", 64, "gelu_pytorch_tanh")],
)
def test_gates(  # noqa: PLR0917
    size: int, width: int, kind: str, rows: int, name: str, dtype: torch.dtype
) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    kernels = QuantisedGemm(torch.device("cuda", 0), dtype, [kind])
    found, expected = gates_of(kernels, size, width, kind, rows, name, dtype)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found - expected).abs().mean() <= torch.finfo(dtype).eps * expected.abs().max() / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_are_replayed(dtype: torch.dtype) -> None:
    """Blocks that share columns take turns anew each time, and kernels that follow each other use the same memory."""
    matrix = matrix_of("4", 4096, 4096, 128, torch.float16, 1, device="cuda")
    x_RK = torch.randn(64, 4096, device="cuda").to(dtype)
    run = QuantisedGemm(torch.device("cuda", 0), dtype, ["4"])
    expected, graph = run.linear(x_RK, matrix), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run.linear(x_RK, matrix) for _ in range(3)]
    for _ in range(5):
        for each in found:
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(each, expected) for each in found)
    assert not run._turns.any()
