"""Plan files on disk: whole or not at all, with the mode and the links that they had."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import attrs
import pytest

from tests.codec_cases import PLAN, TEXT
from tpplan.errors import PlanError, TpplanError
from tpplan.files import text
from tpplan.planfile import codec


def test_save_and_load(tmp_path: Path) -> None:
    """A saved plan loads equal, and its file is the canonical text with LF ends."""
    path = tmp_path / "plan.json"
    codec.save(PLAN, path)
    assert path.read_bytes() == TEXT.encode()
    assert codec.load(path) == PLAN
    assert codec.load(str(path)) == PLAN


def test_load_names_the_file(tmp_path: Path) -> None:
    """The error about a file names the file."""
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(PlanError, match=r"bad\.json has a problem"):
        codec.load(path)


@pytest.mark.parametrize("path", ["missing.json", "", ".", "x" * 300, "a\0b", "plan.json/below"])
def test_unreadable(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read is an error that names it; it is not called a bad plan."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(TEXT)
    with pytest.raises(TpplanError, match="cannot read ") as caught:
        codec.load(path)
    assert not isinstance(caught.value, PlanError)


def test_a_directory_of_plans(tmp_path: Path) -> None:
    """Who names a directory is told to name one of its files, and which commands take several."""
    hint = r"name one of its files; validate and check also take several, such as .*/\*\.json"
    with pytest.raises(TpplanError, match=rf"Is a directory\nhint: {hint}"):
        codec.load(tmp_path)


_UNWRITABLE = ["", ".", "x" * 300, "new/" + "x" * 300, "new/er/a\0b", "plan.json/below", "/dev/full"]


@pytest.mark.parametrize("path", _UNWRITABLE)
def test_unwritable(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is an error that names it, and no directory or part of it is left behind."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text("old")
    with pytest.raises(TpplanError, match="cannot write "):
        codec.save(PLAN, path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert Path("plan.json").read_text() == "old"


def test_missing_directories_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in directories that are missing is written with them; where writing fails, those that were made go."""
    path = tmp_path / "new" / "er" / "plan.json"
    codec.save(PLAN, path)
    assert codec.load(path) == PLAN
    (tmp_path / "old").mkdir()
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("disk full")))
    with pytest.raises(TpplanError, match="disk full"):
        codec.save(PLAN, tmp_path / "old" / "a" / "b" / "plan.json")
    assert not list((tmp_path / "old").iterdir())


def test_invalid_plan_is_not_written(tmp_path: Path) -> None:
    """A plan that could not be loaded again is not written."""
    with pytest.raises(PlanError, match="TP018"):
        codec.save(attrs.evolve(PLAN, devices=(), memory=()), tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace"])
def test_failure_half_way(tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk fails in the middle, the old file is whole and no other file remains."""
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(TpplanError, match=r"cannot write .*No space left on device"):
        codec.save(PLAN, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle leaves the old file and nothing else."""
    path = tmp_path / "plan.json"
    path.write_text("old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        codec.save(PLAN, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left(tmp_path: Path) -> None:
    """The next save of the same file removes what is an hour old, and nothing else."""
    path = tmp_path / "plan.json"
    name = f".plan.json.{'0' * 12}.tpplan-new"
    others = [".plan.json", f".plan.json.{'0' * 12}", f".other.json.{'0' * 12}.tpplan-new", f"x{name}", f"{name}x"]
    young = f".plan.json.{'1' * 12}.tpplan-new"
    for each in (name, *others, young):
        (tmp_path / each).touch()
        if each != young:
            os.utime(tmp_path / each, (0, 0))
    (tmp_path / name.replace("0", "2")).mkdir()
    codec.save(PLAN, path)
    assert {each.name for each in tmp_path.iterdir()} == {"plan.json", *others, young, name.replace("0", "2")}


def test_being_killed_leaves_what_is_removed(tmp_path: Path) -> None:
    """Kill -9 in the middle of a save leaves a file of the name that the next one looks for."""
    code = (
        "import os, signal\n"
        "from tpplan.files import text\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"text.save_text('text', {str(tmp_path / 'plan.json')!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    codec.save(PLAN, tmp_path / "plan.json")
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_unchanged_file_is_left_alone(tmp_path: Path) -> None:
    """Saving what is there already does not touch the file; saving something else replaces it."""
    path = tmp_path / "plan.json"
    codec.save(PLAN, path)
    os.utime(path, ns=(1, 1))
    before = path.stat()
    codec.save(PLAN, path)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    text.save_text(TEXT.replace("2048", "4096"), path)
    assert path.stat().st_mtime_ns != 1
    assert path.read_text(encoding="utf-8") == TEXT.replace("2048", "4096")


def test_mode_is_kept(tmp_path: Path) -> None:
    """A replaced file keeps its permissions; a new one gets those that any new file gets."""
    path, other = tmp_path / "plan.json", tmp_path / "other"
    path.write_text("old")
    path.chmod(0o640)
    codec.save(PLAN, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    other.write_text("")
    codec.save(PLAN, tmp_path / "new.json")
    assert (tmp_path / "new.json").stat().st_mode == other.stat().st_mode


def test_read_only_file_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be written is not replaced either, though its folder would allow that."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(TpplanError, match="Permission denied"):
        codec.save(PLAN, path)
    assert path.read_text() == "old"


def test_symbolic_links_stay(tmp_path: Path) -> None:
    """Saving through a symbolic link replaces the file it points to, present or not yet."""
    (tmp_path / "real").mkdir()
    for name in ("old.json", "new.json"):
        link, real = tmp_path / name, tmp_path / "real" / name
        link.symlink_to(real)
        if name == "old.json":
            real.write_text("old")
        codec.save(PLAN, link)
        assert link.is_symlink()
        assert codec.load(real) == PLAN


def test_pipes_are_written_to() -> None:
    """A pipe is written to, not replaced."""
    reading, writing = os.pipe()
    text.save_text("text\n", f"/dev/fd/{writing}")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "text\n"
