"""The wheel is complete, contains nothing else, and works away from the source tree."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tpplan

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the hatchling that is here, so that no network is needed."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Install the wheel into a new environment that borrows our dependencies; return a way to run its scripts."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # A path in a .pth file does not read the .pth files in there, so the editable tpplan stays out of sight.
    (site,) = home.glob("lib/*/site-packages")
    (site / "borrowed.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    empty = tmp_path_factory.mktemp("empty")
    return lambda script, *args: _run(home / "bin" / script, *args, cwd=empty)


def test_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    """Every source file, the typing marker and the schemas are in the wheel; tests and benchmarks are not."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tpplan").rglob("*.py")}
    schemas = {f"tpplan/schemas/{p.name}" for p in (ROOT / "schemas").glob("*.json")}
    assert names == sources | schemas | {"tpplan/py.typed"}


def test_wheel_needs_four_packages(wheel: Path) -> None:
    """What is installed without extras is light, and the licence is inside."""
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    needs = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    base = {need.split(">")[0] for need in needs if "extra ==" not in need}
    assert base == {"attrs", "cattrs", "cyclopts", "rich"}
    assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


def test_installed_command_tells_its_version(installed: Callable[..., str]) -> None:
    """The script of the wheel runs the wheel's code and says the version that the metadata has."""
    where = installed("python", "-c", "import tpplan; print(tpplan.__file__)").strip()
    assert not Path(where).is_relative_to(ROOT)
    assert tpplan.__version__ in installed("tpplan", "--version")


def test_installed_command_plans_and_shows(installed: Callable[..., str]) -> None:
    """From an empty directory the wheel plans a model for uneven GPUs and reads its own file back."""
    model = ROOT / "examples" / "models" / "Llama-3.1-8B"
    installed("tpplan", "plan", model, "--gpus", "24GiB,12GiB", "--context", "8192", "-o", "plan.json")
    shown = json.loads(installed("tpplan", "show", "plan.json", "--json"))
    budgets = [device["budget_bytes"] for device in shown["plan"]["devices"]]
    assert budgets == [24 * 2**30, 12 * 2**30]
