"""What a GGUF file's metadata says of its model, in a config.json's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tpplan.errors import ModelError
from tpplan.models.config import Config, names_of
from tpplan.models.families.contexts import ORIGINAL
from tpplan.models.gguf.architectures import FLAGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.gguf.architectures import Architecture
    from tpplan.models.gguf.header import Gguf, Value

#: Layers of the largest model, whose scores llama.cpp scales by hidden size over heads, and the others' by head size.
_SCALED: Final = {"gemma2": 46, "gemma3_text": 62}
#: The base of RoPE that llama.cpp takes where a file says none.
_THETA: Final = 1e4
#: Keys of a scaled RoPE behind ``rope.scaling.``, by the config's.
_SCALING: Final = {
    "factor": ("factor",),
    ORIGINAL: ("original_context_length",),
    "attention_factor": ("yarn_attn_factor", "attn_factor"),
    "beta_fast": ("yarn_beta_fast",),
    "beta_slow": ("yarn_beta_slow",),
}
#: DeepSeek's weight of YaRN's attention factor is stored as a tenth.
_TENTHS: Final = 10
_AGAIN: Final = "convert the model again with llama.cpp's tools"


def config_of(file: Gguf, architecture: Architecture, source: str) -> Config:
    """Return the config.json that a file's metadata stands for.

    Raises:
        ModelError: a key is missing, or differs between layers.
    """
    prefix = str(file.metadata["general.architecture"])
    own = {key.removeprefix(f"{prefix}."): value for key, value in file.metadata.items()}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{source} has no tensor token_embd.weight", "the file is no whole language model")
    data: dict[str, Any] = {
        "model_type": architecture.model_type,
        "torch_dtype": "bfloat16",
        "rope_theta": _THETA,
        "sliding_window": None,
        **architecture.fixed,
        **{name: _value(own, key, f"{source}: {prefix}") for name, key in architecture.keys.items() if key in own},
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for flag, tensor in FLAGS.items():
        data[flag] = (tensor.removeprefix("!") in file.tensors) is not tensor.startswith("!")
    if extra := own.get("nextn_predict_layers"):
        data["num_hidden_layers"] = _without(extra, data.get("num_hidden_layers"), source)
    data |= _heads(data, own, architecture, source)
    windows, layers = own.get("attention.sliding_window_pattern"), data.get("num_hidden_layers")
    if isinstance(windows, tuple) and isinstance(layers, int):  # further layers predict
        data["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in windows[:layers]]
    data |= _scaling(own, architecture.model_type)
    return Config({names_of(key, architecture.model_type)[0]: value for key, value in data.items()}, source)


def _value(own: Mapping[str, Value], key: str, prefix: str) -> Value:
    """Return the value of a key, and of one for each layer that of all.

    Raises:
        ModelError: they differ.
    """
    value = own[key]
    if not isinstance(value, tuple):
        return value
    if len(set(value)) != 1:
        hint = "plan for the model's safetensors files, or its config.json"
        raise ModelError(f"{prefix}.{key} differs between layers, which is not supported", hint)
    return value[0]


def _heads(
    data: Mapping[str, Any], own: Mapping[str, Value], architecture: Architecture, source: str
) -> dict[str, Any]:
    """Return what is known of the heads of a model beside their numbers.

    Raises:
        ModelError: see :func:`_latent`.
    """
    if "kv_lora_rank" in architecture.keys:
        return _latent(data, own, source)
    found: dict[str, Any] = {}
    if architecture.model_type == "mixtral":
        found["head_dim"] = None
    if "rope.dimension_count" in own:
        found["rotary_dim"] = own["rope.dimension_count"]
    if architecture.model_type in _SCALED:
        heads, hidden, scalar = (data.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
        is_largest = data.get("num_hidden_layers") == _SCALED[architecture.model_type]
        if is_largest and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            scalar = hidden // heads
        found["query_pre_attn_scalar"] = scalar
    return found


def _without(extra: object, layers: object, source: str) -> int:
    """Return the layers without those that predict further tokens, which llama.cpp counts among them.

    Raises:
        ModelError: these are no numbers, or no layer is left.
    """
    if not isinstance(extra, int) or not isinstance(layers, int) or not 0 < extra < layers:
        raise ModelError(f"{source}: nextn_predict_layers is {extra!r:.40} of {layers!r:.40} layers", _AGAIN)
    return layers - extra


def _latent(data: Mapping[str, Any], own: Mapping[str, Value], source: str) -> dict[str, Any]:
    """Return the sizes of MLA's heads; newer files call those of attention over the latents key_length.

    Raises:
        ModelError: a size is missing, or a key is not larger than its rotary part.
    """
    sizes = [own.get(f"attention.{kind}_length_mla", own.get(f"attention.{kind}_length")) for kind in ("key", "value")]
    rope = data.get("qk_rope_head_dim")
    key, value = sizes
    if not isinstance(key, int) or not isinstance(rope, int) or not 0 < rope < key:
        raise ModelError(f"{source}: RoPE turns {rope!r:.40} elements of keys of {key!r:.40}", _AGAIN)
    ranks = {"q_lora_rank": data.get("q_lora_rank")}  # null without, where transformers has a default
    return {**ranks, "qk_nope_head_dim": key - rope, "v_head_dim": value, "head_dim": None}


def _scaling(own: Mapping[str, Value], model_type: str) -> dict[str, Any]:
    """Return the scaling of RoPE, as a config.json has it; empty without."""
    usual = "linear" if own.get("rope.scaling.factor") else "longrope" if "rope.scaling.attn_factor" in own else "none"
    kind = own.get("rope.scaling.type", usual)  # older files of Phi-3 have only what goes with the kind
    if kind in {"none", ""}:
        return {}
    found: dict[str, Any] = {"rope_type": kind}
    for name, keys in _SCALING.items():
        value = next((own[key] for each in keys if (key := f"rope.scaling.{each}") in own), None)
        if value is not None:
            found[name] = value
    if kind == "yarn":
        found |= _yarn(own, model_type)
    return {"rope_scaling": found}


def _yarn(own: Mapping[str, Value], model_type: str) -> dict[str, Any]:
    """Return what configs say of YaRN beside the keys that files have too."""
    if model_type == "gpt_oss":
        return {"truncate": False}  # llama.cpp rounds the ends of the ramp for all models; this one does not
    found: dict[str, Any] = {}
    weight = own.get("rope.scaling.yarn_log_multiplier")
    if isinstance(weight, float) and weight:
        found = {"mscale": 1.0, "mscale_all_dim": weight}
        if model_type.startswith("deepseek"):
            found = dict.fromkeys(found, weight * _TENTHS)
    if "attention.temperature_scale" in own:
        found["llama_4_scaling_beta"] = own["attention.temperature_scale"]
    return found
