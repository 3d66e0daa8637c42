"""The RoPE parameters of a config.json, in transformers' old form or that of version 5."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Final, Literal

from tpplan.exec.rope.families import ALPHA, DEFAULTS, GPTJ, LOCAL, MROPE
from tpplan.exec.rope.scaling import Default, Dynamic, Linear, Llama3, LongRope, Ntk, Scaling, Yarn
from tpplan.models.config import COMPARE, Config
from tpplan.models.families import LANGUAGE_MODELS
from tpplan.models.families.contexts import ORIGINAL, WITHOUT_ROPE
from tpplan.models.families.wrappers import text_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Style = Literal["neox", "gptj"]
STYLES: Final[tuple[Style, ...]] = ("neox", "gptj")

#: Maximum head size; a larger one is an error or an attack.
_MAX_DIM: Final = 2**16

#: Range of scaling parameters; outside it, float32 may not give usable frequencies.
_LOWEST: Final = 1e-6
_HIGHEST: Final = 1e6

#: Range of the base θ.
_LOWEST_THETA: Final = 1.001
_HIGHEST_THETA: Final = 1e18

#: Kinds with an optional factor; its default is the context length divided by the original one.
_RATIO: Final = frozenset({"yarn", "longrope"})

#: What parameters of a scaling usually are.
_USUAL: Final = {
    "factor": "by which the longest context is longer than that of training, such as 4.0",
    "low_freq_factor": "which is 1.0 in Llama 3.1",
    "high_freq_factor": "which is 4.0 in Llama 3.1",
}

#: Keys of the head size, in order of priority.
_HEADS: Final = ("qk_rope_head_dim", "head_dim")


def read_rope(data: Mapping[str, object], layer_type: str | None) -> tuple[float, int, Scaling, Style]:
    """Return the attributes of a Rope from the object in a config.json."""
    model_type, config = _completed(data)
    if model_type in WITHOUT_ROPE or config.flag("alibi"):
        raise config.error("this model has no RoPE", "its positions are learned, or ALiBi")
    if config.raw("layer_rope_theta"):
        raise config.error("layer_rope_theta gives each layer its own RoPE", "tpplan makes tables for one kind, or two")
    section = _section(config, model_type, layer_type)
    dim = _dim(config, section)
    style: Style = "gptj" if config.flag("rope_interleave", default=model_type in GPTJ) else "neox"
    return _number(section, "rope_theta", low=_LOWEST_THETA, high=_HIGHEST_THETA), dim, _scaling(section, dim), style


def read_growth(data: Mapping[str, object]) -> tuple[float, int]:
    """Return by how much queries grow with their positions (Llama 4), and from which position on.

    Raises:
        ModelError: one of both is missing, of the wrong type or out of range.
    """
    model_type, config = _completed(data)
    section = _section(config, model_type, None)
    return _number(section, "llama_4_scaling_beta"), section.count(ORIGINAL)


def _completed(data: Mapping[str, object]) -> tuple[str, Config]:
    """Return the type of the language model in a config.json, and its config with the defaults of its class."""
    model_type, config = text_part(Config(data, "config.json"))
    defaults: Mapping[str, object] = DEFAULTS.get(model_type, {})
    if family := LANGUAGE_MODELS.get(model_type):
        defaults = {"rope_theta": 1e4, **family.defaults, **defaults}
    given = {key: value for key, value in config.data.items() if value is not None or key not in defaults}
    return model_type, Config({**defaults, **given}, config.source)


def _dim(config: Config, section: Config) -> int:
    """Return the rotary dimension: the RoPE head size of MLA, or the rotated part of a head."""
    head = next((size for key in _HEADS if (size := config.optional_count(key, maximum=_MAX_DIM))), None)
    if head is None:
        head = config.count("hidden_size") // config.count("num_attention_heads")
    part = _number(section, "partial_rotary_factor", high=1.0)
    dim = config.optional_count("rotary_dim", maximum=_MAX_DIM) or int(head * part)
    if not 0 < dim + dim % 2 <= min(head, _MAX_DIM):
        raise config.error(f"{dim} rotary dimensions do not fit a head of {head} (partial_rotary_factor is {part:g})")
    return dim


def _section(config: Config, model_type: str, layer_type: str | None) -> Config:
    """Return one set of RoPE parameters, completed from the rest of the config as in transformers.

    Parameters of a layer type do not inherit ``original_max_position_embeddings`` from the config. Their ``truncate``
    is read from the level of the layer types.
    """
    name = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    given = _by_layer(config) if model_type in LOCAL else _object(config, name)
    layers = tuple(key for key, value in given.items() if isinstance(value, dict))
    if layers:
        if layer_type not in layers:
            known = ", ".join(key[:40] for key in layers)
            raise config.error(f"{name} has nothing for layers of type {layer_type}", f"name one of {known}")
        nested = _object(Config(given, config.source), layer_type)
        given = {**nested, "truncate": given.get("truncate")}
        name = f"{name}.{layer_type}"
    section = Config(given, f"{config.source}: {name}")
    kind = section.text("rope_type") or section.text("type") or "default"
    if kind == "mrope" and model_type in MROPE:
        kind = "default"
    if kind == "dynamic" and model_type not in ALPHA and section.raw("alpha"):
        raise section.error("rope_type dynamic has an alpha, which only models of Hunyuan take")
    longest = config.optional_count("max_position_embeddings")
    original = (None if layers else config.optional_count(ORIGINAL)) or section.optional_count(ORIGINAL)
    filled = {
        "rope_type": kind,
        "rope_theta": _first(section, config, "rope_theta", "rotary_emb_base"),
        "partial_rotary_factor": _first(section, config, "partial_rotary_factor", "rotary_pct", 1.0),
        "max_position_embeddings": longest,
        ORIGINAL: original or longest,
    }
    if section.raw("factor") is None and kind in _RATIO and longest and original:
        filled["factor"] = longest / original
    return Config({**given, **{key: value for key, value in filled.items() if value is not None}}, section.source)


def _first(section: Config, config: Config, key: str, alias: str, default: object = None) -> object:
    """Return the value of ``key`` in the section, else of ``alias`` or ``key`` in the config, else ``default``."""
    values = (section.raw(key), config.raw(alias), config.raw(key))
    return next((value for value in values if value is not None), default)


def _by_layer(config: Config) -> dict[str, object]:
    """Return Gemma 3's and OLMo 3's parameters by layer type; the old form's scaling is for full attention only."""
    given = Config(_object(config, "rope_parameters"), config.source)
    full, sliding = (_object(given, layer_type) for layer_type in ("full_attention", "sliding_attention"))
    local = _number(config, "rope_local_base_freq", low=_LOWEST_THETA, high=_HIGHEST_THETA)
    return {
        "full_attention": {**full, **_object(config, "rope_scaling")},
        "sliding_attention": {"rope_theta": local, **sliding},
    }


def _object(config: Config, key: str) -> dict[str, object]:
    """Return the object under a key; empty if there is none."""
    value = config.raw(key) or {}
    if not isinstance(value, dict):
        raise config.invalid(f"{key} is {reprlib.repr(value)}, expected an object")
    return value


def _scaling(section: Config, dim: int) -> Scaling:
    """Return the RoPE scaling with its parameters.

    Args:
        section: the parameters: ``rope_type``, ``max_position_embeddings``, ``original_max_position_embeddings`` …
        dim: the rotary dimension.

    Raises:
        ModelError: the kind is unknown, a parameter is missing, of the wrong type or out of range, or the kind does
            not support this dimension.
    """
    kind = section.text("rope_type")
    read = _KINDS.get(kind)
    if read is None:
        raise section.error(f"rope_type is {kind[:60]!r}", f"known are {', '.join(_KINDS)}")
    return read(section, dim)


def _number(section: Config, key: str, *, low: float = _LOWEST, high: float = _HIGHEST) -> float:
    """Return a number from ``low`` to ``high``.

    Raises:
        ModelError: it is missing, not a number, or out of range.
    """
    _check_there(section, key)
    value = _optional(section, key, low, high)
    if not value:
        raise section.invalid(f"{key} is 0, outside {low:g} to {high:g}")
    return value


def _check_there(section: Config, *keys: str) -> None:
    """Check that a scaling has these parameters.

    Raises:
        ModelError: it lacks some; the hint says what they usually are.
    """
    lacking = [key for key in keys if section.raw(key) is None]
    if not lacking:
        return
    error = section.missing(*lacking)
    usual = [f"{key}, {_USUAL[key]}" for key in lacking if key in _USUAL and not section.meant_as(key)]
    if usual:
        told = f"add {'; '.join(usual)}; or set rope_type to default if contexts are not to be extended"
        error.hint = error.hint.replace(COMPARE, told)
    raise error


def _optional(section: Config, key: str, low: float = _LOWEST, high: float = _HIGHEST) -> float | None:
    """Return a number, which may be 0; None if it is missing."""
    value = section.raw(key)
    return None if value is None else _checked(section, key, value, low, high)


def _checked(section: Config, name: str, value: object, low: float = _LOWEST, high: float = _HIGHEST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise section.invalid(f"{name} is {reprlib.repr(value)}, which is not a number")
    if value and not low <= value <= high:
        raise section.invalid(f"{name} is {reprlib.repr(value)}, outside {low:g} to {high:g}")
    return float(value)


def _factors(section: Config, key: str, dim: int) -> tuple[float, ...]:
    """Return a list of numbers, one for each pair."""
    values, pairs = section.raw(key), -(-dim // 2)
    if values is None:
        raise section.missing(key)
    if not isinstance(values, list):
        raise section.invalid(f"{key} is {reprlib.repr(values)}, which is not a list of numbers")
    if len(values) != pairs:
        raise section.error(f"{key} has {len(values)} numbers, expected {pairs} for {dim} rotary dimensions")
    numbers = tuple(_checked(section, f"{key}[{i}]", value) for i, value in enumerate(values))
    if 0 in numbers:
        raise section.invalid(f"{key}[{numbers.index(0)}] is 0, which no frequency can be divided by")
    return numbers


def _default(_section: Config, _dim: int) -> Default:
    return Default()


def _linear(section: Config, _dim: int) -> Linear:
    return Linear(_number(section, "factor"))


def _dynamic(section: Config, dim: int) -> Dynamic | Ntk:
    if dim <= 2:  # noqa: PLR2004 - d / (d - 2)
        raise section.error(f"rope_type dynamic needs more than 2 rotary dimensions, found {dim}")
    if section.raw("alpha"):
        return Ntk(_number(section, "alpha"))
    return Dynamic(_number(section, "factor"), section.count("max_position_embeddings"))


def _llama3(section: Config, _dim: int) -> Llama3:
    _check_there(section, "factor", "low_freq_factor", "high_freq_factor")
    low, high = _number(section, "low_freq_factor"), _number(section, "high_freq_factor")
    if low >= high:
        raise section.invalid(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return Llama3(_number(section, "factor"), low, high, section.count(ORIGINAL))


def _yarn(section: Config, dim: int) -> Yarn:
    if dim % 2:
        raise section.error(f"rope_type yarn needs an even number of rotary dimensions, found {dim}")
    return Yarn(
        _number(section, "factor"),
        section.count(ORIGINAL),
        attention_factor=_optional(section, "attention_factor"),
        beta_fast=_optional(section, "beta_fast"),
        beta_slow=_optional(section, "beta_slow"),
        mscale=_optional(section, "mscale"),
        mscale_all_dim=_optional(section, "mscale_all_dim"),
        truncate=section.flag("truncate", default=True),
    )


def _longrope(section: Config, dim: int) -> LongRope:
    if section.raw("short_mscale") or section.raw("long_mscale"):  # Phi-3.5-MoE
        raise section.error("rope_type longrope has an mscale, which tpplan does not support")
    _check_there(section, "short_factor", "long_factor")
    return LongRope(
        _factors(section, "short_factor", dim),
        _factors(section, "long_factor", dim),
        _number(section, "factor"),
        section.count(ORIGINAL, minimum=2),
        _optional(section, "attention_factor"),
    )


_KINDS: Final[dict[str, Callable[[Config, int], Scaling]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
