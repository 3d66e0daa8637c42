"""scripts/size.py counts the lines that hold code."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from scripts import size

if TYPE_CHECKING:
    from pathlib import Path

#: Lines that hold code end in ``# 1``, those inside of a string hold it, too.
SOURCE = '''\
#!/usr/bin/env python3
"""A docstring.

Of three lines."""

import os  # 1


class Shape:  # 1
    """One line."""

    #: A comment.
    sides = (  # 1
        3,  # 1

        # a comment
    )  # 1

    async def area(self):  # 1
        "Two strings, " \\
        "one docstring."
        """No docstring."""  # 1
        def inner(): return 1  # 1

        return """in
# 1

  # 1
"""  # 1
'''


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    """A string that is no docstring is code from its first line to its last."""
    inside = 2  # of the last string, its first line and the blank one
    assert size.lines_of_code(SOURCE.encode()) == SOURCE.count("# 1\n") + inside


def _git(*arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)  # noqa: S607


def _rows(printed: str) -> list[list[str]]:
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    assert len(head) == len(rule)
    return [head, *rows]


def test_packages_are_compared_with_those_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that were added, changed, moved or removed count on their sides, and those of other folders on none."""
    monkeypatch.chdir(tmp_path)
    _git("init", "-q")
    for name, text in {"p/a.py": "x = 1\n", "p/old/b.py": "x = 1\ny = 2\n", "q/c.py": "x = 1\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    _git("add", "-A")
    _git("commit", "-qm", "first")
    (tmp_path / "p/a.py").write_text("\n".join(f"x{i} = 1" for i in range(1200)), encoding="utf-8")
    (tmp_path / "p/new").mkdir()
    (tmp_path / "p/old/b.py").rename(tmp_path / "p/new/b.py")
    (tmp_path / "p/new/empty.py").touch()
    (tmp_path / "p/new/notes.txt").write_text("no code\n", encoding="utf-8")

    assert size.main(["p"]) == 0
    assert _rows(capsys.readouterr().out) == [
        ["package", "files", "lines"],
        ["p", "1", "1,200"],
        ["p.new", "2", "2"],
        ["total", "3", "1,202"],
    ]
    assert size.main(["p", "--against", "HEAD"]) == 0
    assert _rows(capsys.readouterr().out) == [
        ["package", "files before", "files after", "files ±", "lines before", "lines after", "lines ±"],
        ["p", "1", "1", "+0", "1", "1,200", "+1,199"],
        ["p.new", "0", "2", "+2", "0", "2", "+2"],
        ["p.old", "1", "0", "-1", "2", "0", "-2"],
        ["total", "2", "3", "+1", "3", "1,202", "+1,199"],
    ]


def test_an_unknown_commit_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without its other half would pass for a package that is all new."""
    monkeypatch.chdir(tmp_path)
    _git("init", "-q")
    with pytest.raises(subprocess.CalledProcessError):
        size.main(["--against", "no-such-commit"])
