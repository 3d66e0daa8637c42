"""Tables of decoders in which an indexer chooses for each KV head the blocks of tokens that it attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.rows import (
    MIXTRAL_EXPERTS,
    NORMS,
    attention,
    correction,
    gated,
    head_norms,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import FULL, are_of_kind, every_layer
from tpplan.models.families.sparse import mlp_types
from tpplan.models.families.table import Family, Shape, sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.config import Config

#: The flag of layers with an indexer, and what ``layer_types`` calls them.
_INDEXED: Final = "indexed"
_SPARSE: Final = "minimax_m3_sparse"

_KEYS: Final = {"sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim"}


def _minimax_m3(config: Config) -> Config:
    """Read the section ``sparse_attention_config``, and which layers have experts from a list of zeros and ones."""
    inner = config.section("sparse_attention_config") if config.raw("sparse_attention_config") else None
    if inner is not None:
        for own, usual in _KEYS.items():
            config = config.having(usual, inner.raw(own)) if own in inner else config
        if config.raw("layer_types") is None and "sparse_attention_freq" in inner:
            chosen = inner.numbers("sparse_attention_freq")
            config = config.having("layer_types", [_SPARSE if each else FULL for each in chosen])
    if config.raw("mlp_layer_types") is None and config.raw("moe_layer_freq") is not None:
        chosen = config.numbers("moe_layer_freq")
        config = config.having("mlp_layer_types", ["sparse" if each else "dense" for each in chosen])
    return config


def _indexers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers have an indexer."""
    chosen = are_of_kind(config, "layer_types", layers, (FULL, _SPARSE)) or (False,) * layers
    return tuple({_INDEXED: each} for each in chosen)


def _with_index(config: Config, shape: Shape) -> Shape:
    """Add the indexer, whose key of each token is cached beside keys and values, and widths of their own."""
    dim = config.count("index_head_dim", default=128)
    dense = config.count("dense_intermediate_size", default=12_288) if shape.intermediate else 0
    return evolve(
        shape,
        intermediate=dense,
        shared_intermediate=config.count("shared_intermediate_size", default=3072) if shape.experts else 0,
        index_heads=config.count("index_n_heads", default=4),
        index_dim=dim,
        compressed_dim=dim if _INDEXED in shape.flags else 0,
        ratio=1 if _INDEXED in shape.flags else 0,
    )


BLOCKWISE: Final[dict[str, Family]] = {
    "minimax_m3_vl_text": Family(
        architectures=(),
        outside=outside(),
        layer=(
            *NORMS,
            *attention(),
            *head_norms(),
            *linear("self_attn.index_q_proj", "iq", "h", when=_INDEXED, home=Axis.KV_HEADS),
            *linear("self_attn.index_k_proj", "ik", "h", when=_INDEXED, home=Axis.KV_HEADS),
            *norm("self_attn.index_q_norm", "ik", when=_INDEXED, home=Axis.KV_HEADS),
            *norm("self_attn.index_k_norm", "ik", when=_INDEXED, home=Axis.KV_HEADS),
        ),
        dense=gated(),
        sparse=(
            *MIXTRAL_EXPERTS,
            *correction("block_sparse_moe.e_score_correction_bias"),
            *gated("block_sparse_moe.shared_experts", "SX"),
        ),
        ignored=("*.rotary_emb.inv_freq", "mtp.*", "*.mtp.*"),
        defaults={
            **sizes(200_064, 6144, 3072, 60, 64, 4, 524_288, head_dim=128),
            "num_experts": 128,
            "num_experts_per_tok": 4,
        },
        flags={_INDEXED: False},
        usual=_minimax_m3,
        moe=mlp_types(every_layer),
        expert_key="intermediate_size",
        own=_indexers,
        adapt=_with_index,
    ),
}
