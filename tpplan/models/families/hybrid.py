"""Tables of decoders that have linear attention in most of their layers, and full attention in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpplan.core.axes import Axis
from tpplan.core.model import LinearAttention
from tpplan.models.families.rows import (
    EXPERTS,
    NORMS,
    ROUTER,
    SHARED_EXPERT,
    attention,
    gated,
    head_norms,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import MAX_PARTS, STACKED, every_layer, except_every, linear_layers
from tpplan.models.families.sparse import shared_expert, sparse_steps
from tpplan.models.families.table import Family, Row

if TYPE_CHECKING:
    from tpplan.models.config import Config


def _delta_net(config: Config) -> LinearAttention:
    """Read the sizes of a gated DeltaNet."""
    sizes = LinearAttention(
        key_heads=config.count("linear_num_key_heads", default=16, maximum=MAX_PARTS),
        value_heads=config.count("linear_num_value_heads", default=32, maximum=MAX_PARTS),
        key_head_dim=config.count("linear_key_head_dim", default=128),
        value_head_dim=config.count("linear_value_head_dim", default=128),
        kernel=config.count("linear_conv_kernel_dim", default=4),
    )
    if sizes.value_heads % sizes.key_heads:
        numbers = f"{sizes.value_heads} value heads (linear_num_value_heads) are not a multiple of {sizes.key_heads}"
        raise config.error(f"{numbers} key heads (linear_num_key_heads)")
    return sizes


#: All layers of Qwen's have one but every ``full_attention_interval``-th.
_QWEN_LINEAR = linear_layers(_delta_net, except_every(4, "full_attention_interval"))


#: Attention whose output is gated; the projection of the queries gives the gates too, head by head.
_GATED_ATTENTION = (*attention("attention_bias", "attention_bias", q="Q2"), *head_norms())

#: What all forms of the gated DeltaNet have between their projections.
_DELTA_NET = (
    Row("linear_attn.conv1d.weight", "LK+LK+LV 1 ck"),
    Row("linear_attn.dt_bias", "lh"),
    Row("linear_attn.A_log", "lh"),
    *norm("linear_attn.norm", "lv", home=Axis.LINEAR_HEADS),
    *linear("linear_attn.out_proj", "RS", "LV"),
)

#: Projections that lie one behind the other, and those that lie head by head.
_SEPARATE = (
    *linear("linear_attn.in_proj_qkv", "LK+LK+LV", "RS"),
    *linear("linear_attn.in_proj_z", "LV", "RS"),
    *linear("linear_attn.in_proj_b", "lh", "RS"),
    *linear("linear_attn.in_proj_a", "lh", "RS"),
)
_INTERLEAVED = (*linear("linear_attn.in_proj_qkvz", "LQKVZ", "RS"), *linear("linear_attn.in_proj_ba", "lh2", "RS"))

#: Experts whose matrices are stored each on its own, or all of a layer in one tensor, as the checkpoint has it.
_EXPERTS = (
    *gated("mlp.experts.{expert}", "EX", when=f"!{STACKED}"),
    Row("mlp.experts.gate_up_proj", "e EX+EX RS", STACKED, out=1),
    Row("mlp.experts.down_proj", "e RS EX", STACKED, out=1),
)

#: Checkpoints have layers that predict a second token, and those of the text part may have what reads images.
_IGNORED = ("mtp.*", "model.visual.*")

#: What the nested configs of both kinds of Qwen3.5 may leave out.
_QWEN3_5 = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}

HYBRID: Final[dict[str, Family]] = {
    "qwen3_next": Family(
        architectures=("Qwen3NextForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_GATED_ATTENTION),
        linear_layer=(*NORMS, *_INTERLEAVED, *_DELTA_NET),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS, *SHARED_EXPERT),
        ignored=("mtp.*",),
        defaults={"num_key_value_heads": 2, "head_dim": 256},
        flags={"attention_bias": False},
        linear=_QWEN_LINEAR,
        moe=sparse_steps,
        adapt=shared_expert(512),
    ),
    "qwen3_5_text": Family(
        architectures=("Qwen3_5ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_GATED_ATTENTION),
        linear_layer=(*NORMS, *_SEPARATE, *_DELTA_NET),
        dense=gated(),
        ignored=_IGNORED,
        defaults={
            **_QWEN3_5,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        flags={"attention_bias": False},
        linear=_QWEN_LINEAR,
    ),
    "qwen3_5_moe_text": Family(
        architectures=("Qwen3_5MoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_GATED_ATTENTION),
        linear_layer=(*NORMS, *_SEPARATE, *_DELTA_NET),
        sparse=(*ROUTER, *_EXPERTS, *SHARED_EXPERT),
        ignored=_IGNORED,
        defaults={
            **_QWEN3_5,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
        },
        flags={"attention_bias": False},
        linear=_QWEN_LINEAR,
        moe=every_layer,
        adapt=shared_expert(512),
    ),
}
