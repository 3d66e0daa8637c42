"""The schemas that the command prints are the files of the project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.codec_cases import TEXT
from tests.command import command

FOLDER = Path(__file__).parents[2] / "schemas"


def test_names_and_texts() -> None:
    """All are listed, and each is printed as it is, by each way to name it."""
    names = [path.name.removesuffix(".schema.json") for path in sorted(FOLDER.glob("*.schema.json"))]
    assert command("schema").out.split() == sorted(names)
    for name in names:
        text = (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8")
        assert command("schema", name).out == text
        assert command("schema", f"{name}.schema.json").out == text
        assert command("schema", f"urn:tpplan:{name}:1").out == text


def test_unknown_names() -> None:
    """The hint has what was probably meant, else all names."""
    done = command("schema", "splitplan")
    assert done.code == 2
    assert "there is no schema 'splitplan'" in done.err
    assert "did you mean split-plan?" in done.err
    assert "schemas are bench-report, check-report" in " ".join(command("schema", "zzz").err.split())


@pytest.mark.parametrize(
    ("name", "meant"),
    [("plan", "split-plan"), ("diff", "plan-diff"), ("fit", "fit-report"), ("devices", "devices-file"),
     ("urn:tpplan:split-plan:2", "split-plan")],
)  # fmt: skip
def test_words_of_names(name: str, meant: str) -> None:
    """A word of one name, or of two, is enough to tell which is meant."""
    assert f"did you mean {meant}?" in command("schema", name).err


def test_settings() -> None:
    """Settings for editors have each schema under the name that documents have."""
    whole = json.loads(command("schema", "--settings").out)["json.schemas"]
    assert [one["url"] for one in whole] == [f"urn:tpplan:{name}:1" for name in command("schema").out.split()]
    for one in whole:
        assert one == {"url": one["schema"]["$id"], "schema": json.loads(command("schema", one["url"]).out)}
    (plan,) = json.loads(command("schema", "split-plan", "--settings").out)["json.schemas"]
    assert plan["url"] == json.loads(TEXT)["$schema"]
