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


#: Layouts by quantisation method.
LAYOUTS: Final = {
    "gptq": Layout(),
    "awq": Layout(packs_rows=True, order=AWQ, bits=(NIBBLE,)),
    "compressed-tensors": Layout(
        ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", transposed=False
    ),
}


#: Stored dtypes of float codes, and suffixes and dtypes of their scales; E8M0 are powers of two.
_FLOAT8: Final = ("F8_E4M3", "F8_E5M2")
SCALES: Final = (".weight_scale_inv", ".weight_scale")
_OF_FLOAT8: Final = (*FLOATS, "F8_E8M0")
#: Suffixes of the codes and scales of MXFP4.
MXFP4: Final = ("_blocks", "_scales")
#: Suffixes of tensors that are not used: the decoder does not quantise activations, and its cache has own scales.
_UNUSED: Final = frozenset({
    ".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".input_scale_ub"
})  # fmt: skip
_CACHED: Final = re.compile(r"\.self_attn\.(?:\w+\.)?(?:q|k|v|kv)_(?:scale|zero_point)$")
#: Suffixes of the tensors of an unquantised module.
_PLAIN: Final = frozenset({".weight", ".bias", ""})
#: The only matrix that is looked up, not multiplied.
_EMBEDDING: Final = "embed_tokens"

_TAKEN: Final = "it takes GPTQ and compressed-tensors of 4 and 8 bits, AWQ of 4 (gemm), FP8, and gpt_oss in MXFP4"


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


def check_formats(model: ModelSpec, scheme: Scheme, source: str, *, fused: str = "") -> None:
    """Check that the decoder supports the formats of all tensors of a model.

    Args:
        model: the model, from :func:`tpplan.read_model`.
        scheme: quantisation scheme of its checkpoint.
        source: name of the model for the error.
        fused: name of the tensor of gate and up matrices of all experts, see
            :class:`tpplan.decoder.model.settings.Experts`; only such experts may be MXFP4.

    Raises:
        ModelError: a tensor has another format.
    """
    if scheme.problem:
        raise ModelError(scheme.problem.message, f"the decoder needs to know how weights are quantised; {_TAKEN}")
    for stem, tensors in _modules(model):
        suffix = _odd(stem, tensors, DTYPES[model.dtype])
        if suffix is None or _is_coded(stem, tensors, scheme, fused):
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
    """Yield each module of the first layer of every kind, and outside the layers, with its tensors by suffix."""
    for layer, parameters in ((0, model.parameters), *((block.layers[0], block.parameters) for block in model.blocks)):
        modules: dict[str, dict[str, Parameter]] = {}
        for parameter in parameters:
            stem, suffix = split_name(parameter.name.replace("{layer}", str(layer)).replace("{expert}", "0"))
            modules.setdefault(stem, {})[suffix] = parameter
        yield from modules.items()


def _odd(stem: str, tensors: Mapping[str, Parameter], dtype: str) -> str | None:
    """Return the suffix of the first tensor that an unquantised module does not have, None if there is none."""
    used = (suffix for suffix in tensors if suffix not in _UNUSED and not _CACHED.search(stem + suffix))
    return next((suffix for suffix in used if suffix not in _PLAIN or tensors[suffix].dtype != dtype), None)


def _is_coded(stem: str, tensors: Mapping[str, Parameter], scheme: Scheme, fused: str) -> bool:
    """Return whether the decoder computes with the tensors of a quantised module."""
    if stem.endswith(_EMBEDDING):
        return False
    layout = LAYOUTS.get(scheme.method)
    # Quantisation tools store biases as 16-bit floats, whatever the dtype of the model.
    dtypes: dict[str, tuple[str, ...]] = dict.fromkeys((*_UNUSED, ".bias"), FLOATS)
    shapes = {suffix: tensor.shape for suffix, tensor in tensors.items()}
    if layout and layout.codes in tensors:
        dtypes |= {**layout.dtypes, ".weight_shape": ("I64", "I32")}
        fits = _are_ints(layout, shapes, scheme)
    elif ".weight" in tensors:
        dtypes |= {".weight": _FLOAT8, **dict.fromkeys(SCALES, _OF_FLOAT8)}
        fits = _are_floats(shapes, scheme)
    else:
        dtypes |= dict.fromkeys(MXFP4, ("U8",))
        fits = bool(fused) and scheme.method == "mxfp4" and shapes.keys() == {*MXFP4}
    return fits and all(tensor.dtype in dtypes.get(suffix, ()) for suffix, tensor in tensors.items())


def _are_ints(layout: Layout, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> bool:
    """Return whether the shapes of a module's tensors are those of a layout, with bits and groups that are known."""
    codes, scales, zeros = (shapes.get(each, ()) for each in (layout.codes, layout.scales, layout.zeros))
    if len(codes) != len(scales) or len(codes) != 2:  # noqa: PLR2004 (dimensions)
        return False
    forms = [rule.form.format for rule in scheme.rules if rule.form]
    if layout.transposed and any(form != scheme.method for form in forms):
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
