"""The streams of a command: colours, widths and progress on a terminal, and pipes, full disks and closed streams."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.cli_cases import LLAMA_8B, ROOT, folder, written_plans  # noqa: F401 (for every test here)
from tests.codec_cases import FIXTURE, TEXT
from tests.command import command
from tpplan import __version__


@pytest.fixture
def plans() -> tuple[str, str]:
    """Return plans of one model for different GPUs."""
    return written_plans()


COLOUR = re.compile(r"\x1b\[")


def test_colour_only_on_a_terminal(plans: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Colour is for terminals, adds nothing but colour, and goes with NO_COLOR, --plain or a dumb terminal."""
    off = command("show", plans[0]).out
    assert not COLOUR.search(off)
    on = command("show", plans[0], terminal=True).out
    assert COLOUR.search(on)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((100, 24)))
    on = command("show", plans[0], terminal=True).out
    assert [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", on).splitlines()] == off.splitlines()
    assert command("show", plans[0], "--plain", terminal=True).out == off
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert command("show", plans[0], terminal=True).out == off
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert COLOUR.search(command("show", plans[0]).out)


def test_terminal_width_is_used(plans: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide terminal gets longer bars."""
    monkeypatch.setenv("NO_COLOR", "1")
    bars = []
    for columns in (90, 130):
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_, n=columns, **__: os.terminal_size((n, 24)))
        bars.append(command("show", plans[0], terminal=True).out.count("█"))
    assert bars[0] < bars[1]


def test_terminal_shows_progress_and_cleans_up(plans: tuple[str, str]) -> None:
    """On a terminal long work says what it is doing and takes it back; in a pipe it is silent."""
    assert command("check", *plans, "--model", LLAMA_8B).err == ""
    err = command("check", *plans, "--model", LLAMA_8B, terminal=True).err
    assert err.startswith(f"reading {LLAMA_8B} …")
    assert err.rpartition("\r")[2] == ""


def test_progress_stays_on_one_line() -> None:
    """A long or odd path is shortened and escaped, because what has been wrapped cannot be taken back."""
    with patch("tpplan.cli.console.get_terminal_size", lambda: os.terminal_size((60, 24))):
        err = command("inspect", f"no\x1b[2J/{'long/' * 30}model", terminal=True).err
    said = err.partition("\r")[0]
    assert said.startswith("reading no\\u001b[2J/")
    assert said.endswith("model …")
    assert len(said) == 59


def test_ascii_stream(plans: tuple[str, str]) -> None:
    """A stream that cannot write block characters gets ASCII; a document stays UTF-8."""
    assert "####" in command("show", plans[0], encoding="ascii").out
    Path("ü.json").write_text(TEXT, encoding="utf-8")
    assert b"RTX 3060 (B\xc3\xbcro)".decode() in command("show", "ü.json", "--json").out


def _shell(line: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    tpplan = f"{sys.executable} -m tpplan"
    return subprocess.run(
        ["bash", "-c", line.replace("TPPLAN", tpplan)],  # noqa: S607
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    "line", [f"TPPLAN show {FIXTURE} --html -", f"FORCE_COLOR=1 TPPLAN show {FIXTURE}", "TPPLAN plan --help"]
)
def test_closed_pipe_is_quiet(line: str) -> None:
    """A reader that leaves early is no error worth a word."""
    reading, writing = os.pipe()
    os.close(reading)
    done = _shell(line, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_an_error() -> None:
    """What standard output cannot take makes the exit code 2."""
    done = _shell(f"TPPLAN show {FIXTURE} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write")
    assert "Traceback" not in done.stderr


def test_closed_streams_are_no_bug(tmp_path: Path) -> None:
    """A service may close any standard stream; what is written to it goes nowhere, and files are written."""
    assert _shell(f"TPPLAN show {FIXTURE} --svg a.svg --json >&- 2>&-").returncode == 0
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").endswith("</svg>\n")
    assert _shell("TPPLAN show missing.json --json >&- 2>&-").returncode == 2
    done = _shell("TPPLAN show - <&-")
    assert done.returncode == 2
    assert "standard input" in done.stderr.splitlines()[0]


def test_hints_follow_what_they_are_about(plans: tuple[str, str]) -> None:
    """Where both streams go to one file, as in a log, the hint stands after the answer."""
    Path("bad.json").write_text(Path(plans[0]).read_text(encoding="utf-8").replace('"batch": 1', '"batch": 0'))
    assert _shell("TPPLAN validate bad.json 2>&1").stdout.splitlines()[-1].startswith("hint: ")


def test_module_is_the_command() -> None:
    """``python -m tpplan`` does what the script does, and pipes into itself."""
    gpus = "--gpus 24GiB,12GiB --context 4096"
    done = _shell(f"TPPLAN plan {LLAMA_8B} {gpus} -o - | TPPLAN validate - && TPPLAN --version")
    assert done.stdout == f"-: valid\ntpplan {__version__}\n"
    assert done.returncode == 0
