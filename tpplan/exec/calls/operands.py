"""The caller's tensors: checked before any data moves, and viewed as matrices with one row per token."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.errors import ExecutionError
from tpplan.exec.checks import check_copied, check_kind, check_stored, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Slices as (device, first column, one past the last column).
Slices = tuple[tuple[int, int, int], ...]

SEQUENCES = (list, tuple)
_ITEM_BYTES = (1, 2, 4, 8)
#: Dtypes that can be summed, and so those of activations.
ADDABLE = (torch.float16, torch.bfloat16, torch.float32)
#: Complex dtypes and those of their parts, whose tensors may be conjugated or negated lazily.
LAZY = {torch.complex64, torch.complex32, torch.float16, torch.float32, torch.float64}


@frozen(eq=False)
class Group:
    """The requirements on a group of tensors, one per device.

    Attributes:
        what: name of the group in errors.
        names: name of each tensor in errors.
        devices: indices of the devices in the plan.
        wants: shape, torch device and bytes of each tensor.
        dtype: dtype of all tensors.
    """

    what: str
    names: tuple[str, ...]
    devices: tuple[int, ...]
    wants: tuple[tuple[tuple[int, ...], torch.device, int], ...]
    dtype: torch.dtype

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors meet the requirements and are dense: contiguous, with their values as stored.

        This takes most of the time of a call, so it collects nothing for an error message; :meth:`check` does.
        """
        if not isinstance(tensors, SEQUENCES) or len(tensors) != len(self.wants):
            return False
        dtype, item_bytes, is_lazy = self.dtype, self.dtype.itemsize, self.dtype in LAZY
        try:
            for tensor, (shape, device, size) in zip(tensors, self.wants, strict=True):
                if (
                    type(tensor) is not Tensor
                    or tensor.dtype is not dtype
                    or tensor.shape != shape
                    or tensor.device != device
                    or not tensor.is_contiguous()
                    or tensor.requires_grad
                    or (is_lazy and (tensor.is_neg() or tensor.is_conj()))
                    or tensor.storage_offset() * item_bytes + size > tensor.untyped_storage().nbytes()
                ):
                    return False
        except RuntimeError:  # from tensors without a shape or a storage, such as nested and sparse ones
            return False
        return True

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Check tensors, which need not be dense.

        Raises:
            ExecutionError: see :func:`check_count` and :func:`check`.
        """
        check_count(self.what, tensors, self.devices)
        for name, tensor, (shape, device, _) in zip(self.names, tensors, self.wants, strict=True):
            check(name, tensor, shape, self.dtype, device)


def check_facts(what: str, shape: Sequence[int], dtype: torch.dtype, max_rows: int, *, adds: bool = False) -> int:
    """Check that an operation supports tensors of a shape and dtype, and return their rows.

    Args:
        what: name of the tensor in errors.
        shape: ``[..., columns]``; without leading dimensions, it is a single row.
        dtype: dtype of the elements.
        max_rows: maximum rows that the context was compiled for.
        adds: whether elements are added, which requires float16, bfloat16 or float32.

    Raises:
        ExecutionError: the dtype cannot be moved or added, or the tensor has no columns or too many rows.
    """
    if adds and dtype not in ADDABLE:
        hint = "convert it to one of float16, bfloat16 and float32"
        raise ExecutionError(f"{what} has dtype {name_of(dtype)}, which is not added up", hint)
    check_copied(what, dtype, _ITEM_BYTES)
    if not shape or not shape[-1]:
        raise ExecutionError(f"{what} has shape {list(shape)}, which has no columns", "the last dimension is cut")
    rows = prod(shape[:-1])
    if rows > max_rows:
        hint = "move fewer rows at a time, or plan with more --max-rows"
        raise ExecutionError(f"{what} has {rows} rows, but the context was compiled for {max_rows}", hint)
    return rows


def facts_of(what: str, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of a tensor, which determine those of the operation's other tensors.

    Raises:
        ExecutionError: it is not a dense tensor.
    """
    if type(tensor) is not torch.Tensor or tensor.is_nested:
        check_kind(what, tensor)
    return tensor.shape, tensor.dtype


def columns_of(what: str, shape: Sequence[int]) -> int:
    """Return the size of the last dimension.

    Raises:
        ExecutionError: the shape has no dimensions.
    """
    if not shape:
        raise ExecutionError(f"{what} has no dimensions, so no columns", "the last dimension holds the columns")
    return shape[-1]


def check(what: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Check a tensor against the shape, dtype and device that its operation requires.

    Raises:
        ExecutionError: one of them differs; the message gives the actual and the expected value.
    """
    check_kind(what, tensor)
    if tensor.device != device:
        hint = "one tensor per device, in the order of the plan's devices"
        if device.type == "meta":
            hint = 'another process has it: pass its shape and dtype, as torch.empty(shape, dtype=dtype, device="meta")'
        raise ExecutionError(f"{what} is on {tensor.device}, expected {device}", hint)
    if tensor.shape != shape:
        raise ExecutionError(f"{what} has shape {list(tensor.shape)}, expected {list(shape)}", _instead(tensor, shape))
    if tensor.dtype != dtype:
        message = f"{what} has dtype {name_of(tensor.dtype)}, expected {name_of(dtype)}"
        raise ExecutionError(message, "all tensors of an operation have one dtype")
    check_stored(what, tensor)


def _instead(tensor: Tensor, shape: Sequence[int]) -> str:
    """Return a hint on a wrong shape; the most common cause is a missing ``dim``, which gives a multiple of columns."""
    words = "parts have the columns of their device's slice, times dim"
    times, rest = divmod(tensor.shape[-1], shape[-1]) if tensor.shape else (0, 0)
    if times > 1 and not rest and tensor.shape[:-1] == shape[:-1]:
        return f"{words}, the columns per element, such as the head size; these are {times} times as many"
    return words


def check_count(what: str, tensors: Sequence[Tensor], devices: Sequence[int]) -> None:
    """Check that there is one tensor for each device.

    Raises:
        ExecutionError: there is not; the message gives both.
    """
    if not isinstance(tensors, SEQUENCES) or len(tensors) != len(devices):
        got = f"{len(tensors)} tensors" if isinstance(tensors, SEQUENCES) else type(tensors).__name__
        names = f"one for each of the devices {', '.join(map(str, devices))}" if devices else "none in this process"
        raise ExecutionError(f"{what}: {got}, expected {names}", "in device order")


def matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as ``[rows, columns]``, not lazily conjugated or negated: a view if possible, else a copy."""
    is_special = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    flat = tensor.detach().resolve_conj().resolve_neg() if is_special else tensor
    if flat.dim() != 2:  # noqa: PLR2004
        flat = flat.reshape(-1, flat.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
