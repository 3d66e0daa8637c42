"""Steps by kernels of few rows: products with norms and gates, and attention that needs no graph for each span."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from tests.decoder.fused_cases import FakeAttention, FakeGemv, FakeSkinny
from tests.decoder.pointwise_cases import launches
from tests.decoder.test_memory import made, planned
from tests.decoder_cases import CONFIGS, LATENT, OWN_STEPS
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache
from tpplan.decoder import Decoder
from tpplan.decoder.decoding import steps
from tpplan.decoder.fast import fused
from tpplan.decoder.fast.launches import skinny
from tpplan.decoder.model.settings import FAMILIES
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tpplan.core.plan import SplitPlan

__all__ = ["fine_units", "launches"]  # fixtures

BATCH, LENGTH = 8, 128
EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss", "minimax_m2", "qwen3_5_moe_text"}

#: Settings by which rows have all experts, of families whose roundings would choose others.
ALL_EXPERTS = {
    **{name: {"topk_group": 4, "num_experts_per_tok": 8} for name in ("deepseek_v2", "deepseek_v3", "glm4_moe")},
    "minimax_m2": {"num_experts_per_tok": 6},
}


@pytest.fixture
def attending(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let decoders attend by kernels too."""
    monkeypatch.setattr(fused, "Attention", FakeAttention)
    return launches


def said(directory: Path, plan: SplitPlan) -> Iterator[torch.Tensor]:
    """Yield the logits of steps of two sequences: behind prompts, and when a window has long been full."""
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        everywhere = len(context.all_devices)
        for sequence, count in enumerate((3, 100)):
            decoder.prefill([*range(count)], sequence)
        for step in range(3):
            tokens, positions = (
                [x] * everywhere for x in (torch.tensor([5, 9 + step]), torch.tensor([3 + step, 100 + step]))
            )
            yield context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor.float()


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("model_type", [*CONFIGS, *OWN_STEPS])
def test_steps_say_the_same(model_type: str, layout: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In every family, on one device and on uneven ones, but for rounding."""
    directory = made(model_type, tmp_path, **ALL_EXPERTS.get(model_type, {}))
    plans = [planned(directory, layout, shares, Cache("fp16", BATCH * LENGTH)) for shares in ((1,), (3, 1))]
    expected = [list(said(directory, plan)) for plan in plans]
    request.getfixturevalue("attending")
    for plan, each in zip(plans, expected, strict=True):
        FakeGemv.calls.clear()
        FakeAttention.calls.clear()
        for found, right in zip(said(directory, plan), each, strict=True):
            assert (found - right).norm() <= 0.02 * right.norm()
        assert bool(FakeAttention.calls) == (model_type not in LATENT)

        wanted = {
            "linear of a norm",
            "add" if len(plan.devices) == 1 and not FAMILIES[model_type].norms.of_outputs else "linear",
        }
        if not FAMILIES[model_type].norms.before_attention:  # products alone
            wanted = {"linear"}
        elif model_type not in EXPERTS:
            wanted.add("gated")
        assert set(FakeGemv.calls) >= wanted


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (1, (1,), {"linear of a norm": 1, "attention": 1, "add": 2, "gated": 1}),
        (1, (3, 1), {"linear of a norm": 1, "attention": 1, "linear": 2, "gated": 1}),
        (5, (1,), {"norm": 2, "few rows": 1, "attention": 1, "few rows, added": 2, "few rows, gated": 1}),
        (5, (3, 1), {"norm": 2, "few rows": 3, "attention": 1, "few rows, gated": 1}),
        (8, (1,), {"norm": 2, "attention": 1, "silu": 1}),  # beside four matrices
        (8, (3, 1), {"norm": 2, "attention": 1, "silu": 1}),
    ],
)
def test_kernels_of_a_layer(  # noqa: PLR0917
    count: int,
    shares: tuple[int, ...],
    expected: dict[str, int],
    tmp_path: Path,
    attending: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of Llama on each device are as many as the page on benchmarks tells, with sums of several devices."""
    monkeypatch.setattr(skinny, "MOST_ROWS", BATCH - 1)

    def called(layers: int) -> Counter[str]:
        directory = made("llama", tmp_path / str(layers), num_hidden_layers=layers)
        plan = planned(directory, "reduce", shares, Cache("fp16", BATCH * LENGTH))
        with compile_plan(plan, backend="cpu", scratch=False) as context:
            decoder = Decoder(context, directory, load_weights(plan, directory, context))
            for calls in (FakeGemv.calls, FakeSkinny.calls, FakeAttention.calls, attending):
                calls.clear()
            zeros = [torch.zeros(count, dtype=torch.int64)] * len(shares)
            decoder.decode(zeros, zeros)
        return FakeGemv.calls + FakeSkinny.calls + attending + Counter(attention=FakeAttention.calls.total())

    assert called(2) - called(1) == {name: times * len(shares) for name, times in expected.items()}


def test_latents_are_turned_by_a_kernel(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Where RoPE pairs elements of both halves; torch writes them to the cache and attends to them."""
    more = {"mlp_layer_types": ["dense"] * 2, "rope_interleave": False}
    directory = made("glm4_moe_lite", tmp_path, **more)
    plan = planned(directory, "reduce", (3, 1), Cache("fp16", BATCH * LENGTH))
    expected = list(said(directory, plan))
    calls: Counter[str] = request.getfixturevalue("attending")
    FakeAttention.calls.clear()
    for found, right in zip(said(directory, plan), expected, strict=True):
        assert (found - right).norm() <= 0.02 * right.norm()
    assert calls["turn"]
    assert not FakeAttention.calls


@pytest.mark.parametrize("kind", ["q8", "fp8"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_caches_of_8_bits(model_type: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Kernels attend to what torch would read, with windows and caps too, and write what they attend to."""
    directory = made(model_type, tmp_path)
    plan = planned(directory, "reduce", (3, 1), Cache(kind, BATCH * LENGTH))
    expected = list(said(directory, plan))
    calls: Counter[str] = request.getfixturevalue("attending")
    FakeAttention.calls.clear()
    for found, right in zip(said(directory, plan), expected, strict=True):
        assert (found - right).norm() <= 0.02 * right.norm()
    assert FakeAttention.calls
    assert calls["turn"]


@pytest.mark.usefixtures("attending")
def test_products_behind_norms_of_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel takes norm and product together, one takes the product, or two with their gate."""
    monkeypatch.setattr(FakeGemv, "takes_normed", lambda *_, **__: False)
    plan = planned(made("gemma2", tmp_path), "reduce", (1,), Cache("fp16", BATCH * LENGTH))
    for calls in (FakeGemv.calls, FakeSkinny.calls):
        calls.clear()
    list(said(tmp_path, plan))
    assert FakeGemv.calls == {"linear": 3 * (2 * 3 + 1) + 2}  # of three steps, and the logits of two prompts
    # Of these, and of the prompt of three tokens.
    assert FakeSkinny.calls == {"few rows": 2 * 3, "few rows, gated": (3 + 1) * 2}


@pytest.mark.usefixtures("attending")
def test_positions_of_any_integers(tmp_path: Path) -> None:
    """Also those of 32 bits, or a column of other numbers, are where a step goes on."""
    directory = made("llama", tmp_path)
    plan = planned(directory, "reduce", (1,), Cache("fp16", BATCH * LENGTH))
    tokens, positions = torch.tensor([5, 9]), torch.tensor([[3, 100], [7, 100]])
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        for sequence, count in enumerate((3, 7)):
            decoder.prefill([*range(count)], sequence)
        (expected,) = decoder.decode([tokens], [torch.tensor([3, 7])])
        for each in (positions[:, 0], positions.int()[:, 0]):
            (found,) = decoder.decode([tokens], [each])
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("attending")
def test_steps_of_all_lengths_are_one_graph(tmp_path: Path) -> None:
    """Where kernels attend in every layer on every device; others have one graph for each span."""
    directory = made("llama", tmp_path)
    for kind in ("fp16", "q8", "fp8", "fp32"):
        expected = [32, 64, LENGTH] if kind == "fp32" else [LENGTH]
        plan = planned(directory, "reduce", (3, 1), Cache("fp16" if kind == "fp32" else kind, BATCH * LENGTH))
        with compile_plan(plan, backend="cpu", scratch=False) as context, pytest.MonkeyPatch.context() as patched:
            patched.setattr(steps, "_SHORTEST_SPAN", 32)
            decoder = Decoder(context, directory, load_weights(plan, directory, context), cache=kind)
            assert list(decoder.steps(1)._spans()) == expected
