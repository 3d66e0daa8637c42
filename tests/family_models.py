"""What the tests of the families share: specs from dicts, and transformers' models without weights."""

from __future__ import annotations

import importlib
import json
import re
from fnmatch import fnmatch
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.family_configs import REMOTE
from tests.later import transformers
from tests.published import EXAMPLES
from tpplan.core.axes import Axis
from tpplan.models import families
from tpplan.models.config import Config, read_config
from tpplan.models.families.wrappers import VISION, WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from tpplan.core.model import Block, ModelSpec, Parameter

MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
}


#: Sizes of Qwen4's indexer, which its class does not have.
QSA = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
QSA |= {"indexer_budget": 2048, "indexer_compress_ratio": 64}

#: What DeepSeek-OCR's class does not have either.
DEEPSEEK_OCR = {"mlp_layer_types": ["dense", *["sparse"] * 31], "num_experts_per_tok": 6}

#: Keys without which transformers itself cannot build or run a model of the family's default config.
INCOMPLETE_DEFAULTS: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 48},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "step3p5": {"sliding_window": 512},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "bamba": {"attn_layer_indices": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "qwen4_exp_text": QSA,
    "qwen4_exp": {"text_config": QSA},
    "deepseek_ocr2_text": DEEPSEEK_OCR,
    "deepseek_ocr2": {"text_config": DEEPSEEK_OCR},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 8}},
    "granite4_vision": {"deepstack_layer_map": [[0, 1]], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "fun_asr_nano": {"text_config": {"model_type": "qwen3", "hidden_size": 1024}},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 4}}},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {"enable_audio_output": False, "thinker_config": {"text_config": {"head_dim": 128}}},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
}

#: What transformers calls a family that the hub knows by another name.
SAME = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "stablelm_epoch": "stablelm"}

#: Language models that are models of their own on the hub, but in transformers only part of another one.
ONLY_IN_WRAPPERS = {"step3p5": "step3p7"}
#: The smallest part that reads images of that.
VISION_OF_STEP = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}

#: Models that transformers lacks: their own code is on the hub.
NOT_IN_TRANSFORMERS = {
    *("nemotron-nas", "qwen", "internlm2", "baichuan", "chatglm", "bailing_moe"),
    *("aquila", "deepseek", "exaone", "internlm", "minicpm", "orion", "solar", "telechat3", "xverse"),
    *("minimax_text_01", "minimax_m1", "phi4mm", "telechat", "TeleFLM"),
    *REMOTE,
}

#: Embeddings that no plan counts.
NGRAMS = "*.ngram_embedding.*"

#: Models whose part that reads images needs a library of its own in transformers.
WITHOUT_TIMM = {"gemma3n", "fast_vlm", "perception_lm"}

#: Models that transformers saves in another form than they have on the hub.
UNLIKE_HUB = {"kimi_k25", "qianfan_ocr", "qwen3_vl_moe"}

#: And those of which it saves some tensors under names of others.
MISNAMED = {"kimi_linear", "longcat_flash", "molmo2", "olmo_hybrid"}


def spec_of(data: dict[str, Any], name: str = "model") -> ModelSpec:
    """Return the spec of a config that went through JSON like a file."""
    return families.spec_from_config(Config(json.loads(json.dumps(data)), "config.json"), name)


def hub_config(data: dict[str, Any]) -> Any:
    """Return transformers' config of the same data."""
    return transformers.AutoConfig.for_model(**data | {"model_type": SAME.get(data["model_type"], data["model_type"])})


def build(config: Any, **options: Any) -> Any:
    """Build transformers' model of a config, with what reads images if the config has that."""
    if config.model_type in WITHOUT_TIMM:
        return _without_timm(config, **options)
    if config.model_type in ONLY_IN_WRAPPERS:
        whole = {"model_type": ONLY_IN_WRAPPERS[config.model_type], "tie_word_embeddings": config.tie_word_embeddings}
        config = hub_config({**whole, "vision_config": dict(VISION_OF_STEP), "text_config": config.to_dict()})
    if config.model_type == "mistral4":  # which AutoModelForCausalLM does not know
        return transformers.Mistral4ForCausalLM._from_config(config, **options)
    if config.model_type in WRAPPERS:
        return class_of(config.model_type)._from_config(config, **options)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def class_of(model_type: str) -> Any:
    """Return transformers' class of a model around a language model."""
    return getattr(transformers, WRAPPERS[model_type].architectures[0])


def _without_timm(config: Any, **options: Any) -> Any:
    """Build a model with something else in place of what reads images, which needs a library of its own."""
    import torch  # noqa: PLC0415 (where it is not installed, the tests without models run)

    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    real = module.AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        is_timm = config.model_type in {"gemma3n_vision", "timm_wrapper"}
        return torch.nn.Linear(1, 1) if is_timm else real(config, **options)

    with patch.object(module, "AutoModel", SimpleNamespace(from_config=from_config)):
        return class_of(config.model_type)._from_config(config, **options)


def meta_model(config: Any) -> Any:
    """Build the model without its weights."""
    import torch  # noqa: PLC0415 (where it is not installed, the tests without models run)

    with torch.device("meta"):
        return build(config)


def cached_windows(config: Any) -> dict[int, int]:
    """Return the sliding window of each layer that attends to cached keys and values in transformers, 0 without one."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    windows = {}
    layers = transformers.DynamicCache(config=config).layers
    if config.model_type == "longcat_flash":  # two of each layer
        layers = layers[::2]
    for i, layer in enumerate(layers):
        if isinstance(layer, transformers.cache_utils.DynamicLayer):
            windows[i] = getattr(layer, "sliding_window", 0)
        elif isinstance(layer, transformers.cache_utils.DummyLayer) and kinds[i] not in {"mlp", "moe"}:
            windows[i] = config.sliding_window if kinds[i] == "sliding_attention" else 0  # reads another layer's cache
    return windows


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the text model's tensors as ``save_pretrained`` writes them: hub names, experts apart, tied ones once."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    state = {name: tensor for name, tensor in model.state_dict().items() if name in own}
    if model.config.model_type == "olmo_hybrid":
        return _olmo_hybrid(model.config, state)
    tensors: dict[str, torch.Tensor] = transformers.core_model_loading.revert_weight_conversion(model, state)
    wrapper = WRAPPERS.get(model.config.model_type)
    if model.config.model_type == "longcat_flash":  # has gate and up projections of experts that do nothing
        routed = model.config.n_routed_experts
        idle = re.compile(r"experts\.(\d+)\.")
        return {n: t for n, t in tensors.items() if not ((found := idle.search(n)) and int(found[1]) >= routed)}
    if model.config.model_type == "kimi_linear":  # writes layers without experts as those with them
        return {re.sub(r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.", name): t for name, t in tensors.items()}
    if wrapper is None:
        ignored = families.tolerated(model.config.model_type).ignored
        return {name: tensor for name, tensor in tensors.items() if not any(fnmatch(name, p) for p in ignored)}
    text = {name: tensor for name, tensor in tensors.items() if not any(fnmatch(name, p) for p in (*VISION, NGRAMS))}
    if model.config.model_type == "molmo2":  # writes the rows of both vocabularies in equal parts
        _apart(text, model.config.get_text_config().vocab_size)
    if model.config.model_type == "qwen3_vl_moe":  # reads experts as [expert, in, out] too, which the hub has
        text = {name: tensor.mT if ".experts." in name else tensor for name, tensor in text.items()}
    # Layers of what reads images have another name in transformers, which then writes its layers of text as such too.
    blocks = re.compile(r"(?<=^language_model\.model\.)(?:blocks|encoder\.layers)\.")
    return {blocks.sub("layers.", renamed(name, wrapper.renamed)): tensor for name, tensor in text.items()}


def _apart(tensors: dict[str, torch.Tensor], rows: int) -> None:
    """Take the rows of the text's own vocabulary apart from the others, as the hub has them."""
    import torch  # noqa: PLC0415 (where it is not installed, the tests without models run)

    names = [f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")]
    both = torch.cat([tensors[name] for name in names])
    tensors.update(zip(names, (both[:rows], both[rows:]), strict=True))


def _olmo_hybrid(config: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as the hub has them; transformers saves convolutions in equal parts, and names of other layers."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("linear_attn.conv1d.weight"):
            parts = tensor[:keys], tensor[keys : 2 * keys], tensor[2 * keys :]
            tensors |= {name.replace("conv1d", f"{of}_conv1d"): part for of, part in zip("qkv", parts, strict=True)}
            continue
        own = name
        if "layers." in name and config.layer_types[int(name.split("layers.")[1].split(".")[0])] == "linear_attention":
            own = name.replace("input_layernorm", "attention_layer_norm")
            own = own.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[own] = tensor
    return tensors


def save_model(model: Any, directory: Path, shard: str | int) -> None:
    """Save a model as the hub has it, in files of at most this size."""
    if model.config.model_type not in UNLIKE_HUB | MISNAMED:
        model.save_pretrained(directory, max_shard_size=shard)
        return
    from safetensors.torch import save_file  # noqa: PLC0415 (no stubs)

    model.config.save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in saved_tensors(model).items()}
    save_file(tensors, directory / "model.safetensors")


def renamed(name: str, starts: Mapping[str, str]) -> str:
    """Return a name with its start replaced, if it is one of ``starts``."""
    return next((new + name.removeprefix(old) for old, new in starts.items() if name.startswith(old)), name)


def named(spec: ModelSpec) -> Iterator[tuple[str, Parameter, Block | None]]:
    """Yield every tensor of a spec by its full name."""
    for parameter in spec.parameters:
        yield parameter.name, parameter, None
    for block in spec.blocks:
        for layer in block.layers:
            for parameter in block.parameters:
                for expert in range(parameter.copies):
                    name = parameter.name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                    yield name, parameter, block


def parameters_of(spec: ModelSpec) -> list[Parameter]:
    """Return the parameters of a spec, those of equal layers once."""
    return [*spec.parameters, *(parameter for block in spec.blocks for parameter in block.parameters)]


def assert_same_tensors(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Compare names, shapes and counts."""
    assert {name: parameter.shape for name, parameter, _ in named(spec)} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert spec.parameter_count == sum(tensor.numel() for tensor in tensors.values())


def assert_consistent(spec: ModelSpec) -> None:
    """Check what holds for every spec: layers once each, and cuts in equal parts for equal parts of their axis."""
    layers = sorted(layer for block in spec.blocks for layer in block.layers)
    assert layers == list(range(spec.layer_count))
    assert [block.layers[0] for block in spec.blocks] == sorted(block.layers[0] for block in spec.blocks)
    assert len({(b.attention, b.parameters, b.intermediate) for b in spec.blocks}) == len(spec.blocks)
    outer = {Axis.RESIDUAL: spec.hidden_size, Axis.VOCAB: spec.vocab_size}
    for block, parameters in [(None, spec.parameters), *((block, block.parameters) for block in spec.blocks)]:
        sizes = {**outer, **(dict(block.sizes()) if block else {})}
        for parameter in parameters:
            segments = [segment for dim in parameter.dims for segment in dim]
            assert all(s.length > 0 for s in segments), parameter
            assert all(
                s.axis is None
                or s.length % (s.shared or sizes[s.axis]) == 0
                or (s.axis is Axis.RESIDUAL and sizes[s.axis] % s.length == 0)  # a latent, which is narrower
                for s in segments
            ), parameter
            assert all(s.axis and sizes[s.axis] % s.shared == 0 for s in segments if s.shared), parameter
            assert (parameter.out is None) == all(s.axis is None for s in segments), parameter
            assert parameter.home is None or parameter.home in sizes, parameter


@cache
def example(name: str) -> ModelSpec:
    """Read one of the examples' configs."""
    return families.spec_from_config(read_config(EXAMPLES / name), name)
