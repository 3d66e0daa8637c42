"""The agreement of a context's processes on what each of them does for itself: that it went well, and was the same."""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from tpplan.errors import ExecutionError, TpplanError
from tpplan.exec.group.members import differing, listed_processes, said_of
from tpplan.exec.machine.look import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.exec.context import TPContext

_T = TypeVar("_T")

#: Maximum number of differences in an error.
_TOLD = 6
#: Maximum characters of a value that is told whole, and characters of the hash of a longer one.
_LONGEST, _HASH = 80, 12


def agree(
    context: TPContext, what: str, do: Callable[[], _T], facts: Callable[[_T], Mapping[str, str]] = lambda _: {}
) -> _T:
    """Let every process do something for itself, and go on only if all did and have the same facts.

    A process that only raised an error would leave the others waiting. A single process just does it.

    Args:
        context: the context; all of its processes call this at once.
        what: what is done, as in ``the processes differ in what``.
        do: does it.
        facts: returns what has to be the same in all processes, by name.

    Returns:
        What ``do`` has returned.

    Raises:
        TpplanError: as ``do`` raises it, if it does so in all processes alike.
        ExecutionError: ``do`` failed in a process, or the processes differ; the same error in all.
    """
    if context.processes == 1:
        return do()
    own: Mapping[str, str] = {}
    failure: Exception | None = None
    try:
        done = do()
        own = facts(done)
    except Exception as error:  # noqa: BLE001 (whatever it is)
        failure = error
    told = context.tell(
        ({name: _shortened(value) for name, value in own.items()}, said_of(failure) if failure else ("", ""))
    )
    if failed := [i for i, (_, (message, _)) in enumerate(told) if message]:
        if isinstance(failure, TpplanError) and all(said == told[0][1] for _, said in told):
            raise failure
        by_message: defaultdict[str, list[int]] = defaultdict(list)
        for i in failed:
            by_message[told[i][1][0]].append(i)
        problems = [f"{listed_processes(where)}: {message}" for message, where in by_message.items()]
        raise ExecutionError(f"{what} failed:{listed(problems)}", told[failed[0]][1][1]) from failure
    if different := differing([theirs for theirs, _ in told]):
        more = [f"and {len(different) - _TOLD} more"] if len(different) > _TOLD else []
        problems = [*different[:_TOLD], *more]
        raise ExecutionError(f"the processes differ in {what}:{listed(problems)}", "give all of them the same")
    return done


def _shortened(value: str) -> str:
    """Return a value that fits a message, and is another one for every other value."""
    if len(value) <= _LONGEST:
        return value
    return f"{value[:_LONGEST]}... ({sha256(value.encode(errors='replace')).hexdigest()[:_HASH]})"
