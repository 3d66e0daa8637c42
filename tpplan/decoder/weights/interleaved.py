"""Experts of gpt_oss, of which all are in one tensor: as views of it, in the form that the decoder computes with.

A checkpoint stores ``[E, in, out]`` in 16 or 32 bits, or MXFP4 as codes ``[E, out, in / 32, 16]`` and scales
``[E, out, in / 32]``. Outputs of gate and up projections alternate, also in their biases.

Shapes: E experts, O outputs, I inputs of an expert's matrix.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tpplan.decoder.model.stored import MXFP4
from tpplan.decoder.weights.convert import begin, once
from tpplan.decoder.weights.quantised import Float4Matrix
from tpplan.decoder.weights.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from torch import Tensor

_BIAS: Final = "_bias"


def separate(
    name: str, names: Sequence[str], tensors: MutableMapping[str, Tensor], stacked: MutableMapping[str, Stacked]
) -> None:
    """Replace a tensor of all experts by its projections, whose outputs alternate; nothing if a device lacks it.

    Args:
        name: name of the tensor in the checkpoint.
        names: names of the projections.
        tensors: the device's tensors. Biases get the names of their projections and ``.bias``.
        stacked: gets the projections that are quantised.
    """
    codes, scales = (tensors.pop(name + suffix, None) for suffix in MXFP4)
    bias, whole = tensors.pop(name + _BIAS, None), tensors.pop(name, None)
    if whole is not None:
        whole = once(whole, name, partial(_outputs_first, whole))
    for i, own in enumerate(names):
        if whole is not None:
            tensors[own] = whole[:, i :: len(names)]
        elif codes is not None and scales is not None:
            rows = (codes.flatten(2).flatten(0, 1), scales.flatten(0, 1))
            stacked[own] = Stacked(Float4Matrix(*(each[i :: len(names)] for each in rows)), len(codes))
        if bias is not None:
            tensors[f"{own}.bias"] = bias[:, i :: len(names)]


def _outputs_first(whole_EIO: Tensor) -> Tensor:
    """Transpose the matrices of experts in their own memory, one after the other: ``[E, O, I]``."""
    experts, inputs, outputs = whole_EIO.shape
    to_EOI = whole_EIO.view(experts, outputs, inputs)
    begin(whole_EIO)
    for from_IO, to_OI in zip(whole_EIO, to_EOI, strict=True):
        to_OI.copy_(from_IO.mT.clone())
    return to_EOI
