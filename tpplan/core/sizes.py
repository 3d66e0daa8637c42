"""Bytes as people write and read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tpplan.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {unit.casefold(): (unit, scale) for unit, scale in {"B": 1, **_BINARY, **_DECIMAL}.items()}
#: A letter alone is what memory is sold in: a card of 24G has 24 GiB.
_LETTERS = {unit[0].casefold(): (unit, scale) for unit, scale in _BINARY.items()}
_SIZE = re.compile(r"(?P<number>[0-9]{1,16}(?:\.[0-9]{1,6})?) ?(?P<unit>[A-Za-z]*)")
_LARGEST = 2**50
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
#: The least GiB that no GPU has.
_ABSURD = 512


def parse_bytes(text: str, tell: Callable[[str], None] | None = None) -> int:
    """Read a size such as ``24GiB`` (24·2^30) or ``20GB`` (20·10^9) as bytes; fractions round down.

    Capitals make no difference. ``24G`` is taken as ``24GiB``.

    Args:
        text: number and unit.
        tell: called with a note if the unit could mean two things.

    Raises:
        DeviceError: the text is no size, or has no unit.
    """
    size, written = read_size(text)
    if tell and text.strip()[-1:].casefold() in _LETTERS:
        tell(f"{text.strip()} is taken as {written}; write {written[:-2]}B for powers of ten")
    return size


def read_size(text: str) -> tuple[int, str]:
    """Return the bytes of a size, and the size in the spelling that has one meaning; see :func:`parse_bytes`.

    Raises:
        DeviceError: the text is no size, or has no unit.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise DeviceError(f"{text[:60]!r} is not a memory size", "write a number and a unit, such as 24GiB or 20GB")
    number, unit = match["number"], match["unit"].casefold()
    known = _UNITS.get(unit) or _LETTERS.get(unit)
    if known is None:
        what = f"has the unknown unit {match['unit']!r}" if unit else "has no unit"
        raise DeviceError(f"memory size {text[:60]!r} {what}", _with_a_unit(number, match["unit"]))
    name, scale = known
    whole, _, fraction = number.partition(".")
    size = int(whole + fraction) * scale // 10 ** len(fraction)
    if not 0 < size <= _LARGEST:
        raise DeviceError(f"memory size {text[:60]!r} is {size} bytes, outside 1 byte to 1 PiB", "check the unit")
    return size, f"{number}{name}"


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


def counted(count: int, noun: str) -> str:
    """Write how many there are of something: ``1 layer``, ``2 layers``, ``2 entries``."""
    more = noun if count == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {more}"


def listed(items: Sequence[object]) -> str:
    """Write items as a list in words: ``5, 3 and 0``."""
    words = [str(item) for item in items]
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def exact_bytes(size: int) -> str:
    """Write bytes so that :func:`parse_bytes` reads the same number: ``24GiB``, ``25757220865B``."""
    return next(f"{size // scale}{unit}" for unit, scale in (*reversed(_BINARY.items()), ("B", 1)) if size % scale == 0)


def format_bytes(size: int) -> str:
    """Write bytes for people: ``1536`` is ``1.50 KiB``. Exact numbers are for JSON."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size < 2**10:
        return f"{sign}{size} B"
    # Just below a unit, two decimals would show 1024.00 of the smaller one.
    unit, scale = next((u, s) for u, s in reversed(_BINARY.items()) if size >= s * 0.999995 or u == "KiB")
    return f"{sign}{size / scale:.2f} {unit}"


def format_enough(size: int) -> str:
    """Write bytes for people as :func:`format_bytes`, rounded up: whoever writes that again asks for enough."""
    text = format_bytes(size)
    unit = text.rpartition(" ")[2]
    return text if parse_bytes(text) >= size else format_bytes(size + _BINARY[unit] // 200)


def format_apart(*sizes: int) -> tuple[str, ...]:
    """Write bytes for people to compare: as :func:`format_bytes`, but in single bytes where that hides a difference."""
    texts = tuple(map(format_bytes, sizes))
    return texts if len(set(texts)) == len(set(sizes)) else tuple(f"{size} bytes" for size in sizes)
