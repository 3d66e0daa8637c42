"""Tables of decoders with experts, one tensor for each projection of each expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.rows import (
    BIASED_ATTENTION,
    BIASED_NORMS,
    EXPERTS,
    MIXTRAL_EXPERTS,
    NORMS,
    POST_NORMS,
    ROUTER,
    SHARED_EXPERT,
    WIDE_NORMS,
    attention,
    gated,
    head_norms,
    norm,
    outside,
)
from tpplan.models.families.shape import even_before_max_window_layers, every_layer, except_every, no_layer, windows
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_expert, shared_experts, sparse_steps
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config


def _hunyuan(_config: Config, shape: Shape) -> Shape:
    """Add the shared expert, which is as wide as a routed one."""
    return evolve(shape, shared_intermediate=shape.expert_intermediate)


def _cohere2_moe(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, and the width of the dense layers if it is their own."""
    width = config.count("prefix_dense_intermediate_size", default=shape.intermediate) if shape.intermediate else 0
    return evolve(shared_experts("num_shared_experts")(config, shape), intermediate=width)


def _after_prefix(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers with windows of Cohere's mixtures, whose dense first layers have a period of their own."""
    dense = min(config.count("first_k_dense_replace", default=0, minimum=0), layers)
    prefix = except_every(1, "prefix_dense_sliding_window_pattern")(config, dense)
    return *prefix, *except_every(4)(config, layers - dense)


def _flint(config: Config) -> Config:
    """Read which layers are dense: the first two if none are listed."""
    return config if config.raw(_DENSE) is not None else config.having(_DENSE, [0, 1])


def _flint_windows(_config: Config, layers: int) -> tuple[bool, ...]:
    """Select all layers but the first two, each fourth after the second, and the last."""
    return tuple(layer % 4 != 1 and 0 < layer < layers - 1 for layer in range(layers))


_DENSE: Final = "mlp_only_layers"

MOE: Final[dict[str, Family]] = {
    "mixtral": Family(
        architectures=("MixtralForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention()),
        sparse=MIXTRAL_EXPERTS,
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
            *SHARED_EXPERT,
        ),
        defaults={"num_key_value_heads": 16},
        flags={"qkv_bias": True},
        window=windows(4096, even_before_max_window_layers, switch="use_sliding_window"),
        moe=sparse_steps,
        adapt=shared_expert(),
    ),
    "qwen3_moe": Family(
        architectures=("Qwen3MoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS),
        defaults={"num_key_value_heads": 4},
        flags={"attention_bias": False},
        window=windows(4096, every_layer, switch="use_sliding_window"),
        moe=sparse_steps,
    ),
    "olmoe": Family(
        architectures=("OlmoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *WIDE_NORMS),
        sparse=(*ROUTER, *EXPERTS),
        defaults={"num_experts_per_tok": 8},
        flags={"attention_bias": False},
        fixed_head=True,
        moe=every_layer,
        expert_key="intermediate_size",
    ),
    "flex_olmo": Family(
        architectures=("FlexOlmoForCausalLM",),
        outside=outside(),
        layer=(*BIASED_ATTENTION, *WIDE_NORMS, *POST_NORMS),
        sparse=(*ROUTER, *EXPERTS),
        defaults={"num_experts_per_tok": 5},
        flags={"attention_bias": False},
        moe=every_layer,
        expert_key="intermediate_size",
    ),
    "phimoe": Family(
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        outside=(*outside(final=norm("model.norm", bias=True)), Row("lm_head.bias", "VC", "lm_head_bias")),
        layer=(*BIASED_NORMS, *BIASED_ATTENTION),
        sparse=MIXTRAL_EXPERTS,
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2},
        flags={"attention_bias": False, "lm_head_bias": False},
        window=windows(None, every_layer),
        moe=every_layer,
        expert_key="intermediate_size",
    ),
    "hunyuan_v1_moe": Family(
        architectures=("HunYuanMoEV1ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms("query_layernorm", "key_layernorm")),
        sparse=(
            Row("mlp.gate.wg.weight", "e h", home=Axis.EXPERT_INTERMEDIATE, dtype="F32"),  # whatever the model's dtype
            *EXPERTS,
            *gated("mlp.shared_mlp", "SX"),
        ),
        defaults={"num_experts_per_tok": 1},
        flags={"attention_bias": False},
        uniform=("num_experts", "num_experts_per_tok"),
        moe=every_layer,
        expert_key="intermediate_size",
        adapt=_hunyuan,
    ),
    "cohere2_moe": Family(
        architectures=("Cohere2MoeForCausalLM",),
        outside=outside(),
        layer=(*norm("input_layernorm"), *BIASED_ATTENTION),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS, *gated("mlp.shared_experts", "SX", when=SHARED)),
        defaults={"head_dim": 128, "num_experts_per_tok": 2},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, _after_prefix),
        moe=mlp_types(after_dense(0)),
        expert_key="intermediate_size",
        adapt=_cohere2_moe,
    ),
    "mellum": Family(
        architectures=("MellumForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS),
        ignored=("*.rotary_emb.inv_freq", "mtp.*", "model.mtp.*"),
        defaults={"num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 896},
        flags={"attention_bias": False},
        window=windows(1024, no_layer),
        moe=mlp_types(every_layer),
    ),
    "flint": Family(
        architectures=("FlintForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms(), Row("self_attn.softmax_offset", "q")),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS, *gated("mlp.shared_expert", "SX")),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
        },
        flags={"attention_bias": False},
        usual=_flint,
        window=windows(513, _flint_windows),
        moe=sparse_steps,
        adapt=shared_expert(1024),
    ),
}
