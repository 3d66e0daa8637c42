"""Tables of decoders with several residual streams, which layers mix anew (hyper-connections, arXiv:2409.19606)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.hybrid import DELTA_NET, GATED_ATTENTION, KDA, QWEN_LINEAR, SEPARATE, kda, kda_section
from tpplan.models.families.latent import INDEXED, INDEXER, MLA, indexers, with_indexer
from tpplan.models.families.rows import (
    EXPERTS,
    NORMS,
    ROUTER,
    SHARED_EXPERT,
    correction,
    gated,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import FULL, every_layer, except_every, linear_layers
from tpplan.models.families.sparse import SHARED, after_dense, mlp_types, shared_expert
from tpplan.models.families.table import Family, Row, Shape, sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.config import Config

_HEADS: Final = Axis.KV_HEADS
#: What transformers calls layers with an indexer, and what configs of the hub call them.
_INDEXED_KIND: Final = "indexed_attention"


def _hy_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers have an indexer: where no list says, the first, the second, and every fourth after that."""
    if config.raw("indexer_types") is None:
        kinds = ["full" if not layer or layer % 4 == 1 else "shared" for layer in range(layers)]
        config = config.having("indexer_types", kinds)
    return indexers(config, layers)


def _hy(config: Config, shape: Shape) -> Shape:
    """Add latent attention with an indexer, and the streams, each of which a layer reads and writes by a weight."""
    shape = with_indexer(16, 1536)(config, shape)
    streams = config.count("hc_mult", default=4)
    return shape.having(hm=streams, hs=2 * streams, hh=streams * shape.hidden, two=2)


def _mixer(name: str, word: str, scales: str, dtype: str = "") -> tuple[Row, ...]:
    """Return the rows of what mixes all streams."""
    rows = Row(f"{name}_fn", f"{word} hh"), Row(f"{name}_base", word), Row(f"{name}_scale", scales)
    return tuple(evolve(row, dtype=dtype) for row in rows)


def _linear_gated(name: str, width: str, when: str = "") -> tuple[Row, ...]:
    """Return the rows of a gated MLP as transformers saves those of HY."""
    rows = gated(name, width, when=when)
    return tuple(evolve(row, name=row.name.replace("gate_proj", "linear_gate")) for row in rows)


def _usual_kinds(config: Config) -> Config:
    """Read the kinds of layers by their usual names."""
    types = config.texts("layer_types")
    return (
        config.having("layer_types", [FULL if each == _INDEXED_KIND else each for each in types]) if types else config
    )


def _glm_usual(config: Config) -> Config:
    """Read the kinds of layers by their usual names, and the section of linear attention.

    ``head_dim`` is of the rotary part of heads, which there is none of.
    """
    return kda_section(_usual_kinds(config).having("head_dim", None).filled(_GLM_GIVEN))


def _glm(config: Config, shape: Shape) -> Shape:
    """Add latent attention with an indexer that pools tokens, and the streams.

    The indexer keeps the keys of all tokens, the gates that weigh them, and whether they count.
    """
    shape = with_indexer(32, 1536)(config, shape)
    streams, key = config.count("hc_mult", default=4), shape.index_dim
    return evolve(shape, compressed_dim=key + 1 if key else 0, ratio=1 if key else 0).having(
        pool=config.count("index_kpool", default=16),
        hs=streams * (streams + 2),
        hh=streams * shape.hidden,
        three=3,
    )


#: What a config may leave out of latent and linear attention.
_GLM_GIVEN: Final = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "linear_num_heads": 64,
}


_GLM_LINEAR: Final = linear_layers(kda, except_every(4, ""))


def _glm_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers with latent attention have an indexer."""
    return indexers(config, layers, [bool(linear) for linear in _GLM_LINEAR(config, layers)])


def _qwen4_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers have n-gram embeddings: the config counts them from 1.

    Raises:
        ModelError: one of them is no layer, or has no linear attention.
    """
    numbers = frozenset(config.numbers("ple_layer_ids"))
    if outside := sorted(number for number in numbers if not 1 <= number <= layers):
        raise config.error(f"ple_layer_ids has {outside[0]}, expected 1 to {layers} (num_hidden_layers)")
    if full := [i for i, linear in enumerate(QWEN_LINEAR(config, layers), 1) if i in numbers and not linear]:
        raise config.error(f"ple_layer_ids has {full[0]}, a layer of full attention, which has no n-gram embeddings")
    return tuple({_NGRAMS: layer + 1 in numbers} for layer in range(layers))


def _qwen4_sizes(config: Config, shape: Shape) -> Shape:
    """Add the streams, the indexer, whose key of each token is cached beside keys and values, and n-grams.

    Raises:
        ModelError: the indexer has several keys for each token.
    """
    shape = shared_expert(512)(config, shape)
    if (keys := config.count("indexer_kv_heads", default=1)) != 1:
        raise config.error(f"indexer_kv_heads is {keys}, expected 1: the indexer's queries share one key")
    streams, key = config.count("hc_count", default=4), config.count("indexer_head_dim")
    orders, each = config.count("ngram_size", default=3, minimum=2), config.count("heads_per_ngram", default=8)
    return evolve(
        shape, index_heads=config.count("indexer_n_heads"), index_dim=key, compressed_dim=key, ratio=1
    ).having(
        hm=streams,
        hh=streams * shape.hidden,
        rank=config.count("hc_lowrank", default=320),
        orders=orders,
        grams=(orders - 1) * each,
        gram_width=config.count("ple_embed_dim", default=shape.hidden),
        gram_kernel=config.count("ple_conv_kernel_size", default=4),
    )


#: The flag of layers with n-gram embeddings.
_NGRAMS: Final = "ngram_embedding"


def _mixed(name: str) -> tuple[Row, ...]:
    """Return the rows of what mixes all streams into one, and of the weights by which a layer writes to each."""
    return (
        *norm(f"{name}.hc_norm", "hh"),
        *linear(f"{name}.input_mix_weight_down", "rank", "hh"),
        *linear(f"{name}.input_mix_weight_up", "hh", "rank"),
    )


_QWEN4_STREAMS: Final = tuple(
    row
    for name in ("attn_hyper_connection", "mlp_hyper_connection")
    for row in (*_mixed(name), *linear(f"{name}.block_inject_weight", "hm", "hh"))
)

#: What is made of the embeddings of n-grams, which themselves stay in the host's memory.
_QWEN4_NGRAMS: Final = (
    Row("ple.conv1d.weight", "hh 1 gram_kernel", _NGRAMS),
    *linear("ple.key_proj", "hh", "gram_width", when=_NGRAMS),
    *linear("ple.value_proj", "h", "gram_width", when=_NGRAMS),
    *norm("ple.norm_conv", "hh", when=_NGRAMS),
    *norm("ple.norm_key", "hh", when=_NGRAMS),
    *norm("ple.norm_query", "hh", when=_NGRAMS),
    Row("ple.ple_embedding.layer_multipliers", "orders", _NGRAMS, dtype="I64"),
    Row("ple.ple_embedding.ngram_heads_offsets", "grams", _NGRAMS, dtype="I64"),
    Row("ple.ple_embedding.ngram_heads_vocab_sizes", "grams", _NGRAMS, dtype="I64"),
)

STREAMS: Final[dict[str, Family]] = {
    "hy_v4": Family(
        architectures=("HYV4ForCausalLM",),
        outside=(*outside(), *_mixer("model.hc_pre.hc_head.hc_head", "hm", "1", "F32")),
        layer=(
            *_mixer("hc_pre.hc_attn_layer.hc", "hs", "two", "F32"),
            *_mixer("hc_pre.hc_mlp_layer.hc", "hs", "two", "F32"),
            *NORMS,
            *MLA,
            *linear("self_attn.linear_gate", "O", "RS"),
            Row("self_attn.learnable_sink_param", "q", dtype="F32"),
            *INDEXER,
        ),
        dense=_linear_gated("mlp", "ID"),
        sparse=(
            *ROUTER,
            *correction("mlp.gate.e_score_correction_bias"),
            Row("mlp.experts.gate_up_proj", "e EX+EX RS", out=1),
            Row("mlp.experts.down_proj", "e RS EX", out=1),
            *_linear_gated("mlp.shared_experts", "SX", SHARED),
        ),
        extra_layers=True,
        # The tables have the names that transformers saves, these are those of the published files.
        renamed={
            "model.hc_head.": "model.hc_pre.hc_head.",
            **{f".hc_{part}_layer.hc_pre.": f".hc_pre.hc_{part}_layer." for part in ("attn", "mlp")},
            **{f".{mlp}.gate_proj.": f".{mlp}.linear_gate." for mlp in ("mlp", "shared_experts")},
        },
        ignored=("*.rotary_emb.inv_freq", "model.mtp_layers.*"),
        defaults={"head_dim": 64, "num_experts_per_tok": 8},
        flags={"attention_bias": False, INDEXED: True},
        moe=mlp_types(after_dense(1, "")),
        own=_hy_layers,
        adapt=_hy,
    ),
    "qwen4_exp_text": Family(
        architectures=("Qwen4ExpForCausalLM",),
        outside=(*outside(final=()), *_mixed("model.hyper_connection_mixer")),
        layer=(
            *_QWEN4_STREAMS,
            *GATED_ATTENTION,
            *linear("self_attn.indexer.index_qk_proj", "iq+ik", "h", home=_HEADS),
            *norm("self_attn.indexer.q_layernorm", "ik", home=_HEADS),
            *norm("self_attn.indexer.k_layernorm", "ik", home=_HEADS),
        ),
        linear_layer=(*_QWEN4_STREAMS, *SEPARATE, *DELTA_NET, *_QWEN4_NGRAMS),
        sparse=(*ROUTER, *EXPERTS, *SHARED_EXPERT),
        ignored=("mtp.*", "model.visual.*", "*.ple.ple_embedding.ngram_embedding.*"),
        defaults={
            **sizes(248_320, 2048, 0, 40, 16, 2, 32_768, head_dim=256),
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
        },
        flags={"attention_bias": False, _NGRAMS: False},
        usual=_usual_kinds,
        moe=every_layer,
        linear=QWEN_LINEAR,
        own=_qwen4_layers,
        adapt=_qwen4_sizes,
        note="embeddings of n-grams stay in the host's memory, and what their convolution keeps is not counted",
    ),
}

#: Of language models that are only within one that sees.
STREAMS_SEEING: Final[dict[str, Family]] = {
    "glm5_next_text": Family(
        architectures=(),
        outside=outside(),
        layer=(
            *_mixer("hc_attn", "hs", "three"),
            *_mixer("hc_ffn", "hs", "three"),
            *NORMS,
            *MLA,
            *INDEXER,
            Row("self_attn.indexer.index_kpool_compress_ape", "pool ik", INDEXED, _HEADS),
            Row("self_attn.indexer.index_kpool_compress_gate", "ik h", INDEXED, _HEADS),
        ),
        linear_layer=(
            *_mixer("hc_attn", "hs", "three"),
            *_mixer("hc_ffn", "hs", "three"),
            *NORMS,
            *(evolve(row, dims="lh", out=0) if row.name.endswith("A_log") else row for row in KDA),
        ),
        dense=gated(),
        sparse=(
            *ROUTER,
            *correction("mlp.gate.e_score_correction_bias"),
            *EXPERTS,
            *gated("mlp.shared_experts", "SX", when=SHARED),
        ),
        extra_layers=True,
        defaults={
            **sizes(154_880, 4096, 12_288, 45, 64, 64, 1_048_576, head_dim=64),
            "num_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
        },
        flags={"attention_bias": False, INDEXED: True},
        usual=_glm_usual,
        moe=mlp_types(after_dense(3, "")),
        linear=_GLM_LINEAR,
        own=_glm_layers,
        adapt=_glm,
    ),
}
