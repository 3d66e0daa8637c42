"""What tests/conftest.py calls slow is there."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import SLOW

TESTS = Path(__file__).parents[1]


def test_all_that_is_slow_has_the_name_of_a_test() -> None:
    """A file that is moved stays slow; one that is renamed is found here."""
    files = [*TESTS.rglob("test_*.py")]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    folders = {part for path in files for part in path.relative_to(TESTS).parent.parts}
    functions = {name for name in SLOW - texts.keys() - folders if any(f"def {name}(" in t for t in texts.values())}
    assert texts.keys() | folders | functions >= SLOW
