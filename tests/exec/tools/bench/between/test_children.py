"""Processes that measure: their lines as they come, why they failed, and that nothing of them is left."""

from __future__ import annotations

import os
import select
import sys
import time
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tpplan.exec.tools.bench.between import children

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from pathlib import Path


_SAY = "import os, sys; print(*(os.environ[x] for x in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')), flush=True)"


def test_only_the_first_process_is_heard(tmp_path: Path) -> None:
    """Each is told which one it is."""
    lines: list[str] = []
    assert children.run([sys.executable, "-c", _SAY], 2, 60, lines.append, tmp_path) == ""
    assert lines == ["0 2 127.0.0.1"]


def test_multicast_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In NCCL and in torch's symmetric memory, whatever the environment says; tables say so."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    code = f"import os; print(*(os.environ[x] for x in {names}), flush=True)"
    lines: list[str] = []
    assert children.run([sys.executable, "-c", code], 1, 60, lines.append, tmp_path) == ""
    assert lines == ["0 1"]
    assert "NCCL_NVLS_ENABLE=0" in children.NO_MULTICAST


def test_a_process_that_fails_ends_all(tmp_path: Path) -> None:
    """The others, which would wait for it for ever, are ended, and what it said is told."""
    code = f"{_SAY}\nif os.environ['RANK'] == '0': import time; time.sleep(1000)\nsys.exit('no memory left')"
    failure = children.run([sys.executable, "-c", code], 2, 900, lambda _: None, tmp_path)
    assert failure == "process 1 ended with exit code 1\nno memory left"


@pytest.mark.parametrize(
    ("fault", "end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", "Segmentation fault"),
        ("os.abort()", "SIGABRT", "Aborted"),
    ],
)
def test_a_fault_is_told_with_its_place(fault: str, end: str, told: str, tmp_path: Path) -> None:
    """Which process it was, the signal by its name, and where Python was; no names of modules."""
    (tmp_path / "faulty.py").write_text(
        f"import _ctypes, os, signal, threading, time\n\ndef fail():\n    {fault}\n\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(1000)\nfail()\n"
    )
    failure = children.run([sys.executable, "faulty.py"], 2, 900, lambda _: None, tmp_path)
    how, _, said = failure.partition("\n")
    assert how == f"process 1 was ended by {end}"
    assert children.cause(said) == (
        f"Fatal Python error: {told}; in fail ({tmp_path.name}/faulty.py:4), <module> ({tmp_path.name}/faulty.py:9)"
    )


def test_the_cause_of_what_says_no_fault_is_its_last_line() -> None:
    """An exception's; what C++ says before it aborts comes first, and names of modules never count."""
    assert children.cause("Traceback\n  File 'x'\nValueError: no link\n") == "ValueError: no link"
    assert children.cause("") == ""
    abort = "terminate called after throwing\n  what():  no memory\nFatal Python error: Aborted\nExtension modules: a"
    assert children.cause(abort) == "what():  no memory; Fatal Python error: Aborted"
    late = 'Timeout (0:02:00)!\nThread 0x1 (most recent call first):\n  File "/a/b/c.py", line 7 in wait\n'
    assert children.cause(late) == "Timeout (0:02:00)!; in wait (b/c.py:7)"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is to take the lines of a run; once there is one, a thousand seconds of it have gone by."""
    said: list[str] = []
    asked = count()  # the first time for the start of the run

    def now() -> float:
        return time.monotonic() + (1000 if next(asked) and said else 0)

    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    return said


def test_a_process_that_hangs_is_ended_and_says_where(lines: list[str], tmp_path: Path) -> None:
    """Rows that were told before are kept."""
    code = f"import time\ndef stuck():\n    {_SAY}\n    time.sleep(1000)\nstuck()"
    failure = children.run([sys.executable, "-c", code], 1, 900, lines.append, tmp_path)
    assert failure.startswith("not done after 900 s\n")
    assert "in stuck" in failure
    assert lines == ["0 1 127.0.0.1"]


@pytest.mark.parametrize(
    ("then", "end"),
    [("print('here')\ntime.sleep(1000)", "not done after 900 s"), ("sys.exit(3)", "process 0 ended with exit code 3")],
    ids=["hangs", "fails"],
)
def test_nothing_that_a_run_started_is_left(then: str, end: str, lines: list[str], tmp_path: Path) -> None:
    """Be it that the run hung, and was ended, or that it failed by itself."""
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import subprocess, sys, time\npipe = open('pipe', 'wb', 0)\npipe.write(b'here')\n"
        f"subprocess.Popen(['sleep', '1000'], pass_fds=[pipe.fileno()])\n{then}"
    )
    failure = children.run([sys.executable, "-c", code], 1, 900, lines.append, tmp_path)
    assert failure.startswith(end)
    assert os.read(read, 4) == b"here"
    select.select([read], [], [], 60)  # until nobody can write
    assert os.read(read, 4) == b""
    os.close(read)


def test_who_starts_processes_can_end_them(tmp_path: Path) -> None:
    """As Ctrl-C does not reach them."""

    def end(processes: Sequence[subprocess.Popen[str]]) -> None:
        processes[1].terminate()

    failure = children.run([sys.executable, "-c", "import time; time.sleep(900)"], 2, 900, print, tmp_path, started=end)
    assert failure == "process 1 was ended by SIGTERM"
