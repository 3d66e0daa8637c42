"""Tables of prediction layers, which checkpoints hold beside a model's own to draft its next tokens (MTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from tpplan.models.families.rows import linear, norm
from tpplan.models.families.table import Family, Row

if TYPE_CHECKING:
    from tpplan.models.config import Config

_COUNT: Final = "num_nextn_predict_layers"


@frozen(kw_only=True)
class Predictions:
    """The prediction layers of a family.

    A prediction layer is one of the family's, with attention and mostly, if the family has them, with experts.
    Embedding and output matrix are the model's, even where the layer stores them once more.

    Attributes:
        keys: keys of their number; the first that a config.json has counts.
        default: their number if it has none.
        start: how the names of their tensors start. Those of layers that follow the model's have ``{layer}`` in it.
        layers: how the names of a layer's tensors start behind that.
        layer: rows of every layer beside the family's.
        outside: rows of tensors that all of them share.
        joins: names of the matrices that join an embedding and a hidden state.
        dense: whether they have no experts, though the family has.
        most: how many there may be.
    """

    keys: tuple[str, ...] = (_COUNT,)
    default: int = 0
    start: str = ""
    layers: str = ""
    layer: tuple[Row, ...] = ()
    outside: tuple[Row, ...] = ()
    joins: tuple[str, ...] = ("eh_proj",)
    dense: bool = False
    most: int = 64

    def count(self, config: Config) -> int:
        """Return the number of layers that a config.json tells of.

        Raises:
            ModelError: it is no number, or larger than any model's.
        """
        key = next((key for key in self.keys if config.raw(key) is not None), self.keys[0])
        return config.count(key, default=self.default, minimum=0, maximum=self.most)

    def starts(self, count: int, layers: int) -> dict[str, str]:
        """Return how names in a checkpoint start, and what the tables have in its place.

        Args:
            count: number of prediction layers.
            layers: number of the model's layers.
        """
        if "{layer}" not in self.start:
            return {self.start: ""}
        return {self.start.format(layer=layers + i): self.layers.format(layer=i) for i in range(count)}

    def of(self, family: Family) -> Family:
        """Return the tables of the prediction layers of a family."""
        return evolve(
            family,
            outside=self.outside,
            layer=(*family.layer, *self.layer),
            layers=self.layers,
            root="",
            prefix="",
            renamed={},
            ignored=("*embed_tokens.weight", "*shared_head.head.weight", "*shared_head.weight", "*rotary_emb.inv_freq"),
            extra_layers=False,
            ties=False,
            window=None,
            moe=_all if family.moe and not self.dense else None,
            linear=None,
        )


def _all(_config: Config, layers: int) -> tuple[bool, ...]:
    return (True,) * layers


#: Layers behind the model's, each with what joins an embedding and a hidden state, and a norm before the output matrix.
_JOIN: Final = (*norm("enorm"), *norm("hnorm"), *linear("eh_proj", "RS", "RS+RS"))
_BEHIND: Final = Predictions(
    start="model.layers.{layer}.", layers="layers.{layer}.", layer=(*_JOIN, *norm("shared_head.norm"))
)

_QWEN: Final = Predictions(
    keys=(_COUNT, "mtp_num_hidden_layers"),
    default=1,
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

#: By the type of the language model.
PREDICTIONS: Final[dict[str, Predictions]] = {
    "deepseek_v3": _BEHIND,
    # What joins is beside the layer, which is dense.
    "ernie4_5_moe": Predictions(
        start="model.mtp_",
        layers="block.{layer}.",
        outside=(*norm("emb_norm.0"), *norm("hidden_norm.0"), *linear("linear_proj.0", "RS", "RS+RS")),
        joins=("linear_proj.0",),
        dense=True,
        most=1,
    ),
    "hy_v3": evolve(_BEHIND, layer=(*_JOIN, *norm("final_layernorm"))),
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
    "deepseek_v32": _BEHIND,
    "glm_moe_dsa": _BEHIND,
    "glm4_moe": _BEHIND,
    "glm4_moe_lite": _BEHIND,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}
