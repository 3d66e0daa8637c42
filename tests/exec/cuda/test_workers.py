"""Processes that do tasks: who is free takes the next, and none is left behind when one of them or all have to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tpplan.exec.toolchain.kernel_cache import work_off

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: A compiler that notes what it was asked for and does as it is told: ``until N``, it takes its time until N tasks have
#: been begun; ``crash``, it dies of the task; ``forever``, it never answers; ``orphan``, it answers when its parent has
#: gone.
WORKER = """if True:
    import os, sys, time
    from pathlib import Path
    log = Path(sys.argv[1])
    def note(what):
        with log.open("a") as file:  # one write, so that lines stay whole
            file.write(f"{os.getpid()} {what}\\n")
    parent = os.getppid()
    print("noise", file=sys.stderr)
    for line in sys.stdin:
        task, end = line.strip(), time.monotonic() + 100
        note(task)
        if task == "crash":
            os._exit(1)
        while task.startswith("until") and len(log.read_text().splitlines()) < int(task.split()[1]):
            assert time.monotonic() < end
            time.sleep(0.01)
        while task == "forever" or (task == "orphan" and os.getppid() == parent):
            assert time.monotonic() < end
            time.sleep(0.01)
        try:
            print("done", flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    note("end")
"""


def _told(log: Path) -> list[tuple[int, str]]:
    """Return what processes have noted: who, and what."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(process), what) for process, _, what in (line.partition(" ") for line in lines)]


def _do(log: Path, tasks: list[str], most: int) -> list[tuple[int, str]]:
    work_off(tasks, ["-c", WORKER, str(log)], most)
    return _told(log)


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def _elsewhere(log: Path, tasks: list[str]) -> subprocess.Popen[str]:
    """Start another process that has two do the tasks."""
    script = (
        "import signal\nfrom tpplan.exec.toolchain.kernel_cache import work_off\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin without one
        f"work_off({tasks}, {['-c', WORKER, str(log)]}, 2)"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=environ)


def test_a_process_does_one_task_after_the_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is started once, does all in order, and ends by itself; what it says on the way is not shown."""
    told = _do(tmp_path / "log", ["a", "b", "c"], 1)
    assert [what for _, what in told] == ["a", "b", "c", "end"]
    assert len({process for process, _ in told}) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("most", "expected"), [(2, 2), (9, 5)])
def test_there_are_no_more_processes_than_allowed_and_than_tasks(most: int, expected: int, tmp_path: Path) -> None:
    """Each task is done once, and all processes that there may be have a part in it."""
    tasks = [f"until {expected}"] * expected + [f"until {expected + 1}"] * (5 - expected)
    told = _do(tmp_path / "log", tasks, most)
    assert sorted(what for _, what in told if what != "end") == sorted(tasks)
    assert len({process for process, _ in told}) == expected


def test_nothing_waits_behind_a_long_task(tmp_path: Path) -> None:
    """The first takes until all others were begun: the other process does them all."""
    told = _do(tmp_path / "log", ["until 5", "a", "b", "c", "d"], 2)
    (long,) = (process for process, what in told if what == "until 5")
    assert [what for process, what in told if process != long] == ["a", "b", "c", "d", "end"]


def test_a_crash_costs_one_task(tmp_path: Path) -> None:
    """It is not tried again, and what comes behind it is done by a new process."""
    told = _do(tmp_path / "log", ["a", "crash", "b", "c"], 1)
    assert [what for _, what in told] == ["a", "crash", "b", "c", "end"]
    first, second = dict.fromkeys(process for process, _ in told)
    assert told == [(first, "a"), (first, "crash"), (second, "b"), (second, "c"), (second, "end")]


def test_processes_that_cannot_work_at_all_are_given_up(tmp_path: Path) -> None:
    """Where each dies at once, as without a compiler, every task is tried once, and nothing raises or hangs."""
    starts = tmp_path / "starts"
    script = "import sys; open(sys.argv[1], 'a').write('.'); sys.exit(1)"
    work_off(["a", "b", "c"], ["-c", script, str(starts)], 1)
    assert starts.read_text() == "..."


def test_where_no_process_can_be_started_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wanted the tasks done finds out by what is missing, as where processes die."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert _do(tmp_path / "log", ["a", "b"], 2) == []


def test_nothing_to_do_starts_nothing(tmp_path: Path) -> None:
    """No task, no process."""
    assert _do(tmp_path / "log", [], 2) == []


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    """It is raised as soon as it comes, though only the parent is told, and no task is begun any more."""
    log = tmp_path / "log"
    with _elsewhere(log, ["forever", "forever", "never"]) as parent:
        _until(lambda: len(_told(log)) == 2)
        parent.send_signal(signal.SIGINT)
        _, said = parent.communicate(timeout=60)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert [what for _, what in _told(log)] == ["forever", "forever"]
    assert all(_is_gone(process) for process, _ in _told(log))


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """One that dies without a word leaves none that waits for more tasks, for their inputs end with it."""
    log = tmp_path / "log"
    with _elsewhere(log, ["orphan", "orphan", "never"]) as parent:
        _until(lambda: len(_told(log)) == 2)
        parent.kill()
    _until(lambda: len(_told(log)) == 4)
    assert [what for _, what in _told(log)] == ["orphan", "orphan", "end", "end"]
