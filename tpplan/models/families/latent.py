"""Tables of decoders with experts and multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.corrected import CORRECTED_EXPERTS
from tpplan.models.families.rows import EXPERTS, NORMS, ROUTER, gated, linear, norm, outside
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_experts
from tpplan.models.families.table import Family, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.models.config import Config


def with_latent(q_rank: int = 1536, shared: int = 0) -> Callable[[Config, Shape], Shape]:
    """Add the ranks and head sizes of latent attention, and the shared experts, with the defaults of both."""
    add_shared = shared_experts(default=shared)

    def adapt(config: Config, shape: Shape) -> Shape:
        rank = config.optional_count("q_lora_rank", default=q_rank) or 0
        rope = config.count("qk_rope_head_dim")
        shape = evolve(
            shape,
            kv_heads=shape.q_heads,
            head_dim=config.count("qk_nope_head_dim") + rope,
            v_head_dim=config.count("v_head_dim"),
            q_rank=rank,
            kv_rank=config.count("kv_lora_rank"),
            rope_dim=rope,
            flags=shape.flags | ({"q_lora_rank"} if rank else set()),
        )
        return add_shared(config, shape)

    return adapt


def _indexed(config: Config, shape: Shape) -> Shape:
    """Add the indexer, which chooses the tokens that a query attends to by keys and a cache of its own."""
    return evolve(
        with_latent(shared=1)(config, shape),
        index_heads=config.count("index_n_heads", default=64),
        index_dim=config.count("index_head_dim", default=128),
    )


#: What leads down to the latent is needed wherever heads are, what leads up is cut.
MLA = (
    *linear("self_attn.q_proj", "Q", "RS", when="!q_lora_rank"),
    *linear("self_attn.q_a_proj", "qr", "h", "attention_bias", when="q_lora_rank", home=Axis.KV_HEADS),
    *norm("self_attn.q_a_layernorm", "qr", when="q_lora_rank", home=Axis.KV_HEADS),
    *linear("self_attn.q_b_proj", "Q", "qr", when="q_lora_rank"),
    *linear("self_attn.kv_a_proj_with_mqa", "krr", "h", "attention_bias", home=Axis.KV_HEADS),
    *norm("self_attn.kv_a_layernorm", "kr", home=Axis.KV_HEADS),
    *linear("self_attn.kv_b_proj", "KUP", "kr"),
    *linear("self_attn.o_proj", "RS", "O", "attention_bias"),
)

#: All heads attend to the tokens that the indexer's heads choose together, so it is needed wherever heads are.
_INDEXER = (
    *linear("self_attn.indexer.wq_b", "iq", "qr", home=Axis.KV_HEADS),
    *linear("self_attn.indexer.wk", "ik", "h", home=Axis.KV_HEADS),
    *norm("self_attn.indexer.k_norm", "ik", bias=True, home=Axis.KV_HEADS),
    *linear("self_attn.indexer.weights_proj", "ih", "h", home=Axis.KV_HEADS),
)

#: Heads have sizes of their own, so hidden sizes need not be multiples of heads.
_HEAD = {"head_dim": 64}

_DEEPSEEK_V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    outside=outside(),
    layer=(*NORMS, *MLA),
    dense=gated(),
    sparse=CORRECTED_EXPERTS,
    extra_layers=True,
    defaults=_HEAD,
    flags={"attention_bias": False},
    moe=after_dense(3),
    adapt=with_latent(shared=1),
)

LATENT: Final[dict[str, Family]] = {
    "deepseek_v2": Family(
        architectures=("DeepseekV2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *MLA),
        dense=gated(bias="mlp_bias"),
        sparse=(*ROUTER, *EXPERTS, *gated("mlp.shared_experts", "SX", "mlp_bias", when=SHARED)),
        defaults=_HEAD,
        flags={"attention_bias": False, "mlp_bias": False},
        moe=after_dense(0),
        adapt=with_latent(shared=2),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "deepseek_v32": Family(
        architectures=("DeepseekV32ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *MLA, *_INDEXER),
        dense=gated(),
        sparse=CORRECTED_EXPERTS,
        extra_layers=True,
        defaults={"num_experts_per_tok": 8, **_HEAD},
        flags={"attention_bias": False},
        moe=mlp_types(after_dense(3)),
        adapt=_indexed,
    ),
    "glm4_moe_lite": Family(
        architectures=("Glm4MoeLiteForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *MLA),
        dense=gated(),
        sparse=CORRECTED_EXPERTS,
        extra_layers=True,
        defaults={"num_experts_per_tok": 4, **_HEAD},
        flags={"attention_bias": False},
        moe=mlp_types(after_dense(1)),
        adapt=with_latent(768, 1),
    ),
}
