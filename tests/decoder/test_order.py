"""The decoder when everything is done as late as it may be: it waits for what it needs, and mixes no devices."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.decoder.late import late
from tests.decoder_cases import model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.decoder import Decoder, generate
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.build import build
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.exec.memory.binding import Memory


def adversarial(plan: SplitPlan, transport: str) -> tuple[TPContext, Adversary]:
    """Compile a plan for virtual devices that do the worst."""
    made: list[Adversary] = []

    def start(memory: Memory) -> Adversary:
        made.append(Adversary(memory, Random(transport)))
        return made[0]

    places, rows = (torch.device("cpu"),) * len(plan.devices), plan.request.max_rows
    context = build(plan, places, start, transport=transport, max_rows=rows, dtype=torch.float32)
    return context, made[0]


def is_garbage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds nothing yet, as nobody on a device could."""
    with _disable_current_modes():
        return bool(tensor.isnan().all())


@pytest.mark.parametrize(
    ("model_type", "layout", "transport"),
    [
        ("llama", "reduce", "peer"),
        ("gemma2", "gather", "host"),
        ("mixtral", "gather", "peer"),
        ("qwen3_moe", "reduce", "events"),
    ],
)
def test_any_order(model_type: str, layout: str, transport: str) -> None:
    """Under an adversarial schedule two texts have the tokens that transformers gives them."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, request_of(layout), {}, seed=7)
    context, adversary = adversarial(plan, transport)
    with context:
        decoder = Decoder(context, model.directory, load_weights(plan, model.directory, context), cache="fp32")
        with late(context, adversary) as mode:
            found = list(zip(*generate(decoder, model.prompts, 4), strict=True))
        assert [list(tokens) for tokens in found] == [tokens[:4] for tokens in model.tokens]
        assert mode.count > 1000


def test_late_work_is_late() -> None:
    """What is computed from a result is not there before its time; and devices cannot use each other's tensors."""
    context, adversary = adversarial(plan_of(model_of("llama").directory, 2, request_of(), {}, seed=1), "peer")
    with context, late(context, adversary) as mode:
        one, other = context.broadcast(torch.ones(1, 8))
        twice = one * 2
        assert is_garbage(twice)
        with pytest.raises(AssertionError, match="of tensors on devices"):
            twice + other
        mode.finish()
        assert twice.tolist() == [[2.0] * 8]
