"""The command that times a plan's operations, on real GPUs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import tpplan
from tests.command import command
from tests.exec.selftest_cases import EXAMPLES
from tests.exec.tools.bench.cases import OPERATIONS, SCHEMA, short_turns  # noqa: F401 (for every test here)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.multi_gpu
def test_the_command_on_gpus(tmp_path: Path) -> None:
    """On GPUs everybody's results are right, by calls and in graphs, and all links have rates."""
    model = tpplan.read_model(EXAMPLES.parent / "models/Llama-3.1-8B/config.json")
    tpplan.plan(model, tpplan.parse_devices("40GiB,20GiB"), cache=tpplan.Cache(tokens=4096)).save(
        tmp_path / "plan.json"
    )
    done = command("bench", tmp_path / "plan.json", "--rounds", "2", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    SCHEMA.validate(document)
    assert document["in_a_graph"] == 2 * 32 + 1
    assert [t for m in document["measured"] for t in m["timed"] if "failed" in t] == []
    who = {m["operation"]: [(t["by"], t["graph"]) for t in m["timed"]] for m in document["measured"]}
    ours, even = ([(by, graph) for graph in (False, True)] for by in ("tpplan", "even"))
    others = [("torch", False), ("NCCL", False), ("NCCL", True), ("staged", False)]
    assert who == {
        **dict.fromkeys(OPERATIONS, ours + others),
        "allgather": ours + even + others,
        "scatter": ours + even + [one for one in others if one[0] != "NCCL"],
        "gather": [("tpplan", False), ("even", False), ("torch", False), ("ExLlamaV2", False)],
    }
    assert len(document["limits"]) == 6
    assert all(m["least_ns"] > 0 for m in document["measured"])
