"""The caller's tensors: checked before anything moves, and seen as matrices with a row per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_ITEM_BYTES = (1, 2, 4, 8)
_ADDABLE = (torch.float16, torch.bfloat16, torch.float32)


@frozen
class Layout:
    """What the tensors of one operation have in common.

    Attributes:
        lead: all dimensions but the last; their product is the rows.
        dtype: of the elements.
    """

    lead: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Tokens."""
        rows = 1
        for size in self.lead:
            rows *= size
        return rows


def layout_of(what: str, tensor: Tensor, max_rows: int, *, adds: bool = False) -> Layout:
    """Return what the other tensors of an operation have to have too.

    Args:
        what: to call the tensor in errors.
        tensor: ``[..., columns]``; one without leading dimensions is a single row.
        max_rows: rows that the context was compiled for.
        adds: whether its elements are added, which takes float16, bfloat16 or float32.

    Raises:
        ExecutionError: it is no dense tensor, its elements cannot be moved or added, it has no columns, or too many
            rows.
    """
    _check_kind(what, tensor)
    if tensor.layout is not torch.strided:
        raise ExecutionError(f"{what} is {tensor.layout}, expected a dense tensor", "convert it with to_dense()")
    layout = Layout(tuple(tensor.shape[:-1]), tensor.dtype)
    if adds and tensor.dtype not in _ADDABLE:
        hint = "convert it to one of float16, bfloat16 and float32"
        raise ExecutionError(f"{what} has dtype {_name(tensor.dtype)}, which is not added up", hint)
    if tensor.dtype.itemsize not in _ITEM_BYTES:
        message = f"{what} has dtype {_name(tensor.dtype)} of {tensor.dtype.itemsize} bytes, expected 1, 2, 4 or 8"
        raise ExecutionError(message, "view it as a dtype of one of these sizes")
    if not tensor.dim() or not tensor.shape[-1]:
        raise ExecutionError(
            f"{what} has shape {list(tensor.shape)}, which has no columns", "the last dimension is cut"
        )
    if layout.rows > max_rows:
        hint = "move fewer rows at a time, or plan with more --max-rows"
        raise ExecutionError(f"{what} has {layout.rows} rows, but the context was compiled for {max_rows}", hint)
    return layout


def check(what: str, tensor: Tensor, layout: Layout, columns: int, device: torch.device) -> None:
    """Refuse a tensor that does not fit the others of its operation.

    Raises:
        ExecutionError: naming what it has and what was expected.
    """
    _check_kind(what, tensor)
    if tensor.device != device:
        hint = "one tensor per device, in the order of the plan's devices"
        raise ExecutionError(f"{what} is on {tensor.device}, expected {device}", hint)
    shape = (*layout.lead, columns)
    if tensor.shape != shape:
        hint = "parts have the columns of their device's slice, times dim"
        raise ExecutionError(f"{what} has shape {list(tensor.shape)}, expected {list(shape)}", hint)
    if tensor.dtype != layout.dtype:
        message = f"{what} has dtype {_name(tensor.dtype)}, expected {_name(layout.dtype)}"
        raise ExecutionError(message, "all tensors of an operation have one dtype")


def check_count(what: str, tensors: Sequence[Tensor], devices: tuple[int, ...]) -> None:
    """Refuse another number of tensors than devices.

    Raises:
        ExecutionError: naming both.
    """
    if not isinstance(tensors, list | tuple) or len(tensors) != len(devices):
        got = f"{len(tensors)} tensors" if isinstance(tensors, list | tuple) else type(tensors).__name__
        names = ", ".join(map(str, devices))
        raise ExecutionError(f"{what}: {got}, expected one for each of the devices {names}", "in device order")


def check_apart(what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, in_place: bool) -> None:
    """Refuse outputs that lie over inputs or over each other.

    Args:
        what: to call the operation in errors.
        outputs: given by the caller.
        inputs: all others.
        in_place: whether an output may be exactly an input.

    Raises:
        ExecutionError: two of them overlap.
    """
    spans = [(*_span(t), i < len(outputs), t) for i, t in enumerate((*outputs, *inputs))]
    for i, (start, stop, written, tensor) in enumerate(spans):
        for other_start, other_stop, _, other in spans[i + 1 :]:
            if not written or stop <= other_start or other_stop <= start or tensor.device != other.device:
                continue
            if not (in_place and _is_same(tensor, other) and not any(other is o for o in outputs)):
                raise ExecutionError(
                    f"{what}: out shares memory with another tensor", "pass tensors of their own as out"
                )


def matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as ``[rows, columns]``: a view if its strides allow one, else a copy."""
    flat = tensor.detach()
    if flat.dim() != 2:  # noqa: PLR2004
        flat = flat.reshape(-1, flat.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def output_matrix(what: str, tensor: Tensor) -> Tensor:
    """Return a tensor to write to as ``[rows, columns]``.

    Raises:
        ExecutionError: its strides do not allow it.
    """
    columns = tensor.shape[-1]
    try:
        flat = tensor.detach().view(-1, columns)
    except RuntimeError:
        flat = None
    if flat is None or (flat.stride(-1) != 1 and columns > 1) or (flat.stride(0) < columns and flat.shape[0] > 1):
        hint = "the last dimension is contiguous, and the others are one step apart, row by row"
        raise ExecutionError(f"{what} has strides {tensor.stride()}, which cannot be written row by row", hint)
    return flat


def _check_kind(what: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ExecutionError(f"{what} is {type(tensor).__name__}, expected a tensor", "pass a torch.Tensor")


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor and one past its last."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
