"""The architectures of GGUF files: the config.json's words for keys of their metadata, and how tensors are named.

Sources: llama.cpp's gguf-py (constants.py and tensor_mapping.py) for keys and names, its convert_hf_to_gguf.py for what
it stores otherwise than transformers does, transformers for the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from tpplan.core.axes import Axis
from tpplan.errors import ModelError
from tpplan.models.families import FAMILIES
from tpplan.models.families.rows import ALWAYS, gated, linear, norm
from tpplan.models.families.sparse import SHARED
from tpplan.models.families.table import Family, Row

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
_EXPERTS: Final = {"num_experts_per_tok": "expert_used_count", "num_experts": "expert_count"}
_MANY: Final = {**_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}
_SHARED_COUNT: Final = {
    **_MANY,
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
_MLA: Final = {
    **_KEYS,
    **_SHARED_COUNT,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_CAPS: Final = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_FACTORS: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_EPSILON: Final = "attention.layer_norm_epsilon"
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
_LAYER_NORMS: Final = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
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


def _shared(name: str) -> dict[str, str]:
    """Return the names of the matrices of the experts that all tokens share."""
    return {f"{name}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}


_MIXTRAL: Final = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
    "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
}
_LATENT: Final = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
#: Further modules of a prediction layer, which is a block behind the model's.
PREDICTION_NAMES: Final = {
    **{name: f"nextn.{name}" for name in ("enorm", "hnorm", "eh_proj")},
    "shared_head.norm": "nextn.shared_head_norm",
}
_OUTSIDE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER: Final = re.compile(r"model\.layers\.\{layer\}\.(.*)\.(weight|bias)")
#: Tensors without a kind in their names, by the ends of those, and what they are called behind ``blk.N.``.
_WITHOUT_KIND: Final = {"e_score_correction_bias": "exp_probs_b.bias", "self_attn.sinks": "attn_sinks.weight"}

#: Flags of the families, and the tensor that has to be there for them, behind a ``!`` not to be.
FLAGS: Final = {
    "use_qk_norm": "blk.0.attn_q_norm.weight",
    "qk_layernorm": "blk.0.attn_q_norm.weight",
    "attention_bias": "blk.0.attn_q.bias",
    "qkv_bias": "blk.0.attn_q.bias",
    "use_qkv_bias": "blk.0.attn_q.bias",
    "use_bias": "blk.0.attn_q.bias",
    "attention_out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
    "lm_head_bias": "output.bias",
    "use_parallel_residual": "!blk.0.ffn_norm.weight",
}

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
        stored: the family's tables with the tensors that llama.cpp stores in place of others; None if there are none.
    """

    model_type: str
    keys: Mapping[str, str]
    names: Mapping[str, str]
    permuted: bool = False
    fixed: Mapping[str, Any] = {}
    shifted: bool = False
    stored: Family | None = None


def _replaced(rows: tuple[Row, ...], others: Mapping[str, tuple[Row, ...]]) -> tuple[Row, ...]:
    """Return rows with others in the place of those whose names start so."""
    found: dict[Row, None] = {}
    for row in rows:
        found |= dict.fromkeys(next((those for start, those in others.items() if row.name.startswith(start)), (row,)))
    return tuple(found)


#: Experts with biases, which transformers has in one tensor, gate and up interleaved.
_GPT_OSS: Final = evolve(
    FAMILIES["gpt_oss"],
    sparse=(
        *linear("mlp.router", "e", "h", ALWAYS, home=Axis.EXPERT_INTERMEDIATE),
        *gated("mlp.experts.{expert}", "EX", ALWAYS),
    ),
)
#: What leads up from the latent of MLA, as its attention over the latents itself takes it.
_ABSORBED: Final = {
    "self_attn.kv_b_proj": (
        Row("self_attn.k_b_proj.weight", "k kr kn"),
        Row("self_attn.v_b_proj.weight", "k v kr"),
    )
}


#: Norms of single heads, each a tensor of its own in checkpoints.
_STACKED_NORMS: Final = {
    f"self_attn.{part}_layernorm": norm(f"self_attn.{part}_layernorm", f"{part} d", when="qk_layernorm")
    for part in ("q", "k")
}
#: Experts and shared experts whose gate and up projections are one tensor in checkpoints.
_GRANITE_MOE: Final = {
    "block_sparse_moe.input_linear": gated("mlp.experts.{expert}", "EX"),
    "block_sparse_moe.output_linear": (),
    "shared_mlp.input_linear": gated("mlp.shared_mlp", "SX", when=SHARED),
    "shared_mlp.output_linear": (),
}
_LLAMA4: Final = {
    "feed_forward.experts.gate_up_proj": gated("feed_forward.experts.{expert}", "EX"),
    "feed_forward.experts.down_proj": (),
}


def _storing(model_type: str, others: Mapping[str, tuple[Row, ...]]) -> Family:
    """Return a family's tables with other rows in the place of those whose names start so."""
    family = FAMILIES[model_type]
    return evolve(family, layer=_replaced(family.layer, others), sparse=_replaced(family.sparse, others))


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", _KEYS, _LAYER, permuted=True, fixed=_HALF),
    "qwen2": Architecture("qwen2", _KEYS, _LAYER),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_KEYS, **_MANY, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        {**_LAYER, **_ROUTED, **_shared("mlp.shared_expert"), "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
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
        {
            **_KEYS,
            **_WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
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
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _KEYS, {**_LAYER, **_LAYER_NORMS}),
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
        {**_KEYS, **_SHARED_COUNT},
        {
            **_LAYER,
            **_HEAD_NORMS,
            **_ROUTED,
            **_shared("mlp.shared_experts"),
            "post_attention_layernorm": "post_attention_norm",
        },
    ),
    "dots1": Architecture(
        "dots1",
        {**_KEYS, **_SHARED_COUNT},
        {**_LAYER, **_HEAD_NORMS, **_ROUTED, **_shared("mlp.shared_experts")},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**_KEYS, **_EXPERTS, **_WINDOW},
        {
            **_LAYER,
            **_ROUTED,
            "mlp.router": "ffn_gate_inp",
            "post_attention_layernorm": "post_attention_norm",
        },
        stored=_GPT_OSS,
    ),
    "deepseek2": Architecture("deepseek_v3", _MLA, {**_LAYER, **_LATENT, **_ROUTED, **_shared("mlp.shared_experts")}),
    "mistral3": Architecture("ministral3", _KEYS, _LAYER, permuted=True),
    "exaone4": Architecture("exaone4", {**_KEYS, **_WINDOW}, {**_LAYER, **_HEAD_NORMS, **_POST_NORMS}),
    "arcee": Architecture("arcee", _KEYS, _LAYER, permuted=True),
    "command-r": Architecture(
        "cohere", {**_KEYS, "layer_norm_eps": _EPSILON, "logit_scale": "logit_scale"}, {**_LAYER, **_HEAD_NORMS}
    ),
    "cohere2": Architecture(
        "cohere2", {**_KEYS, **_WINDOW, "layer_norm_eps": _EPSILON, "logit_scale": "logit_scale"}, _LAYER
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_KEYS, "norm_epsilon": _EPSILON},
        {**_LAYER, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
    "nemotron": Architecture("nemotron", {**_KEYS, "norm_eps": _EPSILON}, _LAYER),
    "stablelm": Architecture(
        "stablelm",
        {**_KEYS, "layer_norm_eps": _EPSILON},
        {**_LAYER, "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"},
        stored=_storing("stablelm", _STACKED_NORMS),
    ),
    "olmoe": Architecture("olmoe", {**_KEYS, **_EXPERTS}, {**_LAYER, **_HEAD_NORMS, **_ROUTED}),
    "phimoe": Architecture("phimoe", {**_KEYS, **_EXPERTS, **_WINDOW}, {**_LAYER, **_MIXTRAL}),
    "minimax-m2": Architecture("minimax_m2", {**_KEYS, **_EXPERTS}, {**_LAYER, **_HEAD_NORMS, **_MIXTRAL}),
    "granitemoe": Architecture(
        "granitemoeshared",
        {**_KEYS, **_EXPERTS, **_FACTORS, "shared_intermediate_size": "expert_shared_feed_forward_length"},
        {
            **_LAYER,
            **_ROUTED,
            **_shared("mlp.shared_mlp"),
            "block_sparse_moe.router.layer": "ffn_gate_inp",
        },
        permuted=True,
        stored=_storing("granitemoeshared", _GRANITE_MOE),
    ),
    "llama4": Architecture(
        "llama4_text",
        {
            **_KEYS,
            **_EXPERTS,
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        {
            **{name.replace("mlp.", "feed_forward."): own for name, own in {**_LAYER, **_ROUTED}.items()},
            **_shared("feed_forward.shared_expert"),
            "feed_forward.router": "ffn_gate_inp",
        },
        stored=_storing("llama4_text", _LLAMA4),
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **_KEYS,
            **_MANY,
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        {**_LAYER, **_ROUTED, **_shared("mlp.shared_experts")},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {**_KEYS, **_EXPERTS},
        {**_LAYER, **_LAYER_NORMS, **_ROUTED, **_shared("mlp.shared_mlp"), "mlp.gate.wg": "ffn_gate_inp"},
    ),
    "mixtral": Architecture("mixtral", {**_KEYS, **_EXPERTS}, {**_LAYER, **_MIXTRAL}, permuted=True),
}

#: Those that share the name of another in files.
_VARIANTS: Final = frozenset({"mixtral"})


def architecture_of(file: Gguf, source: str) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ModelError: it is none of :data:`ARCHITECTURES`, or no language model.
    """
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        name = "mixtral"  # llama.cpp calls both llama
    if isinstance(name, str) and name in ARCHITECTURES:
        return _variant(ARCHITECTURES[name], file)
    if name == "clip":
        raise ModelError(f"{source} is the vision part of a model (mmproj)", "name the model's own file")
    what = f"has the architecture {name[:40]!r}" if isinstance(name, str) else "names no architecture"
    known = ", ".join(each for each in ARCHITECTURES if each not in _VARIANTS)
    raise ModelError(f"{source} {what}, which tpplan does not read from GGUF", f"it reads {known}")


def _variant(found: Architecture, file: Gguf) -> Architecture:
    """Return the architecture as a file has it, where models that differ share the name of one."""
    tensors = {name.partition(".")[2].partition(".")[2] for name in file.tensors if name.startswith("blk.")}
    if found.model_type == "olmo2" and "olmo2.attention.sliding_window" in file.metadata:
        return evolve(found, model_type="olmo3", keys={**found.keys, **_WINDOW})
    if found.model_type == "granitemoeshared" and "ffn_gate_shexp.weight" not in tensors:
        return evolve(found, model_type="granitemoe", stored=_storing("granitemoe", _GRANITE_MOE))
    if found.model_type != "deepseek_v3":
        return found
    if "exp_probs_b.bias" not in tensors:
        found = evolve(found, model_type="deepseek_v2")
    return evolve(found, stored=_storing(found.model_type, _ABSORBED) if "attn_k_b.weight" in tensors else None)


def name_of(name: str, architecture: Architecture) -> str:
    """Return the name in a GGUF file of a parameter, with ``{layer}`` in it; empty if it has none."""
    for end, own in _WITHOUT_KIND.items():
        if name.endswith(end):
            return f"blk.{{layer}}.{own}"
    if match := _IN_LAYER.fullmatch(name):
        module = architecture.names.get(match[1], "")
        return f"blk.{{layer}}.{module}.{match[2]}" if module else ""
    module, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[module]}.{kind}" if module in _OUTSIDE else ""
