"""The errors that tpplan raises deliberately.

Each is a :class:`TpplanError`: a message with names and numbers, and a hint that says what to do next. Any other
exception from tpplan is a bug.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan.problems import Problem


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
