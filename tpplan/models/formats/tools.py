"""How each quantisation tool describes what it wrote, in config.json or in a file beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.errors import ModelError
from tpplan.models.config import COMPARE, Config, are_meant, read_config, word_meant
from tpplan.models.families.wrappers import text_part
from tpplan.models.formats.names import EXPRESSION
from tpplan.models.formats.scheme import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    HINT,
    LINEAR,
    ROUTER,
    CacheScales,
    Form,
    Rule,
    Scheme,
)
from tpplan.models.formats.table import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

#: The most entries for single modules that are followed.
_MOST_MODULES: Final = 200_000

#: Where a config.json describes the quantisation.
_KEYS: Final = ("quantization_config", "compression_config", "quantization")

#: Files beside config.json that describe the quantisation, and the method that they are of where they do not say.
DESCRIPTIONS: Final = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": ""}
_BITS: Final = (2, 3, 4, 8)
_LAYERS: Final = frozenset({LINEAR, EXPERTS})
_ALL: Final = frozenset({LINEAR, EXPERTS, ROUTER, HEAD, EMBEDDING})
#: Suffixes of scales that some tools store in the dtype of the model.
_SCALES: Final = (".weight_scale", ".input_scale", ".output_scale")


def read_scheme(config: Config, directory: Path | None = None) -> Scheme:
    """Read how a config describes the quantisation of its model, or the language model in it.

    What is wrong with the description is in the scheme's ``problem``: safetensors headers make up for it.

    Args:
        config: the model's config.json.
        directory: where descriptions may be beside it; None if none is to be read.
    """
    method, source, section = "", config.source, None
    try:
        method, section = _described(config, directory)
        if section is None:
            return Scheme(source=source)
        source = section.source
        if read := _METHODS.get(method):
            scheme = read(section)
            return evolve(scheme, slips=section.slips_within() | _misspelt(section, "format", _STORED))
    except ModelError as error:
        slips = section.slips_within() if section else {}
        hint = error.hint if error.hint != COMPARE else are_meant(*slips) if slips else HINT
        problem = ModelError(f"{error.message} (the method is {method!r:.60})" if method else error.message, hint)
        return Scheme(method=method or "unknown", is_known=bool(method), source=source, problem=problem)
    slips = _misspelt(section, "quant_method", (*_METHODS, *_HEADERS_ONLY))
    return Scheme(method=method or "unknown", is_known=method in _HEADERS_ONLY, source=source, slips=slips)


def _misspelt(section: Config, key: str, known: Collection[str]) -> dict[tuple[str, str], str]:
    """Return a question for a word that is none of those that are known, by it and the one that was probably meant."""
    word, meant = section.data.get(key), word_meant(section.data.get(key), known)
    return {(str(word), meant): are_meant((str(word), meant))} if meant else {}


def _described(config: Config, directory: Path | None) -> tuple[str, Config | None]:
    """Return the method and the description, wherever it is; no description if there is none.

    Raises:
        ModelError: it is not an object, its method no text, or a file of it cannot be read.
    """
    text = text_part(config)[1]
    parts = (config,) if text.data is config.data else (config, text)
    for part in parts:
        own = part.raw("quantization")
        if isinstance(own, dict) and {"bits", "group_size"} <= own.keys():
            return "mlx", part.having("quantization", own | {"routers": _mlx_routers(part)}).section("quantization")
    section = next((part.section(key) for part in parts for key in _KEYS if part.raw(key) is not None), None)
    if section is not None and "quantization_config" in section:  # as in some of the first compression_configs
        section = section.section("quantization_config")
    told = next((part.raw("expert_dtype") for part in parts if part.raw("expert_dtype") is not None), None)
    if section is not None and told is not None and "expert_dtype" not in section:  # DeepSeek-V4, of which 4.1 moved it
        section = section.having("expert_dtype", told)
    method = "" if section is None else section.text("quant_method").lower()
    if section is not None and not method:  # ModelOpt has both keys
        method = "modelopt" if "quant_algo" in section else "compressed-tensors" if "config_groups" in section else ""
    for name, usual in DESCRIPTIONS.items():
        path = directory / name if directory else None
        if path and path.exists() and (section is None or method == usual == "modelopt"):
            beside = read_config(path)
            return beside.text("quant_method").lower() or usual or ("awq" if "w_bit" in beside else ""), beside
    if section is not None and not method and section.meant_as("quant_method"):
        raise section.missing("quant_method")
    return method, section


def _gptq(section: Config) -> Scheme:
    base = _gptq_form(section, Form(extra=(".g_idx",)))
    packed = section.text("checkpoint_format") in {"", "gptq", "gptq_v2"} and section.text("pack_dtype") in {
        "",
        "int32",
    }
    base = evolve(base, format="gptq" if packed else "")
    head = section.flag("lm_head")
    kinds = _LAYERS | {HEAD} if head else _LAYERS
    only = _flat(section, "modules_in_block_to_quantize")
    rules = []
    for key, other in _sections(section, "dynamic").items():
        names = (EXPRESSION + key.removeprefix("+:").removeprefix("-:"),)
        form = None if key.startswith("-:") else evolve(_gptq_form(other, base), format=base.format)
        rules.append(Rule(form=form, names=names, kinds=kinds))
    rules.append(Rule(form=base, names=only or None, kinds=_LAYERS if only else kinds))
    if only and head:
        rules.append(Rule(form=base, kinds=frozenset({HEAD})))
    return Scheme(
        method="gptq",
        rules=tuple(rules),
        zeros_less_one=section.text("checkpoint_format") != "gptq_v2",
        source=section.source,
    )


def _gptq_form(section: Config, base: Form) -> Form:
    """Return the form that GPTQ's keys describe; keys that are not there mean what ``base`` has."""
    bits = section.count("bits", default=base.known.get("bits"), maximum=8)
    if bits not in _BITS:
        raise section.error(f"bits is {bits}, but GPTQ packs {', '.join(map(str, _BITS))}")
    group = section.optional_count("group_size", default=base.group or 128, minimum=-1) or -1
    permuted = section.flag("desc_act") if "desc_act" in section else base.permuted
    return evolve(base, format="gptq", known={"bits": bits}, group=group, permuted=permuted)


def _awq(section: Config) -> Scheme:
    bits = section.count("bits" if "bits" in section else "w_bit", default=4, maximum=8)
    if bits not in _BITS:
        raise section.error(f"bits is {bits}, but AWQ packs {', '.join(map(str, _BITS))}")
    group = section.optional_count("group_size" if "group_size" in section else "q_group_size", default=128, minimum=-1)
    known = section.text("version").lower() in {"", "gemm"}
    form = Form(format="awq" if known else "", known={"bits": bits}, group=group or -1)
    return _all_but(section, "awq", form, section.texts("modules_to_not_convert"))


def _all_but(
    section: Config, method: str, form: Form, skipped: tuple[str, ...], kinds: frozenset[str] = _LAYERS
) -> Scheme:
    """Return the scheme of a method that quantises all modules of some kinds alike, but those of a list."""
    rules = (Rule(form=None, names=skipped, kinds=_ALL), Rule(form=form, kinds=kinds))
    return Scheme(method=method, rules=rules, source=section.source)


def _fp8(section: Config) -> Scheme:
    block = _block(section, "weight_block_size")
    static = section.text("activation_scheme") == "static"
    skipped = section.texts("modules_to_not_convert") + section.texts("ignored_layers")
    if experts := section.text("expert_dtype"):
        return _deepseek(section, block, experts, skipped)
    if block:
        form = Form(format="fp8-block", known=block)
    elif "weight_block_size" in section:  # transformers writes the key even if it is null
        form = Form(format="fp8-tensor-inv", dtypes={".weight_scale_inv": "", ".activation_scale": ""})
    else:
        form = Form(format="fp8-tensor")
    scale = ".input_scale" if form.format == "fp8-tensor" else ".activation_scale"
    form = evolve(form, extra=(scale,) if static else ())
    return _all_but(section, "fp8", form, skipped)


def _deepseek(section: Config, block: dict[str, int], experts: str, skipped: tuple[str, ...]) -> Scheme:
    """Return the scheme of DeepSeek's own files, whose experts may have 4 bits; what compresses tokens has 16."""
    if not block or experts not in {"fp4", "fp8"}:
        problem = f"expert_dtype is {experts[:60]!r}" if block else "weight_block_size is missing"
        raise section.error(f"{problem}; experts of blocks in FP8, or of fp4 beside these, are known")
    scales = "F8_E8M0" if section.text("scale_fmt") == "ue8m0" else "F32"
    form = Form(format="fp8-deepseek", known=block, dtypes={".scale": scales})
    plain = Rule(form=None, names=(*skipped, "compressor.wkv", "compressor.wgate"), kinds=_ALL)
    routed = Rule(form=Form(format="fp4-deepseek") if experts == "fp4" else form, names=("experts.*",), kinds=_LAYERS)
    return Scheme(method="fp8", rules=(plain, routed, Rule(form=form, kinds=_LAYERS)), source=section.source)


def _block(section: Config, key: str) -> dict[str, int]:
    """Return the rows and columns of a block, nothing if the key is absent."""
    block = section.numbers(key)
    if block and (len(block) != len(("rows", "columns")) or min(block) < 1):
        raise section.error(f"{key} is {list(block)[:9]}, expected two sizes such as [128, 128]")
    return dict(zip(("rows", "columns"), block, strict=False))


def _fbgemm(section: Config) -> Scheme:
    return _all_but(section, "fbgemm_fp8", Form(format="fp8-channel"), section.texts("modules_to_not_convert"))


def _mxfp4(section: Config) -> Scheme:
    skipped = section.texts("modules_to_not_convert")
    return _all_but(section, "mxfp4", Form(format="mxfp4"), skipped, frozenset({EXPERTS}))


def _compressed(section: Config) -> Scheme:
    named, others = [], []
    groups = section.section("config_groups")
    for key in groups.data:
        group = groups.section(key)
        if group.raw("weights") is None:  # only activations, or the cache
            continue
        form = _compressed_form(group, group.text("format") or section.text("format"))
        targets = group.texts("targets")
        names = tuple(target for target in targets if target not in _CLASSES)
        if names:
            named.append(Rule(form=form, names=names, exact=True, kinds=_ALL - {ROUTER}))
        others += [Rule(form=form, kinds=_CLASSES[target]) for target in targets if target in _CLASSES]
    ignored = Rule(form=None, names=section.texts("ignore"), exact=True, kinds=_ALL)
    caches = None
    if section.raw("kv_cache_scheme") is not None:
        cache = section.section("kv_cache_scheme")
        dims = ("heads", "1", "1") if cache.text("strategy") == "attn_head" else ("1",)
        caches = None if cache.flag("dynamic") else CacheScales(in_projections=False, dtype="", dims=dims)
    rules = (ignored, *named, *others)
    _check_transforms(section)
    if len(rules) == 1 and section.raw("kv_cache_scheme") is None:
        raise section.error("config_groups tells nothing of weights")
    return Scheme(method="compressed-tensors", rules=rules, caches=caches, source=section.source)


def _check_transforms(section: Config) -> None:
    """Check that no transform is left to whoever runs the model: what is stored does not say what is computed then.

    Raises:
        ModelError: one is applied to anything but weights, which are stored with it.
    """
    if not section.raw("transform_config"):
        return
    for name, transform in _sections(section.section("transform_config"), "config_groups").items():
        applied = transform.raw("apply")
        for each in applied if isinstance(applied, list) else [applied]:
            place = each.get("location") if isinstance(each, dict) else None
            if place not in ("weight_input", "weight_output"):
                where = f"transform {name[:60]!r} is applied to {str(place)[:60]!r} as the model runs"
                raise section.error(f"{where}, which is not followed; those of weights alone are")


_CLASSES: Final = {"Linear": _LAYERS | {HEAD}, "Embedding": frozenset({EMBEDDING})}


def _compressed_form(group: Config, stored: str) -> Form:
    """Return the form of a group of compressed-tensors; one without a format if the config does not determine it."""
    weights = group.section("weights")
    size = weights.optional_count("group_size", default=0, minimum=-1) or 0
    strategy = weights.text("strategy") or ("group" if size > 0 else "channel" if size < 0 else "tensor")
    kind, bits = weights.text("type") or "int", weights.count("num_bits", default=8)
    known = _block(weights, "block_structure") if strategy == "block" else {"bits": bits}
    if strategy == "group" and size < 1:
        raise weights.error("group_size is missing, but the strategy is 'group'")
    form = _COMPRESSED.get((stored, kind, bits), "").format("block-scale" if strategy == "block" else strategy)
    if form not in FORMATS or not known or (form == "int-packed" and strategy not in {"group", "channel"}):
        return Form()
    scaled = form.startswith(("fp8", "int8"))
    ones = (".weight_scale",) if scaled and strategy == "tensor" else ()  # one number in one dimension, not a scalar
    return Form(
        format=form,
        known=known,
        group=-1 if strategy == "channel" else size,
        extra=tuple(_compressed_extra(group, weights, strategy)),
        dtypes=dict.fromkeys(_SCALES, "") if scaled or form == "int-packed" else {},
        ranks=dict.fromkeys((*ones, ".input_scale", ".input_zero_point"), 1),
    )


#: Formats by what compressed-tensors calls how it stored numbers of a type and as many bits; ``{}`` is the strategy.
_COMPRESSED: Final = {
    ("pack-quantized", "int", 2): "int-packed",
    ("pack-quantized", "int", 4): "int-packed",
    ("pack-quantized", "int", 8): "int-packed",
    ("float-quantized", "float", 8): "fp8-{}",
    ("naive-quantized", "float", 8): "fp8-{}",
    ("int-quantized", "int", 8): "int8-{}",
    ("naive-quantized", "int", 8): "int8-{}",
    ("nvfp4-pack-quantized", "float", 4): "nvfp4-packed",
    ("mxfp4-pack-quantized", "float", 4): "mxfp4-packed",
    ("mxfp8-quantized", "float", 8): "mxfp8",
}

_STORED: Final = {stored for stored, _, _ in _COMPRESSED}


def _compressed_extra(group: Config, weights: Config, strategy: str) -> Iterator[str]:
    """Yield the suffixes of optional tensors that compressed-tensors stores for a group."""
    if not weights.flag("symmetric", default=True):
        yield ".weight_zero_point"
    if strategy == "group" and weights.raw("actorder") in ("group", "dynamic", True):
        yield ".weight_g_idx"
    if group.raw("input_activations") is None:
        return
    inputs = group.section("input_activations")
    if inputs.raw("dynamic") is False:
        yield ".input_scale"
        if not inputs.flag("symmetric", default=True):
            yield ".input_zero_point"
    if inputs.raw("dynamic") in (False, "local"):
        yield ".input_global_scale"


def _modelopt(section: Config) -> Scheme:
    inner = section.section("quantization") if "quantization" in section else section
    skipped = inner.texts("exclude_modules") + inner.texts("ignore")
    rules = [Rule(form=None, names=skipped, kinds=_ALL)]
    if layers := _sections(inner, "quantized_layers"):
        named = [Rule(form=_modelopt_form(layer), names=(name,), exact=True) for name, layer in layers.items()]
        rules += sorted(named, key=lambda rule: repr(rule.form))  # no two name the same module
    elif inner.text("quant_algo"):
        rules.append(Rule(form=_modelopt_form(inner)))
    elif "quant_algo" not in inner:  # null is for weights that stay as they are
        raise inner.error("quant_algo is missing")
    keeps = inner.raw("kv_cache_quant_algo") or inner.raw("kv_cache_scheme")
    caches = CacheScales(in_projections=True, dtype="F32", dims=()) if keeps else None
    return Scheme(method="modelopt", rules=tuple(rules), caches=caches, source=section.source)


def _modelopt_form(section: Config) -> Form:
    """Return the form of ModelOpt's algorithm; one without a format if its sizes do not follow."""
    algo = section.text("quant_algo").upper()
    group = section.optional_count("group_size", default=0) or 0
    form = _ALGOS.get(algo, Form())
    if form.format.startswith("nvfp4") and group not in {0, 16}:
        return Form()
    return form


_INPUT: Final = (".input_scale",)
_ALGOS: Final = {
    "FP8": Form(format="fp8-tensor", extra=_INPUT),
    "FP8_PER_CHANNEL_PER_TOKEN": Form(format="fp8-channel", ranks={".weight_scale": 1}),
    "FP8_PB_WO": Form(format="fp8-block-4d", known={"rows": 128, "columns": 128}),
    "NVFP4": Form(format="nvfp4", extra=_INPUT),
    "W4A16_NVFP4": Form(format="nvfp4"),
    "MXFP4": Form(format="mxfp4-quark"),
    "W4A8_MXFP4_FP8": Form(format="mxfp4-quark"),
    "MXFP8": Form(format="mxfp8"),
}


def _mlx(section: Config) -> Scheme:
    base = _mlx_form(section, "affine")
    rules: list[Rule] = []
    _check_length(section, len(section.data))
    for key, value in section.data.items():
        if isinstance(value, dict):
            form: Form | None = _mlx_form(section.section(key), section.text("mode") or "affine")
        elif value is False and key != "routers":
            form = None
        else:
            continue
        rules.append(Rule(form=form, names=(key,), exact=True, kinds=_ALL))
    rules.sort(key=lambda rule: repr(rule.form))  # no two name the same module
    kinds = _ALL if section.flag("routers") else _ALL - {ROUTER}
    return Scheme(method="mlx", rules=(*rules, Rule(form=base, kinds=kinds)), source=section.source)


def _mlx_form(section: Config, mode: str) -> Form:
    mode = section.text("mode") or mode
    bits, group = section.count("bits", maximum=8), section.count("group_size")
    form = {"affine": "mlx", "mxfp4": "mlx-float", "mxfp8": "mlx-float", "nvfp4": "mlx-float"}.get(mode, "")
    dtypes = {".scales": "", ".biases": ""} if form == "mlx" else {}
    return Form(format=form, known={"bits": bits}, group=group, dtypes=dtypes, whole_groups=True)


def _mlx_routers(config: Config) -> bool:
    """Return whether MLX's model has routers that are linear layers, which it quantises like others."""
    return config.raw("model_type") not in _RAW_ROUTERS


#: Models whose routers are bare matrices in MLX.
_RAW_ROUTERS: Final = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "dots1"),
        *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "exaone_moe", "mimo_v2_flash", "nemotron_h"),
    }
)


def _auto_round(section: Config) -> Scheme:
    if section.raw("dynamic") is not None:
        raise section.error("dynamic is not followed")
    tool, extra = _auto_round_packing(section)
    base = _auto_round_form(section, section, tool, extra)
    plain, expressions = [], []
    for name, other in _sections(section, "extra_config").items():
        form = _auto_round_form(other, section, tool, extra)
        if _is_plain(name):
            plain.append(Rule(form=form, names=(name,)))
        else:
            expressions.append(Rule(form=form, names=(f"{EXPRESSION}.*{name}",)))
    rules = [*sorted(plain, key=lambda rule: repr(rule.form)), *expressions]  # no two plain ones name the same module
    rules.append(Rule(form=base, kinds=_LAYERS))
    skipped = Rule(form=None, names=section.texts("modules_to_not_convert"), kinds=_ALL)
    return Scheme(
        method="auto-round", rules=(skipped, *rules), zeros_less_one=tool.endswith("gptq"), source=section.source
    )


#: Tools whose packing auto-round uses, and kernels for its own: GPTQ's words, but zero points as they are.
_PACKERS: Final = ("gptq", "auto_gptq", "awq", "auto_awq", "llm_compressor")
_OWN_KERNELS: Final = ("auto_round", "exllamav2", "triton", "tritonv2")


def _auto_round_packing(section: Config) -> tuple[str, tuple[str, ...]]:
    """Return the tool whose packing a file has, ``auto_round`` for auto-round's own, and suffixes of optional tensors.

    Before version 0.5, ``backend`` told the packing, and groups of inputs were stored; now it is the kernel to run.

    Raises:
        ModelError: the packing is none of those.
    """
    key = "packing_format"
    if not section.text(key) and section.text("backend").partition(":")[0] in {"auto_round", *_PACKERS}:
        key = "backend"
    packing = section.text(key)
    words = packing.split(":") if packing not in {"", "auto"} else ["auto_gptq"]
    tool = words[1] if words[0] == "auto_round" and len(words) > 1 else words[0]
    if tool not in {*_PACKERS, *_OWN_KERNELS}:
        known = ", ".join(("auto_round", *_PACKERS))
        raise section.error(f"{key} is {packing!r:.60}, expected auto-round's packing or another tool's ({known})")
    extra = (".g_idx",) if key == "backend" and not tool.endswith("awq") else ()
    return tool if tool in _PACKERS else "auto_round", extra


def _sections(config: Config, key: str) -> dict[str, Config]:
    """Return the objects in the object under ``key``, none if it is absent or empty.

    Raises:
        ModelError: one is no object, or there are too many.
    """
    if not config.raw(key):
        return {}
    section = config.section(key)
    _check_length(section, len(section.data))
    return {name: section.section(name) for name in section.data}


def _check_length(section: Config, length: int) -> None:
    if length > _MOST_MODULES:
        raise section.error(f"has {length} entries, more than {_MOST_MODULES}")


def _is_plain(name: str) -> bool:
    """Return whether a name of auto-round is no regular expression."""
    return name.replace(".", "").replace("_", "").isalnum()


def _auto_round_form(section: Config, base: Config, tool: str, extra: tuple[str, ...]) -> Form | None:
    """Return the form of a section, whose other keys are those of ``base``; None if it is not quantised."""
    keys = Config({**base.data, **section.data}, section.source)
    bits, group = keys.count("bits", maximum=32), keys.optional_count("group_size", default=128, minimum=-1) or -1
    if bits > 8:  # noqa: PLR2004
        return None
    kind = keys.text("data_type") or "int"
    if kind == "int" and bits in _BITS and tool != "llm_compressor":
        packer = "awq" if tool.endswith("awq") else "gptq"
        return Form(format=packer, known={"bits": bits}, group=group, extra=extra, permuted=False)
    if tool == "llm_compressor" and kind.startswith("mx_fp") and bits in {4, 8}:
        return Form(format="mxfp4-packed" if bits == 4 else "mxfp8")  # noqa: PLR2004
    if tool == "llm_compressor" and kind.startswith("nv_fp") and bits == 4:  # noqa: PLR2004
        is_static = keys.count("act_bits", default=16) == 4  # noqa: PLR2004
        return Form(format="nvfp4-packed", extra=(".input_global_scale",) if is_static else ())
    return Form()


def _quark(section: Config) -> Scheme:
    base = _quark_form(section.section("global_quant_config")) if section.raw("global_quant_config") else None
    if section.raw("layer_type_quant_config"):
        raise section.error("layer_type_quant_config is not followed")
    layers = _sections(section, "layer_quant_config")
    rules = [Rule(form=_quark_form(layer), names=(name,)) for name, layer in layers.items()]
    skipped = Rule(form=None, names=section.texts("exclude"), kinds=_ALL)
    return Scheme(method="quark", rules=(skipped, *rules, Rule(form=base)), source=section.source)


def _quark_form(layer: Config) -> Form | None:
    """Return the form of Quark's settings for layers, None if their weights are not quantised."""
    if layer.raw("weight") is None:
        return None
    weight = layer.section("weight")
    dtype, scheme, group = weight.text("dtype"), weight.text("qscheme"), weight.optional_count("group_size", default=0)
    static = tuple(
        suffix
        for key, suffix in (("input_tensors", ".input_scale"), ("output_tensors", ".output_scale"))
        if layer.raw(key) is not None and not layer.section(key).flag("is_dynamic")
    )
    dtypes = dict.fromkeys(_SCALES, "")
    if dtype == "fp8_e4m3" and scheme in {"per_tensor", "per_channel"}:
        ranks = {".weight_scale": 1} if scheme == "per_channel" else {}
        form = "fp8-channel" if scheme == "per_channel" else "fp8-tensor"
        return Form(format=form, extra=static, dtypes=dtypes, ranks=ranks)
    if dtype in {"fp4", "mx"} and scheme == "per_group" and group == 32 and not static:  # noqa: PLR2004
        return Form(format="mxfp4-quark" if weight.text("scale_format") == "e8m0" else "")
    if dtype in {"int4", "uint4"} and scheme == "per_group" and group and not static:
        return Form(format="int4-quark", known={"bits": 4}, group=group, dtypes=dtypes)
    return Form()


def _flat(section: Config, key: str) -> tuple[str, ...]:
    """Return the strings of a list, or of a list of lists."""
    value = section.raw(key)
    rows = value if isinstance(value, list) else [value] if value is not None else []
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    texts = tuple(name for name in names if isinstance(name, str))
    if len(texts) < len(names):
        raise section.error(f"{key} is no list of names")
    return texts


_HEADERS_ONLY: Final = ("exl2", "exl3", "bitsandbytes")
_METHODS: Final[Mapping[str, Callable[[Config], Scheme]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mlx": _mlx,
    "quark": _quark,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}
