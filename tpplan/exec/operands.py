"""The caller's tensors: checked before anything moves, and seen as matrices with a row per token."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.errors import ExecutionError
from tpplan.exec.program import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

#: Device, first column and one past the last, of each.
Slices = tuple[tuple[int, int, int], ...]

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
        return prod(self.lead)


class Operands:
    """Checks the operands of a context's operations.

    Attributes:
        places: torch's device for each of the plan's in use, and for HOST.
        max_rows: most rows of an operand.
    """

    def __init__(self, places: Mapping[int, torch.device], max_rows: int) -> None:
        self.places = places
        self.max_rows = max_rows

    def origin(self, what: str, x: Tensor, source: int | None) -> tuple[int, Layout]:
        """Return the device that a single tensor is on, or HOST, and its layout.

        Args:
            what: to call the operation in errors.
            x: the tensor.
            source: where the caller says that it is, if it does.

        Raises:
            ExecutionError: it is on no device of the plan, or not on that one, or see :func:`layout_of`.
        """
        layout = layout_of(f"{what}: x", x, self.max_rows)
        if source is None:
            source = next((index for index, place in self.places.items() if place == x.device), None)
        if source is None:
            names = ", ".join(map(str, dict.fromkeys(self.places.values())))
            raise ExecutionError(f"{what}: x is on {x.device}, expected one of {names}", "move it there first")
        if source not in self.places:
            names = ", ".join(map(str, self.places))
            raise ExecutionError(f"{what}: source is {source}, expected one of {names}", f"{HOST} is the host")
        check(f"{what}: x", x, layout, x.shape[-1], self.places[source])
        return source, layout

    def parts(self, what: str, parts: Sequence[Tensor], slices: Slices, *, adds: bool = False) -> Layout:
        """Check one part for each slice, and return what they have in common.

        Raises:
            ExecutionError: see :func:`layout_of`, :func:`check_count` and :func:`check`.
        """
        check_count(what, parts, tuple(device for device, _, _ in slices))
        layout = layout_of(f"{what}[0]", parts[0], self.max_rows, adds=adds)
        self.like(what, parts, slices, layout)
        return layout

    def like(self, what: str, tensors: Sequence[Tensor], slices: Slices, layout: Layout) -> None:
        """Check one tensor for each slice against the layout of others.

        Raises:
            ExecutionError: see :func:`check_count` and :func:`check`.
        """
        check_count(what, tensors, tuple(device for device, _, _ in slices))
        for i, (tensor, (device, start, stop)) in enumerate(zip(tensors, slices, strict=True)):
            check(f"{what}[{i}] of device {device}", tensor, layout, stop - start, self.places[device])

    def outputs(
        self,
        what: str,
        slices: Slices,
        layout: Layout,
        *,
        out: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
        own: Sequence[Sequence[Tensor]] = (),
    ) -> tuple[Tensor, ...]:
        """Return a tensor to write to for each slice: new ones, or the caller's.

        Args:
            what: to call the operation in errors.
            slices: device and columns of each.
            layout: of the operation.
            out: the caller's, if there are any.
            inputs: all tensors that are read, which the caller's must not overlap.
            own: for each slice the inputs that the caller's may be, exactly; or nothing.

        Raises:
            ExecutionError: see :func:`check_count`, :func:`check`, :func:`check_writable` and :func:`check_apart`.
        """
        if out is None:
            return tuple(
                torch.empty((*layout.lead, stop - start), dtype=layout.dtype, device=self.places[device])
                for device, start, stop in slices
            )
        self.like(f"{what}: out", out, slices, layout)
        for i, tensor in enumerate(out):
            check_writable(f"{what}: out[{i}]", tensor)
        check_apart(what, out, inputs, own)
        return tuple(out)


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


def columns_of(what: str, tensor: Tensor) -> int:
    """Return the size of the last dimension.

    Raises:
        ExecutionError: there is none.
    """
    _check_kind(what, tensor)
    if not tensor.dim():
        raise ExecutionError(f"{what} has no dimensions, so no columns", "the last dimension holds the columns")
    return tensor.shape[-1]


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


def check_apart(what: str, out: Sequence[Tensor], inputs: Sequence[Tensor], own: Sequence[Sequence[Tensor]]) -> None:
    """Refuse outputs that lie over each other or over inputs.

    Args:
        what: to call the operation in errors.
        out: given by the caller.
        inputs: all tensors that are read.
        own: for each output the inputs that it may be, exactly; or nothing.

    Raises:
        ExecutionError: two of them overlap.
    """
    spans = [(*_span(tensor), tensor) for tensor in (*out, *inputs)]
    for i, (start, stop, output) in enumerate(spans[: len(out)]):
        twins = own[i] if own else ()
        for other_start, other_stop, other in spans[i + 1 :]:
            if start < other_stop and other_start < stop and output.device == other.device:
                if any(other is twin for twin in twins) and _is_same(output, other):
                    continue
                raise ExecutionError(f"{what}: out[{i}] shares memory with another tensor", "give it memory of its own")


def matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as ``[rows, columns]``: a view if its strides allow one, else a copy."""
    flat = tensor.detach()
    if flat.dim() != 2:  # noqa: PLR2004
        flat = flat.reshape(-1, flat.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def check_writable(what: str, tensor: Tensor) -> None:
    """Refuse an output that cannot be written row by row.

    Raises:
        ExecutionError: it has to be copied to have rows one step apart, or its rows or columns overlap.
    """
    columns = tensor.shape[-1]
    try:
        flat = tensor.detach().view(-1, columns)
    except RuntimeError:
        flat = None
    dense = flat is not None and (columns == 1 or flat.stride(1) == 1)
    if flat is None or not dense or (flat.shape[0] > 1 and flat.stride(0) < columns):
        message = (
            f"{what} has shape {list(tensor.shape)} and strides {tensor.stride()}, which cannot be written by rows"
        )
        raise ExecutionError(message, "let its last dimension be contiguous and its rows the same step apart")


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
