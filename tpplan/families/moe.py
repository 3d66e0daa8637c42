"""Tables of decoders with experts, among them those with latent attention (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.axes import Axis
from tpplan.families.rows import ALWAYS, EXPERTS, NORMS, ROUTER, attention, gated, head_norms, linear, norm, outside
from tpplan.families.shape import (
    after_dense,
    even_before_max_window_layers,
    every_layer,
    every_other,
    sparse_steps,
    windows,
)
from tpplan.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.config import Config


def _qwen2_moe(config: Config, shape: Shape) -> Shape:
    """Add the shared expert."""
    return evolve(shape, shared_intermediate=config.count("shared_expert_intermediate_size") if shape.experts else 0)


def _deepseek(config: Config, shape: Shape) -> Shape:
    """Add the ranks and head sizes of latent attention, and the shared experts, which are stored as one."""
    shared = (config.optional_count("n_shared_experts", minimum=0) or 0) if shape.experts else 0
    rank = config.optional_count("q_lora_rank", default=1536) or 0
    rope = config.count("qk_rope_head_dim")
    return evolve(
        shape,
        kv_heads=shape.q_heads,
        head_dim=config.count("qk_nope_head_dim") + rope,
        v_head_dim=config.count("v_head_dim"),
        q_rank=rank,
        kv_rank=config.count("kv_lora_rank"),
        rope_dim=rope,
        shared_intermediate=shared * shape.expert_intermediate,
        flags=shape.flags | ({"q_lora_rank"} if rank else set()) | ({"n_shared_experts"} if shared else set()),
    )


#: Multi-head latent attention: what leads down to the latent is needed wherever heads are, what leads up is cut.
_MLA = (
    *linear("self_attn.q_proj", "Q", "RS", when="!q_lora_rank"),
    *linear("self_attn.q_a_proj", "qr", "h", "attention_bias", when="q_lora_rank", home=Axis.KV),
    *norm("self_attn.q_a_layernorm", "qr", when="q_lora_rank", home=Axis.KV),
    *linear("self_attn.q_b_proj", "Q", "qr", when="q_lora_rank"),
    *linear("self_attn.kv_a_proj_with_mqa", "krr", "h", "attention_bias", home=Axis.KV),
    *norm("self_attn.kv_a_layernorm", "kr", home=Axis.KV),
    *linear("self_attn.kv_b_proj", "KUP", "kr"),
    *linear("self_attn.o_proj", "RS", "O", "attention_bias"),
)

MOE: Final[dict[str, Family]] = {
    "mixtral": Family(
        architectures=("MixtralForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        sparse=(
            *linear("block_sparse_moe.gate", "e", "h", home=Axis.EX),
            *linear("block_sparse_moe.experts.{expert}.w1", "EX", "RS"),
            *linear("block_sparse_moe.experts.{expert}.w2", "RS", "EX"),
            *linear("block_sparse_moe.experts.{expert}.w3", "EX", "RS"),
        ),
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2},
        window=windows(None, every_layer),
        moe=every_layer,
        expert_key="intermediate_size",
    ),
    "qwen2_moe": Family(
        architectures=("Qwen2MoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("qkv_bias")),
        dense=gated(),
        sparse=(
            *ROUTER,
            *EXPERTS,
            *gated("mlp.shared_expert", "SX"),
            *linear("mlp.shared_expert_gate", "1", "h", home=Axis.SX),
        ),
        defaults={"num_key_value_heads": 16},
        flags={"qkv_bias": True},
        window=windows(4096, even_before_max_window_layers, switch="use_sliding_window"),
        moe=sparse_steps,
        adapt=_qwen2_moe,
    ),
    "qwen3_moe": Family(
        architectures=("Qwen3MoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias", "attention_bias"), *head_norms()),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS),
        defaults={"num_key_value_heads": 4},
        flags={"attention_bias": False},
        window=windows(4096, every_layer, switch="use_sliding_window"),
        moe=sparse_steps,
    ),
    # All experts of a layer in one tensor, [expert, in, out], gate and up interleaved.
    "gpt_oss": Family(
        architectures=("GptOssForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias", "attention_bias"), Row("self_attn.sinks", "q")),
        sparse=(
            *linear("mlp.router", "e", "h", ALWAYS, home=Axis.EX),
            Row("mlp.experts.gate_up_proj", "e RS EX2", out=2),
            Row("mlp.experts.gate_up_proj_bias", "e EX2", out=1),
            Row("mlp.experts.down_proj", "e EX RS", out=2),
            Row("mlp.experts.down_proj_bias", "e RS", out=1),
        ),
        defaults={"num_key_value_heads": 8, "head_dim": 64},
        flags={"attention_bias": True},
        window=windows(128, every_other),
        moe=every_layer,
        expert_key="intermediate_size",
    ),
    "deepseek_v2": Family(
        architectures=("DeepseekV2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_MLA),
        dense=gated(bias="mlp_bias"),
        sparse=(*ROUTER, *EXPERTS, *gated("mlp.shared_experts", "SX", "mlp_bias", when="n_shared_experts")),
        flags={"attention_bias": False, "mlp_bias": False},
        moe=after_dense(0),
        adapt=_deepseek,
    ),
    "deepseek_v3": Family(
        architectures=("DeepseekV3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_MLA),
        dense=gated(),
        sparse=(
            *ROUTER,
            Row("mlp.gate.e_score_correction_bias", "e", home=Axis.EX, dtype="F32"),  # whatever the model's dtype
            *EXPERTS,
            *gated("mlp.shared_experts", "SX", when="n_shared_experts"),
        ),
        extra_layers=True,
        flags={"attention_bias": False},
        moe=after_dense(3),
        adapt=_deepseek,
    ),
}
