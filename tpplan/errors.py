"""The errors that tpplan raises on purpose.

Every one of them is a :class:`TpplanError`: a sentence with names and numbers, and a hint that says what to do next.
Anything else that escapes from tpplan is a bug.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan.problems import Problem


class TpplanError(Exception):
    """What is wrong, and what to do about it.

    Attributes:
        message: one sentence or paragraph with the names and numbers that are at odds.
        hint: the next thing to do; empty if there is nothing sensible to say.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ModelError(TpplanError):
    """A model's config or checkpoint that cannot be read, is not supported, or contradicts itself."""


class DeviceError(TpplanError):
    """A device, a memory size or a devices file that cannot be understood or found."""


class RequestError(TpplanError):
    """A request that has no meaning for the model: an unknown cache kind, a context beyond the model's."""


class PlanError(TpplanError):
    """A plan or document that breaks the rules of its format.

    Attributes:
        problems: every rule that it breaks, one by one; the message lists them.
    """

    def __init__(self, message: str, hint: str = "", problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems


class ExecutionError(TpplanError):
    """A compiled plan cannot do what it was asked: operands of the wrong shape or device, no room, use after close."""


class UsageError(TpplanError):
    """Arguments that are no command."""


class InternalError(TpplanError):
    """A bug in tpplan, told without a traceback."""
