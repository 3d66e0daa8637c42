"""The scripts of the page on plans in review, in a repository that is laid out as it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cli_cases import LLAMA_8B
from tests.command import command
from tpplan.reports.check import StaleReason

PAGE: Final = (Path(__file__).parents[2] / "docs/review-plans.md").read_text(encoding="utf-8")
(MANIFEST,) = re.findall(r"```toml\n(.*?\n)```\n", PAGE, re.DOTALL)
CHECK, TELL, ATTRIBUTES = re.findall(r"```sh\n(.*?\n)```\n", PAGE, re.DOTALL)
PLAN = "plans/llama/uneven.json"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with a plan, and make ``tpplan`` a command."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/tpplan"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tpplan "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("BASE", "HEAD")
    for key in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{key}_NAME", "A")
        monkeypatch.setenv(f"GIT_{key}_EMAIL", "a@example.org")
    folder = tmp_path / "repository"
    for name in ("models/llama", "machines", "plans/llama"):
        (folder / name).mkdir(parents=True)
    monkeypatch.chdir(folder)
    shutil.copy(LLAMA_8B / "config.json", "models/llama/config.json")
    Path("tpplan.toml").write_text(MANIFEST, encoding="utf-8")
    machine(24)
    plan()
    assert run("git init -q . && git add . && git commit -q -m plans").returncode == 0
    return folder


def machine(size: int) -> None:
    """Write the devices file, with so many GB on the first GPU."""
    gpu = {"name": "GPU", "memory_bytes": 2**35, "overhead_bytes": 2**29}
    gpus = [{**gpu, "budget_bytes": budget * 10**9} for budget in (size, 12)]
    Path("machines/uneven.json").write_text(json.dumps({"format_version": "1.0", "devices": gpus}), encoding="utf-8")


def plan() -> None:
    """Make the plans."""
    assert command("plan", "--all").code == 0


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as CI does, which lets bash go on after what fails."""
    bash = shutil.which("bash") or "bash"
    return subprocess.run([bash, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("repository")
def test_all_plans_are_checked() -> None:
    """Current plans pass; a stale and an invalid one fail, and each is told."""
    assert run(CHECK).returncode == 0
    Path("plans/llama/broken.json").write_bytes(Path(PLAN).read_bytes()[:-20])
    machine(20)
    done = run(CHECK)
    assert done.returncode == 1
    assert "plans/llama/broken.json: " in done.stdout
    assert f"{PLAN}: stale (devices)" in done.stdout
    assert "plans/llama/pair.json: current" in done.stdout
    assert "\n  tpplan plan --all\n" in done.stderr


def test_reviewers_are_told_what_moves(repository: Path) -> None:
    """The summary has a diff of every plan that changed, and the script succeeds."""
    machine(20)
    plan()
    done = run(TELL)
    assert (done.returncode, done.stderr) == (0, "")
    summary = (repository.parent / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith(f"### {PLAN}: changed\n\n#### Devices\n\n| ")
    assert "device 1 GPU gains 705.50 MiB of weights\n\n" in summary
    assert summary.endswith("\n2 plans since HEAD: 1 changed, 1 same\n")


@pytest.mark.parametrize("broken", ["old", "new"])
def test_what_cannot_be_compared_is_told(repository: Path, broken: str) -> None:
    """For a plan with an invalid version the summary has the error, in a block that ends, and the next plan."""
    whole, other = Path(PLAN).read_text(encoding="utf-8"), Path("plans/llama/pair.json")
    if broken == "old":
        Path(PLAN).write_text("{}", encoding="utf-8")
    assert run("git add . && git commit -q --allow-empty -m more").returncode == 0
    Path(PLAN).write_text(whole if broken == "old" else "{}", encoding="utf-8")
    other.unlink()
    done = run(TELL)
    assert (done.returncode, done.stderr) == (0, "")
    summary = (repository.parent / "summary.md").read_text(encoding="utf-8")
    name = f"HEAD:{PLAN}" if broken == "old" else PLAN
    assert f"### {PLAN}: changed\n\n- {name} has a problem:\n" in summary
    assert f"\n### {other}: deleted\n" in summary


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("script", ["BASE=nowhere\n", "tpplan() { return 127; }\n"])
def test_telling_fails_without_its_means(script: str) -> None:
    """A base that does not exist and a command that cannot run fail the script."""
    machine(20)
    plan()
    assert run(script + TELL).returncode != 0


@pytest.mark.usefixtures("repository")
def test_git_shows_screens() -> None:
    """A diff of git has the lines of the screen."""
    assert run(ATTRIBUTES).returncode == 0
    machine(20)
    plan()
    done = run("git diff -- plans")
    assert re.search(r"^\+0  GPU .*%$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.usefixtures("repository")
def test_git_shows_the_text_of_what_is_no_valid_plan() -> None:
    """A version of a plan that is invalid or of a newer format is compared as it is, and history stays readable."""
    assert run(ATTRIBUTES).returncode == 0
    path = Path("plans/llama/with 'quotes' and blanks.json")
    path.write_text('{"format_version": "2.0"}\n', encoding="utf-8")
    assert run("git add . && git commit -q -m newer").returncode == 0
    shutil.copy(PLAN, path)
    for script in ("git diff -- plans", "git commit -q -a -m older && git log -p -- plans"):
        done = run(script)
        assert (done.returncode, done.stderr) == (0, "")
        assert '\n-{"format_version": "2.0"}\n+' in done.stdout
        assert "\n+weights, cache and workspace are exact;" in done.stdout


def test_every_reason_is_explained() -> None:
    """The page says what to do about each reason that ``tpplan check`` gives."""
    told = PAGE.partition("| reason |")[2]
    assert [reason for reason in StaleReason if f"`{reason}`" not in told] == []
