"""What can be chosen for running, testing and timing a plan, and the checks of it, which need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.sizes import parse_bytes
from tpplan.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


BACKENDS = ("auto", "cpu", "cuda")
TRANSPORTS = ("peer", "host", "events")
TRANSPORTS_OR_AUTO = ("auto", *TRANSPORTS)

_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 1000


def check_choice(what: str, value: str, choices: Sequence[str], hint: str = "choose one of these") -> None:
    """Check that a value is one of the choices that there are.

    Raises:
        RequestError: it is not.
    """
    if value not in choices:
        raise RequestError(f"unknown {what} {str(value)[:40]!r}, expected {', '.join(choices)}", hint)


def tested_transports(wanted: str) -> tuple[str, ...]:
    """Return the transports to test: one, or all for an empty name.

    Raises:
        RequestError: there is no such transport.
    """
    if not wanted:
        return TRANSPORTS
    check_choice("transport", wanted, TRANSPORTS, "name one of these, or leave --transport out to test them all")
    return (wanted,)


def checked_rounds(rounds: int) -> int:
    """Return ``rounds`` if it is valid.

    Raises:
        RequestError: it is too low for a spread, or unreasonably high.
    """
    if not _FEWEST_ROUNDS <= rounds <= _MOST_ROUNDS:
        message = f"--rounds is {rounds}, expected {_FEWEST_ROUNDS} to {_MOST_ROUNDS}"
        raise RequestError(message, "7, the default, take about a minute")
    return rounds


def payloads(text: str) -> tuple[int, ...]:
    """Parse a list of sizes such as ``8KiB,1MiB``.

    Raises:
        RequestError: an entry is not a size.
    """
    try:
        return tuple(parse_bytes(size) for size in text.split(","))
    except DeviceError as error:
        message = f"--sizes: {error.message}".replace("memory size", "size")
        raise RequestError(message, "list sizes such as 8KiB,64KiB,1MiB") from error
