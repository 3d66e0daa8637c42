"""Experts of few rows on a real GPU: what torch computes in several kernels, with copies of the matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tpplan.decoder import experts
from tpplan.decoder.few_rows import GATES
from tpplan.decoder.launcher import DTYPES
from tpplan.decoder.mixture import Mixture
from tpplan.decoder.settings import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
#: Experts, hidden, and the device's part of an expert's width.
SIZES = [(8, 4096, 3584), (128, 2048, 192), (64, 2048, 768), (9, 72, 40), (40, 520, 1032), (16, 2112, 8), (8, 64, 5000)]


def kernels(dtype: torch.dtype, activation: str = "silu") -> Mixture:
    """Return those of the first GPU."""
    return Mixture(torch.device("cuda", 0), dtype, activation)


def check(found: Tensor | None, exact: Tensor) -> None:
    """Compare with a result that is not rounded: a step of 16 bits of the largest, as roundings between may make."""
    assert found is not None
    assert found.isfinite().all()
    step = torch.finfo(found.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * step
    assert (found - exact).abs().mean() <= step / 4


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (60, 4), (128, 8), (129, 6), (512, 32), (3, 3)])
def test_choices(count: int, chosen: int, dtype: torch.dtype, *, normalised: bool) -> None:
    """Experts are in the order of their scores, of equal ones the first before others, with the weights of torch."""
    torch.manual_seed(count)
    scores_RE = (3 * torch.randn(17, count + 3, device="cuda")).to(dtype)[:, 1:-2]
    scores_RE[0], scores_RE[1] = scores_RE[0].round(), 0  # equal ones
    found = kernels(dtype).choose(scores_RE, chosen, normalised=normalised)
    assert found is not None
    weights_RC, _ = experts.choose(scores_RE, chosen, normalised=normalised)
    torch.testing.assert_close(found[:, :chosen], weights_RC, atol=1e-7, rtol=1e-5)
    assert torch.equal(
        found[:, chosen:], scores_RE.sort(stable=True, dim=-1, descending=True).indices[:, :chosen].float()
    )


def test_scores_that_are_none(dtype: torch.dtype) -> None:
    """Experts of rows that have NaN are among those that there are, so that nothing else is read."""
    scores_RE = torch.zeros(4, 40, device="cuda").to(dtype)
    scores_RE[0], scores_RE[1, 0], scores_RE[2, 7], scores_RE[3, ::2] = torch.nan, torch.nan, torch.inf, -torch.inf
    scores_RE[1].view(torch.int16)[0] = 0x7FFF  # the largest of all bits
    found = kernels(dtype).choose(scores_RE, 8, normalised=True)
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
    run = kernels(dtype)
    choice_RC = run.choose(torch.randn(rows, count, device="cuda").to(dtype), chosen, normalised=True)
    assert choice_RC is not None
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()

    def gating(gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS["silu"](gate) * up

    h_RCI = run.up(x_RD, gate_EID, up_EID, choice_RC)
    assert h_RCI is not None
    check(h_RCI, experts.up(x_RD.float(), gate_EID.float(), up_EID.float(), numbers_RC, gating, fixed=True))
    again_RCI = run.up(x_RD, gate_EID, up_EID, choice_RC)
    assert again_RCI is not None
    assert torch.equal(h_RCI, again_RCI)
    exact_RD = experts.down(h_RCI.float(), down_EDI.float(), numbers_RC, weights_RC, fixed=True)
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
    gate_EID, up_EID = ((torch.randn(16, 264, 512, device="cuda") / 16).to(dtype) for _ in range(2))
    choice_RC = torch.tensor([[0.5, 0.5, 3, 11], [0.5, 0.5, 3, 0], [0.5, 0.5, 15, 3]], device="cuda")

    def gating(gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS[name](gate.to(dtype)) * up.to(dtype)

    found = kernels(dtype, name).up(x_RD, gate_EID, up_EID, choice_RC)
    assert found is not None
    numbers_RC = choice_RC[:, 2:].long()
    expected = experts.up(x_RD.float(), gate_EID.float(), up_EID.float(), numbers_RC, gating, fixed=True)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found != expected).float().mean() < 0.25
