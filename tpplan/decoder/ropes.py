"""The RoPE of a model's layers: mostly of one kind, in some models of two, and in others layers without it.

Shapes: R rows, W columns of a RoPE table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import evolve, frozen

from tpplan.decoder.layers import angles
from tpplan.exec.rope.tables import Rope
from tpplan.families import slides
from tpplan.families.shape import without_rope

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.config import Config
    from tpplan.model import ModelSpec

#: Kinds of RoPE: that of the tables' first half, that of their second half, and none.
FIRST: Final = 0
SECOND: Final = 1
NONE: Final = 2

#: Types of layers in a config.json.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

#: Families whose heads may be turned in part.
_PARTIAL: Final = frozenset({"phi3"})


@frozen
class Ropes:
    """The RoPE of each layer.

    Attributes:
        rope: parameters of the tables. A second kind of RoPE is beside the first, so that both take the memory of one.
        kinds: kind of RoPE of each layer.
    """

    rope: Rope
    kinds: tuple[int, ...]

    @classmethod
    def read(cls, config: Config, model_type: str, model: ModelSpec) -> Self:
        """Read the RoPE of a model from its config.json.

        Args:
            config: the config of the language model.
            model_type: its type.
            model: the model.

        Raises:
            ModelError: a kind of RoPE is unknown, pairs neighbouring elements, or rotates a part of heads that
                transformers rotates whole.
        """
        count = model.layer_count
        kinds = [FIRST] * count
        if model_type == "gemma3_text":
            kinds = [SECOND if is_sliding else FIRST for is_sliding in slides(config, model_type, count)]
        elif model_type == "smollm3":
            kinds = [NONE if is_without else FIRST for is_without in without_rope(config, count)]
        data = {**config.data, "model_type": model_type}
        ropes = [Rope.from_config(data, each) for each in ((FULL, SLIDING) if SECOND in kinds else (FULL,))]
        width = next(block.attention.head_dim for block in model.blocks if block.attention)
        for rope in ropes:
            if rope.style != "neox":
                hint = "the decoder does not turn neighbouring elements together"
                raise config.error("rope_interleave is true", hint)
            if rope.width != width and model_type not in _PARTIAL:
                what = f"RoPE turns {rope.width} of {width} elements of a head (partial_rotary_factor)"
                raise config.error(what, f"heads of models of type {model_type} are turned whole")
        return cls(evolve(ropes[0], beside=ropes[1] if len(ropes) > 1 else None), tuple(kinds))

    def angles(self, sin_RW: Tensor, cos_RW: Tensor) -> dict[int, Tensor]:
        """Return the rows' angles for each kind of RoPE that a layer has, see :func:`tpplan.decoder.layers.angles`.

        Args:
            sin_RW: the rows' sines, from the tables.
            cos_RW: the rows' cosines.
        """
        halves = list(zip(sin_RW.chunk(2, dim=-1), cos_RW.chunk(2, dim=-1), strict=True))
        if NONE in self.kinds:
            halves.append((torch.zeros_like(halves[0][0]), torch.ones_like(halves[0][1])))
        return {kind: angles(*halves[kind]) for kind in sorted(set(self.kinds))}
