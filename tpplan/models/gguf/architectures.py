"""The architectures of GGUF files: what their metadata says in a config.json's words, and how tensors are named.

Sources: llama.cpp's gguf-py (constants.py and tensor_mapping.py) for keys and names, transformers for the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tpplan.errors import ModelError
from tpplan.models.config import Config

if TYPE_CHECKING:
    from tpplan.models.gguf.header import Gguf

#: Keys behind the architecture's name, by the config's.
_KEYS: Final = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_EXPERTS: Final = {"num_experts_per_tok": "expert_used_count"}
_MANY: Final = {**_EXPERTS, "num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_ROUTED_KEYS: Final = {
    **_EXPERTS,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
}
_CAPS: Final = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_FACTORS: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_WINDOW: Final = {"sliding_window": "attention.sliding_window"}

#: Names of modules in a layer, behind ``model.layers.N.``, and in a GGUF file, behind ``blk.N.``.
_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HEAD_NORMS: Final = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_POST_NORMS: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}
_ROUTED: Final = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{expert}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{expert}.up_proj": "ffn_up_exps",
    "mlp.experts.{expert}.down_proj": "ffn_down_exps",
}
_SHARED: Final = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_CORRECTED: Final = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_MIXTRAL: Final = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{expert}.w1": "ffn_gate_exps",
    "mlp.experts.{expert}.w3": "ffn_up_exps",
    "mlp.experts.{expert}.w2": "ffn_down_exps",
}
_OUTSIDE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER: Final = re.compile(r"model\.layers\.\{layer\}\.(.*)\.(weight|bias)")
#: A bias that files have as one of a module, behind the start of all names in a layer.
_CORRECTION: Final = "model.layers.{layer}.mlp.gate.e_score_correction_bias"


#: Files name no dtype of the activations. Those of these models fit into float16, which rounds an eighth as much.
_HALF: Final = {"torch_dtype": "float16"}


@frozen
class Architecture:
    """One architecture of GGUF files.

    Attributes:
        model_type: transformers' name for it.
        keys: the config's keys, and those of the metadata behind the architecture's name.
        names: modules of a layer in transformers and in the file.
        permuted: whether llama.cpp reorders the rows of query and key matrices for its kind of RoPE.
        fixed: further values of the config.
        shifted: whether llama.cpp adds 1 to the weights of norms, which Gemma's checkpoints store less 1.
    """

    model_type: str
    keys: Mapping[str, str]
    names: Mapping[str, str]
    permuted: bool = False
    fixed: Mapping[str, Any] = {}
    shifted: bool = False


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", _KEYS, _LAYER, permuted=True, fixed=_HALF),
    "qwen2": Architecture("qwen2", _KEYS, _LAYER),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_KEYS, **_MANY, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        {**_LAYER, **_ROUTED, **_SHARED},
    ),
    "qwen3": Architecture("qwen3", _KEYS, {**_LAYER, **_HEAD_NORMS}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_KEYS, **_MANY},
        {**_LAYER, **_HEAD_NORMS, **_ROUTED},
        fixed={"norm_topk_prob": True},  # as llama.cpp computes it
    ),
    "gemma": Architecture("gemma", _KEYS, _LAYER, shifted=True),
    "gemma2": Architecture("gemma2", {**_KEYS, **_WINDOW, **_CAPS}, {**_LAYER, **_POST_NORMS}, shifted=True),
    "gemma3": Architecture(
        "gemma3_text",
        {**_KEYS, **_WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
        {**_LAYER, **_POST_NORMS, **_HEAD_NORMS},
        shifted=True,
    ),
    "phi3": Architecture(
        "phi3",
        {**_KEYS, **_WINDOW},
        {**_LAYER, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    ),
    "olmo2": Architecture("olmo2", _KEYS, {**_LAYER, **_HEAD_NORMS, **_POST_NORMS}),
    "granite": Architecture("granite", {**_KEYS, **_FACTORS}, _LAYER, permuted=True),
    "smollm3": Architecture("smollm3", _KEYS, _LAYER, permuted=True),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        _KEYS,
        {**_LAYER, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ),
    "seed_oss": Architecture("seed_oss", _KEYS, {**_LAYER, "post_attention_layernorm": "post_attention_norm"}),
    "ernie4_5": Architecture("ernie4_5", _KEYS, _LAYER),
    "glm4": Architecture(
        "glm4",
        _KEYS,
        {
            **_LAYER,
            "mlp.gate_up_proj": "ffn_up",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {**_KEYS, **_ROUTED_KEYS},
        {**_LAYER, **_HEAD_NORMS, **_ROUTED, **_CORRECTED, "post_attention_layernorm": "post_attention_norm"},
    ),
    "dots1": Architecture("dots1", {**_KEYS, **_ROUTED_KEYS}, {**_LAYER, **_HEAD_NORMS, **_ROUTED, **_CORRECTED}),
    "mixtral": Architecture(
        "mixtral",
        {**_KEYS, **_EXPERTS, "num_local_experts": "expert_count"},
        {**_LAYER, **_MIXTRAL},
        permuted=True,
    ),
}


#: Layers of the largest model, whose scores llama.cpp scales by hidden size over heads, and the others' by head size.
_SCALED: Final = {"gemma2": 46, "gemma3_text": 62}


_AGAIN: Final = "convert the model again with llama.cpp's tools"


def architecture_of(file: Gguf, source: str) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ModelError: it is none of :data:`ARCHITECTURES`, or no language model.
    """
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        name = "mixtral"  # llama.cpp calls both llama
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name == "clip":
        raise ModelError(f"{source} is the vision part of a model (mmproj)", "name the model's own file")
    what = f"has the architecture {name[:40]!r}" if isinstance(name, str) else "names no architecture"
    known = ", ".join(each for each in ARCHITECTURES if each != "mixtral")
    raise ModelError(f"{source} {what}, which tpplan does not read from GGUF", f"it reads {known}")


def config_of(file: Gguf, architecture: Architecture, source: str) -> Config:
    """Return the config.json that a file's metadata stands for.

    Raises:
        ModelError: a key is missing, or differs between layers.
    """
    prefix = str(file.metadata["general.architecture"])
    data: dict[str, Any] = {"model_type": architecture.model_type, "torch_dtype": "bfloat16", **architecture.fixed}
    for name, key in architecture.keys.items():
        value = file.metadata.get(f"{prefix}.{key}")
        if isinstance(value, tuple):
            if len(set(value)) != 1:
                message = f"{source}: {prefix}.{key} differs between layers, which is not supported"
                raise ModelError(message, "plan for the model's safetensors files, or its config.json")
            value = value[0]
        if value is not None:
            data[name] = value
    if architecture.model_type == "mixtral":
        data.pop("head_dim", None)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{source} has no tensor token_embd.weight", "the file is no whole language model")
    data["vocab_size"] = embedding.shape[0]
    data["tie_word_embeddings"] = "output.weight" not in file.tensors
    if architecture.model_type in _SCALED:
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        is_largest = data.get("num_hidden_layers") == _SCALED[architecture.model_type]
        data["query_pre_attn_scalar"] = hidden // heads if is_largest and heads and hidden else data.get("head_dim")
    if extra := file.metadata.get(f"{prefix}.nextn_predict_layers"):
        data["num_hidden_layers"] = _without(extra, data.get("num_hidden_layers"), source)
    data["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    data["attention_out_bias"] = "blk.0.attn_output.bias" in file.tensors
    data["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    scaling = file.metadata.get(f"{prefix}.rope.scaling.type")
    if isinstance(scaling, str) and scaling not in {"none", ""}:
        data["rope_scaling"] = _scaling(file, prefix, scaling)
    return Config(data, source)


def _without(extra: object, layers: object, source: str) -> int:
    """Return the layers without those that predict further tokens, which llama.cpp counts among them.

    Raises:
        ModelError: these are no numbers, or no layer is left.
    """
    if not isinstance(extra, int) or not isinstance(layers, int) or not 0 < extra < layers:
        raise ModelError(f"{source}: nextn_predict_layers is {extra!r:.40} of {layers!r:.40} layers", _AGAIN)
    return layers - extra


def _scaling(file: Gguf, prefix: str, kind: str) -> dict[str, Any]:
    """Return the scaling of RoPE, as a config.json has it; the context in the file is the scaled one."""
    found: dict[str, Any] = {"rope_type": kind}
    for name, key in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
        value = file.metadata.get(f"{prefix}.rope.scaling.{key}")
        if value is not None:
            found[name] = value
    return found


def name_of(name: str, architecture: Architecture) -> str:
    """Return the name in a GGUF file of a parameter, with ``{layer}`` in it; empty if it has none."""
    if name == _CORRECTION:
        return "blk.{layer}.exp_probs_b.bias"
    if match := _IN_LAYER.fullmatch(name):
        module = architecture.names.get(match[1], "")
        return f"blk.{{layer}}.{module}.{match[2]}" if module else ""
    module, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[module]}.{kind}" if module in _OUTSIDE else ""
