"""Checks of arguments that are not tensors."""

from __future__ import annotations

import torch

from tpplan.errors import ExecutionError


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
