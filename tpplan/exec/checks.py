"""Checks of arguments: numbers, dtypes, and tensors, which must have values, and memory of their own where told."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from tpplan.errors import ExecutionError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: Limits of how long devices may wait for each other, in seconds: clocks of GPUs may tick once in a millisecond only.
_SHORTEST, _LONGEST = 0.001, 86_400.0
#: Most bits of a number that an error shows: Python may refuse to print larger ones.
_BITS = 64


def whole(what: str, value: object, least: int = 0, hint: str = "pass an int") -> int:
    """Check that an argument is an int, not a bool or ``2.0``, and return it.

    Args:
        what: name of the argument in errors.
        value: its value.
        least: minimum value.
        hint: hint of the error.

    Raises:
        ExecutionError: it is not an int, or too small.
    """
    if type(value) is not int or value < least:
        raise ExecutionError(f"{what} is {value!r:.40}, expected a whole number from {least}", hint)
    return value


def seconds(what: str, value: object) -> float:
    """Check a time that devices may wait for each other, a number of seconds or a timedelta, and return it in seconds.

    Args:
        what: name of the argument in errors.
        value: its value.

    Raises:
        RequestError: it is neither, or not from a millisecond to a day, as infinity and NaN.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, (int, float)) and number is not True and _SHORTEST <= number <= _LONGEST:
        return float(number)
    said = f"{value!r:.60}" if not isinstance(value, int) or value.bit_length() <= _BITS else "larger than 64 bits"
    message = f"{what} is {said}, expected {_SHORTEST} to {_LONGEST:.0f} seconds"
    raise RequestError(message, "pass a number such as 30, or a timedelta")


def check_dtype(what: str, dtype: object) -> None:
    """Check that an argument is a torch dtype, not for example its name.

    Raises:
        ExecutionError: it is not; the message gives the value.
    """
    if type(dtype) is not torch.dtype:
        raise ExecutionError(f"{what} is {dtype!r:.40}, expected a torch.dtype", "pass one such as torch.float16")


def check_type(what: str, value: object, kind: type, hint: str) -> None:
    """Check the type of an argument.

    Raises:
        ExecutionError: the type is wrong; the message gives it.
    """
    if not isinstance(value, kind):
        raise ExecutionError(f"{what} is {type(value).__name__}, expected a {kind.__name__}", hint)


def check_apart(what: str, out: Sequence[Tensor], inputs: Sequence[Tensor], own: Sequence[int]) -> None:
    """Check that outputs overlap neither each other nor inputs; disjoint columns of the same rows do not overlap.

    Args:
        what: name of the operation in errors.
        out: outputs given by the caller.
        inputs: all tensors that are read.
        own: for each input, the index of the output that may be the same tensor; empty if none may.

    Raises:
        ExecutionError: an output overlaps another tensor.
    """
    spans = [(*_span(tensor), tensor) for tensor in (*out, *inputs)]
    ranges = sorted((start, stop) for start, stop, _ in spans)
    if all(stop <= start for (_, stop), (start, _) in pairwise(ranges)):
        return
    for i, (start, stop, output) in enumerate(spans[: len(out)]):
        for j, (other_start, other_stop, other) in enumerate(spans[i + 1 :], i + 1 - len(out)):
            if start >= other_stop or other_start >= stop or output.device != other.device:
                continue
            if j >= 0 and own and own[j] == i and _is_same(output, other):
                continue
            if not _is_beside(output, other):
                name = f"input {j}" if j >= 0 else f"out[{j + len(out)}]"
                raise ExecutionError(f"{what}: out[{i}] shares memory with {name}", "give it memory of its own")


def are_apart(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Tell whether contiguous tensors of these sizes in bytes are disjoint; surplus sizes are ignored."""
    end = 0
    for start, size in sorted([(tensor.data_ptr(), size) for tensor, size in zip(tensors, sizes, strict=False)]):
        if start < end:
            return False
        end = start + size
    return True


def share_bytes(a: Tensor, b: Tensor) -> bool:
    """Tell whether the address ranges of two tensors overlap, each from its first to its last element."""
    (start, stop), (other_start, other_stop) = _span(a), _span(b)
    return start < other_stop and other_start < stop


def extent(tensor: Tensor) -> int:
    """Return the bytes from the start of a tensor's first element in memory to the end of its last."""
    if tensor.is_contiguous():  # includes tensors without elements
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's address range, end exclusive; it is empty if the tensor has no elements."""
    size = extent(tensor)
    start = tensor.data_ptr() if size else 0
    return start, start + size


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _is_beside(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are disjoint columns of the same rows."""
    try:
        left, right = (tensor.detach().view(-1, tensor.shape[-1]) for tensor in (a, b))
    except RuntimeError:
        return False
    dense = all(flat.stride(1) == 1 or flat.shape[1] == 1 for flat in (left, right))
    step, size = left.stride(0) * a.element_size(), a.element_size()
    if not dense or not step or left.stride(0) != right.stride(0):
        return False
    gap = (right.data_ptr() - left.data_ptr()) % step
    return left.shape[1] * size <= gap <= step - right.shape[1] * size


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
