"""What ``tpplan generate`` reads of a checkpoint while it imports torch."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from attrs import frozen

from tests.command import command
from tests.decoder_cases import model_of
from tpplan.decoder.generation import read_ahead

if TYPE_CHECKING:
    from tests.command import Done


@frozen
class Machine:
    """A checkpoint, its plan, and what the system is asked for.

    Attributes:
        directory: directory of the checkpoint, with a plan.json.
        sent: bytes that were sent, by path.
    """

    directory: Path
    sent: dict[str, int]

    def generate(self) -> Done:
        """Generate a token, and wait until all that was begun beside has ended."""
        before = {*threading.enumerate()}
        plan = self.directory / "plan.json"
        done = command("generate", plan, "--model", self.directory, "--token-ids", "5,7", "--backend", "cpu")
        for thread in {*threading.enumerate()} - before:
            thread.join(20)
        return done


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine that notes what is sent."""
    directory = shutil.copytree(model_of("mistral").directory, tmp_path / "tiny")
    (directory / "notes.safetensors.bak").write_bytes(b"no weights")
    assert command("plan", directory, "--gpus", "1GiB,2GiB", "--context", 64, "-o", directory / "plan.json").code == 0
    sent: dict[str, int] = {}

    def send(target: int, source: int, offset: int, count: int) -> int:
        assert os.path.samestat(os.fstat(target), Path(os.devnull).stat())
        name = str(Path(f"/proc/self/fd/{source}").readlink())
        assert offset == sent.get(name, 0)
        got = len(os.pread(source, min(count, 10**5), offset))  # less than asked for, which is allowed
        sent[name] = offset + got
        return got

    monkeypatch.setattr(os, "sendfile", send, raising=False)
    return Machine(directory, sent)


def test_files_with_weights_are_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From their start to their end, and no others."""
    ended = Event()
    monkeypatch.setattr(read_ahead, "Event", lambda: SimpleNamespace(is_set=lambda: False, set=ended.set))
    assert machine.generate().code == 0
    assert ended.is_set()
    [weights] = machine.directory.glob("*.safetensors")
    assert machine.sent == {str(weights): weights.stat().st_size}


def test_reading_ends_with_the_imports(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For then the loader reads itself."""
    monkeypatch.setattr(os, "sendfile", lambda *_: 1)  # a file without an end
    before = {*threading.enumerate()}
    assert machine.generate().code == 0
    assert {*threading.enumerate()} <= before


def test_what_fails_is_not_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems without such a call, or for files that are gone: who needs them says so."""
    expected = machine.generate()
    for failing in (lambda *_: Path("/nothing").stat(), None):
        if failing:
            monkeypatch.setattr(os, "sendfile", failing)
        else:
            monkeypatch.delattr(os, "sendfile")
        done = machine.generate()
        assert (done.code, done.out) == (0, expected.out)
        assert [line.partition(":")[0] for line in done.err.splitlines()] == ["start", "time"]
