"""Reading TOML that somebody else wrote."""

from __future__ import annotations

import tomllib
from typing import Any, Final

from tpplan.errors import FORM, PlanError, Problem, refusal

#: Size limit of a TOML document, in bytes.
LARGEST: Final = 2**18
#: Most dots in a line: the parser's time and memory grow with the square of a key's parts.
_MOST_DOTS: Final = 100


def parse_toml(data: bytes, what: str) -> dict[str, Any]:
    """Parse the bytes of a TOML document; a byte order mark, as editors of Windows write it, is skipped.

    Args:
        data: the document.
        what: its name in errors.

    Raises:
        PlanError: it is larger than 256 KiB, or no TOML; the message has line and column.
    """
    if len(data) > LARGEST:
        raise _malformed(what, f"has {len(data)} bytes, the most is {LARGEST}")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _malformed(what, f"is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from error
    for number, row in enumerate(text.split("\n"), 1):
        if row.count(".") > _MOST_DOTS:
            raise _malformed(what, f"has more than {_MOST_DOTS} dots in line {number}")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise _malformed(what, "is nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        raise _malformed(what, f"is not TOML: {reason[:1].lower()}{reason[1:]}") from error
    except ValueError as error:  # Python's own limit
        raise _malformed(what, "has a number of too many digits") from error


def _malformed(what: str, message: str) -> PlanError:
    return refusal(what, [Problem(FORM, "", message)], "correct it in an editor")
