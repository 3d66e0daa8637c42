"""What is wrong with a document: one record per problem, and the error that lists them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """

    rule: str
    path: str
    message: str

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


def malformed(what: str, message: str, path: str = "") -> PlanError:
    """Return the error for a document that cannot be read at all."""
    return refusal(what, [Problem(FORM, path, message)])
