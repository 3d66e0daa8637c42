"""Tables of decoders whose router's scores are corrected by a bias when experts are chosen."""

from __future__ import annotations

from typing import Final

from tpplan.core.axes import Axis
from tpplan.models.families.rows import (
    BIASED_ATTENTION,
    EXPERTS,
    MIXTRAL_EXPERTS,
    NORMS,
    ROUTER,
    WIDE_NORMS,
    attention,
    correction,
    gated,
    head_norms,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import every_layer, except_every, from_max_window_layers, windows
from tpplan.models.families.sparse import (
    SHARED,
    after_dense,
    mlp_types,
    moe_interval,
    shared_expert,
    shared_experts,
)
from tpplan.models.families.table import Family, Row

_SHARED = gated("mlp.shared_experts", "SX", when=SHARED)

#: Router, experts and shared experts of most of them.
CORRECTED_EXPERTS = (*ROUTER, *correction("mlp.gate.e_score_correction_bias"), *EXPERTS, *_SHARED)

CORRECTED: Final[dict[str, Family]] = {
    "glm4_moe": Family(
        architectures=("Glm4MoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias"), *head_norms(when="use_qk_norm")),
        dense=gated(),
        sparse=CORRECTED_EXPERTS,
        extra_layers=True,
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 8},
        flags={"attention_bias": False, "use_qk_norm": False},
        moe=after_dense(1),
        adapt=shared_experts(default=1),
    ),
    "minimax_m2": Family(
        architectures=("MiniMaxM2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention(), *WIDE_NORMS),
        sparse=(*correction("block_sparse_moe.e_score_correction_bias"), *MIXTRAL_EXPERTS),
        extra_layers=True,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8},
        moe=every_layer,
        expert_key="intermediate_size",
    ),
    # The router and its correction are F32 whatever the model's dtype.
    "ernie4_5_moe": Family(
        architectures=("Ernie4_5_MoeForCausalLM",),
        outside=(*outside(), Row("lm_head.bias", "VC", "use_bias")),
        layer=(*NORMS, *attention("use_bias", "use_bias")),
        dense=gated(bias="use_bias"),
        sparse=(
            Row("mlp.gate.weight", "e h", home=Axis.EXPERT_INTERMEDIATE, dtype="F32"),
            *correction("mlp.moe_statics.e_score_correction_bias", "1 e"),
            *EXPERTS,
            *gated("mlp.shared_experts", "SX", "use_bias", when=SHARED),
        ),
        ignored=("*.rotary_emb.inv_freq", "model.mtp_*"),
        defaults={"num_key_value_heads": 4, "num_experts_per_tok": 6},
        flags={"use_bias": False},
        tied=True,
        moe=moe_interval,
        adapt=shared_experts("moe_num_shared_experts", 2),
    ),
    "dots1": Family(
        architectures=("Dots1ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        sparse=CORRECTED_EXPERTS,
        defaults={"num_key_value_heads": 32},
        flags={"attention_bias": False},
        window=windows(4096, from_max_window_layers(62)),
        moe=after_dense(0),
        adapt=shared_experts(),
    ),
    "exaone_moe": Family(
        architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        outside=outside(),
        layer=(*NORMS, *attention(), *head_norms()),
        dense=gated(),
        sparse=(*ROUTER, *correction("mlp.e_score_correction_bias"), *EXPERTS, *_SHARED),
        ignored=("*.rotary_emb.inv_freq", "mtp.*"),
        defaults={"num_key_value_heads": 32, "num_experts_per_tok": 8},
        window=windows(4096, except_every(4)),
        moe=mlp_types(after_dense(1)),
        adapt=shared_experts("num_shared_experts", 1),
    ),
    "solar_open": Family(
        architectures=("SolarOpenForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias")),
        sparse=CORRECTED_EXPERTS,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8},
        flags={"attention_bias": False},
        moe=every_layer,
        adapt=shared_experts(default=1),
    ),
    "afmoe": Family(
        architectures=("AfmoeForCausalLM",),
        outside=outside(),
        layer=(
            *NORMS,
            *norm("pre_mlp_layernorm"),
            *norm("post_mlp_layernorm"),
            *BIASED_ATTENTION,
            *head_norms(),
            *linear("self_attn.gate_proj", "O", "RS"),
        ),
        dense=gated(),
        sparse=(
            *linear("mlp.router.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            *correction("mlp.expert_bias"),
            *EXPERTS,
            *_SHARED,
        ),
        defaults={"head_dim": 128, "num_experts_per_tok": 6},
        flags={"attention_bias": False},
        window=windows(1024, except_every(4, "global_attn_every_n_layers")),
        moe=after_dense(1, "num_dense_layers"),
        adapt=shared_experts("num_shared_experts", 2),
    ),
    "hy_v3": Family(
        architectures=("HYV3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(bias="mlp_bias"),
        sparse=(
            *linear("mlp.router.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            *correction("mlp.expert_bias"),
            *EXPERTS,
            *gated("mlp.shared_mlp", "SX", "mlp_bias", when=SHARED),
        ),
        extra_layers=True,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8},
        flags={"attention_bias": False, "mlp_bias": False},
        moe=mlp_types(after_dense(1)),
        adapt=shared_experts("num_shared_experts", 1),
    ),
    "kolibri1": Family(
        architectures=("Kolibri1ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *norm("post_attn_norm"), *norm("post_ffn_norm"), *attention(), *head_norms()),
        sparse=(*ROUTER, *correction("moe.router.expert_bias"), *EXPERTS, *gated("mlp.shared_experts", "SX")),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
        },
        window=windows(513, except_every(5, key="")),
        moe=every_layer,
        adapt=shared_expert(512),
    ),
}
