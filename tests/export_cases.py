"""Plans to export, and what was exported, as tests read it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tpplan
from tpplan.export.export import ENGINES, export

ROOT = Path(__file__).parent.parent
PATHS = {f"{path.parent.name}/{path.stem}": path for path in sorted((ROOT / "examples/plans").rglob("*.json"))}
NAMES = tuple(PATHS)

#: Plans by which each device holds as much of every axis, and those whose devices are merely alike.
EVEN = {
    *("Llama-3.1-70B/4xA100-80GB", "Llama-3.1-8B/2xRTX3060", "Mixtral-8x7B/2xA100-80GB"),
    "gpt-oss-20b/2xRTX4060Ti-16GB",
}
ALIKE = {"DeepSeek-V3/8xH200", "DeepSeek-V3/8xMI300X", "Qwen3-Next-80B-A3B/2xH200"}


@cache
def plan_of(name: str) -> tpplan.SplitPlan:
    """Return an example plan."""
    return tpplan.load(PATHS[name])


def data_of(name: str) -> dict[str, Any]:
    """Return an example plan as its file has it."""
    data: dict[str, Any] = json.loads(PATHS[name].read_text(encoding="utf-8"))
    return data


def made(model: str, gpus: str, **options: Any) -> tpplan.SplitPlan:
    """Return a plan for an example model."""
    return tpplan.plan(tpplan.read_model(ROOT / "examples/models" / model), tpplan.parse_devices(gpus), **options)


def options_of(plan: tpplan.SplitPlan, engine: str) -> dict[str, str]:
    """Return the options of an exported command, those without a value as empty texts."""
    report = export(plan, engine)
    assert report.possible, report.reasons
    words = report.argv[len(ENGINES[engine].command) :]
    options: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in options
            options[word] = ""
        else:
            options[next(reversed(options))] += word
    return options
