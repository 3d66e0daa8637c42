"""A device's weights of a GGUF file as tensors of the activations' dtype, in the order that transformers has.

Matrices in blocks become whole numbers, by the package ``gguf`` of llama.cpp's authors; that takes more memory than a
plan counts for them. Experts in MXFP4 stay in it, in the order of columns that checkpoints have.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import torch

from tpplan.core.missing import needing
from tpplan.core.sizes import format_bytes
from tpplan.decoder.weights.quantised import Float4Matrix
from tpplan.errors import ExecutionError
from tpplan.models.gguf.header import TYPES
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.models.gguf.reader import GgufModel
    from tpplan.weights import TensorSlice

#: Types of tensors that torch has too.
_PLAIN: Final = frozenset({"F32", "F16", "BF16", "F64"})
_FLOAT4: Final = "MXFP4"
_NEEDED: Final = "computing with a GGUF file"
#: Rows that are converted at once, which take some further bytes for each of their elements.
_ROWS: Final = 1024


def room_note(context: TPContext, model: GgufModel) -> str:
    """Check that every GPU has room for what a file's blocks become, see :func:`check_room`; return the note on it.

    It is empty for virtual devices, whose memory is the host's.

    Raises:
        ExecutionError: a device has too little.
    """
    return check_room(context.plan, model, context.dtype.itemsize) if _on_gpus(context) else ""


def _on_gpus(context: TPContext) -> bool:
    return any(each.device.type == "cuda" for each in context.devices.values())


def check_room(plan: SplitPlan, model: GgufModel, itemsize: int) -> str:
    """Check that every device has room for its numbers beside what the plan counts, and return a note on how many.

    The bytes of the file stay where they are until the decoder is complete.

    Args:
        plan: the plan.
        model: the file's header.
        itemsize: bytes of a number.

    Raises:
        ExecutionError: a device has too little.
    """
    sizes = dict.fromkeys(range(len(plan.devices)), 0)
    for part in iter_slices(plan, model.spec):
        stays = _stays(part.name, model)
        sizes[part.device] += prod(part.shape) if stays else elements_of(part, model) * itemsize
    for device, size in sizes.items():
        free = plan.memory[device].free_bytes
        if size > free:
            name = plan.devices[device].name
            what = f"device {device} ({name}) needs {format_bytes(size)} for the numbers that blocks of GGUF become"
            hint = "add --backend cpu, which computes on virtual devices; or compute the model's safetensors files"
            raise ExecutionError(f"{what}, beside what the plan counts, which leaves {format_bytes(free)}", hint)
    listed = ", ".join(f"{format_bytes(size)} on device {device}" for device, size in sizes.items() if size)
    return f"the GGUF file's blocks become numbers, which take beside what the plan counts {listed}"


def _stays(name: str, model: GgufModel) -> bool:
    """Return whether the decoder computes with a tensor's codes."""
    return model.kinds[name] == _FLOAT4 and ".experts." in name


def elements_of(part: TensorSlice, model: GgufModel) -> int:
    """Return the elements of a slice, of one in blocks those that its bytes stand for."""
    kind = model.kinds[part.name]
    if kind in _PLAIN:
        return prod(part.shape)
    _, block, size = _type_of(kind)
    return prod(part.shape) // size * block


def _type_of(kind: str) -> tuple[str, int, int]:
    return next(each for each in TYPES.values() if each[0] == kind)


def dequantised(
    weights: Mapping[str, Tensor], model: GgufModel, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Float4Matrix]]:
    """Return a device's tensors as transformers would have them, and apart the matrices that stay codes.

    Args:
        weights: the device's slices as they are in the file, by name; those in blocks are bytes.
        model: the file's header.
        dtype: dtype of the result.

    Raises:
        ExecutionError: a tensor's type is one that the package cannot convert.
        MissingError: the package is not installed.
    """
    head_dim = next(block.attention.head_dim for block in model.spec.blocks if block.attention)
    found: dict[str, Tensor] = {}
    codes: dict[str, Float4Matrix] = {}
    for name, tensor in weights.items():
        kind = model.kinds[name]
        if _stays(name, model):
            codes[name] = in_pairs(tensor)
            continue
        if model.architecture.shifted and name.endswith("norm.weight"):
            whole = (tensor.float() - 1).to(dtype)
        elif kind in _PLAIN:
            whole = tensor.to(dtype)
        else:
            whole = _whole(tensor, name, kind, dtype)
        if (
            model.architecture.permuted
            and ".self_attn." in name
            and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))
        ):
            whole = halves(whole, head_dim)
        found[name] = whole
    return found, codes


def in_pairs(blocks: Tensor) -> Float4Matrix:
    """Return a matrix in MXFP4 whose bytes have two columns next to each other, as checkpoints have it.

    Args:
        blocks: rows of blocks: a scale, then 16 bytes, of which byte ``i`` has the columns ``i`` and ``i + 16``.
    """
    _, _, size = _type_of(_FLOAT4)
    parts_RGB = torch.unflatten(blocks, 1, (blocks.shape[1] // size, size))
    bytes_RGB = parts_RGB[..., 1:]
    columns = torch.cat((bytes_RGB & 15, bytes_RGB >> 4), -1)
    codes = columns[..., ::2] | columns[..., 1::2] << 4
    return Float4Matrix(codes.flatten(1), parts_RGB[..., 0].contiguous())


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
        _, elements, size = _type_of(kind)
        return torch.empty(0, blocks.shape[1] // size * elements, dtype=dtype, device=blocks.device)
    try:
        parts = [
            torch.from_numpy(dequantize(some.cpu().numpy(), GGMLQuantizationType[kind])).to(dtype).to(blocks.device)
            for some in torch.split(blocks, _ROWS)
        ]
    except NotImplementedError as error:
        what = f"{name} is in {kind}, which the package gguf does not convert"
        raise ExecutionError(what, "take a file in Q4_K_M or Q8_0") from error
    return torch.cat(parts)
