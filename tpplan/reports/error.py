"""Errors as documents, and what to change on the command line after the planner found no plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.errors import (
    MOST_PROBLEMS,
    DeviceError,
    ExecutionError,
    InternalError,
    ModelError,
    PlanError,
    Problem,
    RequestError,
    TpplanError,
    UsageError,
)
from tpplan.files.codec import document
from tpplan.hardware.spec import of_size, parse_devices, spec_of, with_budget
from tpplan.planner.infeasible import InfeasibleError, Shortfall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.core.device import Device
    from tpplan.planner.infeasible import Suggestion

#: What to call an error in documents, the most special class first.
_KINDS: dict[type[TpplanError], str] = {
    InfeasibleError: "infeasible",
    ModelError: "model",
    DeviceError: "device",
    RequestError: "request",
    PlanError: "plan",
    ExecutionError: "execution",
    UsageError: "usage",
    InternalError: "internal",
    TpplanError: "file",
}
KINDS = tuple(_KINDS.values())


@frozen(kw_only=True)
class Advice:
    """A single change after which planning succeeds.

    Attributes:
        kind: ``context``, ``tokens``, ``batch``, ``cache``, ``layout``, ``kv``, ``strategy``, ``reserve``, ``devices``,
            ``memory``, ``draft-output`` (to split the draft model), or ``quantisation`` (of the weights, only from
            ``tpplan fit``).
        value: tokens per sequence, those that sequences share, the number of sequences, the cache kind, the layout, kv
            mode or strategy, the bytes to reserve (0: nothing), how many more devices, the budget in bytes, a file, or
            a quantisation.
        device: the one that needs the budget, or more of its kind; -1 for the other kinds.
        message: the change in words.
        option: the change as options of ``tpplan plan``; left out where there is none.
    """

    kind: str
    value: str
    device: int
    message: str
    option: str = ""


@frozen(kw_only=True)
class ErrorBody:
    """What is wrong, and what to do about it.

    Attributes:
        kind: of error.
        message: one sentence or paragraph.
        hint: the next thing to do; left out if there is nothing sensible to say.
        problems: of a plan or another document, the first 100 violations of rules; left out if there are none.
        unlisted: how many more there are; left out if none.
        shortfalls: of a plan that does not fit, what each device lacks; left out for other errors.
        suggestions: single changes that make it fit; left out if there are none.
    """

    kind: str
    message: str
    hint: str = ""
    problems: tuple[Problem, ...] = ()
    unlisted: int = 0
    shortfalls: tuple[Shortfall, ...] = ()
    suggestions: tuple[Advice, ...] = ()


@document("error-report")
@frozen
class ErrorReport:
    """The document that ``--json`` prints where there is no answer.

    Attributes:
        error: what is wrong.
        notes: what the command noted on standard error before; left out for none.
    """

    error: ErrorBody
    notes: tuple[str, ...] = ()


def error_report(error: TpplanError, gpus: str = "") -> ErrorReport:
    """Return the document of an error.

    Args:
        error: what went wrong.
        gpus: the devices as they were named, so that the advice can name them with more memory.
    """
    if not isinstance(error, InfeasibleError):
        kind = next(name for cls, name in _KINDS.items() if isinstance(error, cls))
        problems = getattr(error, "problems", ())
        body = ErrorBody(
            kind=kind,
            message=error.message,
            hint=error.hint,
            problems=problems[:MOST_PROBLEMS],
            unlisted=len(problems[MOST_PROBLEMS:]),
        )
        return ErrorReport(body)
    body = ErrorBody(
        kind="infeasible",
        message=error.message,
        hint=error.hint,
        shortfalls=error.shortfalls,
        suggestions=tuple(_advice(suggestion, gpus) for suggestion in error.suggestions),
    )
    return ErrorReport(body)


def _advice(suggestion: Suggestion, gpus: str) -> Advice:
    s = suggestion
    option = f"--{s.kind} {s.value}" + (f" --context {s.context}" if s.context else "")
    if s.kind == "reserve" or s.in_file:
        option = ""
    elif s.kind == "memory":
        option = other_gpus(gpus, lambda devices: _replaced(devices, s.device, int(s.value)))
    elif s.kind == "devices":
        option = other_gpus(gpus, lambda devices: [*devices, *[devices[s.device]] * int(s.value)])
    return Advice(kind=s.kind, value=s.value, device=s.device, message=s.message, option=option)


def _replaced(devices: Sequence[Device], index: int, budget: int) -> list[Device]:
    return [*devices[:index], with_budget(devices[index], budget) or of_size(budget), *devices[index + 1 :]]


def other_gpus(gpus: str, change: Callable[[Sequence[Device]], list[Device]]) -> str:
    """Return ``--gpus`` with other devices, or nothing where a list cannot name them."""
    try:
        spec = spec_of(change(parse_devices(gpus)))
    except DeviceError:
        return ""
    return f"--gpus {spec}" if spec else ""
