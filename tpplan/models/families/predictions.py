"""Tables of prediction layers, which checkpoints hold beside a model's own to draft its next tokens (MTP).

Sources of names and shapes: how vLLM and SGLang load them (``vllm/model_executor/models/*_mtp.py`` and
``vllm/models/``, ``sglang/srt/models/*_nextn.py``), and transformers' ``MtpModel``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from attrs import evolve, field, frozen

from tpplan.models.config import Config
from tpplan.models.families.aside import PREDICTION_KEYS
from tpplan.models.families.blockwise import BLOCKWISE
from tpplan.models.families.compressed import COMPRESSED
from tpplan.models.families.latent import MLA, with_latent
from tpplan.models.families.mamba import MAMBA, nemotron_kinds
from tpplan.models.families.rows import NORMS, gated, linear, norm
from tpplan.models.families.shape import FULL, every_layer, no_layer
from tpplan.models.families.sparse import mlp_types
from tpplan.models.families.table import Family, Row
from tpplan.models.families.twofold import TWOFOLD

#: What helps where prediction layers are not known.
UNKNOWN_HINT: Final = "keep room for them by their size, if it is known: --reserve SIZE, or reserve in a manifest"

_SLIDING: Final = "sliding_attention"
_TYPES: Final = "layer_types"
_MLP_TYPES: Final = "mlp_layer_types"
#: Further keys that tell of each of a model's layers, of which prediction layers are none.
_PER_LAYER: Final = ("indexer_types", "index_topk_pattern", "mlp_only_layers", "per_layer_config")


def _behind(config: Config, layers: int, count: int, kind: str) -> Mapping[str, object]:
    """Return what a config says of prediction layers: in lists of their own, or behind what it says of the model's.

    Args:
        config: the model's.
        layers: number of the model's layers.
        count: number of prediction layers.
        kind: the type of their attention if it does not say so; empty if the family has none to choose from.
    """
    told: dict[str, object] = dict.fromkeys((*_PER_LAYER, _TYPES, _MLP_TYPES))
    for key in (_TYPES, _MLP_TYPES):
        found = config.texts(f"mtp_{key}") or config.texts(key)[layers:]
        if len(found) == count:
            told[key] = list(found)
    if told[_TYPES] is None and kind:
        told[_TYPES] = [kind] * count
    return {**told, "num_layers": None, "num_hidden_layers": count}  # the former is LongCat's name of the latter


@frozen(kw_only=True)
class Predictions:
    """The prediction layers of a family.

    A prediction layer is one of the family's, with attention and mostly, if the family has them, with experts.
    Embedding and output matrix are the model's, even where the layer stores them once more.

    Attributes:
        default: their number if a config.json names none.
        start: how the names of their tensors start. Those of layers that follow the model's have ``{layer}`` in it.
        layers: how the names of a layer's tensors start behind that.
        layer: rows of every layer beside the family's.
        outside: rows of tensors that all of them share.
        joins: names of the matrices that join an embedding and a hidden state, which tools leave as they are.
        dense: whether they have no experts, though the family has.
        most: how many there may be.
        kind: the type of their attention where the config does not say it, of families that have several.
        tables: their tables, where these are not the family's and ``layer``.
        told: gives what differs in their config from the model's, of the model's config, the numbers of its layers and
            of prediction layers, and ``kind``.
        renamed: parts of names that some checkpoints have, and what the tables have there.
        ignored: patterns of names that hold what the model has too.
    """

    default: int = 0
    start: str = ""
    layers: str = ""
    layer: tuple[Row, ...] = ()
    outside: tuple[Row, ...] = ()
    joins: tuple[str, ...] = ("eh_proj",)
    dense: bool = False
    most: int = 64
    kind: str = ""
    tables: Family | None = None
    told: Callable[[Config, int, int, str], Mapping[str, object]] = _behind
    renamed: Mapping[str, str] = field(factory=dict)
    ignored: tuple[str, ...] = ("*embed_tokens.weight", "*shared_head.head.weight", "*shared_head.weight")

    @property
    def is_behind(self) -> bool:
        """Whether they are numbered behind the model's own layers."""
        return "{layer}" in self.start

    def count(self, *configs: Config) -> tuple[int, str]:
        """Return the number of layers that the first of several configs tells of, and the key; none by default.

        Raises:
            ModelError: it is no number, or larger than any model's.
        """
        for config in configs:
            if key := next((key for key in PREDICTION_KEYS if config.raw(key) is not None), ""):
                return config.count(key, minimum=0, maximum=self.most), key
        return self.default, ""

    def numbered(self, names: Iterable[str]) -> int:
        """Return how many layers the names of a checkpoint's tensors number; 0 where they do not number them."""
        before, mark, _ = f"{self.start}{self.layers}".partition("{layer}")
        pattern = re.compile(re.escape(before) + r"(\d{1,2})\.")
        found = (match for match in map(pattern.match, names) if match)
        return 0 if not mark or self.is_behind else 1 + max((int(match[1]) for match in found), default=-1)

    def starts(self, count: int, layers: int) -> dict[str, str]:
        """Return how names in a checkpoint start, and what the tables have in its place.

        Args:
            count: number of prediction layers.
            layers: number of the model's layers.
        """
        if not self.is_behind:
            return {self.start: ""}
        return {self.start.format(layer=layers + i): self.layers.format(layer=i) for i in range(count)}

    def of(self, family: Family) -> Family:
        """Return the tables of the prediction layers of a family."""
        tables = self.tables or evolve(
            family,
            layer=(*family.layer, *self.layer),
            window=family.window if self.kind else None,
            moe=mlp_types(no_layer if self.dense else every_layer) if family.moe else None,
            linear=None,
        )
        return evolve(
            tables,
            architectures=family.architectures,
            outside=self.outside,
            layers=self.layers,
            root="",
            prefix="",
            renamed={},
            ignored=(*self.ignored, "*rotary_emb.inv_freq"),
            extra_layers=False,
            ties=False,
        )


#: Layers behind the model's, each with what joins an embedding and a hidden state, and a norm before the output matrix.
_JOIN: Final = (*norm("enorm"), *norm("hnorm"), *linear("eh_proj", "RS", "RS+RS"))
_BEHIND: Final = Predictions(
    start="model.layers.{layer}.", layers="layers.{layer}.", layer=(*_JOIN, *norm("shared_head.norm"))
)
_FINAL_NORM: Final = evolve(_BEHIND, layer=(*_JOIN, *norm("final_layernorm")))

#: Layers that share what joins, and the last norm.
_FUSED: Final = Predictions(
    start="mtp.",
    layers="layers.{layer}.",
    outside=(
        *linear("fc", "RS", "RS+RS"),
        *norm("pre_fc_norm_embedding"),
        *norm("pre_fc_norm_hidden"),
        *norm("norm"),
    ),
    joins=("fc",),
)
_QWEN: Final = evolve(_FUSED, default=1)


def _deepseek_v4(config: Config, layers: int, count: int, _kind: str) -> Mapping[str, object]:
    """Tell that the layers compress as their ratios behind the model's say, or not, and look no experts up."""
    ratios = config.numbers("compress_ratios")[layers : layers + count]
    types = None if len(ratios) == count else [_SLIDING] * count
    return {
        "num_hidden_layers": count,
        _TYPES: types,
        "compress_ratios": None if types else list(ratios),
        _MLP_TYPES: ["moe"] * count,
        "per_layer_config": None,
    }


_DEEPSEEK_V4: Final = COMPRESSED["deepseek_v4"]
#: Two matrices join, and the streams become one by weights of the layer's own.
_DEEPSEEK_V4_JOIN: Final = (
    *norm("enorm"),
    *norm("hnorm"),
    *linear("e_proj", "RS", "RS"),
    *linear("h_proj", "RS", "RS"),
    *norm("norm"),
    Row("hc_head_fn", "hm hh", dtype="F32"),
    Row("hc_head_base", "hm", dtype="F32"),
    Row("hc_head_scale", "1", dtype="F32"),
)

_FIRST, _LAST = "first", "last"


def _nemotron(config: Config, _layers: int, count: int, _kind: str) -> Mapping[str, object]:
    """Tell the kinds of the layers, which make a prediction together."""
    kinds = nemotron_kinds(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or (FULL, "moe")
    return {_TYPES: list(kinds) * count, "hybrid_override_pattern": None, "per_layer_config": None}


def _ends(_config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layer is the first and which the last."""
    return tuple({_FIRST: layer == 0, _LAST: layer == layers - 1} for layer in range(layers))


def _nemotron_tables(family: Family) -> Family:
    """Return the tables with what joins in the first layer, and a norm more in the last."""
    more = (
        *(evolve(row, when=_FIRST) for row in _JOIN),
        *(evolve(row, when=_LAST) for row in norm("final_layernorm")),
    )
    return evolve(
        family,
        layer=(*family.layer, *more),
        linear_layer=(*family.linear_layer, *more),
        dense=(*family.dense, *more),
        sparse=(*family.sparse, *more),
        flags={**family.flags, _FIRST: False, _LAST: False},
        own=_ends,
    )


def _transformer(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return rows whose names start with ``transformer_layer``."""
    return tuple(evolve(row, name=f"transformer_layer.{row.name}") for row in rows)


_MINIMAX_M3: Final = BLOCKWISE["minimax_m3_vl_text"]
#: What the layers of MiniMax-M3 all have: an indexer, and experts.
_MINIMAX_M3_KIND: Final = "minimax_m3_sparse"

#: Families whose config.json files tell of prediction layers that no published files of theirs have.
UNPUBLISHED: Final = frozenset({"minimax_m2"})

#: By the type of the language model.
PREDICTIONS: Final[dict[str, Predictions]] = {
    "bailing_hybrid": _FINAL_NORM,
    "bailing_moe": _FINAL_NORM,
    "deepseek_v3": _BEHIND,
    "deepseek_v32": _BEHIND,
    "deepseek_v4": Predictions(
        start="mtp.",
        layers="{layer}.",
        tables=evolve(_DEEPSEEK_V4, layer=(*_DEEPSEEK_V4.layer, *_DEEPSEEK_V4_JOIN)),
        joins=(),
        told=_deepseek_v4,
        renamed={".attn.kv_norm.": ".attn.norm."},
        ignored=("*emb.tok_emb.weight", "*head.weight"),
    ),
    # What joins is beside the layer, which is dense.
    "ernie4_5_moe": Predictions(
        start="model.mtp_",
        layers="block.{layer}.",
        outside=(*norm("emb_norm.0"), *norm("hidden_norm.0"), *linear("linear_proj.0", "RS", "RS+RS")),
        joins=("linear_proj.0",),
        dense=True,
        most=1,
    ),
    "exaone4": evolve(_FUSED, kind=FULL),
    "exaone_moe": evolve(_FUSED, dense=True, kind=FULL),
    "glm4_moe": _BEHIND,
    "glm4_moe_lite": _BEHIND,
    "glm_moe_dsa": _BEHIND,
    "glm_ocr_text": _BEHIND,
    "hy_v3": _FINAL_NORM,
    # One attention and one dense MLP, where the model's layers have two of each beside the experts.
    "longcat_flash": Predictions(
        default=1,
        start="model.mtp.",
        layers="layers.{layer}.",
        outside=norm("norm"),
        tables=evolve(
            TWOFOLD["longcat_flash"],
            layer=(*norm("enorm.m"), *norm("hnorm.m"), *linear("eh_proj", "RS", "RS+RS"), *NORMS, *MLA),
            dense=gated("transformer_layer.mlp"),
            sparse=(),
            defaults={**TWOFOLD["longcat_flash"].defaults, "intermediate_size": 12_288},
            moe=None,
            adapt=with_latent(),
        ),
        most=1,
    ),
    "mellum": evolve(_FUSED, kind=_SLIDING, most=1),
    "mimo": Predictions(
        start="model.mtp_layers.",
        layers="{layer}.",
        layer=(
            *norm("token_layernorm"),
            *norm("hidden_layernorm"),
            *linear("input_proj", "RS", "RS+RS"),
            *norm("final_layernorm"),
        ),
        joins=("input_proj",),
    ),
    # Its config does not count them.
    "mimo_v2_flash": Predictions(
        default=3,
        start="model.mtp.",
        layers="layers.{layer}.",
        layer=(*_JOIN, *norm("final_layernorm")),
        dense=True,
        kind=_SLIDING,
        renamed={".pre_mlp_layernorm.": ".post_attention_layernorm."},
    ),
    "minimax_m3_vl_text": Predictions(
        start="model.mtp.",
        layers="layers.{layer}.",
        kind=_MINIMAX_M3_KIND,
        tables=evolve(
            _MINIMAX_M3,
            layer=(*_transformer(_MINIMAX_M3.layer), *_JOIN, *norm("final_layernorm")),
            dense=_transformer(_MINIMAX_M3.dense),
            sparse=_transformer(_MINIMAX_M3.sparse),
        ),
    ),
    # A prediction takes a layer of each of several kinds.
    "nemotron_h": Predictions(
        start="mtp.", layers="layers.{layer}.", tables=_nemotron_tables(MAMBA["nemotron_h"]), told=_nemotron, most=1
    ),
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
    "step3p5": evolve(
        _BEHIND,
        dense=True,
        kind=FULL,
        renamed={".transformer.shared_head.": ".shared_head."},
        ignored=("*embed_tokens.weight", "*shared_head.head.weight", "*shared_head.output.weight"),
    ),
}
