"""Tables of decoders whose attention sees tokens beyond a window compressed (DeepSeek-V4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.core.sizes import counted
from tpplan.models.families.rows import linear, norm, numbered, outside
from tpplan.models.families.shape import every_layer, windows
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tpplan.models.config import Config

_Kind = TypeVar("_Kind", int, str)

#: Kinds of attention: none compressed, and with the default of tokens that become one.
_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS: Final = {_SPARSE: 4, _HEAVY: 128}
_KEYS: Final = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}

#: Flags of layers: those with a compressor, those whose compressor has an indexer, and those that look experts up.
_COMPRESSED, _INDEXED, _HASHED = "compressed", "compressor_indexed", "hashed"
_RATIO: Final = "compress_ratio"


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """Return the kind of attention of each layer: as called, or by the ratios listed, or every other one alike.

    Raises:
        ModelError: there are fewer than layers, or one is none of the kinds.
    """
    if types := config.texts("layer_types"):
        return _first(config, "layer_types", types, layers, (_SLIDING, *_RATIOS))
    if listed := config.numbers("compress_ratios"):
        known = {0: _SLIDING, **{ratio: kind for kind, ratio in _RATIOS.items()}}
        return [known[ratio] for ratio in _first(config, "compress_ratios", listed, layers, known)]
    return [_SPARSE if layer > 1 and layer % 2 else _HEAVY for layer in range(layers)]


def _first(config: Config, key: str, found: Sequence[_Kind], layers: int, known: Collection[_Kind]) -> Sequence[_Kind]:
    """Return what a list has for the layers; behind them it may have what is for layers that predict further tokens.

    Raises:
        ModelError: the list is too short, or has something that is not known.
    """
    if len(found) < layers:
        raise config.error(
            f"{key} has {counted(len(found), 'entry')} for {counted(layers, 'layer')} (num_hidden_layers)"
        )
    unknown = next((each for each in found[:layers] if each not in known), None)
    if unknown is not None:
        raise config.error(f"{key} has {str(unknown)[:60]!r}, known are {', '.join(map(str, known))}")
    return found[:layers]


def _deepseek_v4_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell how much each layer compresses, and whether tokens are routed to experts by their number alone."""
    rates = config.section("compress_rates") if config.raw("compress_rates") else config
    ratios: dict[str, int] = {}
    for kind, default in _RATIOS.items():
        ratio = rates.count(kind, default=default) if rates is not config else default
        ratios[kind] = config.count(_KEYS[kind], default=ratio)
    routed = config.texts("mlp_layer_types")
    first = config.count("num_hash_layers", default=3, minimum=0)
    hashed: list[bool] = [layer < first for layer in range(layers)]
    if routed:
        hashed = [each == "hash_moe" for each in _first(config, "mlp_layer_types", routed, layers, ("hash_moe", "moe"))]
    return tuple(
        {
            _RATIO: ratios.get(kind, 0),
            _COMPRESSED: kind != _SLIDING,
            _INDEXED: kind == _SPARSE,
            _HASHED: hashed[layer],
        }
        for layer, kind in enumerate(_kinds(config, layers))
    )


def _deepseek_v4(config: Config, shape: Shape) -> Shape:
    """Add the one latent that is key and value of all heads, the groups of their outputs, and what is compressed.

    Groups of query heads are cut as KV heads are: each has a matrix of its own that leads down to the residual stream.

    Raises:
        ModelError: query heads do not divide into groups.
    """
    groups = config.count("o_groups", default=8)
    if shape.q_heads % groups:
        heads = f"{shape.q_heads} query heads (num_attention_heads)"
        raise config.error(f"{heads} are not a multiple of {counted(groups, 'group')} (o_groups)")
    latent, index = shape.head_dim, config.count("index_head_dim", default=128)
    index_heads, ratio = config.count("index_n_heads", default=64), config.count(_RATIO, default=0, minimum=0)
    streams = config.count("hc_mult", default=4)
    indexed = index if _INDEXED in shape.flags else 0
    # Tokens wait with their weights. Layers with an indexer compress two series, of which one overlaps: they keep what
    # they compressed last.
    series = 2 if indexed else 1
    waiting = (ratio - 1) * series + (ratio if indexed else 0) if ratio else 0
    shape = evolve(
        shape,
        kv_heads=groups,
        kv_rank=latent,
        q_rank=config.count("q_lora_rank", default=1024),
        shared_intermediate=shape.expert_intermediate,
        compressed_dim=latent + indexed if ratio else 0,
        ratio=ratio,
        buffer_dim=2 * (latent + indexed) * waiting,
    )
    return shape.having(
        og=Segment(Axis.KV_HEADS, groups * config.count("o_lora_rank", default=1024)),
        oi=shape.q_heads * latent // groups,
        ct=ratio,
        cw=series * latent,
        iw=2 * index,
        id=index,
        iqs=index_heads * index,
        ihs=index_heads,
        tokens=shape.vocab,
        top=shape.experts_per_token,
        hs=streams * (streams + 2),
        hh=streams * shape.hidden,
        hm=streams,
        three=3,
    )


def _in_32_bits(name: str, dims: str, when: str = "", home: Axis | None = None) -> Row:
    return Row(name, dims, when, home, dtype="F32")


_HEADS: Final = Axis.KV_HEADS


def _compressor(name: str, width: str, normed: str, when: str) -> tuple[Row, ...]:
    """Return the rows of what compresses tokens: two projections, weights of their places, and a norm."""
    return (
        *linear(f"{name}.wkv", width, "h", when=when, home=_HEADS),
        *linear(f"{name}.wgate", width, "h", when=when, home=_HEADS),
        _in_32_bits(f"{name}.ape", f"ct {width}", when, _HEADS),
        *norm(f"{name}.norm", normed, when=when, home=_HEADS),
    )


COMPRESSED: Final[dict[str, Family]] = {
    "deepseek_v4": Family(
        architectures=("DeepseekV4ForCausalLM",),
        outside=(
            *outside(head="head"),
            _in_32_bits("model.hc_head.hc_fn", "hm hh"),
            _in_32_bits("model.hc_head.hc_base", "hm"),
            _in_32_bits("model.hc_head.hc_scale", "1"),
        ),
        layer=(
            *(
                _in_32_bits(f"hc_{part}_{name}", dims)
                for part in ("attn", "ffn")
                for name, dims in (("fn", "hs hh"), ("base", "hs"), ("scale", "three"))
            ),
            *norm("attn_norm"),
            *norm("ffn_norm"),
            *linear("attn.wq_a", "qr", "h", home=_HEADS),
            *norm("attn.q_norm", "qr", home=_HEADS),
            *linear("attn.wq_b", "Q", "qr"),
            *linear("attn.wkv", "kr", "h", home=_HEADS),
            *norm("attn.norm", "kr", home=_HEADS),
            *linear("attn.wo_a", "og", "oi"),
            *linear("attn.wo_b", "RS", "og"),
            _in_32_bits("attn.attn_sink", "q"),
            *_compressor("attn.compressor", "cw", "kr", _COMPRESSED),
            *_compressor("attn.indexer.compressor", "iw", "id", _INDEXED),
            *linear("attn.indexer.wq_b", "iqs", "qr", when=_INDEXED, home=_HEADS),
            *linear("attn.indexer.weights_proj", "ihs", "h", when=_INDEXED, home=_HEADS),
        ),
        sparse=(
            *linear("ffn.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            _in_32_bits("ffn.gate.bias", "e", f"!{_HASHED}", Axis.EXPERT_INTERMEDIATE),
            Row("ffn.gate.tid2eid", "tokens top", _HASHED, Axis.EXPERT_INTERMEDIATE, lookup="", dtype="I64"),
            *numbered("ffn.experts.{expert}", "EX"),
            *numbered("ffn.shared_experts", "SX"),
        ),
        # transformers writes the names of layers, but for one, and not the others as they are on the hub.
        renamed={
            "embed.": "model.embed_tokens.",
            "layers.": "model.layers.",
            "norm.": "model.norm.",
            ".attn.kv_norm.": ".attn.norm.",
            **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
        },
        ignored=("*.rotary_emb.inv_freq", "mtp.*"),
        defaults={"num_key_value_heads": 1, "head_dim": 512, "num_experts_per_tok": 6},
        flags={_COMPRESSED: True, _INDEXED: False, _HASHED: False},
        window=lambda config, layers: windows(128, every_layer)(config.having("layer_types", None), layers),
        moe=every_layer,
        own=_deepseek_v4_layers,
        adapt=_deepseek_v4,
    ),
}
