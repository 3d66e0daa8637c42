"""Tables of mixtures of experts that exist only as part of a model that sees."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.models.families.latent import INDEXED, indexers
from tpplan.models.families.rows import (
    BIASED_ATTENTION,
    NORMS,
    attention,
    correction,
    gated,
    linear,
    norm,
    numbered,
    outside,
)
from tpplan.models.families.shape import MAX_PARTS, every_layer, last_of_four, windows, without_rope
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_experts
from tpplan.models.families.table import SHARED_KV, Family, Row, Shape, sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.config import Config

#: The key of ERNIE's two widths of experts: of those for text, and of those for images.
_WIDTHS: Final = "moe_intermediate_size"
_COLUMNS: Final = "expert_columns"
_BOTH: Final = 2
_ERNIE_WIDTHS: Final = (1536, 512)

#: The keys of what each layer of Mistral Large 4 has of its own.
_SOURCES: Final = "kv_source_layers"
_BARE: Final = "without_rope"


def _ernie(config: Config) -> Config:
    """Read a width of experts by which both are cut, as many columns at a time as each has of it.

    Raises:
        ModelError: there are not two widths.
    """
    return config.having(_COLUMNS, gcd(*_ernie_widths(config)))


def _ernie_widths(config: Config) -> tuple[int, ...]:
    widths = config.numbers(_WIDTHS) or _ERNIE_WIDTHS
    if len(widths) != _BOTH or min(widths) < 1:
        raise config.error(f"{_WIDTHS} is {str(widths)[:60]}, expected the widths of experts for text and for images")
    return widths


def _ernie_experts(config: Config, shape: Shape) -> Shape:
    """Add both kinds of experts, and the shared ones, which are as wide as those for text."""
    if not shape.experts:
        return shape
    text, images = _ernie_widths(config)
    shared = config.count("moe_num_shared_experts", default=2, minimum=0, maximum=MAX_PARTS) * text
    shape = evolve(shape, shared_intermediate=shared)
    return shape.having(
        *(SHARED,) if shared else (),
        EX=Segment(Axis.EXPERT_INTERMEDIATE, text),
        IX=Segment(Axis.EXPERT_INTERMEDIATE, images),
        two=2,
    )


def _aria(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, each as wide as a routed one."""
    return shared_experts("moe_num_shared_experts", 2)(config, shape)


def _large_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers have an indexer, rotate nothing, and attend to what an earlier layer has cached.

    Raises:
        ModelError: a list is of another number of layers, or names a layer that caches nothing or comes later.
    """
    sources = config.numbers(_SOURCES) or tuple(range(layers))
    if len(sources) != layers:
        raise config.error(f"{_SOURCES} has {len(sources)} entries for {layers} layers (num_hidden_layers)")
    for layer, source in enumerate(sources):
        if not 0 <= source <= layer or sources[source] != source:
            raise config.error(f"{_SOURCES} has {source} for layer {layer}, which no earlier layer caches")
    each = zip(indexers(config, layers), without_rope(config, layers), sources, strict=True)
    return tuple({**own, _BARE: bare, SHARED_KV: source != i} for i, (own, bare, source) in enumerate(each))


def _large(config: Config, shape: Shape) -> Shape:
    """Add the latent, whose rotary part only some layers have, the indexer, and the shared experts."""
    rope = config.count("qk_rope_head_dim", default=64)
    shape = evolve(
        shape,
        kv_heads=shape.q_heads,
        head_dim=config.count("qk_nope_head_dim", default=64) + rope,
        v_head_dim=config.count("v_head_dim", default=128),
        kv_rank=config.count("kv_lora_rank", default=512),
        rope_dim=0 if config.flag(_BARE) else rope,
        index_heads=config.count("index_n_heads", default=32),
        index_dim=config.count("index_head_dim", default=128) if INDEXED in shape.flags else 0,
    )
    return shared_experts(default=1)(config, shape).having(half=rope // 2)


def _muse_experts(config: Config, shape: Shape) -> Shape:
    """Add the width that all routed experts of Muse read and give."""
    width = config.count("moe_hidden_size", default=4096) if shape.experts else 0
    return evolve(shape, expert_rank=width).having(eh=width)


_HEADS: Final = Axis.KV_HEADS
_EXPERTS: Final = Axis.EXPERT_INTERMEDIATE


def _scaling(name: str, heads: str, when: str = "", home: Axis | None = None) -> tuple[Row, ...]:
    """Return the rows of what scales the scores of each head before their softmax."""
    return Row(f"{name}.ssmax_scaling.b", heads, when, home), Row(f"{name}.ssmax_scaling.s", heads, when, home)


_LARGE_INDEXER: Final = (
    *norm("attention.indexer.k_norm", "ik", bias=True, when=INDEXED, home=_HEADS),
    *norm("attention.indexer.q_input_norm", bias=True, when=INDEXED, home=_HEADS),
    *_scaling("attention.indexer", "ih", INDEXED, _HEADS),
    *linear("attention.indexer.weights_proj", "ih", "h", when=INDEXED, home=_HEADS),
    *linear("attention.indexer.wk", "ik", "h", when=INDEXED, home=_HEADS),
    *linear("attention.indexer.wq_b", "iq", "h", when=INDEXED, home=_HEADS),
)

SEEING: Final[dict[str, Family]] = {
    "aria_text": Family(
        architectures=("AriaTextForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        sparse=(
            *linear("mlp.router", "e", "h", home=_EXPERTS),
            Row("mlp.experts.fc1.weight", "e RS EX+EX", out=2),
            Row("mlp.experts.fc2.weight", "e EX RS", out=2),
            *gated("mlp.shared_experts", "SX", "mlp_bias", when=SHARED),
        ),
        defaults={
            **sizes(32_000, 4096, 4096, 32, 32, 32, 2048),
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        flags={"attention_bias": False, "mlp_bias": False},
        moe=every_layer,
        expert_key="intermediate_size",
        adapt=_aria,
    ),
    # Tokens of images have experts and a router of their own, which are narrower.
    "ernie4_5_vl_moe_text": Family(
        architectures=(),
        outside=outside(),
        layer=(*NORMS, *attention("use_bias", "use_bias")),
        dense=gated(bias="use_bias"),
        sparse=(
            Row("mlp.gate.weight", "h e", home=_EXPERTS, dtype="F32"),
            Row("mlp.gate.weight_1", "h e", home=_EXPERTS, dtype="F32"),
            *correction("mlp.moe_statics.e_score_correction_bias", "two e"),
            *gated("mlp.experts.{expert}", "EX"),
            *(evolve(row, heads="e", first="e") for row in gated("mlp.experts.{head}", "IX")),
            *gated("mlp.shared_experts", "SX", "use_bias", when=SHARED),
        ),
        defaults={
            **sizes(103_424, 2560, 12_288, 28, 20, 4, 131_072),
            "num_experts": 64,
            "num_experts_per_tok": 6,
        },
        flags={"use_bias": False},
        tied=True,
        usual=_ernie,
        expert_key=_COLUMNS,
        moe=mlp_types(after_dense(1)),
        adapt=_ernie_experts,
    ),
    "mistral_large4_text": Family(
        architectures=(),
        outside=(*outside("tok_embeddings", norm("norm"), "output"), Row("lerope.alpha", "half", dtype="F32")),
        layers="layers.{layer}.",
        layer=(
            *norm("attention_norm"),
            *norm("ffn_norm"),
            *linear("attention.wq", "Q", "RS"),
            *linear("attention.wkv_a_with_mqa", "krr", "h", "attention_bias", when=f"!{SHARED_KV}", home=_HEADS),
            *norm("attention.kv_a_norm", "kr", when=f"!{SHARED_KV}", home=_HEADS),
            *linear("attention.wkv_b", "KUP", "kr"),
            *linear("attention.wo", "RS", "O", "attention_bias"),
            *_scaling("attention", "q"),
            *_LARGE_INDEXER,
        ),
        dense=numbered("feed_forward", "ID"),
        sparse=(
            *linear("gate", "e", "h", home=_EXPERTS),
            *numbered("experts.{expert}", "EX"),
            *numbered("shared_experts", "SX", when=SHARED),
        ),
        defaults={
            **sizes(204_800, 6144, 24_576, 72, 64, 64, 1_048_576, head_dim=64),
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 6144,
        },
        flags={"attention_bias": False, INDEXED: True, SHARED_KV: False},
        moe=mlp_types(after_dense(1)),
        own=_large_layers,
        adapt=_large,
    ),
    "muse_spark_text": Family(
        architectures=(),
        outside=outside(),
        layer=(
            *norm("input_layernorm"),
            *norm("pre_feedforward_layernorm"),
            *norm("post_feedforward_layernorm"),
            *BIASED_ATTENTION,
            *linear("self_attn.gate_proj", "O", "RS"),
            Row("post_attention_residual_gate.gate", "h"),
            Row("post_feedforward_residual_gate.gate", "h"),
        ),
        dense=gated(),
        sparse=(
            *linear("mlp.gate", "e", "h", home=_EXPERTS),
            *correction("mlp.gate.e_score_correction_bias"),
            *linear("mlp.pre_expert_proj", "ER", "RS", home=_EXPERTS),
            *norm("mlp.pre_expert_norm", "eh", home=_EXPERTS),
            Row("mlp.experts.gate_up_proj", "e EX+EX ER", out=1),
            Row("mlp.experts.down_proj", "e ER EX", out=1),
            *norm("mlp.experts.post_expert_norm", "eh", home=_EXPERTS),
            *linear("mlp.post_expert_proj", "RS", "ER", home=_EXPERTS),
        ),
        defaults={
            **sizes(202_048, 8192, 16_384, 62, 128, 16, 1_048_576, head_dim=64),
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 4096,
        },
        flags={"attention_bias": False},
        ties=False,
        window=windows(2048, last_of_four),
        moe=mlp_types(every_layer),
        adapt=_muse_experts,
    ),
}
