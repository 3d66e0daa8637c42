"""The errors that tpplan raises deliberately.

Each is a :class:`TpplanError`: a message with names and numbers, and a hint that says what to do next. Any other
exception from tpplan is a bug.

A document that breaks rules has a list of :class:`Problem`, and one error that tells them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence


class TpplanError(Exception):
    """Base class of tpplan's errors, with a message and a hint.

    Attributes:
        message: a sentence or paragraph that says what is wrong, with the names and numbers involved.
        hint: what to do next; empty if there is nothing useful to suggest.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ModelError(TpplanError):
    """A model's config or checkpoint cannot be read, is not supported, or is inconsistent."""


class DeviceError(TpplanError):
    """A device, a memory size or a devices file is invalid or cannot be found."""


class RequestError(TpplanError):
    """A request is invalid for the model: an unknown cache kind, a context longer than the model's."""


class PlanError(TpplanError):
    """A plan or document breaks the rules of its format.

    Attributes:
        problems: one entry for each violation; the message lists them.
    """

    def __init__(self, message: str, hint: str = "", problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems


class ExecutionError(TpplanError):
    """A compiled plan cannot do what is asked: operands of the wrong shape or device, no memory, use after close."""


class UsageError(TpplanError):
    """The command-line arguments are not a valid command."""


class InternalError(TpplanError):
    """A bug in tpplan, reported without a traceback."""


#: Stands for the rule that a document is JSON with the keys and types of its class.
FORM = "TP000"

#: Problems after which a document is not worth more of anybody's time: of one kind, and to list.
MOST_PROBLEMS = 100


@frozen
class Problem:
    """A rule that a document breaks, and where.

    Attributes:
        rule: its number, ``TP001`` and so on; ``TP000`` is the form of the document itself: JSON, keys and types.
        path: of the offending value, such as ``splits[1].bounds``; empty for the whole document.
        message: what is wrong, with the numbers.
        line: of the document's text, from 1; 0 if it is not known.
    """

    rule: str
    path: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.rule} at {self.path or 'top level'}: {self.message}"


#: The hint where nothing more is known of a document than its problems.
CORRECT = "correct it, or make it again with tpplan"


def refusal(what: str, found: Sequence[Problem], hint: str = CORRECT) -> PlanError:
    """Return the error that lists these problems of a document."""
    lines = [f"{what} has {len(found)} problems:" if len(found) > 1 else f"{what} has a problem:"]
    lines += [f"  {problem}" for problem in found[:MOST_PROBLEMS]]
    if len(found) > MOST_PROBLEMS:
        lines.append(f"  and {len(found) - MOST_PROBLEMS} more")
    return PlanError("\n".join(lines), hint, tuple(found))


def malformed(what: str, message: str) -> PlanError:
    """Return the error for a document that cannot be read at all."""
    return refusal(what, [Problem(FORM, "", message)])
