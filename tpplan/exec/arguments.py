"""Arguments that are no tensors, checked alike everywhere."""

from __future__ import annotations

import torch

from tpplan.errors import ExecutionError


def whole(what: str, value: object, least: int = 0, hint: str = "pass an int") -> int:
    """Return a whole number; a bool or ``2.0`` is none.

    Args:
        what: to call the argument in errors.
        value: of it.
        least: that will do.
        hint: for the error.

    Raises:
        ExecutionError: it is none, or less than that.
    """
    if type(value) is not int or value < least:
        raise ExecutionError(f"{what} is {value!r:.40}, expected a whole number from {least}", hint)
    return value


def check_dtype(what: str, dtype: object) -> None:
    """Refuse what is no dtype of torch's, such as a name of one.

    Raises:
        ExecutionError: naming what it is.
    """
    if type(dtype) is not torch.dtype:
        raise ExecutionError(f"{what} is {dtype!r:.40}, expected a torch.dtype", "pass one such as torch.float16")


def check_type(what: str, value: object, kind: type, hint: str) -> None:
    """Refuse what is not of a type.

    Raises:
        ExecutionError: naming its type.
    """
    if not isinstance(value, kind):
        raise ExecutionError(f"{what} is {type(value).__name__}, expected a {kind.__name__}", hint)
