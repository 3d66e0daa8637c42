"""What the tests of the probe share: drivers that say what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.nvml_replay import RECORDINGS, Replay
from tpplan.probe import amd, nvidia

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tpplan.probe import DeviceReport


NOBODY = 1
ERROR = {"error": 3}


def nvidia_said(
    recording: str,
    environ: Mapping[str, str] | None = None,
    own_pid: int = NOBODY,
    new: Mapping[str, object] | None = None,
) -> DeviceReport:
    """Return what a recording of NVML tells, with some answers replaced."""
    return nvidia.read(Replay(recording, new), environ or {}, own_pid)


def amd_said(recording: str, environ: Mapping[str, str] | None = None, own_pid: int = NOBODY) -> DeviceReport:
    """Return what a recording of rocm-smi tells."""
    return amd.read((RECORDINGS / f"{recording}.json").read_text(), environ or {}, own_pid)


def rocm_smi(folder: Path, script: str) -> None:
    """Make a shell script the rocm-smi of a folder."""
    program = folder / "rocm-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
