"""Tables of decoders that store the experts of a layer in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.rows import ALWAYS, BIASED_ATTENTION, NORMS, gated, linear, norm, outside
from tpplan.models.families.shape import every_layer, every_other, except_first_of, renamed, windows, with_rope
from tpplan.models.families.sparse import SHARED, moe_layers
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config


def _llama4(config: Config, shape: Shape) -> Shape:
    """Add the shared expert, which is as wide as a routed one, and the width of the dense layers, which is another."""
    width = config.count("intermediate_size_mlp", default=16_384) if shape.intermediate else 0
    return evolve(shape, shared_intermediate=shape.expert_intermediate, intermediate=width)


def _granite_shared(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, which have a width of their own."""
    width = config.count("shared_intermediate_size", default=0, minimum=0)
    return evolve(shape, shared_intermediate=width, flags=shape.flags | ({SHARED} if width else set()))


#: What DBRX calls the sizes of a model, and those of its attention and experts in sections of their own.
_DBRX: Final = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
_DBRX_SECTIONS: Final = {
    "attn_config": {"kv_n_heads": "num_key_value_heads"},
    "ffn_config": {
        "ffn_hidden_size": "moe_intermediate_size",
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
    },
}


def _dbrx(config: Config) -> Config:
    """Read all sizes under their usual names."""
    config = renamed(config, _DBRX)
    for section, names in _DBRX_SECTIONS.items():
        own = config.section(section).data if config.raw(section) is not None else {}
        for key in names:
            config = config.having(key, own.get(key))
        config = renamed(config, names)
    return config


#: Gate and up side by side, [expert, out, in].
GRANITE_EXPERTS = (
    *linear("block_sparse_moe.router.layer", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
    Row("block_sparse_moe.input_linear.weight", "e EX+EX RS", out=1),
    Row("block_sparse_moe.output_linear.weight", "e RS EX", out=1),
)

_GRANITEMOE = Family(
    architectures=("GraniteMoeForCausalLM",),
    outside=outside(),
    layer=(*NORMS, *BIASED_ATTENTION),
    sparse=GRANITE_EXPERTS,
    defaults={"num_experts_per_tok": 2},
    flags={"attention_bias": False},
    moe=every_layer,
    expert_key="intermediate_size",
)

PACKED: Final[dict[str, Family]] = {
    # Gate and up are interleaved.
    "gpt_oss": Family(
        architectures=("GptOssForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, Row("self_attn.sinks", "q")),
        sparse=(
            *linear("mlp.router", "e", "h", ALWAYS, home=Axis.EXPERT_INTERMEDIATE),
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
    "granitemoe": _GRANITEMOE,
    "granitemoeshared": evolve(
        _GRANITEMOE,
        architectures=("GraniteMoeSharedForCausalLM",),
        sparse=(
            *GRANITE_EXPERTS,
            *linear("shared_mlp.input_linear", "SX+SX", "RS", when=SHARED),
            *linear("shared_mlp.output_linear", "RS", "SX", when=SHARED),
        ),
        adapt=_granite_shared,
    ),
    "granitemoe_swa": evolve(
        _GRANITEMOE,
        architectures=("GraniteMoeSWAForCausalLM",),
        layer=(*NORMS, *BIASED_ATTENTION, Row("self_attn.sinks", "q")),
        sparse=(
            *linear("block_sparse_moe.router", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            Row("block_sparse_moe.experts.gate_up_proj", "e EX+EX RS", out=1),
            Row("block_sparse_moe.experts.down_proj", "e RS EX", out=1),
            *linear("shared_mlp.input_linear", "SX+SX", "RS", when=SHARED),
            *linear("shared_mlp.output_linear", "RS", "SX", when=SHARED),
        ),
        window=windows(128, except_first_of(4)),
        adapt=_granite_shared,
    ),
    # Chunked attention sees no further back than a window of a chunk.
    "llama4_text": Family(
        architectures=("Llama4ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated("feed_forward"),
        sparse=(
            *linear("feed_forward.router", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            Row("feed_forward.experts.gate_up_proj", "e RS EX+EX", out=2),
            Row("feed_forward.experts.down_proj", "e EX RS", out=2),
            *gated("feed_forward.shared_expert", "SX"),
        ),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 1},
        flags={"attention_bias": False},
        window=windows(8192, with_rope, key="attention_chunk_size", kind="chunked_attention"),
        moe=moe_layers,
        expert_key="intermediate_size",
        adapt=_llama4,
    ),
    # The matrices of all experts are below each other.
    "dbrx": Family(
        architectures=("DbrxForCausalLM",),
        outside=outside("transformer.wte", norm("transformer.norm_f")),
        layers="transformer.blocks.{layer}.",
        layer=(
            *norm("norm_attn_norm.norm_1"),
            *norm("norm_attn_norm.norm_2"),
            *linear("norm_attn_norm.attn.Wqkv", "Q+K+V", "RS"),
            *linear("norm_attn_norm.attn.out_proj", "RS", "O"),
        ),
        sparse=(
            *linear("ffn.router.layer", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            Row("ffn.experts.mlp.w1", "e*EX RS"),
            Row("ffn.experts.mlp.v1", "e*EX RS"),
            Row("ffn.experts.mlp.w2", "e*EX RS", out=1),
        ),
        prefix="transformer.",
        defaults={
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "vocab_size": 32_000,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 3584,
        },
        ties=False,
        fixed_head=True,
        usual=_dbrx,
        moe=every_layer,
    ),
}
