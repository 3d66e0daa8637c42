"""What runs plans on virtual devices needs torch, no numpy and nothing for GPUs, as ``exec`` and ``generate`` say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import tpplan
from benchmarks.common import random_checkpoint
from tests.bench_decode_cases import CONFIG
from tpplan.exec.tools.bench.between import children

if TYPE_CHECKING:
    from pathlib import Path

#: Runs commands, one after the other, where some packages cannot be found.
PROBE = """
import importlib.abc, json, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from tpplan.__main__ import main
sys.exit([words for words in json.loads(sys.argv[1]) if main(words)] or 0)
"""

#: Packages that are for GPUs.
FOR_GPUS = ("cuda", "llvmlite", "numba", "numba_cuda")

#: Runs a plan in a process that says which of its devices are its own, where these packages cannot be found.
OWNING = (
    PROBE.partition("from tpplan")[0]
    + """
import tpplan, tpplan.exec
with tpplan.exec.process_group() as group:
    with tpplan.exec.compile(tpplan.load(sys.argv[1]), backend="cpu", group=group, own=[0, 1]) as context:
        print(context.processes, context.tell("told"))
"""
)

COMMANDS = (
    ["selftest", "plan.json", "--transport", "events"],
    ["generate", "plan.json", "--model", ".", "--token-ids", "5,17", "--max-new-tokens", "2"],
    ["bench", "plan.json", "--sizes", "1KiB", "--rounds", "2"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small checkpoint and its plan."""
    folder = tmp_path_factory.mktemp("tiny")
    random_checkpoint.write(folder, CONFIG)
    gpus = [tpplan.Device(name="virtual", budget_bytes=2**30, overhead_bytes=0)] * 2
    tpplan.plan(tpplan.read_model(folder), gpus, max_rows=16).save(folder / "plan.json")
    return folder


def run(folder: Path, commands: list[list[str]], *missing: str) -> subprocess.CompletedProcess[str]:
    """Run commands in a process that lacks some packages."""
    words = [sys.executable, "-W", "default", "-c", PROBE, json.dumps(commands), *missing]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_virtual_devices_need_no_cuda(folder: Path) -> None:
    """Commands that run plans do so on virtual devices where neither CUDA's bindings nor numba nor numpy are installed.

    They say nothing of that: what torch warns of when it is imported without numpy is left out.
    """
    done = run(folder, [[*words, "--backend", "cpu"] for words in COMMANDS], "numpy", *FOR_GPUS)
    assert done.returncode == 0, done.stderr
    assert not re.search("numpy|warning", done.stderr, re.IGNORECASE)


def test_processes_on_virtual_devices_need_no_cuda(folder: Path) -> None:
    """Nor do processes that share out the devices of a plan, of which one may own all."""
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(children._free_port())}
    words = [sys.executable, "-c", OWNING, "plan.json", *FOR_GPUS]
    done = subprocess.run(
        words, cwd=folder, env=os.environ | launcher, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "1 ['told']\n"), done.stderr


def test_torch_is_named_where_it_is_missing(folder: Path) -> None:
    """Commands that run plans say that torch is not installed, and what installs it, whichever engine is asked for."""
    engines = [[*COMMANDS[1], "--engine", engine] for engine in ("auto", "tpplan", "transformers")]
    asked = [*map(list, COMMANDS), *engines]
    done = run(folder, asked, "torch", *FOR_GPUS)
    assert done.stdout == ""
    # Python is called as the search path has it, where it leads to this one at all.
    missing = r"error: running a plan( by transformers)? needs torch, which is not installed\nhint: .+ -m pip install "
    assert len(re.findall(missing, done.stderr)) == len(asked), done.stderr
