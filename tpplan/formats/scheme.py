"""The quantisation scheme of a model's weights, as its config.json describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from tpplan.errors import ModelError
from tpplan.families.wrappers import newer_name, text_part

if TYPE_CHECKING:
    from tpplan.config import Config

_HINT: Final = "point to the directory that has the model's .safetensors files: their headers say what is stored"

#: Modules that no method quantises: the routers of mixture-of-experts layers, and weights of an indexer's heads.
_ROUTERS: Final = frozenset({"gate", "shared_expert_gate", "router", "layer", "wg", "weights_proj"})

#: Regular expressions of ignore lists that are accepted, as they match in bounded time, and their most stars.
_PLAIN_PATTERN: Final = re.compile(r"(?:[\w$^-]|\\?\.\*?){1,200}")
_MAX_STARS: Final = 3


@frozen(kw_only=True)
class Scheme:
    """The quantisation that a config.json describes.

    Attributes:
        method: the config's ``quant_method``, empty for unquantised weights.
        format: name in the table of formats, empty if the config does not determine it.
        known: parameters of the format.
        group: elements that share a scale; -1 for a whole row, 0 if not given.
        zeros_less_one: whether GPTQ stored zero points less 1, as its first format does.
        permuted: whether GPTQ quantised rows in activation order (``desc_act``); None if not given.
        static: whether the scales of activations are stored.
        model_scales: whether scales have the dtype of the model.
        lm_head: whether the output matrix is quantised too.
        only: modules of a layer that are quantised; empty for all.
        skipped: modules that are not quantised.
        source: name of the file in messages.
    """

    method: str = ""
    format: str = ""
    known: Mapping[str, int] = field(factory=dict)
    group: int = 0
    zeros_less_one: bool = False
    permuted: bool | None = None
    static: bool = False
    model_scales: bool = False
    lm_head: bool = False
    only: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    source: str = ""

    @property
    def is_known(self) -> bool:
        """Whether tpplan can read the method's checkpoints."""
        return self.method in {"", *_METHODS, *_HEADERS_ONLY}

    def parameters(self, inputs: int) -> dict[str, int]:
        """Return the parameters of the format for a matrix with this many inputs."""
        return {**self.known, **({"group": inputs if self.group < 0 else self.group} if self.group else {})}

    def quantises(self, module: str) -> bool:
        """Return whether a module of a layer is quantised; lists may have either of a wrapper's names for it."""
        known_as = {module, newer_name(module)}
        is_skipped = any(_names(pattern, name) for pattern in self.skipped for name in known_as)
        if is_skipped or module.rpartition(".")[2] in _ROUTERS:
            return False
        return not self.only or any(module.endswith(f".{name}") for name in self.only)


def read_scheme(config: Config) -> Scheme:
    """Read a config's ``quantization_config``, or that of the language model in it if only that has one.

    Raises:
        ModelError: it is not an object, or a key has the wrong type or is out of range.
    """
    stating = next(
        (part for part in (config, text_part(config)[1]) if part.raw("quantization_config") is not None), None
    )
    if stating is None:
        return Scheme(source=config.source)
    section = stating.section("quantization_config")
    method = section.text("quant_method").lower()
    read = _METHODS.get(method)
    return read(section) if read else Scheme(method=method or "unknown", source=section.source)


def needs_headers(scheme: Scheme) -> ModelError:
    """Return the error for weights whose sizes do not follow from the config alone."""
    what = f"the sizes of {scheme.method!r:.60} weights do not follow from the config alone"
    return ModelError(f"{scheme.source}: {what}", _HINT)


def _names(pattern: str, module: str) -> bool:
    """Return whether an entry of a module list matches: as consecutive parts of its name, or as an expression.

    A part ``*`` matches any part, such as the number of a layer.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    wanted, parts = pattern.strip(".").split("."), module.split(".")
    return any(
        all(want in {"*", part} for want, part in zip(wanted, parts[i:], strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def _gptq(section: Config) -> Scheme:
    bits = section.count("bits", maximum=8)
    if bits not in _BITS:
        raise section.error(f"bits is {bits}, but GPTQ packs {', '.join(map(str, _BITS))}")
    group = section.optional_count("group_size", default=128, minimum=-1) or -1
    varied = bool(section.raw("dynamic")) or section.text("checkpoint_format") not in {"", "gptq", "gptq_v2"}
    return Scheme(
        method="gptq",
        format="" if varied else "gptq",
        known={} if varied else {"bits": bits},
        group=0 if varied else group,
        zeros_less_one=section.text("checkpoint_format") != "gptq_v2",
        permuted=section.flag("desc_act") if "desc_act" in section else None,
        lm_head=section.flag("lm_head"),
        only=_flat(section, "modules_in_block_to_quantize"),
        source=section.source,
    )


def _awq(section: Config) -> Scheme:
    bits = section.count("bits" if "bits" in section else "w_bit", default=4, maximum=8)
    if bits not in _BITS:
        raise section.error(f"bits is {bits}, but AWQ packs {', '.join(map(str, _BITS))}")
    group = section.optional_count("group_size" if "group_size" in section else "q_group_size", default=128, minimum=-1)
    return Scheme(
        method="awq",
        format="awq" if section.text("version").lower() in {"", "gemm"} else "",
        known={"bits": bits},
        group=group or -1,
        skipped=_skipped(section, "modules_to_not_convert"),
        source=section.source,
    )


def _fp8(section: Config) -> Scheme:
    block = section.numbers("weight_block_size")
    if block and (len(block) != len(("rows", "columns")) or min(block) < 1):
        raise section.error(f"weight_block_size is {list(block)}, expected two sizes such as [128, 128]")
    static = section.text("activation_scheme") == "static"
    return Scheme(
        method="fp8",
        format="fp8-tensor" if not block else "" if static else "fp8-block",
        known=dict(zip(("rows", "columns"), block, strict=False)),
        static=static,
        skipped=_skipped(section, "modules_to_not_convert") + _skipped(section, "ignored_layers"),
        source=section.source,
    )


def _mxfp4(section: Config) -> Scheme:
    skipped = _skipped(section, "modules_to_not_convert")
    return Scheme(method="mxfp4", format="mxfp4", skipped=skipped, source=section.source)


def _compressed(section: Config) -> Scheme:
    """Read a compressed-tensors scheme; its format is set only for FP8 with one group for all linear layers."""
    groups = section.raw("config_groups")
    values = list(groups.values()) if isinstance(groups, dict) else []
    group = values[0] if len(values) == 1 and isinstance(values[0], dict) else {}
    weights, inputs = group.get("weights"), group.get("input_activations")
    weights = weights if isinstance(weights, dict) else {}
    float8 = weights.get("type") == "float" and weights.get("num_bits") == 8 and group.get("targets") == ["Linear"]  # noqa: PLR2004
    strategy = weights.get("strategy")
    bits, size, block = (_counts(weights.get(key)) for key in ("num_bits", "group_size", "block_structure"))
    known = dict(zip(("rows", "columns"), block, strict=False))
    known |= {} if float8 else dict(zip(("bits",), bits, strict=False))
    return Scheme(
        method="compressed-tensors",
        format=f"fp8-{strategy}" if float8 and strategy in ("tensor", "channel") else "",
        known=known,
        group=-1 if strategy == "channel" else next(iter(size), 0) if strategy == "group" else 0,
        static=isinstance(inputs, dict) and inputs.get("dynamic") is False,
        model_scales=True,
        skipped=_skipped(section, "ignore"),
        source=section.source,
    )


def _counts(value: object) -> list[int]:
    """Return a positive whole number or a list of them as a list; an empty list for any other value."""
    values: list[object] = value if isinstance(value, list) else [value]
    counts = [each for each in values if isinstance(each, int) and not isinstance(each, bool) and each > 0]
    return counts if len(counts) == len(values) else []


def _flat(section: Config, key: str) -> tuple[str, ...]:
    """Return the strings of a list, or of a list of lists."""
    value = section.raw(key)
    rows = value if isinstance(value, list) else [value] if value is not None else []
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    texts = tuple(name for name in names if isinstance(name, str))
    if len(texts) < len(names):
        raise section.error(f"{key} is no list of names")
    return texts


def _skipped(section: Config, key: str) -> tuple[str, ...]:
    """Return a list of modules, after checking that its regular expressions are simple."""
    names = section.texts(key)
    for name in names:
        if name.startswith("re:") and (not _PLAIN_PATTERN.fullmatch(name, 3) or name.count("*") > _MAX_STARS):
            raise section.error(
                f"{key} has the expression {name[:60]!r}, which is too complicated to be followed", _HINT
            )
    return names


_BITS: Final = (2, 3, 4, 8)
_HEADERS_ONLY: Final = ("exl2", "exl3", "bitsandbytes")
_METHODS: Final = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
}
