"""Formats of quantised matrices that the decoder supports, and how they store codes, scales and zero points."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.errors import ModelError
from tpplan.models.families import DTYPES
from tpplan.models.formats.storage import split_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tpplan.core.model import ModelSpec, Parameter
    from tpplan.models.formats.scheme import Scheme

#: Bits of a word, and of a code of 4 bits.
WORD: Final = 32
NIBBLE: Final = 4
#: The order in which AWQ packs the eight 4-bit codes of a word: the place of each, from the lowest bits.
AWQ: Final = (0, 4, 1, 5, 2, 6, 3, 7)

#: Dtypes of scales.
FLOATS: Final = ("F32", "F16", "BF16")


@frozen
class Layout:
    """How the tensors of a format store a matrix.

    Attributes:
        codes: suffix of the codes' name.
        scales: suffix of the scales, ``[N, G]`` or transposed.
        zeros: suffix of the zero points, shaped likewise, with several rows packed into a word.
        groups: suffix of the group indices of the columns.
        transposed: whether rows of the matrix are columns of these tensors.
        packs_rows: whether a word packs the codes of several rows rather than columns.
        order: order of the codes in a word, see :func:`tpplan.decoder.weights.convert.unpacked`.
        bits: numbers of bits that a code may have.
    """

    codes: str = ".qweight"
    scales: str = ".scales"
    zeros: str = ".qzeros"
    groups: str = ".g_idx"
    transposed: bool = True
    packs_rows: bool = False
    order: tuple[int, ...] | None = None
    bits: tuple[int, ...] = (NIBBLE, 2 * NIBBLE)

    @property
    def outputs(self) -> int:
        """The dimension of codes and scales that rows of the matrix are in."""
        return 1 if self.transposed else 0

    @property
    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """The dtypes of all tensors of a matrix, by suffix."""
        return {self.codes: ("I32",), self.scales: FLOATS, self.zeros: ("I32",), self.groups: ("I32",)}

    def bits_of(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bits of a code, given the shapes of the whole tensors by suffix; 0 if they do not tell."""
        codes, scales, zeros = (shapes.get(each, ()) for each in (self.codes, self.scales, self.zeros))
        words = (codes if self.packs_rows else zeros)[self.outputs :][:1]
        rows = scales[self.outputs :][:1]
        return 0 if not words or not rows or words[0] * WORD % rows[0] else words[0] * WORD // rows[0]

    def width_of(self, codes: tuple[int, ...], bits: int) -> int:
        """Return the columns of a matrix, given the shape of all its codes."""
        return codes[1 - self.outputs] * (1 if self.packs_rows else WORD // bits)


#: Layouts of packed integers by quantisation method.
LAYOUTS: Final = {
    "gptq": Layout(),
    "awq": Layout(packs_rows=True, order=AWQ, bits=(NIBBLE,)),
    "compressed-tensors": Layout(
        ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", transposed=False
    ),
}


def layout_of(scheme: Scheme) -> Layout | None:
    """Return the layout of a checkpoint's packed integers; None if it has none. auto-round packs as other tools do."""
    if scheme.method != "auto-round":
        return LAYOUTS.get(scheme.method)
    formats = {rule.form.format for rule in scheme.rules if rule.form}
    return LAYOUTS.get(formats.pop()) if len(formats) == 1 else None


#: Stored dtypes of float codes, and suffixes and dtypes of their scales; E8M0 are powers of two.
_FLOAT8: Final = ("F8_E4M3", "F8_E5M2")
SCALES: Final = (".weight_scale_inv", ".weight_scale")
_OF_FLOAT8: Final = (*FLOATS, "F8_E8M0")
#: Suffixes of the codes and scales of gpt_oss's experts in MXFP4.
MXFP4: Final = ("_blocks", "_scales")
#: Suffixes of codes of 4-bit floats, and of what all their scales are multiplied by; the latter's inverse is stored by
#: compressed-tensors.
FLOAT4: Final = (".weight_packed", ".weight")
FACTOR: Final = ".weight_scale_2"
INVERSE: Final = ".weight_global_scale"
#: Columns that share a scale of these, by the scale's dtype.
OF_FLOAT4: Final = {"F8_E4M3": 16, "U8": 32, "F8_E8M0": 32}
#: Suffixes of the scales of 8-bit integers that are not packed: bitsandbytes stores them times 127.
INT8_SCALES: Final = (".SCB", ".weight_scale")
#: Suffix of the scales of bitsandbytes' 4-bit codes; what further tensors there are begins so.
ABSMAX: Final = ".weight.absmax"
QUANT_STATE: Final = ".weight.quant_state.bitsandbytes__"
#: Suffix of the codes of EXL2, and the dtypes of all its tensors.
EXL2: Final = ".q_weight"
_OF_EXL2: Final = {
    EXL2: ("I32",), ".q_scale": ("I32",), ".q_scale_max": ("F16",), ".q_groups": ("I16",),
    **dict.fromkeys((".q_invperm", ".q_perm"), ("I32",)), ".q_group_map": ("I16",),
}  # fmt: skip
#: Suffixes of tensors that are not used: the decoder does not quantise activations, and its cache has own scales.
_UNUSED: Final = frozenset({
    ".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".input_scale_ub",
    ".input_global_scale", ".input_zero_point",
})  # fmt: skip
_OF_TABLES: Final = {
    ".weight": ("U8", "BF16", "F16", "F32"),
    ABSMAX: ("U8", "F32"),
    **dict.fromkeys((".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"), ("F32",)),
    **dict.fromkeys((f"{QUANT_STATE}nf4", f"{QUANT_STATE}fp4"), ("U8",)),
}
#: Experts behind the first.
_FURTHER: Final = re.compile(r"\.experts\.[1-9]")
_CACHED: Final = re.compile(r"\.self_attn\.(?:\w+\.)?(?:q|k|v|kv)_(?:scale|zero_point)$")
#: Suffixes of the tensors of an unquantised module.
_PLAIN: Final = frozenset({".weight", ".bias", ""})
#: Modules that may be stored in 32 bits, whatever the dtype of the model.
_WIDE: Final = re.compile(r"\.linear_attn\.(?:A_log|dt_bias|norm)$")
#: The only matrix that is looked up, not multiplied.
_EMBEDDING: Final = "embed_tokens"

_TAKEN: Final = (
    "it takes GPTQ and compressed-tensors of 4 and 8 bits, AWQ of 4 (gemm), 8-bit integers, FP8, MXFP8, NVFP4, MXFP4, "
    "NF4 and EXL2"
)


def config_values(scheme: Scheme, key: str) -> frozenset[int]:
    """Return the config's values of a parameter of its formats, such as ``group``; several if modules differ."""
    forms = [rule.form for rule in scheme.rules if rule.form]
    return frozenset(form.group if key == "group" else form.known.get(key, 0) for form in forms) - {0}


def size_of(length: int, count: int, from_config: Collection[int]) -> int:
    """Return the elements that share a scale.

    Args:
        length: number of elements.
        count: number of scales.
        from_config: sizes in the config, -1 for all elements.

    Returns:
        The size in the config if it has ``count`` scales, else that of equal parts; 0 if neither is certain.
    """
    sizes = {min(size, length) if size > 0 else length for size in from_config}
    fitting = [size for size in sizes if -(-length // size) == count]
    if fitting:
        return fitting[0] if len(fitting) == 1 else 0
    return 0 if length % count else length // count


def check_formats(
    model: ModelSpec, scheme: Scheme, source: str, *, fused: str = "", wide: Collection[str] = ()
) -> None:
    """Check that the decoder supports the formats of all tensors of a model.

    Args:
        model: the model, from :func:`tpplan.read_model`.
        scheme: quantisation scheme of its checkpoint.
        source: name of the model for the error.
        fused: name of the tensor of gate and up matrices of all experts, see
            :class:`tpplan.decoder.model.settings.Experts`; only such experts may be MXFP4.
        wide: names, relative to a layer, of tensors that are computed with in float32, whatever they are stored as.

    Raises:
        ModelError: a tensor has another format.
    """
    if scheme.problem:
        raise ModelError(scheme.problem.message, f"the decoder needs to know how weights are quantised; {_TAKEN}")
    for stem, tensors in _modules(model):
        suffix = _odd(stem, tensors, {DTYPES[model.dtype], *(("F32",) if _WIDE.search(stem) else ())})
        if suffix is None or _is_coded(stem, tensors, scheme, fused):
            continue
        if suffix in _PLAIN and tensors[suffix].dtype in FLOATS and stem.endswith(tuple(f".{name}" for name in wide)):
            continue
        name, dtype = stem + suffix, tensors[suffix].dtype
        if suffix in _PLAIN and dtype in FLOATS:
            what = f"{name} is stored as {dtype}, the decoder computes in {model.dtype}"
            hint = "convert the checkpoint to one dtype of 16 or 32 bits, and name it in config.json"
            raise ModelError(f"{source}: {what}", hint)
        stored = ", ".join(f"{suffix} {tensor.dtype} {[*tensor.shape]}".strip() for suffix, tensor in tensors.items())
        what = f"the decoder does not compute with {stem} ({stored}), weights are {model.weight_format}"
        raise ModelError(f"{source}: {what}", _TAKEN)


def _modules(model: ModelSpec) -> Iterator[tuple[str, dict[str, Parameter]]]:
    """Yield each module of the first layer of every kind, and outside the layers, with its tensors by suffix.

    Of experts it is the first, also of those that have tensors of different length.
    """
    for layer, parameters in ((0, model.parameters), *((block.layers[0], block.parameters) for block in model.blocks)):
        modules: dict[str, dict[str, Parameter]] = {}
        for parameter in parameters:
            stem, suffix = split_name(parameter.name.replace("{layer}", str(layer)).replace("{expert}", "0"))
            if _FURTHER.search(stem):
                continue
            modules.setdefault(stem, {})[suffix] = parameter
        yield from modules.items()


def _odd(stem: str, tensors: Mapping[str, Parameter], dtypes: Collection[str]) -> str | None:
    """Return the suffix of the first tensor that an unquantised module does not have, None if there is none."""
    used = (suffix for suffix in tensors if suffix not in _UNUSED and not _CACHED.search(stem + suffix))
    return next((suffix for suffix in used if suffix not in _PLAIN or tensors[suffix].dtype not in dtypes), None)


def _is_coded(stem: str, tensors: Mapping[str, Parameter], scheme: Scheme, fused: str) -> bool:
    """Return whether the decoder computes with the tensors of a quantised module."""
    if stem.endswith(_EMBEDDING):
        return False
    layout = layout_of(scheme)
    # Quantisation tools store biases as 16-bit floats, whatever the dtype of the model.
    dtypes: dict[str, tuple[str, ...]] = dict.fromkeys((*_UNUSED, ".bias"), FLOATS) | {".input_zero_point": ("I8",)}
    shapes = {suffix: tensor.shape for suffix, tensor in tensors.items()}
    codes = next((tensors[suffix].dtype for suffix in FLOAT4 if suffix in tensors), "")
    if layout and layout.codes in tensors and tensors[layout.codes].dtype == "I32":
        dtypes |= {**layout.dtypes, ".weight_shape": ("I64", "I32")}
        fits = _are_ints(layout, shapes, scheme)
    elif codes == "U8" and ".weight_scale" in tensors:
        dtypes |= {**dict.fromkeys(FLOAT4, ("U8",)), ".weight_scale": tuple(OF_FLOAT4)}
        dtypes |= dict.fromkeys((FACTOR, INVERSE), ("F32",))
        fits = _are_float4(shapes, tensors[".weight_scale"].dtype)
    elif EXL2 in tensors:
        dtypes |= _OF_EXL2
        is_padded = len(outputs := tensors[EXL2].dims[1]) > 1 and outputs[-1].axis is None
        fits = not is_padded and ".experts." not in stem and any(each in tensors for each in (".q_invperm", ".q_perm"))
    elif ABSMAX in tensors:
        dtypes |= _OF_TABLES
        fits = any(QUANT_STATE + kind in tensors for kind in ("nf4", "fp4"))
    elif codes == "I8":
        dtypes |= {".weight": ("I8",), ".weight_zero_point": ("I8",), ".weight_format": ("U8",)}
        dtypes |= dict.fromkeys(INT8_SCALES, FLOATS)
        fits = _are_int8(shapes, scheme)
    elif ".weight" in tensors:
        dtypes |= {".weight": _FLOAT8, **dict.fromkeys(SCALES, _OF_FLOAT8)}
        if is_mx(shapes):
            dtypes[".weight_scale"] = ("U8", "F8_E8M0")
        fits = _are_floats(shapes, scheme)
    else:
        dtypes |= dict.fromkeys(MXFP4, ("U8",))
        fits = bool(fused) and scheme.method == "mxfp4" and shapes.keys() == {*MXFP4}
    return fits and all(tensor.dtype in dtypes.get(suffix, ()) for suffix, tensor in tensors.items())


def _are_int8(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> bool:
    """Return whether a module has integers with scales for the matrix, its rows, or groups of a known size."""
    found = [shapes[suffix] for suffix in INT8_SCALES if suffix in shapes]
    codes = shapes[".weight"]
    if len(found) != 1 or len(codes) != 2 or shapes.get(".weight_zero_point", found[0]) != found[0]:  # noqa: PLR2004
        return False
    (scales,) = found
    if scales in {(), (1,), codes[:1], (codes[0], 1)}:
        return True
    return (
        scales[:1] == codes[:1]
        and len(scales) == len(codes)
        and bool(size_of(codes[1], scales[1], config_values(scheme, "group")))
    )


def _are_float4(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bool:
    """Return whether a module has 4-bit floats, two in a byte, with as many scales of a dtype as are to be."""
    codes, scales = next(shapes[suffix] for suffix in FLOAT4 if suffix in shapes), shapes[".weight_scale"]
    factors = sum(suffix in shapes for suffix in (FACTOR, INVERSE))
    if dtype not in OF_FLOAT4 or len(codes) != 2 or factors != (dtype == "F8_E4M3"):  # noqa: PLR2004 (dimensions)
        return False
    return scales == (codes[0], -(-2 * codes[1] // OF_FLOAT4[dtype]))


def _are_ints(layout: Layout, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> bool:
    """Return whether the shapes of a module's tensors are those of a layout, with bits and groups that are known."""
    codes, scales, zeros = (shapes.get(each, ()) for each in (layout.codes, layout.scales, layout.zeros))
    if len(codes) != len(scales) or len(codes) != 2:  # noqa: PLR2004 (dimensions)
        return False
    forms = [rule.form.format for rule in scheme.rules if rule.form]
    if layout.transposed and any(LAYOUTS.get(form) is not layout for form in forms):
        return False
    bits = {layout.bits_of(shapes)} if layout.packs_rows or zeros else config_values(scheme, "bits")
    if not bits or not bits <= {*layout.bits}:
        return False
    rows = codes[layout.outputs] * (WORD // min(bits) if layout.packs_rows else 1)
    widths = [layout.width_of(codes, each) for each in bits]
    count = scales[1 - layout.outputs]
    return rows == scales[layout.outputs] and any(
        size_of(width, count, config_values(scheme, "group")) for width in widths
    )


def is_mx(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether 8-bit floats have a scale for each 32 columns of a row, as MXFP8 does."""
    rows, columns = shapes[".weight"]
    return shapes.get(".weight_scale") == (rows, columns // 32) and not columns % 32


def _are_floats(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> bool:
    """Return whether a module has 8-bit floats with scales for the matrix, its rows, or blocks of a known size."""
    scale_shapes = [shapes[suffix] for suffix in SCALES if suffix in shapes]
    codes = shapes[".weight"]
    if len(scale_shapes) != 1 or len(codes) != 2:  # noqa: PLR2004 (dimensions)
        return False
    (scales,) = scale_shapes
    if scales in {(), (1,), codes[:1], (codes[0], 1)}:
        return True
    sizes = zip(codes, scales, ("rows", "columns"), strict=False)
    return len(scales) == len(codes) and all(
        size_of(size, count, config_values(scheme, key)) for size, count, key in sizes
    )
