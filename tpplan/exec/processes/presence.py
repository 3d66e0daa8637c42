"""Which processes of a host are lost while their GPUs wait for each other, seen in memory that they share.

A process holds a lock on a byte of the memory's file, which the system takes away from it however it ends. A look at
the locks of the others twice a second, in a thread, tells their kernels to end, long before their time-out. These are
record locks (``lockf``): children that a process has forked do not hold them, and they go before the GPU's memory does.

A process that was only stopped keeps its lock. It is named after the time-out, as it does not count on in the memory.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from tpplan.errors import ExecutionError
from tpplan.exec.group.lost import are_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: int32 words of the memory, one for each process: how often it has looked, where it is, and whether it is the cause.
_LOOKS, _WHERE, _BLAMED, _MOST = 256, 512, 768, 256
#: Where a process is; 0 before it has come.
_HERE, _LEFT = 1, 2
#: Status words beyond those of kernels: processes have ended, or do nothing.
_LOST, _SILENT = 16, 17
#: Seconds between two looks, and after how many of them a process that does not count on is silent.
_TICK_S: Final = 0.5
_SILENT_TICKS: Final = 4
_MASK = 2**31 - 1


class Presence:
    """A process among others that share memory."""

    def __init__(self, path: Path, words: memoryview, process: int, count: int, *, tick_s: float = _TICK_S) -> None:
        """Come, and begin to look at the others.

        Args:
            path: file of the memory. Nothing may open it any more in this process: who closes it loses the lock.
            words: the memory, of which the first word is the status of kernels.
            process: index of this process.
            count: number of processes.
            tick_s: seconds between two looks.

        Raises:
            ExecutionError: the file system has no locks.
        """
        assert count <= _MOST  # noqa: S101 (each has a GPU of the host)
        self._words, self._process = words, process
        self._others = [other for other in range(count) if other != process]
        self._seen = dict.fromkeys(self._others, (0, 0))
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, process)
        except OSError as error:
            os.close(self._fd)
            message = f"{path.parent} has no locks for process {process}: {error.strerror}"
            raise ExecutionError(message, 'compile with transport="events"') from error
        words[_WHERE + process] = _HERE
        self._end = Event()
        self._thread = Thread(target=self._watch, args=(tick_s,), name="tpplan presence", daemon=True)
        self._thread.start()

    def blame(self) -> None:
        """Make the status say who is lost, unless it says something else already."""
        if not self._words[0] and (lost := self._lost()):
            self._blame(_LOST, lost)

    def cause(self, code: int, name: Callable[[Sequence[int]], str], timeout: float) -> str:
        """Return why kernels have failed, if that is another process, in words; once known, the same in all processes.

        Args:
            code: their status; 1 to 3 after a time-out.
            name: names processes.
            timeout: seconds that kernels wait.
        """
        if 0 < code <= 3 and self._words[0] == code:  # noqa: PLR2004 (see Exchanges)
            if lost := self._lost():
                self._blame(_LOST, lost)
            elif silent := [other for other, (_, ticks) in self._seen.items() if ticks >= _SILENT_TICKS]:
                self._blame(_SILENT, silent)
            code = self._words[0]
        if code not in {_LOST, _SILENT}:
            return ""
        blamed = [i for i in range(len(self._others) + 1) if self._words[_BLAMED + i]]
        is_one = len(blamed) == 1
        why = f"{'it' if is_one else 'they'} no longer run{'s' if is_one else ''}"
        why = why if code == _LOST else f"nothing came from there for {timeout:g} s"
        return f"{are_lost(blamed, name)}: {why}"

    def leave(self) -> None:
        """Tell that this process uses no memory of the others any more."""
        self._words[_WHERE + self._process] = _LEFT
        self._end.set()

    def is_left(self) -> bool:
        """Return whether all have left."""
        return all(self._words[_WHERE + other] == _LEFT for other in self._others)

    def is_alone(self) -> bool:
        """Return whether all others have left or are lost."""
        lost = self._lost()
        return all(self._words[_WHERE + other] == _LEFT or other in lost for other in self._others)

    def close(self) -> None:
        """Leave, and give back the lock."""
        self.leave()
        self._thread.join()
        self._seen = {}
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lost(self) -> list[int]:
        """Return the processes that have come, and ended without leaving."""
        return [other for other in self._others if self._fd >= 0 and self._has_ended(other)]

    def _has_ended(self, other: int) -> bool:
        where = _WHERE + other
        # Before, as it locks before it comes; and behind, as it leaves before it unlocks.
        return self._words[where] == _HERE and not self._is_locked(other) and self._words[where] == _HERE

    def _is_locked(self, other: int) -> bool:
        with suppress(OSError, ValueError):  # it is locked, or this process has closed the file meanwhile
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, other)  # shared: several may try at once
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, other)
            return False
        return True

    def _blame(self, status: int, processes: list[int]) -> None:
        for other in processes:
            self._words[_BLAMED + other] = 1
        self._words[0] = status  # behind the names, as other processes read them at once

    def _watch(self, tick_s: float) -> None:
        mine = _LOOKS + self._process
        while not self._end.wait(tick_s):
            self._words[mine] = self._words[mine] + 1 & _MASK
            for other, (looks, ticks) in self._seen.items():
                now = self._words[_LOOKS + other]
                # In own ticks, as this process may have been stopped too.
                is_silent = now == looks and self._words[_WHERE + other] == _HERE
                self._seen[other] = (now, ticks + 1 if is_silent else 0)
            self.blame()
