"""Processes that share memory: who is killed is named by the others, who leaves or forks is not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch

from tpplan.exec.group.lost import named

presence = pytest.importorskip("tpplan.exec.processes.presence", reason="needs record locks", exc_type=ImportError)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

    from tpplan.exec.processes.presence import Presence

#: Seconds in which another process has to come this far.
_MOST_S = 30.0
_TICK_S = 0.05
#: Other processes are forks of one that has imported torch, which takes longer than all that they do.
_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(["torch", "tpplan.exec.processes.presence"])


def _words(path: Path) -> memoryview:
    """Map the memory as a page does."""
    return memoryview(torch.from_file(str(path), shared=True, size=1024, dtype=torch.int32).numpy())  # type: ignore[arg-type]


def _other(path: Path, process: int, count: int, more: str, here: Connection) -> None:
    """Be another process: come, perhaps do more, tell the own number, or that of a child that outlives it, and wait."""
    one = presence.Presence(path, _words(path), process, count, tick_s=_TICK_S)
    if more == "child" and not os.fork():
        os._exit(0)
    if more == "leave":
        one.leave()
    if more == "close":
        one.close()
    if number := os.fork() if more == "fork" else os.getpid():
        here.send(number)
    if more != "close":
        time.sleep(60)


class Others:
    """Other processes on the same memory."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self.started: dict[int, ForkServerProcess] = {}

    def start(self, process: int, more: str = "") -> int:
        """Start one, and return the number that it tells when it has come."""
        told, here = _START.Pipe(duplex=False)
        with told, here:
            self.started[process] = _START.Process(target=_other, args=(self.path, process, self.count, more, here))
            self.started[process].start()
            assert told.poll(_MOST_S)
            number: int = told.recv()
        return number

    def signal(self, process: int, number: int) -> None:
        """Send one a signal."""
        pid = self.started[process].pid
        assert pid
        os.kill(pid, number)

    def kill(self, process: int) -> None:
        """Kill one."""
        self.started[process].kill()
        self.started[process].join(_MOST_S)

    def close(self) -> None:
        """Kill all."""
        for process, each in self.started.items():
            self.kill(process)
            each.close()


@pytest.fixture
def words(tmp_path: Path) -> memoryview:
    """Return the memory."""
    (tmp_path / "page").write_bytes(bytes(4096))
    return _words(tmp_path / "page")


@pytest.fixture
def others(tmp_path: Path, words: memoryview) -> Iterator[Others]:
    """Return three processes' memory, of which this one is the first."""
    del words
    found = Others(tmp_path / "page", 3)
    yield found
    found.close()


@pytest.fixture
def one(tmp_path: Path, words: memoryview, others: Others) -> Iterator[Presence]:
    """Return this process among the others."""
    found = presence.Presence(tmp_path / "page", words, 0, others.count, tick_s=_TICK_S)
    yield found
    found.close()


def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + _MOST_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(_TICK_S)


def cause(one: Presence, code: int) -> str:
    """Return the cause of a failure in words; the last process has another rank."""
    return one.cause(code, lambda processes: named(processes, (0, 1, 5)), 7)


def test_a_killed_process_is_named(one: Presence, words: memoryview, others: Others) -> None:
    """The status word, by which kernels end, changes by itself, though no kernel has waited in vain."""
    others.start(1)
    others.start(2, "child")  # its child closes the file, which takes no lock of its own away
    time.sleep(4 * _TICK_S)
    assert not words[0]
    others.kill(2)
    until(lambda: words[0])
    assert cause(one, words[0]) == "process 2 (rank 5) is lost: it no longer runs"
    others.kill(1)
    assert cause(one, words[0]) == "process 2 (rank 5) is lost: it no longer runs", "the first cause stays"
    assert one.is_alone()
    assert not one.is_left()


def test_who_has_forked_is_named(words: memoryview, one: Presence, others: Others) -> None:
    """Children that outlive it have the file, but no lock."""
    child = others.start(1, "fork")
    try:
        others.kill(1)
        os.kill(child, 0)
        until(lambda: words[0])
        assert cause(one, words[0]) == "process 1 is lost: it no longer runs"
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("more", ["leave", "close"])
def test_who_leaves_is_not_lost(more: str, words: memoryview, one: Presence, others: Others) -> None:
    """Neither when it has ended behind that, nor is one that has not come yet."""
    others.start(1, more)
    others.kill(1)
    time.sleep(4 * _TICK_S)
    assert not words[0]
    assert not one.is_alone(), "process 2 has not come"
    words[0] = 1
    assert not cause(one, 1)
    assert [*words[:1]] == [1]


def test_several_are_named_at_once_after_a_timeout(words: memoryview, one: Presence, others: Others) -> None:
    """The kernels' status gives way to the cause, which others of the memory see too."""
    others.start(1)
    others.start(2)
    words[0] = 2  # before they are killed, so that no look names the first alone
    others.kill(1)
    others.kill(2)
    assert cause(one, 2) == "process 1 and process 2 (rank 5) are lost: they no longer run"
    assert words[0] > 3
    one.blame()
    assert cause(one, words[0]) == "process 1 and process 2 (rank 5) are lost: they no longer run"


def test_a_stopped_process_is_named_after_a_timeout(words: memoryview, one: Presence, others: Others) -> None:
    """Not before: it may go on. One that is only late counts on, and is not named."""
    others.start(1)
    others.start(2)
    others.signal(2, signal.SIGSTOP)
    until(lambda: one._seen[2][1] >= 20)
    assert not words[0]
    until(lambda: one._seen[1][1] == 0)
    words[0] = 3
    assert cause(one, 3) == "process 2 (rank 5) is lost: nothing came from there for 7 s"
    others.signal(2, signal.SIGCONT)
    until(lambda: one._seen[2][1] == 0)
    assert cause(one, words[0]) == "process 2 (rank 5) is lost: nothing came from there for 7 s", "the verdict stays"


def test_all_have_left(one: Presence, others: Others) -> None:
    """Then nothing is kept."""
    others.start(1, "leave")
    others.start(2, "close")
    assert one.is_left()
    assert one.is_alone()


def test_a_closed_one_says_nothing(words: memoryview, one: Presence, others: Others) -> None:
    """Closing twice does nothing more."""
    others.start(1)
    one.close()
    one.close()
    others.kill(1)
    words[0] = 1
    assert not cause(one, 1)
