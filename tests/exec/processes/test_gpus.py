"""Processes with a GPU each: operations by kernels and by NCCL, graphs, the decoder, and one that is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tpplan.exec.tools.bench.between import children

ROOT = Path(__file__).parents[3]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "scenarios",
    [
        ("peer",),
        ("events",),
        ("graphs", "reach", "decoder"),
        ("late", "slow", "interrupted"),
        ("lost",),
        ("hidden", "peer", "graphs", "decoder"),
    ],
    ids="-".join,
)
def test_every_process_finds_what_is_right(scenarios: tuple[str, ...]) -> None:
    """One process for each GPU; see :mod:`tests.exec.processes.on_gpus`."""
    lines: list[str] = []
    words = [sys.executable, "-m", "tests.exec.processes.on_gpus", *scenarios]
    failure = children.run(words, torch.cuda.device_count(), 240, lines.append, ROOT)
    assert not failure
    assert [line.partition(":")[0] for line in lines] == [each for each in scenarios if each != "hidden"]
