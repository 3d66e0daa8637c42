"""Processes of torch.distributed: they agree on a plan or say why not, and notice when another one has gone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contexts import UNEVEN
from tests.exec.processes.scenarios import WORLDS, results
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec import HOST
from tpplan.exec import compile as compile_plan
from tpplan.files.codec import dumps

ROOT = Path(__file__).parents[3]
REFUSED = "ExecutionError: the plan for Tiny cannot run here:"

#: What is wrong in each scenario that is refused.
PROBLEMS = {
    "another_plan": (
        r"plan: Tiny \((\w+)\) in process 1, Tiny \((?!\1)\w+\) in all others\n"
        r"  plan.request.batch: 2 in process 1, 1 in all others"
    ),
    "other_arguments": (
        r"max_rows: 5 in process 1, 12 in all others\n  dtype: float16 in process 2, bfloat16 in all others"
    ),
    "other_timeouts": "timeout: default in process 0, 30 s in process 1, 60 s in process 2",
    "wrong_timeout": r"process 2: timeout is inf, expected 0\.001 to 86400 seconds",
    "owned_twice": (
        r"devices\[0\]: processes 0, 1 own it, expected one\n  devices\[2\]: processes 1, 2 own it, expected one"
    ),
    "owned_by_nobody": (
        r"devices\[0\]: processes 0, 1, 2 own it, expected one\n"
        r"  devices\[2\]: no process owns it, expected one\n"
        r"  devices\[3\]: no process owns it, expected one"
    ),
    "wrong_own": (
        r"process 0: own: \[0, 9\] are not different devices from 0 to 3\n"
        r"  process 1: own: \[2, 2\] are not different devices from 0 to 3\n"
        r"  process 2: own: the plan uses none of \[1\]"
    ),
    "without_gpus": "all processes: devices: this process owns 1, this machine has 0 CUDA devices",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return what each process has found in each scenario; None for one that was killed."""
    folder = tmp_path_factory.mktemp("worlds")
    (folder / "plan.json").write_text(dumps(UNEVEN))
    words = [sys.executable, "-m", "tests.exec.processes.scenarios", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for count, names in WORLDS.items():
        for i in range(count):
            file = folder / f"{count}-{i}.json"
            world = json.loads(file.read_text()) if file.exists() else {}
            assert "error" not in world, f"{world['error']}\n{done.stderr}"
            assert world or names == ("killed",), done.stderr
            for name in names:
                found[name].append(world.get(name))
    return dict(found)


@pytest.fixture(scope="module")
def truth() -> dict[str, dict[str, Any]]:
    """Return the results of all devices in a single process."""
    with compile_plan(UNEVEN, backend="cpu") as ctx:
        return results(ctx)


def assert_right(found: list[dict[str, dict[str, Any]]], truth: dict[str, dict[str, Any]]) -> None:
    """Compare what the devices of all processes have, and the host memory of each, with what they have in one."""
    host = str(HOST)
    for name, devices in truth.items():
        assert [len(each[name]) for each in found if host in each[name]] == [1] * len(found) * (host in devices)
        assert {d: x for each in found for d, x in each[name].items()} == devices, name
        assert host in devices or sum(len(each[name]) for each in found) == len(devices)


def test_by_default_each_process_owns_as_many(told: dict[str, list[Any]], truth: dict[str, dict[str, Any]]) -> None:
    """Devices in use are dealt out in order; operations are right, and a note says who owns what."""
    own, found, notes = zip(*told["by_default"], strict=True)
    assert own == ([0], [2], [3])
    assert_right([*found], truth)
    assert notes[0] == notes[1] == notes[2]
    assert "0 owns 0, 1 owns 2, 2 owns 3" in notes[0][0]
    assert "gloo" in notes[0][1]


def test_processes_may_own_devices_in_any_order(told: dict[str, list[Any]], truth: dict[str, dict[str, Any]]) -> None:
    """The group of all processes is the default if they say what they own; idle devices among it do not matter."""
    own, found = zip(*told["in_any_order"], strict=True)
    assert own == ([3], [0], [2])
    assert_right([*found], truth)


def test_processes_that_agree_on_another_model_are_not_told_that_they_differ(told: dict[str, list[Any]]) -> None:
    """What all of them have wrong is said once, with what helps: they already have the same plan and arguments."""
    ((message, hint),) = {*map(tuple, told["another_model"])}
    assert message.startswith("the plan for Tiny cannot run here")
    assert "all processes: " in message
    assert "process 0" not in message
    assert hint == "tpplan check compares a plan with its model; plan again for this machine and model"


def test_contexts_take_turns(told: dict[str, list[Any]], truth: dict[str, dict[str, Any]]) -> None:
    """Messages of two contexts of the same processes are not taken for each other."""
    for found in zip(*told["two_contexts"], strict=True):
        assert_right([*found], truth)


def test_some_processes_have_a_context(told: dict[str, list[Any]], truth: dict[str, dict[str, Any]]) -> None:
    """Processes are counted within the group; one that is not in it is told so, and may be in another."""
    (first, alone, second) = told["subgroups"]
    assert [own for own, _, _ in (first, alone, second)] == [[2], [0, 2, 3], [0, 3]]
    assert_right([first[1], second[1]], truth)
    assert_right([alone[1]], truth)
    uneven = "own: 3 devices are in use, which 2 processes cannot own equally many of"
    assert first[2] == second[2]
    assert first[2].startswith(f"{REFUSED}\n  all processes: {uneven}\nhint: ")
    assert re.match("ExecutionError: group: this process is not in .*\nhint: compile only in the processes", alone[2])


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_processes_get_the_same_error(name: str, told: dict[str, list[Any]]) -> None:
    """Whatever is wrong, and in whichever process, all are told what it is and where, and none goes on or waits."""
    if name == "without_gpus" and torch.cuda.is_available():
        pytest.skip("is about machines without GPUs")
    first, *others = told[name]
    assert re.fullmatch(f"{re.escape(REFUSED)}\n  {PROBLEMS[name]}\nhint: .+", first)
    assert others == [first, first]


def test_what_one_process_has_no_room_for_none_has(told: dict[str, list[Any]]) -> None:
    """All are told, and what the others have allocated they give back."""
    for i, (programmatic, late, built) in enumerate(told["no_room"]):
        for message in (programmatic, late):
            assert message.startswith(f"{REFUSED}\n  process 1: device 2 (GPU 2): too little memory\nhint: ")
        assert built == ["<TPContext Tiny, 1 devices>" if i == 1 else "<TPContext Tiny, closed>"]


def test_different_operations_end_in_errors(told: dict[str, list[Any]]) -> None:
    """Messages of one are not taken for those of another: each process says what it was in, now and from then on."""
    first, outsider, second = told["other_operations"]
    assert outsider is None
    for i, (names, (message, later)) in enumerate(zip(("all_reduce", "allgather"), (first, second), strict=True)):
        failure = f"process {i} failed in {names} by events of 2 rows of bfloat16: "
        assert message.startswith(f"ExecutionError: {failure}")
        assert "call the same operations in the same order" in message
        assert later.startswith(f"ExecutionError: the processes no longer agree: {failure}")


def test_a_process_that_is_killed_is_missed(told: dict[str, list[Any]], truth: dict[str, dict[str, Any]]) -> None:
    """The operation that waits for it, all later ones and the next compilation end in errors; closing does not."""
    (before, (message, later), again, closed), killed = told["killed"]
    assert killed is None
    assert all(before[name]["0"] == truth[name]["0"] for name in truth if name != "gather")
    failure = r"process 0 failed in [^ ]+ by events of 2 rows of bfloat16: process 1 is lost: (?!.*:\d)[^\n]+"
    assert re.match(f"ExecutionError: {failure}\nhint: see whether all processes run", message)
    assert re.match(f"ExecutionError: the processes no longer agree: {failure}\nhint: close the context", later)
    assert re.match(r"ExecutionError: the processes could not meet: process 1 is lost: (?!.*:\d).+\nhint: ", again)
    assert closed == "no error"


def test_without_processes_there_is_no_group() -> None:
    """Naming what a process owns is not enough: torch.distributed has to be initialised."""
    for arguments in ({"own": [0]}, {"own": range(4)}, {"group": object(), "own": (0,)}):
        with pytest.raises(ExecutionError, match=r"group: torch.distributed has no processes yet\nhint: call torch"):
            compile_plan(UNEVEN, backend="cpu", **arguments)


@pytest.mark.parametrize("own", [0, "0", {0}, True])
def test_own_is_a_list(own: Any) -> None:
    """Anything else is refused by name."""
    with pytest.raises(RequestError, match=r"own is .+, expected a list of devices of the plan\nhint: pass their"):
        compile_plan(UNEVEN, backend="cpu", own=own)
