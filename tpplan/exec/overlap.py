"""Checks for memory shared between the caller's tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


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
