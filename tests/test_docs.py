"""What the README and the pages of docs/ say is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tpplan.families import supported

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of this repository names one that exists."""
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def test_the_python_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines run, and what their comments say is what they give."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 (our own)
    assert capsys.readouterr().out == "the plans are equal\n"
    promised = re.findall(r"^(plan\..+?)  # (.+)$", code, re.MULTILINE)
    assert len(promised) == 2
    for call, value in promised:
        assert repr(eval(call, names)) == value  # noqa: S307 (our own)


def test_the_readme_names_the_models() -> None:
    """The list of models is the list of the tables."""
    text = README.partition("## Models")[2].partition(". Their names")[0]
    assert set(re.findall("[a-z0-9_]+", text)) - {"and"} == set(supported())
