"""Bytes as people write and read them."""

from __future__ import annotations

import re

from tpplan.errors import DeviceError

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {"B": 1, **_BINARY, **_DECIMAL}
_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?P<unit>[A-Za-z]*)")
_LARGEST = 2**50
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
#: The least GiB that no GPU has.
_ABSURD = 512


def parse_bytes(text: str) -> int:
    """Read a size such as ``24GiB`` (24·2^30) or ``20GB`` (20·10^9) as bytes; fractions round down.

    Raises:
        DeviceError: the text is no size, has no unit, or has one that could mean two things (``20g``, ``20gb``).
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise DeviceError(f"{text[:60]!r} is not a memory size", "write a number and a unit, such as 24GiB or 20GB")
    number, unit = match["number"], match["unit"]
    if unit not in _UNITS:
        what = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise DeviceError(f"memory size {text[:60]!r} {what}", _with_a_unit(number, unit))
    whole, _, fraction = number.partition(".")
    size: int = int(whole + fraction) * _UNITS[unit] // 10 ** len(fraction)
    if not 0 < size <= _LARGEST:
        raise DeviceError(f"memory size {text[:60]!r} is {size} bytes, outside 1 byte to 1 PiB", "check the unit")
    return size


def _with_a_unit(number: str, unit: str) -> str:
    """Return how to write a number whose unit is unknown or missing; too many GiB were probably MiB, or bytes."""
    if not float(number):
        return "write a number above 0 and a unit, such as 24GiB"
    prefix = unit[:1].upper()
    if prefix not in _POWERS:
        prefix = "G" if float(number) < _ABSURD else "M" if float(number) < _ABSURD * 2**10 else ""
    if not prefix:
        return f"write {number}B for as many bytes"
    power = _POWERS[prefix]
    binary, decimal = f"{number}{prefix}iB", f"{number}{'k' if prefix == 'K' else prefix}B"
    return f"write {binary} for {number}·2^{10 * power} bytes or {decimal} for {number}·10^{3 * power} bytes"


def format_unequal(a: int, b: int) -> tuple[str, str]:
    """Write two numbers of bytes for people; in bytes if they differ and would look the same otherwise."""
    texts = format_bytes(a), format_bytes(b)
    return (f"{a} B", f"{b} B") if a != b and texts[0] == texts[1] else texts


def format_bytes(size: int) -> str:
    """Write bytes for people: ``1536`` is ``1.50 KiB``. Exact numbers are for JSON."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size < 2**10:
        return f"{sign}{size} B"
    # Just below a unit, two decimals would show 1024.00 of the smaller one.
    unit, scale = next((u, s) for u, s in reversed(_BINARY.items()) if size >= s * 0.999995 or u == "KiB")
    return f"{sign}{size / scale:.2f} {unit}"
