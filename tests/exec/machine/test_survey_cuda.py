"""The survey of real GPUs: compiling uses what it measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tpplan.exec import compile as compile_plan
from tpplan.exec.tools.survey import speeds, survey
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


@pytest.mark.multi_gpu
def test_measured_speeds_are_those_of_gpus() -> None:
    """Reading is no slower than half of copying, nor twice as fast; kernels and sums take some microseconds."""
    found = speeds.measure()
    assert len(found.gpus) == torch.cuda.device_count()
    for gpu in found.gpus:
        assert gpu.copy_bytes_per_second / 2 < gpu.read_bytes_per_second < 2 * gpu.copy_bytes_per_second
        assert 100 < gpu.boundary_ns < 10**5
        assert gpu.matrix_flops_per_second > 10**12
    assert {(link.first, link.second) for link in found.links} >= {(0, 1)}
    assert all(500 < link.latency_ns < 10**6 for link in found.links)
