"""Quantised matrices of random codes: how a config asks for them, and what is in their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tpplan.models.formats.storage import split_name
from tpplan.weights.load import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.weights import TensorSlice

_GROUP: Final = 128
#: By name: what a config.json says of how its weights are quantised.
METHODS: Final[dict[str, dict[str, Any]]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": _GROUP,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    },
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_GROUP, _GROUP],
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}
#: Words of zeros in the middle of the codes, which GPTQ stores less one.
_ZEROS: Final = {"awq": 0x88888888 - 2**32, "gptq": 0x77777777}

#: Of weights, of codes from -8 to 7, and of floats up to 448.
_DEVIATION, _OF_CODES, _OF_FLOATS = 0.02, 8 / 3, 64
#: Exponent, plus 127, that MXFP4's random codes are scaled by: 2 ** -7.
_EXPONENT: Final = 120
#: Suffixes of tensors that are random if they are matrices; experts' tensors and biases may have none.
_RANDOM: Final = frozenset({"", ".weight", ".qweight", "_blocks"})


def quantised(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a model's config with its matrices quantised by one of :data:`METHODS`, or as it is without a method."""
    return {**config, **({"quantization_config": METHODS[method]} if method else {})}


def kind_of(tensor: TensorSlice) -> str:
    """Return the dtype of a tensor that gets random values, as matrices do, or an empty string for any other."""
    is_random = len(tensor.whole) > 1 and split_name(tensor.name)[1] in _RANDOM
    return tensor.dtype if is_random else ""


def block_of(kind: str, normal: torch.Tensor) -> torch.Tensor:
    """Return random values for matrices of a dtype, or codes for them, of an odd length.

    Args:
        kind: from :func:`kind_of`.
        normal: values of deviation 1, of an odd length.
    """
    if kind == "I32":  # eight to a word, in any order
        count = (len(normal) // 8 - 1) | 1
        codes = normal[: 8 * count].mul(_OF_CODES).round_().clamp_(-8, 7).add_(8).int().view(8, count)
        words = torch.zeros(count, dtype=torch.int32)
        for place, some in enumerate(codes):
            words |= some << 4 * place
        return words
    dtype = DTYPES[kind]
    if kind == "U8":  # two codes, all bits as likely
        return normal.mul(2**16).int().view(torch.uint8)[::4].contiguous()
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        return normal.mul(_OF_FLOATS).clamp_(-most, most).to(dtype)
    return normal.mul(_DEVIATION).to(dtype)


def constant_of(tensor: TensorSlice, config: Mapping[str, Any]) -> torch.Tensor:
    """Return the values of a tensor that are not random.

    Args:
        tensor: a tensor for which :func:`kind_of` returns an empty string.
        config: config of the model.
    """
    suffix, dtype = split_name(tensor.name)[1], DTYPES[tensor.dtype]
    if suffix == ".g_idx":
        return torch.arange(tensor.whole[0], dtype=dtype) // _GROUP
    value: float = 0 if suffix == ".bias" else 1
    if suffix == ".qzeros":
        value = _ZEROS[config["quantization_config"]["quant_method"]]
    elif suffix == ".scales":
        value = _DEVIATION / _OF_CODES
    elif suffix == "_scales":
        value = _EXPONENT
    elif suffix == ".weight_scale_inv":
        value = _DEVIATION / _OF_FLOATS
    return torch.full(tensor.whole, value, dtype=dtype)
