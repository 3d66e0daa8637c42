"""What a plan can be run on, and the check of such a choice, which needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKENDS = ("auto", "cpu", "cuda")


def check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    """Check that a value is one of the choices that there are.

    Raises:
        RequestError: it is not.
    """
    if value not in choices:
        raise RequestError(f"unknown {what} {str(value)[:40]!r}, expected {', '.join(choices)}", "choose one of these")
