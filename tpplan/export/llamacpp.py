"""llama.cpp: tensor mode, which cuts every matrix by one ratio, and layer mode, which gives whole layers to devices."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from tpplan.core.sizes import counted, format_bytes, listed
from tpplan.export.engine import DRAFT, MODEL, CacheKind, Engine
from tpplan.export.facts import MIB, round_up
from tpplan.export.layers import Layers
from tpplan.export.names import EngineName
from tpplan.models.families.drafts import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.export.engine import Flags
    from tpplan.export.facts import Facts

#: Architectures of tpplan's families that its converter to GGUF does not know.
UNKNOWN = frozenset({
    *("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration", "CwmForCausalLM"),
    *("FlexOlmoForCausalLM", "GPTJForCausalLM", "HeliumForCausalLM", "HyperCLOVAXForCausalLM"),
    *("InternVLForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    *("LlavaOnevisionForConditionalGeneration", "MinistralForCausalLM", "NanoChatForCausalLM", "OPTForCausalLM"),
    *("PaliGemmaForConditionalGeneration", "PhimoeForCausalLM", "VaultGemmaForCausalLM"),
    "VipLlavaForConditionalGeneration",
})  # fmt: skip

#: Those that it runs in layer mode only.
LAYERS_ONLY = frozenset({
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("KimiK25ForConditionalGeneration", "MiniMaxM2ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    "OlmoeForCausalLM",
})  # fmt: skip

#: Ratios that ``--tensor-split`` takes: one less than its table of devices has.
MOST_DEVICES = 15

#: A sequence's part of the cache is a multiple of this many tokens.
_TOKENS = 256

#: Whole blocks of 32 elements with a scale of 16 bits; Q5_1 has a minimum too.
_CACHES = {
    "fp16": CacheKind(name="f16", sixteenths=32),
    "fp8": CacheKind(name="q8_0", sixteenths=17),
    "q8": CacheKind(name="q8_0", sixteenths=17),
    "q6": CacheKind(name="q5_1", sixteenths=12),
    "q4": CacheKind(name="q4_0", sixteenths=9),
}

_VERSION = "llama.cpp at 0c1e57098 (that of llama-cpp-python 0.3.36)"


def _flags(mode: str, ratio: Callable[[Facts], tuple[int, ...]]) -> Flags:
    return {
        "--split-mode": lambda plan: mode if plan.count > 1 else "none",
        "--tensor-split": lambda plan: ",".join(map(str, ratio(plan))) if plan.count > 1 else None,
        "--n-gpu-layers": lambda _: "all",
        "--fit": lambda _: "off",
        "--flash-attn": lambda _: "on",
        "--ctx-size": _cells,
        "--parallel": lambda plan: plan.request.batch,
        "--kv-unified": lambda plan: bool(plan.request.context) or None,
        "--kv-unified-per-slot": lambda plan: plan.request.context or None,
        "--swa-full": lambda plan: plan.request.full_window or None,
        "--cache-type-k": lambda plan: _kind(plan).name,
        "--cache-type-v": lambda plan: _kind(plan).name,
        "--batch-size": lambda plan: plan.request.max_rows,
        "--ubatch-size": lambda plan: plan.request.max_rows,
    }


def _cells(plan: Facts) -> int:
    """Return the tokens of the cache, of which each sequence gets an equal part, rounded up."""
    request = plan.request
    if request.context:
        return round_up(_TOKENS, request.cache.tokens)
    return round_up(_TOKENS, request.sequence_tokens) * request.batch


def _kind(plan: Facts) -> CacheKind:
    return _CACHES[plan.request.cache.kind]


def _refused(plan: Facts) -> Iterator[str]:
    if plan.model.architecture in UNKNOWN and not plan.is_gguf:
        yield f"its converter to GGUF does not know {plan.model.architecture}"
    if plan.count > MOST_DEVICES:
        yield f"--tensor-split takes at most {MOST_DEVICES} devices, and the plan has {plan.count}"


def _refused_tensor(plan: Facts) -> Iterator[str]:
    yield from _refused(plan)
    if plan.model.architecture in LAYERS_ONLY:
        yield f"its tensor mode does not know {plan.model.architecture}; --for llama.cpp-layer does"
    held = sum(entry.weights_bytes for entry in plan.memory) + sum(plan.cache_bytes(_kind(plan).sixteenths))
    parts = [held * part // sum(plan.ratio) - MIB for part in plan.ratio]  # less what rounding the ratio may add
    yield from plan.overfull(parts, _kind(plan).name)


def _differs(plan: Facts) -> Iterator[str]:
    if plan.is_gguf:
        yield f"{MODEL}.gguf is the file that was planned, in {plan.model.weight_format}; of several, the first"
    else:
        yield (
            f"{MODEL}.gguf is a file that its convert_hf_to_gguf.py makes of the model, with bytes of its own, which "
            "are cut by the same ratio; a plan of that file has them exactly"
        )
    yield "the embedding of the tokens stays in the host's memory"
    if _cells(plan) != plan.request.cache.tokens:
        yield f"the cache has {_cells(plan)} tokens instead of {plan.request.cache.tokens}, in multiples of {_TOKENS}"


def _differs_tensor(plan: Facts) -> Iterator[str]:
    if plan.count > 1:
        yield "one ratio cuts weights and cache alike: their sum on each device in MiB, which stays as planned"
        yield from _most_moved(plan)
        for total, planned in plan.kv_heads():
            heads = dict.fromkeys(rotated_heads(total, plan.ratio))
            if {planned} != {*heads}:
                ways = " or ".join(f"({', '.join(map(str, parts))})" for parts in heads)
                copies = " copies" if sum(planned) > total else ""
                yield (
                    f"it rounds KV heads, and every layer begins at the next device: {ways}; "
                    f"the plan has {planned}{copies}"
                )
        yield "tensor mode is experimental; it cuts in blocks of the file's format, which may be wider than a head"
    yield from _differs(plan)
    if plan.request.cache.kind != "fp16" and plan.count > 1:
        yield (
            "its docs/multi-gpu.md says that tensor mode refuses a quantised cache, which the source does not; "
            f"f16 takes {format_bytes(sum(plan.cache_bytes(32)))} in all"
        )


def _most_moved(plan: Facts) -> Iterator[str]:
    """Yield the device whose cache differs the most from the plan's, if it differs by a twentieth of all."""
    whole, caches = sum(plan.ratio), [entry.cache_bytes for entry in plan.memory]
    given = [sum(caches) * part // whole for part in plan.ratio]
    most = max(range(plan.count), key=lambda i: abs(given[i] - caches[i]))
    if 20 * abs(given[most] - caches[most]) > sum(caches):
        sizes = f"{format_bytes(given[most])} of the cache instead of {format_bytes(caches[most])}"
        yield f"{plan.name(most)} gets about {sizes}, and as much less or more of the weights"


def rotated_heads(heads: int, ratio: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how many KV heads each device gets in layers 0, 1, …: all ends but the last one are rounded down."""
    count, whole = len(ratio), sum(ratio)
    for first in range(count):
        order = [(first + i) % count for i in range(count)]
        ends = [heads * end // whole for end in accumulate(ratio[i] for i in order)]
        parts = [0] * count
        for i, end, start in zip(order, ends, (0, *ends), strict=False):
            parts[i] = end - start
        yield tuple(parts)


def _layers(plan: Facts) -> Layers:
    """Return how layers go to the devices; the last one gets the output matrix, and the host the embedding."""
    return Layers.but_embedding(plan, _kind(plan).sixteenths)


def _layer_ratio(plan: Facts) -> tuple[int, ...]:
    """Return the layers of each device; what is behind them counts as one more, of the last device."""
    *others, last = _layers(plan).counts
    return (*others, last + 1)


def _refused_layer(plan: Facts) -> Iterator[str]:
    yield from _refused(plan)
    yield from _layers(plan).obstacles()


def _differs_layer(plan: Facts) -> Iterator[str]:
    if plan.count > 1:
        yield "it cuts no matrix: a token goes through whole layers on one device after the other, which wait for it"
        yield (
            f"the devices get {listed(_layers(plan).counts)} of {counted(plan.model.layers, 'layer')}, each with "
            "its cache; --tensor-split counts what is behind the last layer as one more"
        )
    yield from _differs(plan)


def _draft(kind: str) -> str:
    words = f"--model-draft {DRAFT}.gguf --gpu-layers-draft all"
    if not kind:
        return words
    return KINDS[kind].llamacpp and f"{words} --spec-type {KINDS[kind].llamacpp}"


_COMMAND = ("llama-server", "--model", f"{MODEL}.gguf")

TENSOR = Engine(
    name=EngineName.LLAMACPP,
    version=_VERSION,
    command=_COMMAND,
    flags=_flags("tensor", lambda plan: plan.ratio),
    caches=_CACHES,
    refused=_refused_tensor,
    differs=_differs_tensor,
    draft=_draft,
    mtp="--spec-type draft-mtp",
)

LAYER = Engine(
    name=EngineName.LLAMACPP_LAYER,
    version=_VERSION,
    command=_COMMAND,
    flags=_flags("layer", _layer_ratio),
    caches=_CACHES,
    refused=_refused_layer,
    differs=_differs_layer,
    draft=_draft,
    mtp="--spec-type draft-mtp",
)
