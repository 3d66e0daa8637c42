"""The survey of real GPUs: compiling uses what it measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tpplan.exec import compile as compile_plan
from tpplan.exec.tools.survey import survey
from tpplan.exec.tools.survey.timer import synthetic_plan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.multi_gpu
def test_real_gpus_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On real GPUs the survey ends with thresholds that compiling uses, and says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = survey.survey()
    assert report.thresholds
    assert not report.notes
    count = report.thresholds[0].devices
    with compile_plan(synthetic_plan(count), backend="cuda", devices=range(count)) as context:
        explanation = context.explain()
    assert explanation.limits.tuning == report.thresholds[0].tuning
    assert f"note: thresholds measured on {count} GPUs of this machine" in str(explanation)
    plan = synthetic_plan(count)
    with compile_plan(plan, backend="cuda", devices=range(count), transport="events") as context:
        assert not any(note.startswith("thresholds") for note in context.explain().notes)  # it has none
