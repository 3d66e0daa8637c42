"""Processes that measure: their lines as they come, why they failed, and that nothing of them is left."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import children

if TYPE_CHECKING:
    from pathlib import Path


_SAY = "import os, sys; print(*(os.environ[x] for x in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')), flush=True)"


def test_only_the_first_process_is_heard(tmp_path: Path) -> None:
    """Each is told which one it is."""
    lines: list[str] = []
    assert children.run([sys.executable, "-c", _SAY], 2, 60, lines.append, tmp_path) == ""
    assert lines == ["0 2 127.0.0.1"]


def test_a_process_that_fails_ends_all(tmp_path: Path) -> None:
    """The others, which would wait for it for ever, are ended, and what it said is told."""
    code = f"{_SAY}\nif os.environ['RANK'] == '0': import time; time.sleep(1000)\nsys.exit('no memory left')"
    failure = children.run([sys.executable, "-c", code], 2, 900, lambda _: None, tmp_path)
    assert failure == "ended with [-9, 1]\nno memory left"


def test_a_process_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    """Rows that were told before are kept."""
    lines: list[str] = []
    code = f"{_SAY}\nimport time\ndef stuck(): time.sleep(1000)\nstuck()"
    failure = children.run([sys.executable, "-c", code], 1, 2, lines.append, tmp_path)
    assert failure.startswith("not done after 2 s\n")
    assert "in stuck" in failure
    assert lines == ["0 1 127.0.0.1"]


@pytest.mark.parametrize(("then", "end"), [("time.sleep(60)", "not done after 2 s"), ("sys.exit(3)", "ended with [3]")])
def test_nothing_that_a_run_started_is_left(then: str, end: str, tmp_path: Path) -> None:
    """Be it that the run hung, and was ended, or that it failed by itself."""
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import subprocess, sys, time\npipe = open('pipe', 'wb', 0)\npipe.write(b'here')\n"
        f"subprocess.Popen(['sleep', '60'], pass_fds=[pipe.fileno()])\n{then}"
    )
    failure = children.run([sys.executable, "-c", code], 1, 2, lambda _: None, tmp_path)
    assert failure.startswith(end)
    assert os.read(read, 4) == b"here"
    select.select([read], [], [], 10)  # until nobody can write
    assert os.read(read, 4) == b""
    os.close(read)
