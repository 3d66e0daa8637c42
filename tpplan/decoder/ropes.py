"""The RoPE of a model's layers: mostly of one kind, in some models of two, and in others layers without it.

Shapes: R rows, W columns of a RoPE table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import evolve, frozen

from tpplan.decoder.layers import angles
from tpplan.exec.rope.tables import Rope
from tpplan.families.shape import without_rope

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.config import Config
    from tpplan.model import ModelSpec

#: Kinds of RoPE: that of the tables' first half, that of their second half, and none.
FIRST: Final = 0
SECOND: Final = 1
NONE: Final = 2


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
            ModelError: a kind of RoPE is unknown, or pairs neighbouring elements.
        """
        count, kinds = model.layer_count, [FIRST] * model.layer_count
        data = {**config.data, "model_type": model_type}
        rope = Rope.from_config(data, "full_attention")
        if rope.style != "neox":
            raise config.error("rope_interleave is true", "the decoder does not turn neighbouring elements together")
        if model_type == "gemma3_text":
            rope = evolve(rope, beside=Rope.from_config(data, "sliding_attention"))
            for block in model.blocks:
                for layer in block.layers if block.attention and block.attention.window else ():
                    kinds[layer] = SECOND
        elif model_type == "smollm3":
            kinds = [NONE if is_without else FIRST for is_without in without_rope(config, count)]
        return cls(rope, tuple(kinds))

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
