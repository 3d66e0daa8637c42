"""Tables of decoders with experts and multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.models.families.corrected import CORRECTED_EXPERTS
from tpplan.models.families.rows import EXPERTS, NORMS, ROUTER, gated, linear, norm, outside
from tpplan.models.families.shape import are_of_kind
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_experts
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tpplan.models.config import Config


#: The flag of layers with an indexer of their own.
INDEXED: Final = "indexed"


def with_latent(q_rank: int = 1536, shared: int = 0) -> Callable[[Config, Shape], Shape]:
    """Add the ranks and head sizes of latent attention, and the shared experts, with the defaults of both."""
    add_shared = shared_experts(default=shared)

    def adapt(config: Config, shape: Shape) -> Shape:
        rank = config.optional_count("q_lora_rank", default=q_rank) or 0
        rope = config.count("qk_rope_head_dim", minimum=0)
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


def with_indexer(heads: int = 64, q_rank: int = 1536) -> Callable[[Config, Shape], Shape]:
    """Add the indexer, which chooses the tokens that a query attends to by keys and a cache of its own.

    Args:
        heads: default of its heads.
        q_rank: default of the rank of the queries.

    Raises:
        ModelError: queries have no latent, which the indexer reads (when the result is called).
    """
    add_latent = with_latent(q_rank, shared=1)

    def adapt(config: Config, shape: Shape) -> Shape:
        shape = add_latent(config, shape)
        if INDEXED in shape.flags and not shape.q_rank:
            raise config.error("q_lora_rank is null, but the indexer reads the latent of the queries")
        return evolve(
            shape,
            index_heads=config.count("index_n_heads", default=heads),
            index_dim=config.count("index_head_dim", default=128) if INDEXED in shape.flags else 0,
        )

    return adapt


def indexers(config: Config, layers: int, without: Sequence[bool] = ()) -> tuple[Mapping[str, object], ...]:
    """Tell which layers have an indexer; the others take the tokens that the layer before them took.

    Their types tell it, a pattern of letters, or a period.

    Args:
        config: the config.
        layers: number of layers.
        without: which layers have no attention that an indexer chooses tokens for; empty for none of them.

    Raises:
        ModelError: the types or the pattern are of another number of layers, or of other kinds; or the first layer that
            needs one has none to share.
    """
    pattern = config.raw("index_topk_pattern")
    if config.raw("indexer_types") is None and isinstance(pattern, str):
        letters = {"F": "full", "S": "shared"}
        config = config.having("indexer_types", [letters.get(letter, letter) for letter in pattern])
    elif config.raw("indexer_types") is None and pattern is not None:
        config = config.having("indexer_types", pattern)
    taken = are_of_kind(config, "indexer_types", layers, ("full", "shared"))
    if not taken:
        period = max(1, config.count("index_topk_freq", default=1, minimum=0))
        offset = config.count("index_skip_topk_offset", default=2, minimum=0)
        taken = tuple(max(layer - offset + 1, 0) % period != 0 for layer in range(layers))
    needs = [not each for each in without] or [True] * layers
    first = next((layer for layer, needed in enumerate(needs) if needed), 0)
    if needs[first] and taken[first]:
        raise config.error(f"layer {first} shares an indexer (indexer_types), but no layer before it has one")
    return tuple({INDEXED: needed and not each} for needed, each in zip(needs, taken, strict=True))


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
INDEXER = (
    *linear("self_attn.indexer.wq_b", "iq", "qr", when=INDEXED, home=Axis.KV_HEADS),
    *linear("self_attn.indexer.wk", "ik", "h", when=INDEXED, home=Axis.KV_HEADS),
    *norm("self_attn.indexer.k_norm", "ik", bias=True, when=INDEXED, home=Axis.KV_HEADS),
    *linear("self_attn.indexer.weights_proj", "ih", "h", when=INDEXED, home=Axis.KV_HEADS),
)


def _gated_norm(name: str) -> tuple[Row, ...]:
    """Return the rows of a norm whose output a gate of a rank scales (A.X-K2)."""
    return (
        *norm(f"{name}.norm"),
        *linear(f"{name}.W_down", "gated_norm_rank", "h"),
        *linear(f"{name}.W_up", "h", "gated_norm_rank"),
    )


def _axk2(config: Config, shape: Shape) -> Shape:
    """Add the indexer, the rank of gates of norms, and what queries and the gates of their outputs are made of."""
    shape = with_indexer(16, 384)(config, shape)
    columns = shape.q_heads * (shape.head_dim + shape.v_head_dim)
    return shape.having(
        gated_norm_rank=config.count("gated_norm_rank", default=16),
        QG=Segment(Axis.Q_HEADS, columns),
    )


#: Heads have sizes of their own, so hidden sizes need not be multiples of heads.
_HEAD = {"head_dim": 64}

_SHARED_EXPERTS: Final = gated("mlp.shared_experts", "SX", when=SHARED)

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

_DEEPSEEK_V32 = Family(
    architectures=("DeepseekV32ForCausalLM",),
    outside=outside(),
    layer=(*NORMS, *MLA, *INDEXER),
    dense=gated(),
    sparse=CORRECTED_EXPERTS,
    extra_layers=True,
    defaults={"num_experts_per_tok": 8, **_HEAD},
    flags={"attention_bias": False, INDEXED: True},
    moe=mlp_types(after_dense(3)),
    adapt=with_indexer(),
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
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": evolve(
        _DEEPSEEK_V32, architectures=("GlmMoeDsaForCausalLM",), own=indexers, adapt=with_indexer(32, 2048)
    ),
    "mistral4": Family(
        architectures=("Mistral4ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *MLA),
        dense=gated(),
        sparse=(
            *ROUTER,
            Row("mlp.experts.gate_up_proj", "e EX+EX RS", out=1),
            Row("mlp.experts.down_proj", "e RS EX", out=1),
            *_SHARED_EXPERTS,
        ),
        defaults={"num_experts_per_tok": 4, **_HEAD},
        flags={"attention_bias": False},
        moe=after_dense(0),
        adapt=with_latent(1024, 1),
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
    "axk1": evolve(
        _DEEPSEEK_V3,
        architectures=("AXK1ForCausalLM",),
        sparse=(*CORRECTED_EXPERTS, *norm("post_mlp_layernorm")),
        ignored=("*.rotary_emb.inv_freq", "*.mlp.post_mlp_layernorm.weight"),
        moe=mlp_types(after_dense(1)),
    ),
    # Queries and the gates of heads' outputs are projected together, from the latent before its norm and after it.
    "axk2": evolve(
        _DEEPSEEK_V32,
        architectures=("AXK2ForCausalLM",),
        layer=(
            *_gated_norm("input_layernorm"),
            *(evolve(row, dims="QG qr+qr") if "q_b_proj" in row.name else row for row in MLA),
            *INDEXER,
        ),
        dense=(*gated(), *norm("post_attention_layernorm")),
        sparse=(*CORRECTED_EXPERTS, *_gated_norm("post_attention_layernorm")),
        moe=mlp_types(after_dense(1)),
        adapt=_axk2,
    ),
    "minicpm3": Family(
        architectures=("MiniCPM3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *MLA),
        dense=gated(bias="mlp_bias"),
        defaults=_HEAD,
        flags={"attention_bias": False, "mlp_bias": False},
        tied=True,
        adapt=with_latent(768),
    ),
    "youtu": Family(
        architectures=("YoutuForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *MLA),
        dense=gated(),
        defaults=_HEAD,
        flags={"attention_bias": False},
        tied=True,
        adapt=with_latent(),
    ),
}
