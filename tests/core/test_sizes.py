"""Bytes as people write and read them."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpplan.core.sizes import format_apart, format_bytes, parse_bytes
from tpplan.errors import DeviceError

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("20GB", 20_000_000_000),
        (" 20 GB ", 20_000_000_000),
        ("1.5KiB", 1536),
        ("0.000001TB", 1_000_000),
        ("1.9B", 1),
        ("1024TiB", 2**50),
        ("0001MiB", 2**20),
        ("20G", 20 * 2**30),
        ("20g", 20 * 2**30),
        ("1.5 t", 3 * 2**39),
        ("20gb", 20_000_000_000),
        ("20Gib", 20 * 2**30),
        ("8kb", 8000),
        ("1tib", 2**40),
    ],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    """GiB and G are 2^30, GB is 10^9; fractions are exact decimals, rounded down to whole bytes."""
    notes: list[str] = []
    assert parse_bytes(text, notes.append) == size
    assert bool(notes) == (not text.strip().casefold().endswith("b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a memory size"),
        ("GiB", "'GiB' is not a memory size"),
        ("-1GiB", "'-1GiB' is not a memory size"),
        ("1e3GiB", "'1e3GiB' is not a memory size"),
        ("1,5GiB", "'1,5GiB' is not a memory size"),
        ("٣GiB", "is not a memory size"),
        ("9" * 100 + "GiB", "is not a memory size"),
        ("24", "memory size '24' has no unit"),
        ("20gbit", "memory size '20gbit' has the unknown unit 'gbit'"),
        ("20gbit", "write 20GiB for 20·2^30 bytes or 20GB for 20·10^9 bytes"),
        ("20", "write 20GiB for"),
        ("20xb", "write 20GiB for"),
        ("511", "write 511GiB for"),
        ("24576", "write 24576MiB for 24576·2^20 bytes or 24576MB for 24576·10^6 bytes"),
        ("512", "write 512MiB for"),
        ("524287", "write 524287MiB for"),
        ("524288", "write 524288B for as many bytes"),
        ("24576mb/s", "is not a memory size"),
        ("8kbit", "write 8KiB for 8·2^10 bytes or 8kB for 8·10^3 bytes"),
        ("1tbit", "write 1TiB for 1·2^40 bytes or 1TB for 1·10^12 bytes"),
        ("0GiB", "'0GiB' is 0 bytes, outside 1 byte to 1 PiB"),
        ("0.9B", "'0.9B' is 0 bytes, outside 1 byte to 1 PiB"),
        ("1025TiB", "outside 1 byte to 1 PiB"),
    ],
)
def test_what_is_no_size_is_an_error(text: str, words: str) -> None:
    """What is no size, has no unit, or one that nobody knows, is an error with a hint."""
    with pytest.raises(DeviceError) as raised:
        parse_bytes(text)
    assert words in str(raised.value)
    assert raised.value.hint
    assert len(str(raised.value)) < 250


@given(st.integers(1, 1000), st.sampled_from(list(UNITS)), st.sampled_from(["", " "]))
def test_whole_numbers_of_every_unit_are_exact(number: int, unit: str, blank: str) -> None:
    """A whole number of a unit is exactly that many of it."""
    assert parse_bytes(f"{number}{blank}{unit}") == number * UNITS[unit]


@given(st.integers(1, 2**50))
def test_what_people_see_can_be_read_back(size: int) -> None:
    """A size as people see it has at most four digits before the point, and means the size within its rounding."""
    text = format_bytes(size)
    match = re.fullmatch(r"(\d{1,4})(\.\d\d)? (B|KiB|MiB|GiB|TiB)", text)
    assert match
    assert int(match[1]) < 1024 or text == "1024.00 TiB"
    assert abs(parse_bytes(text) - size) <= UNITS[match[3]] * 0.005 + 1
    assert format_bytes(-size) == f"-{text}"


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_device_error(text: str) -> None:
    """No text crashes the parser or gives a size out of range."""
    with suppress(DeviceError):
        assert 0 < parse_bytes(text) <= 2**50


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (24 * 2**30, "24.00 GiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    """Bytes are shown in the largest binary unit that leaves a number from 1 to 1024."""
    assert format_bytes(size) == text


def test_sizes_that_differ_look_different() -> None:
    """Where two decimals hide what two sizes differ in, their bytes are shown."""
    assert format_apart(3 * 2**30, 2**30) == ("3.00 GiB", "1.00 GiB")
    assert format_apart(8598323, 8598324) == ("8598323 bytes", "8598324 bytes")
    assert format_apart(8598323, 8598323) == ("8.20 MiB", "8.20 MiB")
