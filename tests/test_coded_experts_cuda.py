"""Experts of few rows whose matrices are 4-bit codes on a real GPU: what torch computes with copies of them."""

from __future__ import annotations

import pytest
import torch

from tests.test_coded_experts import Case, gating_of, matrices
from tests.test_mixture_cuda import check
from tpplan.decoder import experts
from tpplan.decoder.few_rows import GATES
from tpplan.decoder.launcher import DTYPES
from tpplan.decoder.mixture import Mixture

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
CASES: list[Case] = [
    (8, 4096, 3584, 128, torch.float16, 1),
    (128, 2048, 192, 64, torch.bfloat16, None),
    (64, 2048, 768, 128, torch.float16, 0),
    (9, 96, 160, 32, torch.float32, 1),
    (40, 544, 1056, 96, torch.bfloat16, 0),
    (8, 64, 4992, 4992, torch.float16, None),
]


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (1, 8), (2, 4), (8, 1), (2, 3)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, rows: int, chosen: int, dtype: torch.dtype) -> None:
    """Of each row with its own experts, which rows may share; rows and results may be parts of longer ones."""
    count, hidden, *_ = case
    torch.manual_seed(hidden + rows)
    gate_EID, up_EID, down_EDI = matrices(case, "cuda")
    x_RD = torch.randn(rows, hidden + 8, device="cuda").to(dtype)[:, :hidden]
    run = Mixture(torch.device("cuda", 0), dtype, "silu", coded=True)
    choice_RC = run.choose(torch.randn(rows, count, device="cuda").to(dtype), chosen, normalised=True)
    assert choice_RC is not None
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()
    h_RCI = run.up(x_RD, gate_EID, up_EID, choice_RC)
    exact_RCI = experts.up(x_RD.float(), gate_EID, up_EID, numbers_RC, gating_of("silu", torch.float32), fixed=True)
    check(h_RCI, exact_RCI)
    assert h_RCI is not None
    again_RCI = run.up(x_RD, gate_EID, up_EID, choice_RC)
    assert again_RCI is not None
    assert torch.equal(h_RCI, again_RCI)
    exact_RD = experts.down(h_RCI.float(), down_EDI, numbers_RC, weights_RC, fixed=True)
    check(run.down(h_RCI, down_EDI, choice_RC), exact_RD)
    to_RD = torch.randn(rows, hidden + 3, device="cuda").to(dtype)
    before = to_RD.clone()
    run.down(h_RCI, down_EDI, choice_RC, to_RD[:, 1:-2])
    check(to_RD[:, 1:-2], before[:, 1:-2] + exact_RD)
    assert torch.equal(to_RD[:, 0], before[:, 0])
    assert torch.equal(to_RD[:, -2:], before[:, -2:])


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, dtype: torch.dtype) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    torch.manual_seed(3)
    x_RD = torch.randn(3, 512, device="cuda").to(dtype)
    gate_EID, up_EID, _ = matrices((16, 512, 256, 128, torch.float16, 1), "cuda")
    choice_RC = torch.tensor([[0.5, 0.5, 3, 11], [0.5, 0.5, 3, 0], [0.5, 0.5, 15, 3]], device="cuda")
    found = Mixture(torch.device("cuda", 0), dtype, name, coded=True).up(x_RD, gate_EID, up_EID, choice_RC)
    assert found is not None
    numbers_RC, gating = choice_RC[:, 2:].long(), gating_of(name, dtype)
    expected = experts.up(x_RD.float(), gate_EID, up_EID, numbers_RC, gating, fixed=True).float()
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found != expected).float().mean() < 0.25
