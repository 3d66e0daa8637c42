"""Computing the stored tensors of a model from its config alone."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.axes import Axis
from tpplan.formats.scheme import needs_headers
from tpplan.formats.storage import split_name, store
from tpplan.formats.table import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.formats.scheme import Scheme
    from tpplan.model import Block, ModelSpec, Parameter

#: Optional tensors that current tools store for a format.
_USUAL: Final = {"gptq": (".g_idx",)}


def rebuild(logical: ModelSpec, stored: Callable[[Parameter, int | None], tuple[Parameter, ...]]) -> ModelSpec:
    """Return the model with each parameter replaced by its stored parameters in its layer (None outside the layers).

    Layers of a block whose stored parameters differ go to separate blocks, in order of their first layer.
    """
    blocks: list[Block] = []
    for block in logical.blocks:
        groups: dict[tuple[Parameter, ...], list[int]] = {}
        for layer in block.layers:
            parameters = tuple(chain.from_iterable(stored(parameter, layer) for parameter in block.parameters))
            groups.setdefault(parameters, []).append(layer)
        blocks += [evolve(block, layers=tuple(layers), parameters=found) for found, layers in groups.items()]
    return evolve(
        logical,
        blocks=tuple(sorted(blocks, key=lambda block: block.layers)),
        parameters=tuple(chain.from_iterable(stored(parameter, None) for parameter in logical.parameters)),
    )


def stored_by_formula(logical: ModelSpec, scheme: Scheme) -> ModelSpec:
    """Return the model as stored in the format that its config names.

    Raises:
        ModelError: the sizes of the stored tensors do not follow from the config.
    """
    if not scheme.method:
        return logical
    if not scheme.format or (scheme.format == "mxfp4" and logical.model_type != "gpt_oss"):
        raise needs_headers(scheme)
    form = FORMATS[scheme.format]
    usual = (*_USUAL.get(scheme.format, ()), *((".input_scale",) if scheme.static else ()))
    suffixes = [suffix for suffix, piece in form.pieces.items() if piece.required or suffix in usual]
    model_dtype = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[logical.dtype]
    dtypes = {
        suffix: model_dtype if scheme.model_scales and suffix.endswith("_scale") else form.pieces[suffix].dtypes[0]
        for suffix in suffixes
    }
    texts: dict[str, str] = {}

    def by_formula(parameter: Parameter, layer: int | None) -> tuple[Parameter, ...]:
        if not _is_quantised(parameter, layer, scheme):
            return (parameter,)
        found = store(parameter, scheme.format, scheme, dtypes)
        if found is None:
            raise needs_headers(scheme)
        texts[found.text] = found.gather_only
        return found.parameters

    spec = rebuild(logical, by_formula)
    text, gather_only = next(iter(texts.items()), (logical.weight_format, ""))
    return evolve(spec, weight_format=text, gather_only=gather_only)


def _is_quantised(parameter: Parameter, layer: int | None, scheme: Scheme) -> bool:
    """Return whether the scheme quantises a tensor: linear layers of decoder layers, and optionally the output.

    Raises:
        ModelError: it quantises all experts of a layer in one tensor, and the method does not say how these are stored.
    """
    stem, suffix = split_name(parameter.name)
    axes = {segment.axis for dim in parameter.dims for segment in dim}
    if len(parameter.dims) == len(("experts", "in", "out")) and Axis.EX in axes:
        name = parameter.name.removesuffix(".weight").replace("{layer}", str(layer))
        if scheme.quantises(name) and scheme.format != "mxfp4":
            raise needs_headers(scheme)
        return scheme.quantises(name)
    if scheme.format == "mxfp4":
        return False
    if suffix != ".weight" or len(parameter.dims) != len(("out", "in")) or "norm" in stem:
        return False
    if layer is None:
        return scheme.lm_head and parameter.out is not None and not parameter.lookup and "embed" not in stem
    return scheme.quantises(stem.replace("{layer}", str(layer)))
