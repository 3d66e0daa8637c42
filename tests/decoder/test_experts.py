"""Experts against the formula, however many rows there are, and routers against those of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from tests.later import transformers
from tpplan.decoder.layer import experts
from tpplan.decoder.layer.steps import Plain
from tpplan.decoder.model.router import Router
from tpplan.decoder.weights.device import DeviceWeights
from tpplan.decoder.weights.products import ROOM, ProductOptions
from tpplan.decoder.weights.stacked import Projection

COUNT, CHOSEN, HIDDEN, WIDTH = 7, 3, 10, 6


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("rows", "room"), [(1, ROOM), (2, ROOM), (3, ROOM), (40, ROOM), (40, 3000), (40, 0)])
def test_as_one_row_after_the_other(rows: int, room: int, *, fixed: bool, normalised: bool) -> None:
    """Each row has the weighed sum of its own experts, of which some may have no rows, and others all."""
    torch.manual_seed(rows)
    x, scores = torch.randn(rows, HIDDEN, dtype=torch.float64), torch.randn(rows, COUNT, dtype=torch.float64)
    scores[:, 5], scores[:, 2] = -9, 5
    gate, up = torch.randn(2, COUNT, WIDTH, HIDDEN, dtype=torch.float64)
    down = torch.randn(COUNT, HIDDEN, WIDTH, dtype=torch.float64)
    weights, chosen = experts.choose(scores, CHOSEN, Router(normalised=normalised))
    options = ProductOptions(room=room)
    with patch.object(experts, "AT_ONCE", 100):  # copies of one or two columns of what is chosen
        hidden = experts.up(
            x, Projection(gate), Projection(up), chosen, lambda x, y: functional.silu(x) * y, options, fixed=fixed
        )
        found = experts.down(hidden, Projection(down), chosen, weights.double(), options, fixed=fixed)
    for row in range(rows):
        likely = scores[row].softmax(0).topk(CHOSEN)
        share = likely.values / likely.values.sum() if normalised else likely.values
        outputs = [down[e] @ (functional.silu(gate[e] @ x[row]) * (up[e] @ x[row])) for e in likely.indices.tolist()]
        expected = sum(one * weight for one, weight in zip(outputs, share, strict=True))
        torch.testing.assert_close(found[row], expected, atol=1e-6, rtol=1e-6)


#: Modules of transformers that choose experts, the router that is to do the same, and settings of the model.
ROUTERS: dict[str, tuple[str, str, Router, dict[str, Any]]] = {
    "softmax": ("qwen3_moe", "Qwen3MoeTopKRouter", Router(), {"norm_topk_prob": False}),
    "greedy": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        Router(factor=16.0, wide=True),
        {"topk_method": "greedy", "routed_scaling_factor": 16.0},
    ),
    "best of a group": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        Router(groups=4, eligible=2, factor=2.5, wide=True),
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "two best of a group": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        Router(sigmoid=True, groups=4, eligible=2, best=2, normalised=True, factor=2.5, wide=True),
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "not normalised": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        Router(sigmoid=True, groups=2, eligible=1, best=2, wide=True),
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "one group": (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        Router(sigmoid=True, best=2, normalised=True, factor=1.5, wide=True),
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_as_transformers(name: str, dtype: torch.dtype) -> None:
    """The same experts of each row with the same weights, also where the router's matrix has 16 bits."""
    model_type, class_name, router, settings = ROUTERS[name]
    sizes = {
        "num_attention_heads": 2,
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": CHOSEN,
        "hidden_size": HIDDEN,
    }
    config = transformers.AutoConfig.for_model(model_type, **sizes, **settings)
    module = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), class_name)(config)
    torch.manual_seed(len(name))
    x, weight = torch.randn(50, HIDDEN).to(dtype), torch.randn(8, HIDDEN).to(dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    correction = getattr(module, "e_score_correction_bias", None)
    if correction is not None:
        correction.normal_(0, 0.3)
    _, weights, numbers = module(x)
    steps = Plain(1e-6, "silu")
    logits = steps.route(x, DeviceWeights({"router.weight": weight}), "router", wide=router.wide)
    choice = steps.choose(logits, CHOSEN, router, correction)
    expected = torch.zeros(50, 8).scatter_(1, numbers, weights.float())
    found = torch.zeros(50, 8).scatter_(1, choice[:, CHOSEN:].long(), choice[:, :CHOSEN])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=2**-8 if weights.dtype == torch.bfloat16 else 1e-5)


def test_scores_that_are_all_zero() -> None:
    """Sigmoids of very low logits leave weights of zero, not of no number."""
    weights, _ = experts.choose(torch.full((2, 4), -1e4), 2, Router(sigmoid=True, normalised=True))
    assert torch.equal(weights, torch.zeros(2, 2))
