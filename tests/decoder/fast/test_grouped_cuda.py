"""Rows grouped by their experts on a real GPU: what torch computes with all experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests.decoder.fast.experts_cases import Case, check_gates, check_products, chosen_of
from tests.decoder.fast.test_coded_experts_cuda import CASES
from tpplan.decoder.fast.launches import grouped
from tpplan.decoder.fast.launches.grouped import GroupedGemm
from tpplan.decoder.weights.quantised import Float4Matrix
from tpplan.decoder.weights.row_kernels import GATES

if TYPE_CHECKING:
    from tpplan.decoder.weights.stacked import Stacked

pytestmark = pytest.mark.gpu
#: Those where no experts share scales, as torch cannot take them apart.
_APART = [case for case in CASES if not (case.width % case.block[0] or case.hidden % case.block[0])]
#: Those of a dtype that kernels take: numbers that scales become must not be too small.
KINDS = [
    *((case, torch.bfloat16) for case in _APART),
    *((case, torch.float16) for case in _APART if case.scales is torch.float16),
]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these kernels take few rows too, for which GEMV is faster."""
    monkeypatch.setattr(grouped, "_FEW", 0)


@pytest.mark.parametrize(("rows", "chosen"), [(6, 7), (33, 2), (150, 4), (700, 4)])
@pytest.mark.parametrize(("case", "dtype"), KINDS, ids=str)
def test_products(case: Case, dtype: torch.dtype, rows: int, chosen: int) -> None:
    """Tiles of all sizes, not all of them full; rows and results may be parts of longer ones."""
    torch.manual_seed(case.hidden + rows)
    x_RD = torch.randn(rows, case.hidden + 8, device="cuda").to(dtype)[:, : case.hidden]
    run = GroupedGemm(torch.device("cuda", 0), dtype, "silu", (case.kind,))
    three = [rounded(each, dtype) for each in case.matrices("cuda")]
    check_products(run, (three[0], three[1], three[2]), x_RD, chosen_of(rows, chosen, case.count).cuda())


def rounded(matrices: Stacked, dtype: torch.dtype) -> Stacked:
    """Return matrices whose scales are those of 16 bits that kernels make of them."""
    matrix = matrices.matrix
    if isinstance(matrix, Float4Matrix):
        return matrices
    return evolve(matrices, matrix=evolve(matrix, scales=matrix.scales.to(dtype).to(matrix.scales.dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "hidden", "width"), [(64, 2048, 768), (9, 80, 144), (8, 4096, 1792)])
@pytest.mark.parametrize(("rows", "chosen"), [(6, 7), (33, 2), (150, 4), (700, 4)])
def test_whole_matrices(  # noqa: PLR0917
    rows: int, chosen: int, count: int, hidden: int, width: int, dtype: torch.dtype
) -> None:
    """Of elements that are no codes; those of gates lie between what they are for."""
    torch.manual_seed(count + rows)
    both_EID = (torch.randn(count, 2 * width, hidden, device="cuda") / hidden**0.5).to(dtype)
    down_EDI = (torch.randn(count, hidden, width, device="cuda") / width**0.5).to(dtype)
    x_RD = torch.randn(rows, hidden + 8, device="cuda").to(dtype)[:, :hidden]
    choice_RC = chosen_of(rows, chosen, count).cuda()
    run = GroupedGemm(torch.device("cuda", 0), dtype, "silu")
    check_products(run, (both_EID[:, ::2], both_EID[:, 1::2], down_EDI), x_RD, choice_RC)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of experts that would take much memory are of some rows at a time."""
    torch.manual_seed(rows)
    monkeypatch.setattr(grouped, "_FREE", 2**12)
    case = Case("4", 8, 2048, 32, (1, 32), torch.float16)
    x_RD = torch.randn(rows, case.hidden, device="cuda", dtype=torch.bfloat16)
    run = GroupedGemm(torch.device("cuda", 0), torch.bfloat16, "silu", (case.kind,))
    check_products(run, case.matrices("cuda"), x_RD, chosen_of(rows, 6, case.count).cuda())


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates(dtype: torch.dtype, name: str) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are; elements are exact here."""
    torch.manual_seed(3)
    run = GroupedGemm(torch.device("cuda", 0), dtype, name, ["e2m1"])
    gate_EID, up_EID = ((torch.randn(16, 264, 512, device="cuda") / 16).to(dtype) for _ in range(2))
    check_gates(run, name, gate_EID, up_EID, dtype)
    if dtype is torch.bfloat16:
        gates, ups, _ = Case("e2m1", 16, 512, 256, (1, 32), torch.uint8).matrices("cuda")
        check_gates(run, name, gates, ups, dtype)
