"""Pinned memory that the system refuses: the hint names the limit that was hit."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest
import torch

from tpplan.errors import ExecutionError
from tpplan.exec.memory import pinning
from tpplan.exec.memory.arena import Arena
from tpplan.hardware.probe import system_memory

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of a plain machine with 64 GiB available and no limits."""
    files = {name: tmp_path / name for name in ("meminfo", "kernel", "limit", "used", "limit1", "used1")}
    files["meminfo"].write_text(f"MemTotal: {128 * 2**20} kB\nMemAvailable: {64 * 2**20} kB\n")
    files["kernel"].write_text("6.8.0-31-generic\n")
    files["limit"].write_text("max\n")
    files["used"].write_text("1234\n")
    monkeypatch.setattr(system_memory, "_MEMINFO", files["meminfo"])
    monkeypatch.setattr(pinning, "_KERNEL", files["kernel"])
    groups = ((files["limit"], files["used"]), (files["limit1"], files["used1"]))
    monkeypatch.setattr(pinning, "_GROUPS", groups)
    _lock(monkeypatch, resource.RLIM_INFINITY)
    return tmp_path


def _lock(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (most, -1) if what == resource.RLIMIT_MEMLOCK else None)


@pytest.mark.parametrize(
    ("files", "locked", "hint"),
    [
        ({}, None, "free host memory, of which the system pins a part at most"),
        ({"meminfo": "MemTotal: 4194304 kB\nMemAvailable: 524288 kB"}, 8, "free host memory: 512.00 MiB are available"),
        ({"limit": f"{3 * GIB}", "used": f"{3 * GIB - 2**20}"}, 8, "raise the container's limit of memory: 1.00 MiB"),
        ({"limit1": f"{GIB}", "used1": f"{GIB + 1}"}, None, "raise the container's limit of memory: 0 "),
        ({"kernel": "5.15.153.1-microsoft-standard-WSL2"}, 8, "raise memory= in .wslconfig: WSL2 pins a part of that"),
        ({}, 8 * 2**20, "raise the limit of locked memory, with ulimit -l or docker's --ulimit memlock=-1: 8.00 MiB"),
        ({}, GIB, "free host memory, of which"),
    ],
)
def test_the_hint_names_what_was_hit(
    files: dict[str, str], locked: int | None, hint: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the host, of the container, of WSL2, or what a process may lock; the budgets of GPUs are not it."""
    for name, text in files.items():
        machine.joinpath(name).write_text(text)
    if locked is not None:
        _lock(monkeypatch, locked)
    error = pinning.refused("no memory", GIB, RuntimeError("CUDA error: out of memory\nCompile with"), "plan for less")
    assert error.message == "no memory: CUDA error: out of memory"
    assert error.hint.startswith(hint)
    assert error.hint.endswith(", or plan for less")


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin")
def test_an_arena_says_so() -> None:
    """The memory of a context that cannot be pinned ends in such an error."""
    with pytest.raises(ExecutionError, match=r"^host: cannot allocate 64 pinned bytes on cpu: ") as caught:
        Arena(64, "cpu", "host", pinned=True)
    assert caught.value.hint == (
        "free host memory, of which the system pins a part at most, or plan with a smaller --max-rows"
    )
