"""Experts against the formula: however many rows there are, and whether shapes may depend on the choice or not."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from tpplan.decoder.layer import experts
from tpplan.decoder.weights.stacked import Projection

COUNT, CHOSEN, HIDDEN, WIDTH = 7, 3, 10, 6


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_as_one_row_after_the_other(rows: int, *, fixed: bool, normalised: bool) -> None:
    """Each row has the weighed sum of its own experts, of which some may have no rows, and others all."""
    torch.manual_seed(rows)
    x, scores = torch.randn(rows, HIDDEN, dtype=torch.float64), torch.randn(rows, COUNT, dtype=torch.float64)
    scores[:, 5], scores[:, 2] = -9, 5
    gate, up = torch.randn(2, COUNT, WIDTH, HIDDEN, dtype=torch.float64)
    down = torch.randn(COUNT, HIDDEN, WIDTH, dtype=torch.float64)
    weights, chosen = experts.choose(scores, CHOSEN, normalised=normalised)
    with patch.object(experts, "AT_ONCE", 100):  # copies of one or two columns of what is chosen
        hidden = experts.up(
            x, Projection(gate), Projection(up), chosen, lambda x, y: functional.silu(x) * y, fixed=fixed
        )
        found = experts.down(hidden, Projection(down), chosen, weights.double(), fixed=fixed)
    for row in range(rows):
        likely = scores[row].softmax(0).topk(CHOSEN)
        share = likely.values / likely.values.sum() if normalised else likely.values
        outputs = [down[e] @ (functional.silu(gate[e] @ x[row]) * (up[e] @ x[row])) for e in likely.indices.tolist()]
        expected = sum(one * weight for one, weight in zip(outputs, share, strict=True))
        torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=1e-6)
