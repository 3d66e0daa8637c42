"""The first cause of a failure of torch.distributed, found by the processes that are left, and the same in all.

torch.distributed says at most that messages of another process do not come. That one may be lost, or wait for a third
one itself, or have ended because it noticed before. So each process writes whose messages it waits for to the store by
which torch.distributed's processes found each other. A process that others wait for and that writes nothing is the
cause. The first verdict is kept, and is everybody's.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tpplan.exec.toolchain.torch_shims import store_of, store_rank
from tpplan.files.jsontext import read_json, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: How long processes wait for the reports of the others, and how long for the store, which may be lost too, in seconds.
_GRACE_S: Final = 2.0
_LONGEST_S: Final = 3.5
_PAUSE_S: Final = 0.02
#: Maximum bytes of a report, and maximum characters of a verdict.
_MOST: Final = 4000

_ADDRESS: Final = re.compile(r" ?\[[0-9A-Fa-f:.%\w]+\]:\d+")
_LIMIT: Final = re.compile(r"[Tt]imed? ?out(?: waiting)?(?: after)?(?: for)? (\d+) ?ms")


class Report(NamedTuple):
    """What a process has noticed.

    Attributes:
        awaited: the processes whose messages it waits for in vain.
        reason: what torch.distributed says.
    """

    awaited: tuple[int, ...]
    reason: str

    @property
    def is_silent(self) -> bool:
        """Whether the messages did not come in time, while connections hold."""
        return is_silence(self.reason)


class PeerError(RuntimeError):
    """Messages of some processes do not come.

    Attributes:
        awaited: indices of the processes.
    """

    def __init__(self, message: str, awaited: Sequence[int]) -> None:
        super().__init__(message)
        self.awaited = tuple(awaited)


@contextmanager
def about(*processes: int) -> Iterator[None]:
    """Let errors of torch.distributed in the block be about these processes.

    Raises:
        PeerError: torch.distributed failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(reason_of(error), processes) from error


class Causes:
    """Finds why the processes of a group no longer reach each other."""

    def __init__(self, key: str, process: int, ranks: Sequence[int]) -> None:
        """Look at nothing yet.

        Args:
            key: what distinguishes this context from others; the same in all processes.
            process: index of this process.
            ranks: rank of each process.
        """
        self._key, self._process, self._ranks = key, process, ranks
        self._verdict = ""

    def verdict(self, awaited: Sequence[int], reason: str) -> str:
        """Return the first cause of a failure, in words.

        Args:
            awaited: the processes whose messages do not come, as far as this one knows; none if it failed by itself.
            reason: what torch.distributed says, or what this process has met itself, as the rest of a sentence.
        """
        if not self._verdict:
            mine = Report(tuple(awaited), reason)
            found: list[str] = []
            # A store that is lost, or on a host that is, may not answer for long.
            thread = Thread(target=lambda: found.append(self._agreed(mine)), daemon=True)
            thread.start()
            thread.join(_LONGEST_S)
            self._verdict = found[0] if found and found[0] else self._without_store(mine)
        return self._verdict

    def _agreed(self, mine: Report) -> str:
        """Return the verdict of all that are left; empty if the store does not answer."""
        try:
            store = store_of(self._key)
            store.set(str(self._process), json.dumps(mine))
            cause = first_cause(self._reports(store, mine), self._name, len(self._ranks))
            return visible(store.compare_set("cause", "", cause[:_MOST]).decode(errors="replace")[:_MOST])
        except ValueError:  # there is no store
            return self._alone(mine)
        except RuntimeError:
            return ""

    def _reports(self, store: Any, mine: Report) -> dict[int, Report]:
        """Return the reports of the processes, as soon as no others are to be expected."""
        reports, end = {self._process: mine}, time.monotonic() + _GRACE_S
        while len(reports) < len(self._ranks) and not store.check(["cause"]):
            for other in range(len(self._ranks)):
                if other not in reports and store.check([str(other)]):
                    reports[other] = _read(store.get(str(other)))
            # Who is silent may still report that it waits itself. Who has ended has reported before, or never will.
            if not mine.is_silent or time.monotonic() > end:
                break
            time.sleep(_PAUSE_S)
        return reports

    def _alone(self, mine: Report) -> str:
        """Return what this process can say by itself."""
        return first_cause({self._process: mine}, self._name, len(self._ranks))

    def _without_store(self, mine: Report) -> str:
        """Return what this process can say if the store does not answer, which is lost with the process that has it."""
        rank = store_rank()
        if rank not in self._ranks or (owner := self._ranks.index(rank)) == self._process:
            return self._alone(mine)
        doubt = f", or {self._name([self._process])} is cut off from it" if mine.is_silent else ""
        reason = _what(mine) if owner in mine.awaited else "the store of torch.distributed does not answer"
        return f"{are_lost([owner], self._name)}{doubt}: {reason}"

    def _name(self, processes: Sequence[int]) -> str:
        return named(processes, self._ranks)


def named(processes: Sequence[int], ranks: Sequence[int]) -> str:
    """Return the names of processes, as in a sentence."""
    return " and ".join(f"process {i}" if i == ranks[i] else f"process {i} (rank {ranks[i]})" for i in processes)


def first_cause(reports: Mapping[int, Report], name: Callable[[Sequence[int]], str], count: int) -> str:
    """Return the first cause of what processes report, in words.

    Args:
        reports: what processes have noticed, by their index.
        name: names processes.
        count: number of processes.
    """
    for is_silent in (False, True):  # a connection that has ended says more than silence
        blamed = {
            other: report
            for _, report in sorted(reports.items())
            if report.is_silent == is_silent
            for other in report.awaited
            if other not in reports
        }
        if blamed:
            lost = sorted(blamed)
            cause = are_lost(lost, name)
            if is_silent and len(reports) == 1 < len(lost) == count - 1:  # which looks the same from here
                cause += f", or {name([*reports])} is cut off from them"
            return f"{cause}: {_what(blamed[lost[0]])}"
    for process, report in sorted(reports.items()):
        if not report.awaited:
            return f"{name([process])} {report.reason}"
    waiting = sorted(reports)
    return f"{name(waiting)} wait for each other in vain: {_what(reports[waiting[0]])}"


def are_lost(processes: Sequence[int], name: Callable[[Sequence[int]], str]) -> str:
    """Return the words that these processes are lost."""
    return f"{name(processes)} {'is' if len(processes) == 1 else 'are'} lost"


def is_silence(reason: str) -> bool:
    """Return whether a reason is that nothing came in time."""
    return "timed out" in reason.lower() or "timeout" in reason.lower()


def reason_of(error: BaseException) -> str:
    """Return what torch.distributed says of a failure, in one line, without places in its source and addresses."""
    line = re.sub(r"^\[[^\]]*\] *", "", str(error).partition("\n")[0])
    return _ADDRESS.sub("", line.partition(". This is typically")[0])


def _what(report: Report) -> str:
    """Return a report's reason, which for silence says how long it was."""
    limit = _LIMIT.search(report.reason)
    return f"nothing came from there for {int(limit[1]) / 1000:g} s" if limit else report.reason


def _read(data: bytes) -> Report:
    """Return a report from the store; one of nothing if it is none."""
    try:
        awaited, reason = _listed(read_json(data[:_MOST]))
        return Report(tuple(map(int, _listed(awaited))), visible(str(reason)))
    except (TypeError, ValueError):
        return Report((), "has written no report to the store of torch.distributed")


def _listed(data: object) -> list[Any]:
    """Return data of JSON that is a list.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(data, list):
        raise TypeError(type(data))
    return data
