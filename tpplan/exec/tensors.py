"""Checks of the caller's tensors: that their values can be moved and their memory written."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from tpplan.errors import ExecutionError
from tpplan.exec.overlap import extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: ``__torch_dispatch__`` of tensor classes that do not override it.
_PLAIN = torch.Tensor.__torch_dispatch__


def check_kind(what: str, tensor: object) -> None:
    """Check that an object is a dense tensor with its own values, not a wrapper such as a fake or distributed tensor.

    Raises:
        ExecutionError: it is not; the message names its kind.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ExecutionError(f"{what} is {type(tensor).__name__}, expected a tensor", "pass a torch.Tensor")
    if not is_plain(tensor):
        hint = "pass what holds the values, such as a distributed tensor's to_local()"
        raise ExecutionError(f"{what} is {type(tensor).__name__}, expected a plain tensor", hint)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ExecutionError(f"{what} is {kind}, expected a dense tensor", "convert it to a dense one")


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor holds its values itself, and is not a lazy one that has no shape yet."""
    kind = type(tensor)
    return kind is torch.Tensor or (kind.__torch_dispatch__ is _PLAIN and not is_lazy(tensor))


def check_copied(what: str, dtype: torch.dtype, sizes: Sequence[int] = ()) -> None:
    """Check that torch can copy a dtype, and that its size in bytes is one of ``sizes``, if there are any.

    Raises:
        ExecutionError: it cannot, or has another size; the message names the dtype and its size.
    """
    if (sizes and dtype.itemsize not in sizes) or not _is_copied(dtype):
        message = f"{what} has dtype {name_of(dtype)} of {dtype.itemsize} bytes, which is not moved"
        raise ExecutionError(message, "view it as a dtype of 1, 2, 4 or 8 bytes, such as uint8")


@cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Tell whether torch can copy elements of a dtype; some it can only store."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check_stored(what: str, tensor: Tensor) -> None:
    """Check that a tensor lies within its storage.

    Raises:
        ExecutionError: it does not; the message names the bytes of both.
    """
    if not is_stored(tensor):
        start = tensor.storage_offset() * tensor.itemsize
        message = (
            f"{what} takes bytes {start} to {start + extent(tensor)} of its storage, which has {_stored_bytes(tensor)}"
        )
        raise ExecutionError(message, "pass it while its memory is there; inside of torch.func's transforms it is not")


def is_stored(tensor: Tensor) -> bool:
    """Tell whether a tensor lies within its storage, which may have been shrunk after the tensor was created."""
    end = tensor.nbytes if tensor.is_contiguous() else extent(tensor)  # saves a call for most tensors
    if end and (offset := tensor.storage_offset()):
        end += int(offset) * tensor.itemsize
    return end <= _stored_bytes(tensor)


def _stored_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:  # inside of torch.func's transforms
        return 0


def check_writable(what: str, tensor: Tensor) -> None:
    """Check that an output can be written row by row and is not tracked by autograd.

    Raises:
        ExecutionError: it has no view as rows with one stride, its columns are not contiguous, its rows overlap, it is
            a conjugate or negative view, or it requires grad while gradients are recorded.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        hint = "pass its detach(), or call under torch.no_grad()"
        raise ExecutionError(f"{what} requires grad, but what is written to it has no gradient", hint)
    columns = tensor.shape[-1]
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return
    try:
        flat = tensor.detach().view(-1, columns)
    except RuntimeError:
        flat = None
    dense = flat is not None and (columns == 1 or flat.stride(1) == 1)
    if (
        flat is None
        or not dense
        or tensor.is_conj()
        or tensor.is_neg()
        or (flat.shape[0] > 1 and flat.stride(0) < columns)
    ):
        message = (
            f"{what} has shape {list(tensor.shape)} and strides {tensor.stride()}, which cannot be written by rows"
        )
        raise ExecutionError(message, "let its last dimension be contiguous and its rows the same step apart")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as in plans, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
