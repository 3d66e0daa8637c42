"""ExLlamaV3 as TabbyAPI loads it, and ExLlamaV2's ``load_tp``: both cut by the memory that devices are told to have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.axes import Axis
from tpplan.core.sizes import counted, listed
from tpplan.export.engine import DRAFT, MODEL, CacheKind, Engine, models_only
from tpplan.export.facts import GIB, gibibytes, round_up
from tpplan.export.layers import Layers
from tpplan.export.names import EngineName
from tpplan.planner.exllamav2 import integer_split
from tpplan.reports.export import TextFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.export.facts import Facts

#: Architectures of tpplan's families that ExLlamaV3 cuts.
_CUT_BY_V3 = frozenset({
    *("ApertusForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "Dots1ForCausalLM"),
    *("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "Gemma2ForCausalLM"),
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Glm4ForCausalLM", "Glm4MoeForCausalLM"),
    *("Glm4vForConditionalGeneration", "GptOssForCausalLM", "HYV3ForCausalLM", "HyperCLOVAXForCausalLM"),
    *("LlamaForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    *("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    *("SeedOssForCausalLM", "SmolLM3ForCausalLM", "SolarOpenForCausalLM"),
})  # fmt: skip

#: Those that it runs too, but gives to devices in whole layers.
_LAYERS_IN_V3 = frozenset({
    *("AfmoeForCausalLM", "DeepseekV3ForCausalLM", "NanoChatForCausalLM", "Olmo3ForCausalLM", "Qwen3NextForCausalLM"),
})  # fmt: skip

#: Those that ExLlamaV2 cuts.
_CUT_BY_V2 = frozenset({
    *("Glm4ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM",
})  # fmt: skip

#: TabbyAPI's cache and its pieces of prompts are multiples of this many tokens.
_TOKENS = 256

#: Bits of keys and values; 32 elements share a scale of 16 bits.
_CACHES_V3 = {
    "fp16": CacheKind(name="FP16", sixteenths=32),
    "fp8": CacheKind(name="8,8", sixteenths=17),
    "q8": CacheKind(name="8,8", sixteenths=17),
    "q6": CacheKind(name="6,6", sixteenths=13),
    "q4": CacheKind(name="4,4", sixteenths=9),
}

_CACHES_V2 = {
    "fp16": CacheKind(name="ExLlamaV2Cache", sixteenths=32),
    "fp8": CacheKind(name="ExLlamaV2Cache_8bit", sixteenths=16),
    "q8": CacheKind(name="ExLlamaV2Cache_Q8", sixteenths=17),
    "q6": CacheKind(name="ExLlamaV2Cache_Q6", sixteenths=13),
    "q4": CacheKind(name="ExLlamaV2Cache_Q4", sixteenths=9),
}

#: What ExLlamaV2's units of the intermediate size are.
_INTERMEDIATE_UNIT = 128


def _gpu_split(plan: Facts, *, whole: bool = False) -> str:
    """Return GiB for each device, without the overhead, which neither engine counts.

    Args:
        plan: the plan.
        whole: give all of the budgets, where they are limits; else what the plan uses of them, for its proportions.
    """
    sizes = [entry.used_bytes - entry.overhead_bytes for entry in plan.memory]
    if whole:  # rounded down
        sizes = [size + max(0, entry.free_bytes - GIB // 100) for size, entry in zip(sizes, plan.memory, strict=True)]
    return ", ".join(map(gibibytes, sizes))


def _config_yml(plan: Facts) -> tuple[TextFile, ...]:
    request = plan.request
    cuts = plan.model.architecture in _CUT_BY_V3 and plan.count > 1
    text = f"""\
model:
  model_name: {MODEL}
  max_seq_len: {request.sequence_tokens}
  cache_size: {_cache_size(plan)}
  cache_mode: {_CACHES_V3[request.cache.kind].name}
  tensor_parallel: {str(cuts).lower()}
  gpu_split_auto: false
  gpu_split: [{_gpu_split(plan, whole=not cuts)}]
  chunk_size: {round_up(_TOKENS, request.max_rows)}
  max_batch_size: {request.batch}
"""
    return (TextFile("config.yml", text),)


def _cache_size(plan: Facts) -> int:
    return round_up(_TOKENS, plan.request.cache.tokens)


def _refused_v3(plan: Facts) -> Iterator[str]:
    architecture = plan.model.architecture
    if architecture not in _CUT_BY_V3 | _LAYERS_IN_V3:
        yield f"it does not know {architecture}"
        return
    kind = _CACHES_V3[plan.request.cache.kind]
    if architecture in _LAYERS_IN_V3:
        yield from Layers.but_embedding(plan, kind.sixteenths).obstacles()
        return
    caches = plan.cache_bytes(kind.sixteenths)
    held = [entry.weights_bytes + cache for entry, cache in zip(plan.memory, caches, strict=True)]
    yield from plan.overfull(held, kind.name)


def _differs_v3(plan: Facts) -> Iterator[str]:
    architecture = plan.model.architecture
    if architecture in _LAYERS_IN_V3:
        yield f"it does not cut {architecture}: whole layers go to one device after the other, and wait for each other"
    else:
        yield "it cuts each matrix by what is then left of gpu_split, in whole KV heads and in units of its own"
        if plan.cuts(Axis.EXPERT_INTERMEDIATE):
            yield "it gives whole experts to devices instead of a part of each"
    yield "weights in its own format, EXL3, have other bytes than the plan's, unless it was made for them"
    if _cache_size(plan) != plan.request.cache.tokens:
        yield f"the cache has {counted(_cache_size(plan), 'token')} instead of {plan.request.cache.tokens}"


V3 = Engine(
    name=EngineName.EXLLAMAV3,
    aliases=("tabbyapi",),
    version="ExLlamaV3 1.4.1 and TabbyAPI at e632af4",
    command=("python", "main.py"),
    flags={},
    caches=_CACHES_V3,
    files=_config_yml,
    refused=_refused_v3,
    no_gguf="which it does not read; its own format is EXL3",
    differs=_differs_v3,
    draft=models_only(f"draft_model_name: {DRAFT} under draft_model:"),
    mtp="draft_mode: mtp under draft_model: (it knows those of DeepSeek-V4, HY-V3 and Qwen3.5)",
)


def _v2_split(plan: Facts) -> str:
    """Return the budgets if they are what the plan was cut by, as ExLlamaV2 cuts, else what is used of them."""
    if plan.request.strategy == "exllamav2":
        return ", ".join(f"{device.budget_bytes / GIB:.9g}" for device in plan.devices)
    return _gpu_split(plan)


def _load_py(plan: Facts) -> tuple[TextFile, ...]:
    request, base = plan.request, _CACHES_V2[plan.request.cache.kind].name
    classes = dict.fromkeys(("ExLlamaV2", base, "ExLlamaV2Cache_TP", "ExLlamaV2Config"))
    text = f"""\
from exllamav2 import {", ".join(classes)}

config = ExLlamaV2Config("{MODEL}")
config.arch_compat_overrides()
config.max_seq_len = {request.sequence_tokens}
config.max_batch_size = {request.batch}
config.max_input_len = {request.max_rows}
config.no_graphs = True
model = ExLlamaV2(config)
model.load_tp(
    gpu_split=[{_v2_split(plan)}],
    expect_cache_tokens={request.cache.tokens},
    expect_cache_base={base},
)
cache = ExLlamaV2Cache_TP(model, base={base}, max_seq_len={request.cache.tokens})
"""
    return (TextFile("load.py", text),)


def _refused_v2(plan: Facts) -> Iterator[str]:
    architecture = plan.model.architecture
    if architecture not in _CUT_BY_V2:
        yield f"its load_tp does not know {architecture}"
    for split in plan.cuts(Axis.INTERMEDIATE):
        if split.size % _INTERMEDIATE_UNIT:
            yield f"the intermediate size {split.size} is no multiple of its units of {_INTERMEDIATE_UNIT}"


def _differs_v2(plan: Facts) -> Iterator[str]:
    for total, planned in plan.kv_heads():
        given = kv_heads_v2(total, plan)
        if given != planned:
            copies = " copies" if sum(planned) > total else ""
            yield f"the devices get {listed(given)} KV heads instead of {listed(planned)}{copies}"
    if plan.request.strategy != "exllamav2":
        yield "it cuts the rest by what cache and attention leave of gpu_split; --strategy exllamav2 plans as it does"
    yield "it holds nothing against gpu_split once it has cut"
    yield "the embedding stays in the host's memory; weights in its own format, EXL2, have other bytes than the plan's"


def kv_heads_v2(heads: int, plan: Facts) -> tuple[int, ...]:
    """Return the KV heads that ExLlamaV2 gives to each device."""
    budgets: Sequence[float] = [float(size) for size in _v2_split(plan).split(", ")]
    return tuple(integer_split(heads, budgets))


V2 = Engine(
    name=EngineName.EXLLAMAV2,
    version="ExLlamaV2 0.3.2",
    command=("python", "load.py"),
    flags={},
    caches=_CACHES_V2,
    files=_load_py,
    refused=_refused_v2,
    no_gguf="which it does not read; its own format is EXL2",
    differs=_differs_v2,
    draft=models_only("draft_model=… and draft_cache=… to its generator"),
)
