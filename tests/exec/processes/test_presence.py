"""Processes that share memory: who is killed is named by the others, who leaves or forks is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tpplan.exec.group.lost import named

presence = pytest.importorskip("tpplan.exec.processes.presence", reason="needs record locks", exc_type=ImportError)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpplan.exec.processes.presence import Presence

#: Seconds in which another process has to come this far.
_MOST_S = 30.0
_TICK_S = 0.05
#: Another process: maps the memory as a page does, comes, perhaps does more, and waits to be killed.
_OTHER = """
import os, sys, time
from pathlib import Path
import torch
from tpplan.exec.processes.presence import Presence
path, process, count, more = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
words = torch.from_file(str(path), shared=True, size=1024, dtype=torch.int32)
one = Presence(path, memoryview(words.numpy()), process, count, tick_s=0.05)
if more == "fork" and not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)
if more == "child" and not os.fork():
    os._exit(0)
if more == "leave":
    one.leave()
if more == "close":
    one.close()
    print("here", flush=True)
    sys.exit()
if more != "fork":
    print("here", flush=True)
time.sleep(60)
"""


class Others:
    """Other processes on the same memory."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(self, process: int, more: str = "") -> str:
        """Start one, and return its line when it has come."""
        words = [sys.executable, "-c", _OTHER, str(self.path), str(process), str(self.count), more]
        self.started[process] = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        output = self.started[process].stdout
        assert output
        return output.readline().strip()

    def kill(self, process: int) -> None:
        """Kill one."""
        self.started[process].send_signal(signal.SIGKILL)
        self.started[process].wait(_MOST_S)

    def close(self) -> None:
        """Kill all."""
        for each in self.started.values():
            each.kill()
            each.wait(_MOST_S)
            if each.stdout:
                each.stdout.close()


@pytest.fixture
def words(tmp_path: Path) -> memoryview:
    """Return the memory."""
    (tmp_path / "page").write_bytes(bytes(4096))
    return memoryview(torch.from_file(str(tmp_path / "page"), shared=True, size=1024, dtype=torch.int32).numpy())  # type: ignore[arg-type]


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
    child = int(others.start(1, "fork"))
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
    others.started[2].send_signal(signal.SIGSTOP)
    until(lambda: one._seen[2][1] >= 20)
    assert not words[0]
    until(lambda: one._seen[1][1] == 0)
    words[0] = 3
    assert cause(one, 3) == "process 2 (rank 5) is lost: nothing came from there for 7 s"
    others.started[2].send_signal(signal.SIGCONT)
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
