"""The sample of the cases of tests with many: a fifth, which can be run again, and others for other commits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import run
from typing import Any

from attrs import frozen

from tests import conftest
from tests.conftest import sampled

#: Says how many random examples there are.
_COUNTING = """
from hypothesis import settings
def test_one():
    print(settings().max_examples, "examples")
"""


@frozen
class Case:
    """What a sample reads of a test's case."""

    originalname: str
    name: str
    nodeid: str
    path: Path


def cases(name: str, count: int, path: Path = Path("tests/test_some.py")) -> list[Any]:
    """Return the cases of a test."""
    return [Case(name, name, f"{path}::{name}[{i}]", path) for i in range(count)]


def test_a_fifth_of_the_cases_and_all_of_them_in_the_end() -> None:
    """Of few cases it takes all, of no test fewer than four, or two if it is slow; of a seed always the same ones."""
    few, some, many = cases("test_few", 4), cases("test_some", 10), cases("test_many", 100)
    found = sampled([*few, *some, *many], "0f3a")
    assert [len(found & {*each}) for each in (few, some, many)] == [4, 4, 20]
    assert sampled([*many, *some, *few][::-1], "0f3a") == found
    slow = Path(conftest.__file__).parent / "decoder" / "test_some.py"
    assert [len(sampled(cases("test_slow", count, slow), "0f3a")) for count in (2, 3, 32, 48)] == [2, 2, 2, 3]
    assert sampled(many, "0f3b") != sampled(many, "0f3a")
    assert {case for seed in range(60) for case in sampled(many, f"{seed:x}")} == {*many}


def test_a_sample_can_be_run_again(tmp_path: Path) -> None:
    """All workers take the same cases; with the seed that is printed, one process takes them again."""
    (tmp_path / "conftest.py").write_text(Path(conftest.__file__).read_text())
    lines = ("import pytest", '@pytest.mark.parametrize("n", range(40))', "def test_one(n): pass")
    (tmp_path / "test_many.py").write_text("\n".join(lines))
    found = []
    for options in (("-n", "2", "--sample="), ("--sample=none",), ("--sample=0f3a",)):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *options]
        done = run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        seed = re.search(r"just test --sample=(\w+)$", done.stdout, re.MULTILINE)
        assert seed, done.stdout
        found.append((seed[1], {*re.findall(r"^PASSED (.*)", done.stdout, re.MULTILINE)}))
    assert [(seed, len(cases)) for seed, cases in found] == [("none", 8), ("none", 8), ("0f3a", 8)]
    assert found[1] == found[0]
    assert found[2][1] != found[0][1]


def test_a_sample_has_half_of_the_random_examples(tmp_path: Path) -> None:
    """Unless a profile is named."""
    (tmp_path / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (tmp_path / "test_one.py").write_text(_COUNTING)
    for options, count in ((("--sample=0f3a",), 25), (("--sample=0f3a", "--hypothesis-profile=quick"), 10)):
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *options]
        done = run(command, cwd=tmp_path, env=os.environ | {"CI": "1"}, capture_output=True, text=True, check=False)
        assert f"{count} examples" in done.stdout
