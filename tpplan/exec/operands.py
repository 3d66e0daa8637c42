"""The caller's tensors: checked before anything moves, and seen as matrices with a row per token."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.overlap import check_apart
from tpplan.exec.program import HOST
from tpplan.exec.tensors import check_copied, check_kind, check_stored, check_writable, is_plain, is_stored, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

#: Device, first column and one past the last, of each.
Slices = tuple[tuple[int, int, int], ...]

_ITEM_BYTES = (1, 2, 4, 8)
#: Dtypes that are added up, and so those of activations.
ADDABLE = (torch.float16, torch.bfloat16, torch.float32)


class Layout(NamedTuple):
    """What the tensors of one operation have in common.

    Attributes:
        lead: all dimensions but the last.
        dtype: of the elements.
        rows: tokens, the product of ``lead``.
    """

    lead: tuple[int, ...]
    dtype: torch.dtype
    rows: int


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
        if type(source) is not int or source not in self.places:
            names = ", ".join(map(str, self.places))
            raise ExecutionError(f"{what}: source is {source!r:.40}, expected one of {names}", f"{HOST} is the host")
        if x.device != self.places[source]:
            check(f"{what}: x", x, layout, x.shape[-1], self.places[source])
        return source, layout

    def parts(self, what: str, parts: Sequence[Tensor], slices: Slices, *, adds: bool = False) -> Layout:
        """Check one part for each slice, and return what they have in common.

        Raises:
            ExecutionError: see :func:`layout_of`, :func:`check_count` and :func:`check`.
        """
        check_count(what, parts, [device for device, _, _ in slices])
        layout = layout_of(f"{what}[0]", parts[0], self.max_rows, adds=adds)
        self.like(what, parts, slices, layout)
        return layout

    def like(self, what: str, tensors: Sequence[Tensor], slices: Slices, layout: Layout) -> None:
        """Check one tensor for each slice against the layout of others.

        Raises:
            ExecutionError: see :func:`check_count` and :func:`check`.
        """
        check_count(what, tensors, [device for device, _, _ in slices])
        for i, (tensor, (device, start, stop)) in enumerate(zip(tensors, slices, strict=True)):
            if not _is_like(tensor, layout, stop - start, self.places[device]):
                check(f"{what}[{i}] of device {device}", tensor, layout, stop - start, self.places[device])

    def outputs(
        self,
        what: str,
        slices: Slices,
        layout: Layout,
        *,
        out: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
        owners: Sequence[int] = (),
    ) -> tuple[Tensor, ...]:
        """Return a tensor to write to for each slice: new ones, or the caller's.

        Args:
            what: to call the operation in errors.
            slices: device and columns of each.
            layout: of the operation.
            out: the caller's, if there are any.
            inputs: all tensors that are read, which the caller's must not overlap.
            owners: the device of each input, where a device's output may be its input itself; or nothing.

        Raises:
            ExecutionError: see :func:`check_count`, :func:`check`, :func:`~tpplan.exec.tensors.check_writable` and
                :func:`~tpplan.exec.overlap.check_apart`.
        """
        if out is None:
            return tuple(
                self._new((*layout.lead, stop - start), layout.dtype, device) for device, start, stop in slices
            )
        self.like(f"{what}: out", out, slices, layout)
        for i, tensor in enumerate(out):
            check_writable(f"{what}: out[{i}]", tensor)
        check_apart(what, out, inputs, [[owner == device for owner in owners] for device, _, _ in slices])
        return tuple(out)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
        """Return an uninitialised tensor; one on the host is pinned if devices write it."""
        pinned = device == HOST and any(place.type == "cuda" for place in self.places.values())
        return torch.empty(shape, dtype=dtype, device=self.places[device], pin_memory=pinned)


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
    check_kind(what, tensor)
    lead = tensor.shape[:-1]
    layout = Layout(lead, tensor.dtype, prod(lead))
    if adds and tensor.dtype not in ADDABLE:
        hint = "convert it to one of float16, bfloat16 and float32"
        raise ExecutionError(f"{what} has dtype {name_of(tensor.dtype)}, which is not added up", hint)
    check_copied(what, tensor.dtype, _ITEM_BYTES)
    if not tensor.dim() or not tensor.shape[-1]:
        raise ExecutionError(
            f"{what} has shape {list(tensor.shape)}, which has no columns", "the last dimension is cut"
        )
    if layout.rows > max_rows:
        hint = "move fewer rows at a time, or plan with more --max-rows"
        raise ExecutionError(f"{what} has {layout.rows} rows, but the context was compiled for {max_rows}", hint)
    check_stored(what, tensor)
    return layout


def columns_of(what: str, tensor: Tensor) -> int:
    """Return the size of the last dimension.

    Raises:
        ExecutionError: there is none.
    """
    check_kind(what, tensor)
    if not tensor.dim():
        raise ExecutionError(f"{what} has no dimensions, so no columns", "the last dimension holds the columns")
    return tensor.shape[-1]


def check(what: str, tensor: Tensor, layout: Layout, columns: int, device: torch.device) -> None:
    """Refuse a tensor that does not fit the others of its operation.

    Raises:
        ExecutionError: naming what it has and what was expected.
    """
    check_kind(what, tensor)
    if tensor.device != device:
        hint = "one tensor per device, in the order of the plan's devices"
        raise ExecutionError(f"{what} is on {tensor.device}, expected {device}", hint)
    shape = (*layout.lead, columns)
    if tensor.shape != shape:
        hint = "parts have the columns of their device's slice, times dim"
        raise ExecutionError(f"{what} has shape {list(tensor.shape)}, expected {list(shape)}", hint)
    if tensor.dtype != layout.dtype:
        message = f"{what} has dtype {name_of(tensor.dtype)}, expected {name_of(layout.dtype)}"
        raise ExecutionError(message, "all tensors of an operation have one dtype")
    check_stored(what, tensor)


def _is_like(tensor: object, layout: Layout, columns: int, device: torch.device) -> bool:
    """Tell what :func:`check` will find, without preparing to say it."""
    return (
        (type(tensor) is torch.Tensor or (isinstance(tensor, torch.Tensor) and is_plain(tensor)))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.shape == (*layout.lead, columns)
        and tensor.dtype == layout.dtype
        and tensor.device == device
        and is_stored(tensor)
    )


def check_count(what: str, tensors: Sequence[Tensor], devices: Sequence[int]) -> None:
    """Refuse another number of tensors than devices.

    Raises:
        ExecutionError: naming both.
    """
    if not isinstance(tensors, list | tuple) or len(tensors) != len(devices):
        got = f"{len(tensors)} tensors" if isinstance(tensors, list | tuple) else type(tensors).__name__
        names = ", ".join(map(str, devices))
        raise ExecutionError(f"{what}: {got}, expected one for each of the devices {names}", "in device order")


def matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as ``[rows, columns]``: a view if its strides allow one, else a copy; its bits are its values."""
    is_special = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    flat = tensor.detach().resolve_conj().resolve_neg() if is_special else tensor
    if flat.dim() != 2:  # noqa: PLR2004
        flat = flat.reshape(-1, flat.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
