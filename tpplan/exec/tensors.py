"""Single tensors of the caller: whether they have values that can be moved, and memory that can be written."""

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

#: What torch has for tensors that do not step in for its operations.
_PLAIN = torch.Tensor.__torch_dispatch__


def check_kind(what: str, tensor: object) -> None:
    """Refuse what is no dense tensor, or one that only stands for others, such as a fake or a distributed one.

    Raises:
        ExecutionError: naming what it is.
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
    """Tell whether a tensor is its values, and has a shape already."""
    kind = type(tensor)
    return kind is torch.Tensor or (kind.__torch_dispatch__ is _PLAIN and not is_lazy(tensor))


def check_copied(what: str, dtype: torch.dtype, sizes: Sequence[int] = ()) -> None:
    """Refuse elements that torch does not copy, or that have none of these sizes in bytes.

    Raises:
        ExecutionError: naming the dtype and its size.
    """
    if (sizes and dtype.itemsize not in sizes) or not _is_copied(dtype):
        message = f"{what} has dtype {name_of(dtype)} of {dtype.itemsize} bytes, which is not moved"
        raise ExecutionError(message, "view it as a dtype of 1, 2, 4 or 8 bytes, such as uint8")


@cache
def _is_copied(dtype: torch.dtype) -> bool:
    """Tell whether torch copies elements of a dtype: some it only stores."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check_stored(what: str, tensor: Tensor) -> None:
    """Refuse a tensor that reaches beyond its storage.

    Raises:
        ExecutionError: naming the bytes of both.
    """
    if not is_stored(tensor):
        start = tensor.storage_offset() * tensor.itemsize
        message = (
            f"{what} takes bytes {start} to {start + extent(tensor)} of its storage, which has {_stored_bytes(tensor)}"
        )
        raise ExecutionError(message, "pass it while its memory is there; inside of torch.func's transforms it is not")


def is_stored(tensor: Tensor) -> bool:
    """Tell whether a tensor's storage holds it: who shrinks a storage leaves the tensors over it as they were."""
    end = tensor.nbytes if tensor.is_contiguous() else extent(tensor)  # spares most of them a call
    if end and (offset := tensor.storage_offset()):
        end += int(offset) * tensor.itemsize
    return end <= _stored_bytes(tensor)


def _stored_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:  # inside of torch.func's transforms
        return 0


def check_writable(what: str, tensor: Tensor) -> None:
    """Refuse an output that cannot be written row by row, or that autograd would have to follow.

    Raises:
        ExecutionError: it has to be copied to have rows one step apart, its rows or columns overlap, or it requires
            grad while gradients are recorded.
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
    """Return what plans and people call a dtype."""
    return str(dtype).removeprefix("torch.")
