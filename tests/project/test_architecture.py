"""docs/architecture.md has a line for each package, and each of its packages is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_tree_is_the_packages() -> None:
    """Each package once, with the modules that its line names."""
    packages = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tpplan").rglob("__init__.py")} - {"tpplan"}
    rows = re.findall(r"^\| `(tpplan/[a-z0-9_/]+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert sorted(path for path, _ in rows) == sorted(packages)


def test_packages_say_what_is_in_them() -> None:
    """The first line of each package's docstring is a sentence."""
    for path in (ROOT / "tpplan").rglob("__init__.py"):
        assert re.match(r'"""[A-Z][^\n]{15,}\.("""|\n)', path.read_text(encoding="utf-8")), path
