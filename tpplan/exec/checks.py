"""Checks of arguments that are not tensors."""

from __future__ import annotations

from datetime import timedelta

import torch

from tpplan.errors import ExecutionError, RequestError

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
