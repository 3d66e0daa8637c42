"""Products that devices add up as they multiply: where decoders do so, and that they say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.decoder.fused_cases import FakeChannel, FakeGemv, FakeSkinny
from tests.decoder.pointwise_cases import launches
from tests.decoder.test_memory import made, planned
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache
from tpplan.decoder import Decoder
from tpplan.decoder.fast.launches import skinny
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.exec.context import TPContext
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

    from tpplan.core.plan import SplitPlan

__all__ = ["fine_units", "launches"]  # fixtures

#: Sequences that decode together.
FEW, MORE, MANY = 2, 3, 5


def said(directory: Path, plan: SplitPlan, count: int) -> torch.Tensor:
    """Return the logits of a step of so many sequences, each behind some tokens."""
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        for sequence in range(count):
            decoder.prefill([5, 3 + sequence], sequence)
        FakeGemv.calls.clear()
        FakeSkinny.calls.clear()
        tokens, positions = ([x] * len(context.all_devices) for x in (torch.arange(count) + 7, torch.full((count,), 2)))
        return context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor.float()


@pytest.mark.parametrize(
    ("model_type", "layout", "count", "shares", "joint"),
    [
        ("mistral", "reduce", FEW, (3, 1), 2),
        ("mistral", "reduce", FEW, (2, 1, 1), 2),
        ("qwen2", "reduce", FEW, (3, 1), 2),
        ("llama", "reduce", FEW, (3, 1), 0),  # whose matrices have biases here
        ("mixtral", "reduce", FEW, (3, 1), 1),  # of a layer; its experts' sums are apart
        ("mistral", "reduce", MORE, (3, 1), 2),
        ("mistral", "reduce", MORE, (2, 1, 1), 2),
        ("llama", "reduce", MORE, (3, 1), 0),
        ("mistral", "reduce", MANY, (3, 1), 0),
        ("mistral", "reduce", FEW, (1,), 0),
        ("mistral", "gather", FEW, (3, 1), 0),
        ("gemma2", "reduce", FEW, (3, 1), 0),  # which has norms before the sums
    ],
)
def test_devices_add_up_as_they_multiply(  # noqa: PLR0917
    model_type: str,
    layout: str,
    count: int,
    shares: tuple[int, ...],
    joint: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For few rows, where nothing is between the products and the residual stream; else sums are operations."""
    directory = made(model_type, tmp_path, num_hidden_layers=2)
    plan = planned(directory, layout, shares, Cache("fp16", 4 * 64))
    expected = said(directory, plan, count)
    request.getfixturevalue("launches")
    channel = FakeChannel()
    monkeypatch.setattr(skinny, "MOST_JOINT", MANY - 1)
    monkeypatch.setattr(TPContext, "channel", lambda _self, _elements: channel)
    found = said(directory, plan, count)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    calls = FakeGemv.calls["joint"], FakeSkinny.calls["few rows, joint"]
    assert calls == ((2 * joint * len(shares), 0) if count == FEW else (0, 2 * joint * len(shares)))


def test_virtual_devices_have_no_channels(tmp_path: Path, launches: Counter[str]) -> None:
    """And a decoder does without; what is no number of elements is refused."""
    directory = made("llama", tmp_path)
    plan = planned(directory, "reduce", (1, 1), Cache("fp16", 4 * 64))
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        assert context.channel(8) is None
        for wrong in (0, 2.0, True, None):
            with pytest.raises(ExecutionError, match="channel: elements"):
                context.channel(wrong)  # type: ignore[arg-type]
    said(directory, plan, FEW)
    assert launches
    assert not FakeGemv.calls["joint"]
