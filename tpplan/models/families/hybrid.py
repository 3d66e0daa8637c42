"""Tables of decoders that have linear attention in most of their layers, and full attention in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import MAX_LAYERS, Axis
from tpplan.core.model import LinearAttention
from tpplan.models.families.latent import MLA, with_latent
from tpplan.models.families.rows import (
    BIASED_ATTENTION,
    EXPERTS,
    MIXTRAL_EXPERTS,
    NORMS,
    POST_NORMS,
    ROUTER,
    SHARED_EXPERT,
    WIDE_NORMS,
    attention,
    correction,
    gated,
    head_norms,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import (
    FULL,
    LINEAR,
    MAX_PARTS,
    STACKED,
    every_layer,
    except_every,
    linear_layers,
    renamed,
)
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_expert, sparse_steps
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config


_EXPERTS_HOME: Final = Axis.EXPERT_INTERMEDIATE

#: What remote code calls the context.
_CONTEXT: Final = {"model_max_length": "max_position_embeddings"}


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
QWEN_LINEAR = linear_layers(_delta_net, except_every(4, "full_attention_interval"))


#: Attention whose output is gated; the projection of the queries gives the gates too, head by head.
GATED_ATTENTION = (*attention("attention_bias", "attention_bias", q="Q2"), *head_norms())

#: What all forms of the gated DeltaNet have between their projections.
DELTA_NET = (
    Row("linear_attn.conv1d.weight", "LK+LK+LV 1 ck"),
    Row("linear_attn.dt_bias", "lh"),
    Row("linear_attn.A_log", "lh"),
    *norm("linear_attn.norm", "lv", home=Axis.LINEAR_HEADS),
    *linear("linear_attn.out_proj", "RS", "LV"),
)

#: Projections that lie one behind the other, and those that lie head by head.
SEPARATE = (
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


#: The section of a config on linear attention.
_SECTION: Final = "linear_attn_config"

#: Kimi K3's keys beside those of Kimi Linear: its latents of experts, its full gates, and its sums over layers.
_LATENT_WIDTH: Final = "routed_expert_hidden_size"
_FULL_GATE: Final = "use_full_rank_gate"
SUMS: Final = "attn_res_block_size"
#: The flag of decays that are padded with zeros.
_ZEROS: Final = "padded_decays"


def kda_section(config: Config) -> Config:
    """Read what the section ``linear_attn_config``, if there is one, says of Kimi Delta Attention."""
    if config.raw(_SECTION) is None:
        return config
    inner = config.section(_SECTION)
    for key, own in (
        ("head_dim", "linear_head_dim"),
        ("num_heads", "linear_num_heads"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        (_FULL_GATE, _FULL_GATE),
    ):
        config = config.having(own, inner.raw(key)) if key in inner else config
    return config


def _kimi(config: Config) -> Config:
    """Read the section ``linear_attn_config``, which numbers layers from 1, and the context by its name.

    Raises:
        ModelError: layers are not all told.
    """
    config = kda_section(renamed(config, _CONTEXT, keep=True))
    if config.raw(_SECTION) is None:
        return config
    inner = config.section(_SECTION)
    if config.raw("layer_types") is not None or "full_attn_layers" not in inner or "kda_layers" not in inner:
        return config
    full, linear = ({*inner.numbers(key)} for key in ("full_attn_layers", "kda_layers"))
    layers = config.count("num_hidden_layers", default=27, maximum=MAX_LAYERS)
    if full & linear or full | linear != {*range(1, layers + 1)}:
        of = f"the {layers} layers from 1 on"
        raise config.error(f"full_attn_layers and kda_layers of linear_attn_config are not, taken together, {of}")
    return config.having("layer_types", [FULL if layer in full else LINEAR for layer in range(1, layers + 1)])


def _kimi_linear(config: Config, layers: int) -> tuple[bool, ...]:  # noqa: ARG001 (no key changes it)
    """Select all layers but every fourth after the first."""
    return tuple(not layer or layer % 4 != 0 for layer in range(layers))


def kda(config: Config) -> LinearAttention:
    """Read the sizes of Kimi Delta Attention, whose heads have each a query, a key and a value of one size."""
    heads = config.count("linear_num_heads", default=32, maximum=MAX_PARTS)
    size = config.count("linear_head_dim", default=128)
    return LinearAttention(heads, heads, size, size, config.count("linear_conv_kernel_dim", default=4))


def _three_convolutions(name: str) -> tuple[Row, ...]:
    """Return the rows of the convolutions of queries, keys and values, each on its own."""
    return tuple(
        Row(f"{name}.{of}_conv1d.weight", f"{word} 1 ck") for of, word in (("q", "LK"), ("k", "LK"), ("v", "LV"))
    )


def _kimi_sizes(config: Config, shape: Shape) -> Shape:
    """Add latent attention, and what routed experts read and give in Kimi K3.

    Its files have as many decays as a head has elements, and zeros behind those of the heads.
    """
    shape = with_latent(0, shared=1)(config, shape)
    width = config.optional_count(_LATENT_WIDTH) or 0 if shape.experts else 0
    linear = next(filter(None, shape.linear), None)
    zeros = max(0, linear.key_head_dim - linear.key_heads) if linear else 0
    flags = ("latent_experts",) * bool(width) + (SUMS,) * bool(config.optional_count(SUMS)) + (_ZEROS,) * bool(zeros)
    return evolve(shape, expert_rank=width).having(*flags, eh=width, zeros=zeros)


def _summed(*names: str) -> tuple[Row, ...]:
    """Return the rows of what weighs the sums of earlier layers (attention residuals, Kimi K3)."""
    each = ((*norm(f"{name}_norm", when=SUMS), *linear(f"{name}_proj", "1", "h", when=SUMS)) for name in names)
    return tuple(row for rows in each for row in rows)


#: Gates of all channels go through a rank that is a head's size, which every device has that has any of the heads.
KDA = (
    *linear("self_attn.q_proj", "LK", "RS"),
    *linear("self_attn.k_proj", "LK", "RS"),
    *linear("self_attn.v_proj", "LV", "RS"),
    *_three_convolutions("self_attn"),
    *linear("self_attn.f_a_proj", "lv", "h", home=Axis.LINEAR_HEADS),
    *linear("self_attn.f_b_proj", "LK", "lv"),
    Row("self_attn.dt_bias", "LK"),
    Row("self_attn.A_log", "1 1 lh 1", out=2),
    *linear("self_attn.b_proj", "lh", "RS"),
    *linear("self_attn.g_a_proj", "lv", "h", home=Axis.LINEAR_HEADS),
    *linear("self_attn.g_b_proj", "LV", "lv"),
    *norm("self_attn.o_norm", "lv", home=Axis.LINEAR_HEADS),
    *linear("self_attn.o_proj", "RS", "LV"),
)

#: Of Kimi K3 gates have no rank, and decays are a vector, one for each head.
_KIMI_KDA = (
    *(
        evolve(row, when=f"{row.when} !{_FULL_GATE}".strip()) if ".g_" in row.name or "A_log" in row.name else row
        for row in KDA
    ),
    *linear("self_attn.g_proj", "LV", "RS", when=_FULL_GATE),
    Row("self_attn.A_log", "lh", f"{_FULL_GATE} !{_ZEROS}"),
    Row("self_attn.A_log", "lh+zeros", f"{_FULL_GATE} {_ZEROS}", Axis.LINEAR_HEADS),
)

#: Experts as Mixtral calls them, and the shared ones as DeepSeek does; what leads to the latent and from it is needed
#: wherever experts are.
_KIMI_EXPERTS = (
    *(evolve(row, dims=row.dims.replace("RS", "ER")) for row in MIXTRAL_EXPERTS),
    *correction("block_sparse_moe.gate.e_score_correction_bias"),
    *gated("block_sparse_moe.shared_experts", "SX", when=SHARED),
    *linear("block_sparse_moe.routed_expert_down_proj", "ER", "RS", when="latent_experts", home=_EXPERTS_HOME),
    *norm("block_sparse_moe.routed_expert_norm", "eh", when="latent_experts latent_moe_use_norm", home=_EXPERTS_HOME),
    *linear("block_sparse_moe.routed_expert_up_proj", "RS", "ER", when="latent_experts", home=_EXPERTS_HOME),
)


def _olmo_delta_net(config: Config) -> LinearAttention:
    """Read the sizes of OLMo's gated DeltaNet, which follow from the hidden size and the heads where none are given."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads", maximum=MAX_PARTS)
    keys = config.count("linear_num_key_heads", default=heads, maximum=MAX_PARTS)
    size = config.count("linear_key_head_dim", default=3 * hidden // (4 * keys))
    config = config.having("linear_num_key_heads", keys).having("linear_key_head_dim", size)
    values = config.count("linear_num_value_heads", default=heads)
    wide = config.count("linear_value_head_dim", default=2 * size)
    return _delta_net(config.having("linear_num_value_heads", values).having("linear_value_head_dim", wide))


def _olmo_linear(config: Config, layers: int) -> tuple[bool, ...]:
    """Select all but every fourth layer, or but the last if there is no fourth."""
    chosen = except_every(4, "")(config, layers)
    return chosen if not all(chosen) else (*chosen[:-1], False)


def _bailing(config: Config) -> Config:
    """Read the context and the heads of linear attention by their names."""
    names = {
        **_CONTEXT,
        "head_dim": "linear_head_dim",
        "num_attention_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    return renamed(config, names, keep=True)


#: Latent attention with a gate for each head, and Kimi Delta Attention whose gates have no rank.
_BAILING_MLA = (
    *(evolve(row, name=row.name.replace("self_attn", "attention").replace("o_proj", "dense")) for row in MLA),
    *linear("attention.g_proj", "q", "RS"),
)
_BAILING_KDA = (
    *linear("attention.q_proj", "LK", "RS"),
    *linear("attention.k_proj", "LK", "RS"),
    *linear("attention.v_proj", "LV", "RS"),
    *_three_convolutions("attention"),
    *linear("attention.f_proj", "LK", "RS"),
    *linear("attention.g_proj", "LV", "RS"),
    *linear("attention.b_proj", "lh", "RS"),
    Row("attention.dt_bias", "LK"),
    Row("attention.A_log", "lh"),
    *norm("attention.o_norm", "lv", home=Axis.LINEAR_HEADS),
    *linear("attention.dense", "RS", "LV"),
)

HYBRID: Final[dict[str, Family]] = {
    "bailing_hybrid": Family(
        architectures=("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
        outside=outside("model.word_embeddings"),
        layer=(*NORMS, *_BAILING_MLA),
        linear_layer=(*NORMS, *_BAILING_KDA),
        dense=gated(),
        sparse=(
            *ROUTER,
            *correction("mlp.gate.expert_bias"),
            *EXPERTS,
            *gated("mlp.shared_experts", "SX", when=SHARED),
        ),
        extra_layers=True,
        ties=False,
        defaults={"head_dim": 128, "num_experts": 512, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        flags={"attention_bias": False},
        usual=_bailing,
        moe=mlp_types(after_dense(2)),
        linear=linear_layers(kda, except_every(6, "layer_group_size")),
        adapt=with_latent(0, shared=1),
    ),
    "kimi_linear": Family(
        architectures=("KimiLinearForCausalLM",),
        outside=(*outside(), *_summed("model.output_attn_res")),
        layer=(
            *NORMS,
            *MLA,
            *linear("self_attn.g_proj", "O", "RS", when="mla_use_output_gate"),
            *_summed("self_attention_res", "mlp_res"),
        ),
        linear_layer=(*NORMS, *_KIMI_KDA, *_summed("self_attention_res", "mlp_res")),
        dense=gated(),
        sparse=_KIMI_EXPERTS,
        defaults={"head_dim": 64, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024},
        flags={
            "attention_bias": False,
            "mla_use_output_gate": False,
            "latent_moe_use_norm": False,
            _FULL_GATE: False,
        },
        extra_layers=True,
        ties=False,
        usual=_kimi,
        moe=mlp_types(after_dense(1)),
        linear=linear_layers(kda, _kimi_linear),
        adapt=_kimi_sizes,
    ),
    "olmo_hybrid": Family(
        architectures=("OlmoHybridForCausalLM",),
        outside=outside(),
        layer=(*BIASED_ATTENTION, *WIDE_NORMS, *POST_NORMS),
        linear_layer=(
            *norm("attention_layer_norm"),
            *norm("feedforward_layer_norm"),
            *linear("linear_attn.q_proj", "LK", "RS"),
            *linear("linear_attn.k_proj", "LK", "RS"),
            *linear("linear_attn.v_proj", "LV", "RS"),
            *linear("linear_attn.a_proj", "lh", "RS"),
            *linear("linear_attn.b_proj", "lh", "RS"),
            *linear("linear_attn.g_proj", "LV", "RS"),
            *_three_convolutions("linear_attn"),
            Row("linear_attn.dt_bias", "lh"),
            Row("linear_attn.A_log", "lh"),
            *norm("linear_attn.o_norm", "lv", home=Axis.LINEAR_HEADS),
            *linear("linear_attn.o_proj", "RS", "LV"),
        ),
        dense=gated(),
        flags={"attention_bias": False},
        linear=linear_layers(_olmo_delta_net, _olmo_linear),
    ),
    "qwen3_next": Family(
        architectures=("Qwen3NextForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *GATED_ATTENTION),
        linear_layer=(*NORMS, *_INTERLEAVED, *DELTA_NET),
        dense=gated(),
        sparse=(*ROUTER, *EXPERTS, *SHARED_EXPERT),
        ignored=("mtp.*",),
        defaults={"num_key_value_heads": 2, "head_dim": 256},
        flags={"attention_bias": False},
        linear=QWEN_LINEAR,
        moe=sparse_steps,
        adapt=shared_expert(512),
    ),
    "qwen3_5_text": Family(
        architectures=("Qwen3_5ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *GATED_ATTENTION),
        linear_layer=(*NORMS, *SEPARATE, *DELTA_NET),
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
        linear=QWEN_LINEAR,
    ),
    "qwen3_5_moe_text": Family(
        architectures=("Qwen3_5MoeForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *GATED_ATTENTION),
        linear_layer=(*NORMS, *SEPARATE, *DELTA_NET),
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
        linear=QWEN_LINEAR,
        moe=every_layer,
        adapt=shared_expert(512),
    ),
}
