"""How long sequences are: RoPE scaling, contexts beyond the model's, pools of tokens, and whole sliding windows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.family_models import MISTRAL, spec_of
from tests.planning_cases import spec
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache, Request, SplitPlan
from tpplan.core.workspace import workspace_bytes
from tpplan.errors import ModelError, RequestError
from tpplan.planfile.verify import problems
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import plan, replan
from tpplan.planner.request import resolve
from tpplan.render.show import request_lines
from tpplan.reports.inspect import inspect
from tpplan.reports.show import show_report

GIB = 2**30
KIB = 2**10
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PAIR = tuple(Device(name=f"GPU {i}", budget_bytes=size * GIB) for i, size in enumerate((24, 12)))
#: Mistral 7B v0.1: 32 layers with a window of 4096 tokens, and 8 KV heads of 128 elements.
WINDOWS = spec_of(MISTRAL | {"num_key_value_heads": 8, "sliding_window": 4096})
#: fp16, keys and values of all layers.
PER_TOKEN = 2 * 2 * 32 * 8 * 128


def context_of(model_type: str, longest: int, **keys: Any) -> tuple[int, str]:
    """Return the longest context of a model with some keys, and what decides it."""
    found = spec_of(MISTRAL | {"model_type": model_type, "max_position_embeddings": longest} | keys)
    return found.max_context, inspect(found).context_basis


@pytest.mark.parametrize(
    ("model_type", "longest", "keys", "expected", "basis"),
    [
        # Qwen2.5's model cards: add yarn for texts of up to 131,072 tokens. Qwen3's: 40,960 without, 131,072 with it.
        ("qwen2", 32768, {"rope_scaling": YARN}, 131072, "32768 × 4 by yarn"),
        ("qwen3", 40960, {"rope_scaling": {**YARN, "rope_type": "yarn"}}, 131072, "32768 × 4 by yarn"),
        ("qwen3", 40960, {"rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072, "32768 × 4 by yarn"),
        ("qwen3", 40960, {"rope_scaling": None, "rope_parameters": YARN}, 131072, "32768 × 4 by yarn"),
        ("qwen2", 32768, {"rope_scaling": {"type": "yarn", "factor": 2.5}}, 81920, "32768 × 2.5 by yarn"),
        ("qwen2", 131072, {"rope_scaling": YARN}, 131072, "32768 × 4 by yarn"),
        ("qwen2", 9, {"rope_scaling": YARN, "original_max_position_embeddings": 8}, 32, "8 × 4 by yarn"),
        ("qwen2", 9, {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 3}}, 9, ""),
        # Vicuna 16k, and InternLM2.5.
        ("llama", 4096, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384, "4096 × 4 by linear"),
        ("llama", 32768, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 65536, "32768 × 2 by dynamic"),
        # These configs give the extended number: DeepSeek-V3, gpt-oss, Gemma 3, Llama 3.1, Phi-3, and OLMo 3.
        (
            "gpt_oss",
            131072,
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
                "num_local_experts": 4,
                "num_experts_per_tok": 4,
            },
            131072,
            "4096 × 32 by yarn",
        ),
        ("gpt_oss", 512, {"num_local_experts": 4, "num_experts_per_tok": 4}, 131072, "4096 × 32 by yarn"),
        ("ministral3", 512, {}, 262144, "16384 × 16 by yarn"),  # as of their classes, if a config says nothing
        ("gemma3_text", 131072, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072, ""),
        (
            "gemma3_text",
            131072,
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            131072,
            "",
        ),
        (
            "llama",
            131072,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
            131072,
            "",
        ),
        (
            "phi3",
            131072,
            {"rope_scaling": {"type": "longrope", "factor": 32.0}, "original_max_position_embeddings": 4096},
            131072,
            "",
        ),
        ("phi3", 131072, {"rope_scaling": {"type": "su", "factor": 32.0}}, 131072, ""),
        (
            "olmo3",
            8192,
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            65536,
            "8192 × 8 by yarn",
        ),
        ("qwen2", 128000, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 128000, ""),
        ("qwen2", 128000, {"rope_scaling": {"type": "mrope", "rope_type": "default", "factor": 9}}, 128000, ""),
        ("gpt2", 1024, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024, ""),
        ("cohere", 8192, {"model_max_length": 131072}, 131072, ""),
    ],
)
def test_rope_scaling_decides_the_context(
    model_type: str, longest: int, keys: dict[str, Any], expected: int, basis: str
) -> None:
    """As vLLM reads it: the original context times yarn's factor, the maximum times others', once."""
    assert context_of(model_type, longest, **keys) == (expected, basis)


def test_what_is_assumed_of_a_scaling_is_a_note() -> None:
    """Yarn without an original context multiplies the maximum, as transformers fills it in."""
    scaling = {"type": "yarn", "factor": 4}
    (note,) = spec_of(MISTRAL | {"rope_scaling": scaling}).notes
    assert "yarn without original_max_position_embeddings" in note
    assert not spec_of(MISTRAL | {"rope_scaling": YARN}).notes


@pytest.mark.parametrize("factor", ["4", True, 0, -2, 1e300, [4], 10**400])
def test_factors_without_meaning_are_refused(factor: object) -> None:
    """They name the key and its value."""
    with pytest.raises(ModelError, match=r"config.json: rope_scaling: factor is .*, expected one that makes"):
        spec_of(MISTRAL | {"rope_scaling": {"type": "linear", "factor": factor}})
    with pytest.raises(ModelError, match="rope_scaling is 'yarn', expected an object"):
        spec_of(MISTRAL | {"rope_scaling": "yarn"})


def refused(model: Any, **asked: Any) -> RequestError:
    """Plan what has no meaning."""
    with pytest.raises(RequestError) as error:
        plan(model, PAIR, **asked)
    return error.value


def test_a_context_beyond_the_models_is_planned_at_ones_own_risk() -> None:
    """The refusal names the option; with it, the plan is as for a model of that context, and says so."""
    cache = Cache(tokens=40960)
    error = refused(WINDOWS, cache=cache)
    assert error.message.startswith("40960 tokens per sequence are more than the 32768 that ")
    assert "--beyond" in error.hint
    found = plan(WINDOWS, PAIR, cache=cache, beyond=True)
    assert found.format_version == "1.1"
    assert found.memory == plan(evolve(WINDOWS, max_context=65536), PAIR, cache=cache).memory
    assert "beyond the model's context" in words(found)
    assert replan(WINDOWS, found) == found
    assert not plan(WINDOWS, PAIR, cache=Cache(tokens=9), beyond=True).request.beyond


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_learned_positions_end(model_type: str) -> None:
    """A model has no embedding of a position beyond its table, whatever risk is taken."""
    model = spec_of(MISTRAL | {"model_type": model_type, "num_key_value_heads": None, "max_position_embeddings": 512})
    assert refused(model, cache=Cache(tokens=513), beyond=True).message.endswith("the 512 that model has positions for")


def words(found: SplitPlan) -> str:
    """Return the request as the screen says it."""
    from tpplan.files.codec import unstructure  # noqa: PLC0415

    return request_lines(unstructure(show_report(found))["plan"])[1]


def cache_and_workspace(found: SplitPlan) -> tuple[int, int]:
    """Return the bytes of the cache, and of the workspace, of all devices."""
    return sum(m.cache_bytes for m in found.memory), sum(m.workspace_bytes for m in found.memory)


@pytest.mark.parametrize(
    ("asked", "tokens", "longest"),
    [
        ({"context": 20480}, 40960, 20480),
        ({"context": 40960}, 40960, 40960),
        ({"context": 20480, "full_window": True}, 40960, 20480),
    ],
)
def test_a_pool_is_shared(asked: dict[str, Any], tokens: int, longest: int) -> None:
    """N tokens in layers of full attention, of windows at most one for each sequence, and RoPE for the longest."""
    full = spec_of(MISTRAL | {"num_key_value_heads": 8, "sliding_window": None, "max_position_embeddings": 2**16})
    model = evolve(WINDOWS, max_context=2**16)
    pool = plan(full, PAIR, cache=Cache(tokens=tokens), batch=4, **asked)
    assert pool.request.context == longest
    assert not pool.request.full_window  # there is none
    assert cache_and_workspace(pool)[0] == tokens * PER_TOKEN
    # With the same cuts, equal parts have shorter tables on each device with heads, and all else is the same.
    equal = plan(full, pool.devices, cache=Cache(tokens=tokens), batch=4).request
    tables = 2 * 128 * 2 * (longest - tokens // 4)
    bounds = pool.bounds(Axis.KV_HEADS)
    expected = [tables * (end > start) for start, end in pairwise(bounds)]
    shared, apart = (workspace_bytes(pool.splits, "bfloat16", request) for request in (pool.request, equal))
    assert [a - b for a, b in zip(shared, apart, strict=True)] == expected
    assert any(expected)
    windows = plan(model, PAIR, cache=Cache(tokens=tokens), batch=4, **asked)
    kept = tokens if asked.get("full_window") else 4 * 4096
    assert cache_and_workspace(windows)[0] == kept * PER_TOKEN
    few = plan(model, PAIR, cache=Cache(tokens=9000), batch=4, context=5000)
    assert cache_and_workspace(few)[0] == 9000 * PER_TOKEN  # fewer than four windows
    assert not problems(pool)
    assert f"shared by up to 4 sequences of at most {longest}" in words(pool)
    assert ("sliding windows kept whole" in words(windows)) == windows.request.full_window
    assert replan(model, windows) == windows


@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 40), st.booleans(), st.booleans())
def test_requests_say_only_what_changes_something(
    batch: int, tokens: int, context: int, full_window: bool, beyond: bool
) -> None:
    """A resolved request resolves to itself; its context, windows and leave are kept where plans differ by them."""
    model = spec(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=7)
    model = evolve(model, max_context=16)
    asked = Request("", "balanced", Cache("fp16", tokens), batch, 8, "idle", context, full_window, beyond)
    try:
        found = resolve(model, asked)
    except RequestError as error:
        assert error.hint  # noqa: PT017
        return
    assert resolve(model, found) == found
    longest = found.sequence_tokens
    assert found.cache.tokens == (tokens or (context or 16) * batch)
    assert longest == (context or -(-found.cache.tokens // batch))
    assert found.beyond == (longest > 16) <= beyond
    assert found.full_window == (full_window and longest > 7)
    assert bool(found.context) == (longest * batch - found.cache.tokens >= batch)


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        (
            {"context": 9, "cache": Cache(tokens=8)},
            "a sequence of 9 tokens does not fit into a pool of 8",
            "at least 9",
        ),
        ({"context": 4, "cache": Cache(tokens=9), "batch": 2}, "9 cache tokens are more than 2 sequences", "at most 8"),
        ({"context": -1}, "context is -1", ""),
        (
            {"context": 40000, "batch": 2, "cache": Cache(tokens=50000)},
            "40000 tokens per sequence are more",
            "--beyond",
        ),
    ],
)
def test_pools_without_meaning_are_refused(asked: dict[str, Any], message: str, hint: str) -> None:
    """One sentence with the numbers, and what to ask for instead."""
    error = refused(WINDOWS, **asked)
    assert error.message.startswith(message)
    assert hint in error.hint


@pytest.mark.parametrize(("budget", "lower"), [(12, False), (8, True)])
def test_the_largest_pool_that_fits_is_suggested(budget: int, *, lower: bool) -> None:
    """With its context where that does not fit either; more tokens do not fit."""
    devices = (Device(name="GPU", budget_bytes=budget * GIB),) * 2
    asked: dict[str, Any] = {"batch": 8, "context": 24576, "full_window": True}
    with pytest.raises(InfeasibleError) as error:
        plan(WINDOWS, devices, cache=Cache(tokens=180224), **asked)
    (best,) = (s for s in error.value.suggestions if s.kind == "tokens")
    assert "context" not in {s.kind for s in error.value.suggestions}
    assert best.message in error.value.hint
    assert bool(best.context) == lower
    tokens = int(best.value)
    plan(WINDOWS, devices, cache=Cache(tokens=tokens), **asked | {"context": best.context or 24576})
    more = {"context": best.context + 256 if lower else 24576}
    with pytest.raises(InfeasibleError):
        plan(WINDOWS, devices, cache=Cache(tokens=tokens + 256), **asked | more)


def test_exllamav2_counts_all_tokens_in_layers_with_windows() -> None:
    """Mistral 7B on 12 GiB and 8 GiB: the original's cuts, which knows no windows; the ledger counts what they keep."""
    devices = tuple(Device(name="GPU", budget_bytes=size * GIB) for size in (12, 8))
    found = plan(WINDOWS, devices, cache=Cache(tokens=32768), layout="gather", strategy="exllamav2")
    cuts = {axis: found.bounds(axis)[1] for axis in (Axis.INTERMEDIATE, Axis.VOCAB, Axis.RESIDUAL)}
    assert cuts == {Axis.INTERMEDIATE: 8448, Axis.VOCAB: 18816, Axis.RESIDUAL: 2400}
    assert cache_and_workspace(found)[0] == 4096 * PER_TOKEN
