"""Experts of few rows on a real GPU: what torch computes in several kernels, with copies of the matrices."""

from __future__ import annotations

import pytest
import torch

from tests.decoder.fast.experts_cases import check_gates, check_products, chosen_of
from tpplan.decoder.fast.launches.experts import ExpertGemv
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.layer import experts
from tpplan.decoder.model.router import Router
from tpplan.decoder.weights.row_kernels import GATES

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
#: ExpertGemv, hidden, and the device's part of an expert's width.
SIZES = [(8, 4096, 3584), (128, 2048, 192), (64, 2048, 768), (9, 72, 40), (40, 520, 1032), (16, 2112, 8), (8, 64, 5000)]


def kernels(dtype: torch.dtype, activation: str = "silu") -> ExpertGemv:
    """Return those of the first GPU."""
    return ExpertGemv(torch.device("cuda", 0), dtype, activation)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (60, 4), (128, 8), (129, 6), (512, 32), (3, 3)])
def test_choices(count: int, chosen: int, dtype: torch.dtype, *, normalised: bool) -> None:
    """Experts are in the order of their scores, of equal ones the first before others, with the weights of torch."""
    torch.manual_seed(count)
    scores_RE = (3 * torch.randn(17, count + 3, device="cuda")).to(dtype)[:, 1:-2]
    scores_RE[0], scores_RE[1] = scores_RE[0].round(), 0  # equal ones
    router = Router(normalised=normalised)
    found = kernels(dtype).choose(scores_RE, chosen, router)
    assert found is not None
    weights_RC, _ = experts.choose(scores_RE, chosen, router)
    torch.testing.assert_close(found[:, :chosen], weights_RC, atol=1e-7, rtol=1e-5)
    assert torch.equal(
        found[:, chosen:], scores_RE.sort(stable=True, dim=-1, descending=True).indices[:, :chosen].float()
    )


@pytest.mark.parametrize(
    ("count", "chosen", "router"),
    [
        (64, 6, Router()),
        (256, 8, Router(sigmoid=True, groups=8, eligible=4, best=2, normalised=True, factor=2.5)),
        (160, 6, Router(groups=8, eligible=3, factor=16.0)),
        (384, 8, Router(sigmoid=True, normalised=True, factor=2.827)),
        (512, 32, Router(sigmoid=True, groups=32, eligible=9, best=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("corrects", [False, True])
def test_routers(count: int, chosen: int, router: Router, dtype: torch.dtype, *, corrects: bool) -> None:
    """Of DeepSeek-V2, V3 and Kimi-K2, among others, by logits in 32 bits."""
    torch.manual_seed(count)
    logits_RE = torch.randn(19, count, device="cuda")
    correction_E = torch.randn(count, device="cuda") if corrects else None
    found = kernels(dtype).choose(logits_RE, chosen, router, correction_E)
    assert found is not None
    weights_RC, numbers_RC = experts.choose(logits_RE, chosen, router, correction_E)
    torch.testing.assert_close(found[:, :chosen], weights_RC, atol=1e-6, rtol=1e-5)
    assert torch.equal(found[:, chosen:], numbers_RC.float())


def test_scores_that_are_none(dtype: torch.dtype) -> None:
    """Experts of rows that have NaN are among those that there are, so that nothing else is read."""
    scores_RE = torch.zeros(4, 40, device="cuda").to(dtype)
    scores_RE[0], scores_RE[1, 0], scores_RE[2, 7], scores_RE[3, ::2] = torch.nan, torch.nan, torch.inf, -torch.inf
    scores_RE[1].view(torch.int16)[0] = 0x7FFF  # the largest of all bits
    found = kernels(dtype).choose(scores_RE, 8, Router(normalised=True))
    assert found is not None
    assert torch.equal(found[:, 8:], scores_RE.sort(stable=True, dim=-1, descending=True).indices[:, :8].float())
    assert found[:2, :8].isnan().all()
    torch.testing.assert_close(found[3, :8], torch.full((8,), 1 / 8, device="cuda"))


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (1, 8), (2, 4), (8, 1), (4, 2), (2, 3)])
@pytest.mark.parametrize(("count", "hidden", "width"), SIZES)
def test_products(count: int, hidden: int, width: int, rows: int, chosen: int, dtype: torch.dtype) -> None:  # noqa: PLR0917
    """Of each row with its own experts, which rows may share; rows and results may be parts of longer ones."""
    torch.manual_seed(hidden + rows)
    x_RD = torch.randn(rows, hidden + 8, device="cuda").to(dtype)[:, :hidden]
    gate_EID, up_EID = ((torch.randn(count, width, hidden, device="cuda") / hidden**0.5).to(dtype) for _ in range(2))
    down_EDI = (torch.randn(count, hidden, width, device="cuda") / width**0.5).to(dtype)
    check_products(kernels(dtype), (gate_EID, up_EID, down_EDI), x_RD, chosen_of(rows, chosen, len(gate_EID)).cuda())


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, dtype: torch.dtype) -> None:
    """The products, the activations and what comes of both are rounded, as torch's are."""
    torch.manual_seed(3)
    gate_EID, up_EID = ((torch.randn(16, 264, 512, device="cuda") / 16).to(dtype) for _ in range(2))
    check_gates(kernels(dtype, name), name, gate_EID, up_EID, dtype)
