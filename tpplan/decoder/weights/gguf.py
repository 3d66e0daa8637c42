"""A device's weights of a GGUF file as tensors of the activations' dtype, in the order that transformers has.

Matrices in blocks become whole numbers, by the package ``gguf`` of llama.cpp's authors; that takes more memory than a
plan counts for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from tpplan.core.missing import needing
from tpplan.errors import ExecutionError
from tpplan.models.gguf.header import TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.models.gguf.reader import GgufModel

#: Types of tensors that torch has too.
_PLAIN: Final = frozenset({"F32", "F16", "BF16", "F64"})
_NEEDED: Final = "computing with a GGUF file"
#: Rows that are converted at once, which take some further bytes for each of their elements.
_ROWS: Final = 1024


def dequantised(
    weights: Mapping[str, Tensor], model: GgufModel, dtype: torch.dtype, head_dim: int
) -> dict[str, Tensor]:
    """Return a device's tensors as transformers would have them.

    Args:
        weights: the device's slices as they are in the file, by name; those in blocks are bytes.
        model: the file's header.
        dtype: dtype of the result.
        head_dim: rows of a head in query and key matrices.

    Raises:
        ExecutionError: a tensor is in blocks, and on a device for whose memory the plan counts its bytes; or its type
            is one that the package cannot convert.
        MissingError: the package is not installed.
    """
    found = {}
    for name, tensor in weights.items():
        kind = model.kinds[name]
        if kind in _PLAIN:
            whole = tensor.to(dtype)
        else:
            if tensor.device.type == "cuda":
                what = f"{name} is in {kind}, and the decoder takes more memory for it than the plan counts"
                raise ExecutionError(what, "add --backend cpu, which computes on virtual devices")
            whole = _whole(tensor, name, kind, dtype)
        if (
            model.architecture.permuted
            and ".self_attn." in name
            and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))
        ):
            whole = halves(whole, head_dim)
        found[name] = whole
    return found


def halves(rows: Tensor, head_dim: int) -> Tensor:
    """Return the rows of query or key heads in the order in which RoPE turns row ``i`` with ``i + head_dim / 2``.

    In llama.cpp's order for models of Llama's kind, both are next to each other. Devices have whole heads.

    Args:
        rows: a matrix or a bias, ``[heads · head_dim, …]``.
        head_dim: rows of a head.
    """
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _whole(blocks: Tensor, name: str, kind: str, dtype: torch.dtype) -> Tensor:
    """Return a matrix of numbers from one of bytes."""
    with needing(_NEEDED, "gguf"):
        from gguf import GGMLQuantizationType  # noqa: PLC0415 - an extra
        from gguf.quants import dequantize  # noqa: PLC0415
    if not len(blocks):
        _, elements, size = next(each for each in TYPES.values() if each[0] == kind)
        return torch.empty(0, blocks.shape[1] // size * elements, dtype=dtype)
    try:
        parts = [
            torch.from_numpy(dequantize(some.numpy(), GGMLQuantizationType[kind])).to(dtype)
            for some in torch.split(blocks, _ROWS)
        ]
    except NotImplementedError as error:
        what = f"{name} is in {kind}, which the package gguf does not convert"
        raise ExecutionError(what, "take a file in Q4_K_M or Q8_0") from error
    return torch.cat(parts)
