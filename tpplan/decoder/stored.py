"""Formats of quantised matrices that the decoder supports, and how they store codes, scales and zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.decoder.packing import AWQ, NIBBLE
from tpplan.errors import ModelError
from tpplan.families import DTYPES
from tpplan.formats.storage import split_name

if TYPE_CHECKING:
    from tpplan.formats.scheme import Scheme
    from tpplan.model import ModelSpec


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
        order: order of the codes in a word, see :func:`tpplan.decoder.packing.unpacked`.
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
    def suffixes(self) -> frozenset[str]:
        """The suffixes of all tensors of a matrix."""
        return frozenset({self.codes, self.scales, self.zeros, self.groups})


#: Layouts by quantisation method.
LAYOUTS: Final = {
    "gptq": Layout(),
    "awq": Layout(packs_rows=True, order=AWQ, bits=(NIBBLE,)),
    "compressed-tensors": Layout(
        ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", transposed=False
    ),
}


#: Stored dtypes of float codes, and suffixes of their scales. Activations are not quantised, so theirs are unused.
_FLOATS: Final = ("F8_E4M3", "F8_E5M2")
SCALES: Final = (".weight_scale_inv", ".weight_scale")
#: Suffixes of the codes and scales of MXFP4.
MXFP4: Final = ("_blocks", "_scales")
_UNUSED: Final = frozenset({
    ".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".input_scale_ub", ".weight_shape"
})  # fmt: skip


def check_formats(model: ModelSpec, scheme: Scheme, source: str, *, fused: str = "") -> None:
    """Check that the decoder supports the formats of all tensors of a model.

    Args:
        model: the model, from :func:`tpplan.read_model`.
        scheme: quantisation scheme of its checkpoint.
        source: name of the model for the error.
        fused: name of the tensor of gate and up matrices of all experts, see
            :class:`tpplan.decoder.settings.Experts`; only such experts may be MXFP4.

    Raises:
        ModelError: a tensor has another format.
    """
    if scheme.problem:
        raise scheme.problem
    layout = LAYOUTS.get(scheme.method)
    is_told = scheme.format or scheme.method == "compressed-tensors"
    ints = layout.suffixes if layout and is_told and scheme.known.get("bits", NIBBLE) in layout.bits else frozenset()
    found = [(0, parameter) for parameter in model.parameters]
    found += [(block.layers[0], parameter) for block in model.blocks for parameter in block.parameters]
    for layer, parameter in found:
        suffix = split_name(parameter.name)[1]
        is_float4 = bool(fused) and scheme.method == "mxfp4" and suffix in MXFP4
        is_float = suffix in SCALES or (suffix == ".weight" and parameter.dtype in _FLOATS)
        # Quantisation tools store biases as 16-bit floats, whatever the dtype of the model.
        is_bias = suffix == ".bias" and layout is not None
        if (
            parameter.dtype == DTYPES[model.dtype]
            or suffix in ints
            or suffix in _UNUSED
            or is_float
            or is_float4
            or is_bias
        ):
            continue
        name = parameter.name.replace("{layer}", str(layer)).replace("{expert}", "0")
        if not scheme.method:
            what = f"{name} is stored as {parameter.dtype}, the decoder computes in {model.dtype}"
            hint = "convert the checkpoint to one dtype of 16 or 32 bits, and name it in config.json"
        else:
            what = f"the decoder does not compute with {name} ({parameter.dtype}), weights are {model.weight_format}"
            hint = "it takes GPTQ and compressed-tensors of 4 and 8 bits, AWQ of 4 (gemm), FP8, and gpt_oss in MXFP4"
        raise ModelError(f"{source}: {what}", hint)
