"""Formats of quantised matrices that the decoder computes with: where their tensors have codes, scales and zeros."""

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
    """Where the tensors of a format have the matrix.

    Attributes:
        codes: the suffix of the codes.
        scales: of their scales, ``[N, G]`` or transposed.
        zeros: of their zeros, likewise, of which words have those of several rows.
        groups: of the group of each column.
        transposed: whether rows of the matrix are columns of these tensors.
        packs_rows: whether a word has the codes of several rows, not of several columns.
        order: of the codes in a word, see :func:`tpplan.decoder.packing.unpacked`.
        bits: of a code.
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
        """Those of all tensors of a matrix."""
        return frozenset({self.codes, self.scales, self.zeros, self.groups})


#: By the method that quantised.
LAYOUTS: Final = {
    "gptq": Layout(),
    "awq": Layout(packs_rows=True, order=AWQ, bits=(NIBBLE,)),
    "compressed-tensors": Layout(
        ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", transposed=False
    ),
}


#: What belongs to codes that are floats; scales of activations, which are not rounded here, are not used.
_FLOATS: Final = ("F8_E4M3", "F8_E5M2")
SCALES: Final = (".weight_scale_inv", ".weight_scale")
_UNUSED: Final = frozenset({
    ".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".input_scale_ub", ".weight_shape"
})  # fmt: skip


def check_formats(model: ModelSpec, scheme: Scheme, source: str) -> None:
    """Make sure that the decoder computes with all tensors of a model as they are stored.

    Args:
        model: from :func:`tpplan.read_model`.
        scheme: of its checkpoint.
        source: names the model.

    Raises:
        ModelError: one is stored in another way.
    """
    layout = LAYOUTS.get(scheme.method)
    is_told = scheme.format or scheme.method == "compressed-tensors"
    ints = layout.suffixes if layout and is_told and scheme.known.get("bits", NIBBLE) in layout.bits else frozenset()
    found = [(0, parameter) for parameter in model.parameters]
    found += [(block.layers[0], parameter) for block in model.blocks for parameter in block.parameters]
    for layer, parameter in found:
        suffix = split_name(parameter.name)[1]
        is_float = suffix in SCALES or (suffix == ".weight" and parameter.dtype in _FLOATS)
        # Packers make biases of 16-bit floats, whatever the model has.
        is_bias = suffix == ".bias" and layout is not None
        if parameter.dtype == DTYPES[model.dtype] or suffix in ints or suffix in _UNUSED or is_float or is_bias:
            continue
        name = parameter.name.replace("{layer}", str(layer)).replace("{expert}", "0")
        if not scheme.method:
            what = f"{name} is stored as {parameter.dtype}, the decoder computes in {model.dtype}"
            hint = "convert the checkpoint to one dtype of 16 or 32 bits, and name it in config.json"
        else:
            what = f"the decoder does not compute with {name} ({parameter.dtype}), weights are {model.weight_format}"
            hint = "it takes GPTQ and compressed-tensors of 4 and 8 bits, AWQ of 4 (version gemm), and FP8"
        raise ModelError(f"{source}: {what}", hint)
