"""Which versions the metadata asks for, which ones the pages say were tried, and which ones are pinned, agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Final = ("exec", "cu12", "cu13", "generate")


def _requirements(*extras: str) -> list[Requirement]:
    """Return what some extras need of others' packages."""
    groups = PROJECT["optional-dependencies"]
    found = [Requirement(text) for extra in extras for text in groups[extra]]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def _table() -> dict[str, tuple[str, list[str]]]:
    """Return the table of versions: what is needed of each package, and what was tried without a GPU."""
    text = (ROOT / "docs/executor.md").read_text(encoding="utf-8").partition("\n## Versions\n")[2]
    rows = re.findall(r"^\| (\S+) \| `(.+?)` \| (.+?) \|", text, re.MULTILINE)
    return {package: (needed, tried.split(", ")) for package, needed, tried in rows}


def _minors(versions: list[str]) -> list[str]:
    return ["{}.{}".format(*Version(version).release) for version in versions]


def test_the_table_needs_what_the_metadata_needs() -> None:
    """Python and every package of the executor's extras have a row, with the bounds that pip goes by."""
    needed = {package: SpecifierSet(text) for package, (text, _) in _table().items()}
    asked = {each.name: each.specifier for each in _requirements(*EXTRAS)}
    assert needed == {"Python": SpecifierSet(PROJECT["requires-python"]), **asked}


def test_both_kinds_of_cuda_need_the_same() -> None:
    """The extras for CUDA 12 and 13 differ in what numba-cuda brings along, and in nothing else."""
    first, second = ({each.name: each.specifier for each in _requirements(extra)} for extra in ("cu12", "cu13"))
    assert first == second


@pytest.mark.parametrize("package", _table())
def test_the_oldest_version_was_tried(package: str) -> None:
    """What was tried is allowed, and the oldest of it is of the release that the lower bound names."""
    needed, tried = _table()[package]
    assert list(SpecifierSet(needed).filter(tried)) == tried
    (lowest,) = re.findall(r">=([0-9.]+)", needed)
    assert min(tried, key=Version) in SpecifierSet(f"=={lowest}.*")


def test_every_python_that_is_named_was_tried() -> None:
    """Classifiers, the continuous integration and the table have the same Pythons; the pages name the oldest."""
    pythons = _minors(_table()["Python"][1])
    kind = "Programming Language :: Python :: 3."
    assert [f"3.{text.removeprefix(kind)}" for text in PROJECT["classifiers"] if text.startswith(kind)] == pythons
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert re.findall(r'"(.+?)"', matrix) == pythons
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {pythons[0]} or newer" in (ROOT / page).read_text(encoding="utf-8")


def test_pins_are_within_the_bounds() -> None:
    """Everything that development installs is pinned, to a version that users may have; the executor's was tried."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    base = [Requirement(text) for text in PROJECT["dependencies"]]
    asked = base + _requirements("dev", "probe", "test", *EXTRAS)
    assert [str(each) for each in asked if each.name not in pins or pins[each.name] not in each.specifier] == []
    table = _table()
    assert [name for name in table if name in pins and pins[name] not in table[name][1]] == []
