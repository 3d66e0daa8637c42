"""The manifest: what its keys mean, where its paths lead, and that every mistake is named."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tpplan.cli import commands
from tpplan.errors import PlanError, TpplanError
from tpplan.planner.manifest import load, loads
from tpplan.planner.options import USUAL, Options

ENTRY = '[[plan]]\nfile = "plans/a.json"\nmodel = "models/m"\ngpus = "2x24GiB"\n'


def test_options_are_those_of_the_command() -> None:
    """A manifest takes the options of ``plan`` by their names; neither has defaults of its own."""
    given = inspect.signature(commands.plan).parameters
    options = {name.replace("_", "-"): each.default for name, each in given.items()}
    others = {"model", "gpus", "all-", "manifest", "output", "draft", "draft-output", "json"}
    assert {name for name in options if name not in others} == USUAL.keys()
    assert not any(value for name, value in options.items() if name not in others)


def test_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry overrides defaults, has each option's value, and paths are those from the manifest's folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team/models/org").mkdir(parents=True)
    text = """
    [defaults]
    model = "models/org/m"
    gpus = "machines/box.json"
    batch = 2
    kv = "replicate"

    [[plan]]
    file = "plans/a.json"
    context = 4_096
    batch = 4
    cache = "q8"
    layout = "gather"
    strategy = "latency"
    max-rows = 512
    kv = "idle"
    tokens = 8192
    full-window = true
    beyond = true
    reserve = ["1GiB", "2GiB@0"]

    [[plan]]
    file = "plans/deep/../b.json"
    model = "org/name@v1"
    gpus = " 4xRTX4090 "
    reserve = "1GiB"
    """
    first, second = loads(("\ufeff" + text).replace("\n", "\r\n").encode(), "team/tpplan.toml").plans
    assert (first.file, first.model, first.gpus) == (
        "team/plans/a.json",
        "team/models/org/m",
        "team/machines/box.json",
    )
    assert first.options == Options(
        context=4096,
        batch=4,
        cache="q8",
        layout="gather",
        strategy="latency",
        max_rows=512,
        kv="idle",
        tokens=8192,
        full_window=True,
        beyond=True,
        reserve=("1GiB", "2GiB@0"),
    )
    assert (second.file, second.model, second.gpus) == ("team/plans/b.json", "org/name@v1", "4xRTX4090")
    assert second.options == Options(batch=2, kv="replicate", reserve=("1GiB",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[plan", "is not TOML: "),
        ("a = " + "9" * 5000, "has a number of too many digits"),
        ("a = " + "[" * 9000, "is nested too deeply"),
        ("a." * 200 + "a = 1", "has more than 100 dots in line 1"),
        ("#" * 2**18 + "\n", "bytes, the most is 262144"),
        ("", "has no plan: begin each with [[plan]]"),
        ("[plan]\nfile = 'a.json'", "begin each with [[plan]], in two brackets"),
        ("[default]\n" + ENTRY, 'has the unknown key "default"; did you mean defaults?'),
        ("defaults = 3\n" + ENTRY, "at defaults: is 3, expected a table"),
        ("[defaults]\nfile = 'x.json'\n" + ENTRY, 'at [defaults]: has the unknown key "file"'),
        (
            ENTRY + "max_rows = 5",
            'at [[plan]] 1 (plans/a.json): has the unknown key "max_rows"; did you mean max-rows?',
        ),
        (ENTRY + "contxt = 5", "did you mean context?"),
        (ENTRY + "context = 0", "context is 0, expected a whole number from 1"),
        (ENTRY + "context = '32k'", 'context is "32k", expected a whole number'),
        (ENTRY + "batch = true", "batch is true, expected a whole number"),
        (ENTRY + "batch = 2.0", "batch is 2.0, expected a whole number"),
        (ENTRY + "tokens = 0x" + "9" * 9000, "tokens is a very long number, expected a whole number"),
        (ENTRY + "cache = 'q9'", 'cache is "q9", expected fp16, fp8, q8, q6 or q4'),
        (ENTRY + "kv = 'replicated'", "did you mean replicate?"),
        (ENTRY + "beyond = 1", "beyond is 1, expected true or false"),
        (ENTRY + "reserve = [2]", 'reserve is a list, expected a text such as "2GiB"'),
        (ENTRY + "reserve = '2GiB@x'", "'x' is not the index of a device"),
        (ENTRY.replace("2x24GiB", "auto"), 'gpus is "auto", which differs between machines'),
        (ENTRY.replace("2x24GiB", " "), "expected a text that names GPUs"),
        (ENTRY.replace("plans/a", "../a"), "expected a path within the folder of the manifest"),
        (ENTRY.replace("plans/a", "/plans/a"), "expected a path within the folder of the manifest"),
        (ENTRY.replace("a.json", "a.txt"), "which ends in .json"),
        (ENTRY.replace("gpus", "#"), "at [[plan]] 1 (plans/a.json): has no gpus"),
        (ENTRY.replace('"models/m"', "2000-01-01"), "model is 2000-01-01, expected a text that names a model"),
        (ENTRY + ENTRY.replace("plans/", "./plans/"), "has the same file as [[plan]] 1 (plans/a.json)"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    """Each is refused in words that name the entry, the key and the value."""
    with pytest.raises(PlanError) as caught:
        loads(text.encode(), "tpplan.toml")
    assert words in caught.value.message
    assert caught.value.hint


def test_all_mistakes_are_told_at_once() -> None:
    """Those of defaults and of every entry."""
    with pytest.raises(PlanError) as caught:
        loads(("[defaults]\nbatch = 0\n" + ENTRY + "kv = 1\n[[plan]]\nfile = 2").encode(), "tpplan.toml")
    assert len(caught.value.problems) == 5


def test_a_manifest_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names one in a folder above, if there is one."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(TpplanError, match=r"there is no manifest 'tpplan\.toml'"):
        load("tpplan.toml")
    (tmp_path / "tpplan.toml").write_text(ENTRY, encoding="utf-8")
    with pytest.raises(TpplanError) as caught:
        load("tpplan.toml")
    above = caught.value.hint.rpartition(" ")[2]
    assert [Path(entry.file) for entry in load(above).plans] == [Path("../plans/a.json")]
