"""What the tests of the probe share: drivers that say what was recorded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.nvml_replay import RECORDINGS, Replay
from tpplan.hardware.probe import amd_smi, nvml, rocm_smi

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tpplan.hardware.probe import DeviceReport
    from tpplan.hardware.probe.system_memory import SystemMemory


NOBODY = 1
ERROR = {"error": 3}


def nvidia_said(
    recording: str,
    environ: Mapping[str, str] | None = None,
    own_pid: int = NOBODY,
    new: Mapping[str, object] | None = None,
    system: SystemMemory | None = None,
) -> DeviceReport:
    """Return what a recording of NVML tells, with some answers replaced."""
    return nvml.read(Replay(recording, new), environ or {}, own_pid, system)


def amd_said(
    recording: str,
    environ: Mapping[str, str] | None = None,
    own_pid: int = NOBODY,
    system: SystemMemory | None = None,
) -> DeviceReport:
    """Return what a recording of amd-smi (its answers by command) or rocm-smi tells."""
    text = (RECORDINGS / f"{recording}.json").read_text()
    if not recording.startswith("amd_smi"):
        return rocm_smi.read(text, environ or {}, own_pid, system)
    answers = {command: json.dumps(answer) for command, answer in json.loads(text).items()}
    return amd_smi.read(answers, environ or {}, own_pid, system)


def install(folder: Path, script: str, name: str = "rocm-smi") -> None:
    """Make a shell script a program of a folder."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
