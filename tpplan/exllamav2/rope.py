"""The RoPE of a model of ExLlamaV2, as its config has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from tpplan.errors import ModelError
from tpplan.exec.rope.config import STYLES
from tpplan.exec.rope.scaling import Scaling
from tpplan.exec.rope.tables import Rope

if TYPE_CHECKING:
    from torch import Tensor

#: The original's styles by number.
_STYLES = ("none", "gptj", "neox")

#: What of a config the methods (``alt_rope_method``) need, and what config.json calls it.
_METHODS = {
    "llama3": {
        "l3_rope_factor": "factor",
        "l3_rope_low_freq_factor": "low_freq_factor",
        "l3_rope_high_freq_factor": "high_freq_factor",
        "l3_rope_original_max_position_embeddings": "original_max_position_embeddings",
    },
    "yarn": {
        "yarn_rope_factor": "factor",
        "yarn_rope_original_max_position_embeddings": "original_max_position_embeddings",
    },
    "su": {
        "scale_short_factor": "short_factor",
        "scale_long_factor": "long_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
}


@frozen
class Adjusted:
    """Another scaling at positions divided by a factor (``scale_pos_emb``), or in half precision.

    Attributes:
        scaling: the other one.
        factor: what positions are divided by.
        half: whether its frequencies are rounded to float16 (``rope_freq_half``).
    """

    scaling: Scaling
    factor: float
    half: bool

    @property
    def attention(self) -> float:
        """The other one's."""
        return self.scaling.attention

    def frequencies(self, theta: float, dim: int, positions: int) -> Tensor:
        """Return the other one's, rounded, then divided by the factor."""
        found = self.scaling.frequencies(theta, dim, positions)
        return (found.half().float() if self.half else found) / self.factor


def read_rope(config: Any, head_dim: int, context: int) -> Rope | None:
    """Return the RoPE of a config, None for a model without.

    Args:
        config: anything with the attributes of an ExLlamaV2Config; those that are missing have its defaults.
        head_dim: elements of a head.
        context: ``max_seq_len``.

    Raises:
        ModelError: the method is unknown, or what it needs is missing or out of range.
    """
    arch = getattr(config, "arch", None)
    lm = getattr(arch, "lm", arch)
    style = getattr(lm, "rope_style", None)
    style = "neox" if style is None else getattr(style, "name", style)
    name = (_STYLES[style] if type(style) is int and style in range(len(_STYLES)) else str(style)).lower()
    if name == "none":
        return None
    chosen = next((known for known in STYLES if known == name), None)
    if chosen is None:
        raise ModelError(f"model.config.arch.lm.rope_style is {name[:60]!r}", f"known are none, {', '.join(STYLES)}")
    if offset := getattr(config, "pos_id_index", None):
        raise ModelError(f"model.config.pos_id_index is {str(offset)[:60]}", "tables here start at position 0")
    alpha, factor = _number(config, "scale_alpha_value", 1.0), _number(config, "scale_pos_emb", 1.0)
    if alpha != 1.0 and head_dim <= 2:  # noqa: PLR2004 - d / (d - 2)
        raise ModelError(f"model.config.scale_alpha_value with a head_dim of {head_dim}", "it needs a larger one")
    growth = alpha ** (head_dim / (head_dim - 2)) if alpha != 1.0 else 1.0
    rope = Rope.from_config(
        {
            "model_type": "llama",
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rope_theta": _number(config, "rotary_embedding_base", 10000.0) * growth,
            "rope_scaling": _scaling(config, context),
        }
    )
    half = bool(getattr(lm, "rope_freq_half", False))
    plain = factor == 1.0 and not half
    return evolve(rope, style=chosen, scaling=rope.scaling if plain else Adjusted(rope.scaling, factor, half))


def _scaling(config: Any, context: int) -> dict[str, object] | None:
    """Return the config's method as a config.json has it; None for none."""
    method = getattr(config, "alt_rope_method", None)
    if method is None:
        return None
    if method not in _METHODS:
        raise ModelError(f"model.config.alt_rope_method is {str(method)[:60]!r}", f"known are {', '.join(_METHODS)}")
    given = {key: getattr(config, name, None) for name, key in _METHODS[method].items()}
    if missing := [name for name, key in _METHODS[method].items() if given[key] is None]:
        raise ModelError(f"model.config has no {missing[0]}", f"alt_rope_method {method!r} needs it")
    trained = given["original_max_position_embeddings"]
    is_stretched = not isinstance(trained, int) or context > trained  # what is no number is reported where it is read
    if method == "su":  # the original chooses by the context, however many positions a table has
        factors = given["long_factor" if is_stretched else "short_factor"]
        return {"rope_type": "longrope", **given, "long_factor": factors, "short_factor": factors}
    if method == "yarn" and not is_stretched:
        return None
    return {"rope_type": method, **given}


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None) or default
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"model.config.{name} is {str(value)[:60]}", "expected a number above 0")
    return float(value)
