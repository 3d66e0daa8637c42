"""Asking a vendor's program."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: For all questions to a program together.
SECONDS = 30


@frozen
class Answer:
    """What a program wrote.

    Attributes:
        code: its exit status.
        text: its standard output.
        last_line: of its standard output, or of its standard error if that is empty.
    """

    code: int
    text: str
    last_line: str


def deadline() -> float:
    """Return by :func:`time.monotonic` when a program has to have answered that is asked now."""
    return time.monotonic() + SECONDS


def run(program: str, name: str, arguments: Sequence[str], until: float) -> Answer:
    """Return what a program writes.

    Args:
        program: its path.
        name: its name, for errors.
        arguments: of the command.
        until: see :func:`deadline`.

    Raises:
        DeviceError: it does not run or answer.
    """
    hint = f"see what {name} itself says"
    try:
        done = subprocess.run(  # noqa: S603 - on the path of whoever calls
            [program, *arguments],
            capture_output=True,
            timeout=max(0.0, until - time.monotonic()),
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"{name} did not answer within {SECONDS} s", hint) from error
    except OSError as error:
        raise DeviceError(f"{name} does not run: {error.strerror}", hint) from error
    text, complaint = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
    return Answer(done.returncode, text, (complaint + text).strip().rpartition("\n")[2].strip()[:200])
