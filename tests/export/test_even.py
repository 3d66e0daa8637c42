"""vLLM, SGLang and transformers: flags by arithmetic on the plan's file, and what keeps a plan from being even."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.export_cases import EVEN, data_of, made, options_of, plan_of
from tests.family_models import NOT_IN_TRANSFORMERS, SAME
from tests.later import transformers as hub
from tpplan.core.plan import Cache, Reserve
from tpplan.export.even import even_bytes
from tpplan.export.export import export
from tpplan.export.facts import Facts
from tpplan.export.transformers import NO_PLAN, WHOLE_ATTENTION
from tpplan.models.families import FAMILIES
from tpplan.models.families.remote import REMOTE

GIB = 2**30
#: What CUDA hands out of each GPU of the even examples, in MiB: the second column of the catalogue.
HANDED_OUT = {"A100 80GB": 81038, "RTX 3060": 11906, "RTX 4060 Ti 16GB": 15744}


def _first(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return request, device and ledger of an even example, whose devices are equal."""
    data = data_of(name)
    assert len({str(entry | {"device": 0}) for entry in data["memory"]}) == 1
    return data["request"], data["devices"][0], data["memory"][0]


@pytest.mark.parametrize("name", sorted(EVEN))
def test_vllm(name: str) -> None:
    """The share is what the plan counts on a GPU, by all memory that there is; other values are the request's."""
    request, device, entry = _first(name)
    cache = entry["cache_bytes"] * {"q4": 16 / 9}.get(request["cache"]["kind"], 1)
    used = entry["weights_bytes"] + cache + entry["workspace_bytes"] + entry["overhead_bytes"]
    options = options_of(plan_of(name), "vllm")
    whole = HANDED_OUT[device["name"]] * 2**20
    assert float(options.pop("--gpu-memory-utilization")) == math.ceil(used / whole * 1000) / 1000
    assert options == {
        "--tensor-parallel-size": str(len(data_of(name)["devices"])),
        "--max-model-len": str(request["cache"]["tokens"] // request["batch"]),
        "--max-num-seqs": str(request["batch"]),
        "--max-num-batched-tokens": str(request["max_rows"]),
        "--kv-cache-dtype": "fp8" if request["cache"]["kind"] == "q4" else "auto",
    }


@pytest.mark.parametrize("name", sorted(EVEN))
def test_sglang(name: str) -> None:
    """The share is weights and cache, by what is free once a process runs."""
    request, device, entry = _first(name)
    held = entry["weights_bytes"] + entry["cache_bytes"] * {"q4": 16 / 9}.get(request["cache"]["kind"], 1)
    options = options_of(plan_of(name), "sglang")
    free = HANDED_OUT[device["name"]] * 2**20 - entry["overhead_bytes"]
    assert float(options.pop("--mem-fraction-static")) == math.ceil(held / free * 1000) / 1000
    assert options == {
        "--tp-size": str(len(data_of(name)["devices"])),
        "--context-length": str(request["cache"]["tokens"] // request["batch"]),
        "--max-running-requests": str(request["batch"]),
        "--chunked-prefill-size": str(request["max_rows"]),
        "--kv-cache-dtype": "fp8_e4m3" if request["cache"]["kind"] == "q4" else "auto",
    }


def test_a_part_of_a_gpu_is_a_part_of_all_of_it() -> None:
    """Of a GPU with a smaller budget, shares are of what it has; of one that no catalogue has, of the budget."""
    cache = Cache("fp16", 8192)
    named, unnamed = made("Llama-3.1-8B", "2xRTX3090:12GiB", cache=cache), made("Llama-3.1-8B", "2x12GiB", cache=cache)
    used = named.memory[0].used_bytes
    assert used == unnamed.memory[0].used_bytes
    shares = [float(options_of(plan, "vllm")["--gpu-memory-utilization"]) for plan in (named, unnamed)]
    assert shares == [math.ceil(used / (24123 * 2**20) * 1000) / 1000, math.ceil(used / (12 * GIB) * 1000) / 1000]


def test_what_does_not_divide_is_named() -> None:
    """Each axis that does not divide has a line, and so have devices that are not alike."""
    report = export(plan_of("Qwen2.5-7B/3xRTX3060"), "vllm")
    assert report.reasons == (
        "4 KV heads do not divide by 3 devices",
        "28 query heads do not divide by 3 devices",
        "18944 intermediate columns do not divide by 3 devices",
    )
    (reason,) = export(plan_of("Llama-3.1-8B/RTX4090+RTX3060"), "vllm").reasons
    assert "device 0 (RTX 4090) has 23.52 GiB and device 1 (RTX 3060) has 11.63 GiB" in reason
    assert "5 and 3 KV heads" in reason


def test_more_devices_than_heads() -> None:
    """In vLLM a KV head may be on several devices, in transformers it may not."""
    plan = made("Qwen3-Next-80B-A3B", "4xA100-80GB", cache=Cache("fp16", 16384), kv="replicate")
    assert export(plan, "vllm").possible  # 2 KV heads, 16 query heads
    assert export(plan, "transformers").reasons == ("2 KV heads do not divide by 4 devices",)


def test_different_gpus_with_equal_parts_are_even() -> None:
    """Names do not matter where the plan gives each as much: one share is enough for both."""
    plan = plan_of("Llama-3.1-8B/2xRTX3060")
    larger = attrs.evolve(plan.devices[1], name="RTX 3060 Ti", budget_bytes=plan.devices[1].budget_bytes + GIB)
    other = attrs.evolve(plan, devices=(plan.devices[0], larger))
    assert options_of(other, "vllm")["--tensor-parallel-size"] == "2"
    shares = [float(options_of(each, "vllm")["--gpu-memory-utilization"]) for each in (plan, other)]
    assert shares[0] == shares[1]  # that of the smaller one


def test_devices_alike_that_do_not_hold_the_same() -> None:
    """The engine cuts evenly then, and each axis that the plan cuts otherwise has a line with both."""
    report = export(plan_of("DeepSeek-V3/8xH200"), "vllm")
    assert (
        "it cuts evenly: 16 KV heads on each device; the plan has 20, 18, 0, 18, 18, 18, 18 and 18"
        in report.differences
    )
    assert not [line for line in report.differences if "each expert" in line]  # 256 on each


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from(("RTX4090", "RTX3090", "A100-40GB", "A100-80GB")), min_size=1, max_size=5),
    st.integers(1, 8).filter(lambda n: 8 % n == 0),
    st.sampled_from(("fp16", "q4")),
)
def test_a_suggestion_is_never_too_small(gpus: list[str], count: int, kind: str) -> None:
    """What an equal part needs by a plan for some GPUs is no less than a plan for equal GPUs counts on each."""
    tokens = 4096
    try:
        plan = made("Llama-3.1-8B", ",".join(gpus), cache=Cache(kind, tokens))
    except Exception as error:
        raise AssertionError(gpus) from error
    need, _ = even_bytes(Facts(plan), count, {"fp16": 32, "q4": 9}[kind])
    equal = made("Llama-3.1-8B", f"{count}xA100-80GB", cache=Cache(kind, tokens))
    assert max(m.used_bytes - m.overhead_bytes for m in equal.memory) <= need


def test_what_is_reserved_is_kept() -> None:
    """GPUs are suggested only where the reserve fits beside the model."""
    plan = made("Llama-3.1-8B", "RTX4090,RTX3060", cache=Cache("q8", 32768), reserve=(Reserve(6 * GIB, 0),))
    assert export(plan, "vllm").works_with == "2xRTX4090"
    plan = made("Llama-3.1-8B", "RTX4090,RTX3060", cache=Cache("q8", 32768), reserve=(Reserve(GIB, 1),))
    assert export(plan, "vllm").works_with == "2xRTX3060"  # the reserve names device 1


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - NOT_IN_TRANSFORMERS))
def test_what_transformers_cuts(model_type: str) -> None:
    """Architectures without a plan of transformers, and those whose plan has no attention, are those of the tables."""
    config = hub.AutoConfig.for_model(SAME.get(model_type, model_type))
    rules = getattr(config, "base_model_tp_plan", None) or {}
    attention = any(word in rule for rule in rules for word in ("q_proj", "qkv", "q_b_proj", "query_key_value"))
    for architecture in FAMILIES[model_type].architectures:
        assert (architecture in NO_PLAN) == (not rules)
        assert (architecture in WHOLE_ATTENTION) == (bool(rules) and not attention)


@pytest.mark.parametrize("model_type", sorted(REMOTE.keys() - SAME.keys()))
def test_transformers_has_no_plan_for_code_of_others(model_type: str) -> None:
    """Models with code of their own cannot be cut by a plan of transformers' classes."""
    assert {*FAMILIES[model_type].architectures} <= NO_PLAN
