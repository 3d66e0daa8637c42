"""The schemas that the command prints are the files of the project."""

from __future__ import annotations

from pathlib import Path

from tests.command import command

FOLDER = Path(__file__).parents[2] / "schemas"


def test_names_and_texts() -> None:
    """All are listed, and each is printed as it is, with or without the end of its file's name."""
    names = [path.name.removesuffix(".schema.json") for path in sorted(FOLDER.glob("*.schema.json"))]
    assert command("schema").out.split() == sorted(names)
    for name in names:
        text = (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")
        assert command("schema", name).out == text
        assert command("schema", f"{name}.schema.json").out == text


def test_unknown_names() -> None:
    """The hint has what was probably meant, else all names."""
    done = command("schema", "splitplan")
    assert done.code == 2
    assert "there is no schema 'splitplan'" in done.err
    assert "did you mean split-plan?" in done.err
    assert "schemas are bench-report, check-report" in " ".join(command("schema", "zzz").err.split())
