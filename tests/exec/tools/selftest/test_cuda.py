"""The command that tests a compiled plan, on real GPUs."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

import tpplan
from tests.command import command
from tests.exec.selftest_cases import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.multi_gpu
def test_the_command_on_gpus(tmp_path: Path) -> None:
    """On GPUs all transports that are verified pass, in graphs and aside; torch's threads and current device stay."""
    sizes = tpplan.parse_devices("40GiB,20GiB")
    model = tpplan.read_model(EXAMPLES.parent / "models/Llama-3.1-8B/config.json")
    tpplan.plan(model, sizes, cache=tpplan.Cache(tokens=4096)).save(tmp_path / "plan.json")
    torch.cuda.set_device(1)
    before = torch.get_num_threads()
    done = command("selftest", tmp_path / "plan.json", "--json")
    assert done.code == 0
    assert done.err == ""
    report = json.loads(done.out)
    assert (report["backend"], report["refused"]) == ("cuda", [])
    schedules = Counter(one["schedule"] for one in report["tested"])
    assert schedules == {"plain": 8 * 3, "aside": 8 * 3, "captured": 5 * 3, "adversarial": 8 * 3}
    assert (torch.get_num_threads(), torch.cuda.current_device()) == (before, 1)
