"""The RoPE (arXiv:2104.09864) of a model's layers: most models have one kind; some have two, or layers without it.

Shapes: R rows, T positions, W columns of a RoPE table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from tpplan.decoder.math import angles, angles_at
from tpplan.exec.rope.config import read_growth
from tpplan.exec.rope.families import GPTJ
from tpplan.exec.rope.tables import Rope
from tpplan.models.families import slides
from tpplan.models.families.shape import without_rope

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec
    from tpplan.models.config import Config

#: Kinds of RoPE: that of the tables' first half, that of their second half, and none.
FIRST: Final = 0
SECOND: Final = 1
NONE: Final = 2

#: Types of layers in a config.json.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

#: Families in which RoPE may rotate only a part of each head.
_PARTIAL: Final = frozenset({
    *("phi3", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text", "minimax_m2"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
})  # fmt: skip
#: Families whose config says whether neighbours are rotated together (``rope_interleave``).
_TOLD: Final = frozenset({"deepseek_v3", "kimi_k2", "glm4_moe_lite"})


@frozen
class Growth:
    """Temperature scaling of queries by position, which keeps attention sharp over long texts (Llama 4).

    Models with it have no norms of queries, so that it may come before RoPE, which is linear.

    Attributes:
        beta: weight of the growth.
        original: positions from which queries grow, and again from each multiple.
    """

    beta: float
    original: int

    def factors(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor of the queries at each position, ``[R, 1, 1]``."""
        whole = torch.floor(positions / self.original)
        return (1 + self.beta * torch.log(1 + whole)).to(dtype)[:, None, None]


@frozen(eq=False)
class Angles:
    """The RoPE angles of the rows of a pass, and the factors of their queries.

    Attributes:
        by_kind: angles for each kind of RoPE that a layer has, see :func:`tpplan.decoder.math.angles`.
        growth: factors of the rows' queries, ``[R, 1, 1]``; None if all are 1.
    """

    by_kind: Mapping[int, Tensor]
    growth: Tensor | None = None


@frozen
class Ropes:
    """The RoPE of each layer.

    Attributes:
        rope: parameters of the tables, of style ``neox``. A second kind of RoPE is beside the first, so that both take
            the memory of one.
        kinds: kind of RoPE of each layer.
        are_neighbours: whether neighbouring elements are rotated together (GPT-J), instead of those half a head apart.
        growth: growth of queries with their positions; None if they do not grow.
    """

    rope: Rope
    kinds: tuple[int, ...]
    are_neighbours: bool = False
    growth: Growth | None = None

    @classmethod
    def read(cls, config: Config, model_type: str, model: ModelSpec) -> Self:
        """Read the RoPE of a model from its config.json.

        Args:
            config: the config of the language model.
            model_type: its type.
            model: the model.

        Raises:
            ModelError: a kind of RoPE is unknown; or it pairs other elements than in transformers, or rotates only a
                part of heads that transformers rotates whole.
        """
        kinds = _kinds(config, model_type, model.layer_count)
        data = {**config.data, "model_type": model_type}
        ropes = [Rope.from_config(data, each) for each in ((FULL, SLIDING) if SECOND in kinds else (FULL,))]
        first = next(block.attention for block in model.blocks if block.attention)
        width = config.count("qk_rope_head_dim") if first.latent_dim else first.head_dim
        are_neighbours = ropes[0].style == "gptj" if model_type in _TOLD else model_type in GPTJ
        for rope in ropes:
            if (rope.style == "gptj") is not are_neighbours:
                hint = f"transformers does not read this key for models of type {model_type}"
                raise config.error(f"rope_interleave is {str(not are_neighbours).lower()}", hint)
            if rope.width != width and model_type not in _PARTIAL:
                what = f"RoPE turns {rope.width} of {width} elements of a head (partial_rotary_factor)"
                raise config.error(what, f"heads of models of type {model_type} are turned whole")
        beside = ropes[1] if len(ropes) > 1 else None
        found = read_growth(data) if model_type == "ministral3" else None
        return cls(
            evolve(ropes[0], style="neox", beside=beside), kinds, are_neighbours, Growth(*found) if found else None
        )

    def angles(
        self,
        sin_TW: Tensor,
        cos_TW: Tensor,
        positions: Tensor,
        find: Callable[[Tensor, Tensor, Tensor], Tensor] = angles_at,
    ) -> Angles:
        """Return the angles of rows.

        Args:
            sin_TW: sines of all positions, from the tables.
            cos_TW: cosines of all positions.
            positions: position of each row.
            find: what finds the angles of rows, see :func:`tpplan.decoder.math.angles_at`.
        """
        halves = list(zip(sin_TW.chunk(2, dim=-1), cos_TW.chunk(2, dim=-1), strict=True))
        found = {kind: find(*halves[kind], positions) for kind in sorted(set(self.kinds) - {NONE})}
        if NONE in self.kinds:
            none = sin_TW.new_zeros(len(positions), halves[0][0].shape[1])
            found[NONE] = angles(none, torch.ones_like(none))
        grows = self.growth is not None and len(sin_TW) > self.growth.original
        growth = self.growth.factors(positions, sin_TW.dtype) if self.growth and grows else None
        return Angles(found, growth)


def _kinds(config: Config, model_type: str, layers: int) -> tuple[int, ...]:
    """Return the kind of RoPE of each layer."""
    if model_type == "gemma3_text":
        return tuple(SECOND if is_sliding else FIRST for is_sliding in slides(config, model_type, layers))
    if model_type == "smollm3":
        return tuple(NONE if is_without else FIRST for is_without in without_rope(config, layers))
    if model_type in {"exaone4", "exaone_moe"} and config.optional_count("sliding_window", default=1) is not None:
        return tuple(FIRST if is_sliding else NONE for is_sliding in slides(config, model_type, layers))
    return (FIRST,) * layers
