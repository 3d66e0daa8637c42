"""What commands find as Markdown, read by a parser of it, and as annotations, read as GitHub's runner does."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.cli_cases import LLAMA_8B, folder, written_plans  # noqa: F401 (for every test here)
from tests.codec_cases import PLAN
from tests.command import command
from tests.examples import examples
from tests.render_cases import data
from tpplan.files.codec import dumps
from tpplan.files.jsontext import visible
from tpplan.render.markdown import escaped, fenced, markdown
from tpplan.render.show import show

if TYPE_CHECKING:
    from markdown_it.token import Token

READER = MarkdownIt("commonmark").enable("table")


def shown(token: Token) -> str:
    """Return the text that a reader sees of a paragraph, a heading or a cell; nothing in it may be a link or HTML."""
    seen = [child for child in token.children or () if (child.type, child.content) != ("html_inline", "<!-- -->")]
    assert {child.type for child in seen} <= {"text", "text_special", "strong_open", "strong_close"}
    return "".join(child.content for child in seen)


def parsed(text: str) -> tuple[list[str], list[list[list[str]]], list[list[str]]]:
    """Return the headings, the tables by rows, and for each table how its columns are aligned."""
    headings: list[str] = []
    tables: list[list[list[str]]] = []
    sides: list[list[str]] = []
    tokens = READER.parse(text)
    for before, token in pairwise([*tokens[:1], *tokens]):
        if before.type == "heading_open" and token.type == "inline":
            headings.append(shown(token))
        elif token.type == "table_open":
            tables.append([])
            sides.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif before.type in {"th_open", "td_open"}:
            tables[-1][-1].append(shown(token))
            if before.type == "th_open":
                sides[-1].append(str(before.attrs.get("style", "")).removeprefix("text-align:"))
    return headings, tables, sides


def test_show_as_markdown() -> None:
    """A plan has headings and tables: every device's bytes in GiB, and its slice of every split."""
    Path("plan.json").write_text(dumps(PLAN), encoding="utf-8")
    done = command("show", "plan.json", "--format", "markdown", terminal=True)
    headings, (memory, splits), sides = parsed(done.out)
    assert headings == [
        "Fixture-MoE on 4 devices",
        "Memory, GiB",
        "Splits, start:end; shares of all budgets and of all bytes used",
    ]
    assert memory[0] == ["device", "name", "weights", "cache", "workspace", "overhead", "free", "budget", "full"]
    for i, (device, entry) in enumerate(zip(PLAN.devices, PLAN.memory, strict=True)):
        assert memory[1 + i][:3] == [str(i), device.name, f"{entry.weights_bytes / 2**30:.2f}".replace("0.00", "0")]
        assert memory[1 + i][-2] == f"{device.budget_bytes / 2**30:.2f}"
    assert splits[0][4:] == [str(split.axis) for split in PLAN.splits]
    assert [row[1] for row in splits[1:5]] == ["layers", "size", "unit", "replicas"]
    assert splits[2][4:] == [str(split.size) for split in PLAN.splits]
    for i in range(len(PLAN.devices)):
        cuts = [split.bounds[i : i + 2] for split in PLAN.splits]
        assert splits[5 + i][4:] == [f"{start}:{end}" if end > start else "-" for start, end in cuts]
    assert sides[0] == ["right", "", *["right"] * 7]
    assert "\x1b" not in done.out
    assert not re.search("[█▓▒░·]", done.out)


def test_diff_as_markdown() -> None:
    """What moves is a table by devices, with signs."""
    a, b = written_plans()
    done = command("diff", a, b, "--format=markdown")
    assert done.code == 1
    headings, tables, _ = parsed(done.out)
    assert [one.partition(",")[0] for one in headings] == ["Devices", "Splits", "Memory", "Speed"]
    change = json.loads(command("diff", a, b, "--json").out)
    weights = [one["buckets"][0]["delta_bytes"] for one in change["memory"]]
    assert [row[2] for row in tables[2][1:-1]] == [f"{delta / 2**30:+.2f}" for delta in weights]
    assert tables[0][2][-4:] == ["budget_bytes", "12.00 GiB", "→", "24.00 GiB"]


def test_fit_as_markdown() -> None:
    """The table of what fits has a row per context and a column per cache, and what helps has one per option."""
    asked = ("fit", LLAMA_8B, "--gpus", "RTX3090")
    done = command(*asked, "--format", "markdown")
    assert done.code == 1
    _, (table, options), sides = parsed(done.out)
    report = json.loads(command(*asked, "--json").out)
    assert table[0] == [
        "context",
        *(cell["cache"] for cell in report["rows"][0]["cells"]),
        "bits",
        "which is",
        "tokens/s",
    ]
    for row, one in zip(table[1:-1], report["rows"], strict=True):
        rates = [f"{cell['tokens_per_second']:,}" if cell["fits"] else "-" for cell in one["cells"]]
        assert row[:-3] == [f"{one['context']:,}", *rates]
    weights = {"option": "other weights"}
    helps = [one | weights if one["kind"] == "quantisation" else one for one in report["suggestions"]]
    named = [one["option"] for one in helps if "option" in one]
    assert [row[0] for row in options[1:]] == named
    assert sides[0] == [*["right"] * (len(table[0]) - 2), "", "right"]


HOSTILE = ["a|b", "`x`", "<b>x</b>", "&lt;", "*a* _b_", "[a](b:c)", "~~no~~", "\\|", "a\nb", "$x$", "x\\", "![i](j)"]
CALLING = ["@someone", "by @some-one/team", "https://a.b/c", "HTTP://a.b", "see www.a.b", "#12", "a/b#7"]


@pytest.mark.parametrize("name", HOSTILE + CALLING)
def test_names_in_markdown(name: str) -> None:
    """Whatever a device or a model is called, it neither breaks a table nor becomes markup."""
    devices = (attrs.evolve(PLAN.devices[0], name=name), *PLAN.devices[1:])
    plan = attrs.evolve(PLAN, devices=devices, model=attrs.evolve(PLAN.model, name=name))
    headings, (memory, splits), _ = parsed(markdown(show(data(plan))))
    assert headings[0] == f"{visible(name)} on 4 devices"
    assert memory[1][1] == splits[5][1] == visible(name)


@pytest.mark.parametrize("name", CALLING)
def test_names_call_nobody(name: str) -> None:
    """GitHub looks for mentions, issues and links in each piece of text; no piece of a name has one."""
    (_, inline, _) = READER.parse(escaped(name))
    pieces = [child.content for child in inline.children or () if child.type == "text"]
    assert "".join(pieces) == name
    assert not any(re.search(r"(?:^|\W)@\w|(?:^|\W|\w)#\d|://|www\.", piece, re.IGNORECASE) for piece in pieces)
    assert escaped("2GiB@0 of a_b") == "2GiB@0 of a_b"


@settings(max_examples=examples(200))
@given(st.text(max_size=30))
def test_escapes(text: str) -> None:
    """Any text is seen as it is in a cell, in a paragraph, and in a block of code."""
    seen = " ".join(visible(text.strip(" ")).split())
    _, tables, _ = parsed(f"| a |\n| --- |\n| {escaped(text)} |\n")
    assert " ".join(tables[0][1][0].split()) == seen
    if seen:
        start, inline, end = READER.parse(markdown([((text.strip(" "), ""),)]))
        assert (start.type, " ".join(shown(inline).split()), end.type) == ("paragraph_open", seen, "paragraph_close")
    block, *more = READER.parse(fenced(f"{visible(text)}\n"))
    assert (block.type, block.content, more) == ("fence", f"{visible(text)}\n", [])


def commands_in(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Read workflow commands as GitHub's runner does (ActionCommand.TryParseV2): kind, properties and message."""
    found = []
    for line in text.splitlines():
        assert line.startswith("::")
        head, _, message = line[2:].partition("::")
        kind, _, rest = head.partition(" ")
        pairs = dict(one.split("=", 1) for one in rest.split(",") if "=" in one)
        for escape, character in (("%3A", ":"), ("%2C", ",")):
            pairs = {key: value.replace(escape, character) for key, value in pairs.items()}
        for escape, character in (("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            pairs = {key: value.replace(escape, character) for key, value in pairs.items()}
            message = message.replace(escape, character)
        found.append((kind, pairs, message))
    return found


def test_annotations_of_problems() -> None:
    """Each problem is at its line of the file, whatever that is called; another formatting is a warning."""
    plan = attrs.evolve(PLAN, request=attrs.evolve(PLAN.request, batch=0))
    text = dumps(plan)
    path = "100%, a:b,.json"
    Path(path).write_text(text, encoding="utf-8")
    Path("cut.json").write_text(text[:400], encoding="utf-8")
    Path("spaced.json").write_text(dumps(PLAN).replace('"layers": 6', '"layers":  6'), encoding="utf-8")
    done = command("validate", path, "cut.json", "spaced.json", "none.json", "--format", "github")
    assert done.code == 2
    batch, cut, spaced, none = commands_in(done.out)
    line = next(i for i, one in enumerate(text.splitlines(), 1) if '"batch": 0' in one)
    assert batch[:2] == ("error", {"file": path, "line": str(line), "title": "the plan breaks TP008"})
    assert batch[2].startswith("at request.batch: ")
    assert cut[1]["line"] == str(1 + text[:400].count("\n"))
    assert (spaced[0], spaced[1]["title"]) == ("warning", "non-canonical formatting")
    assert dumps(PLAN).splitlines()[int(spaced[1]["line"]) - 1].strip().startswith('"layers": 6')
    assert none[1] == {"file": "none.json", "title": "the plan cannot be read"}
    problems = commands_in(command("check", path, "--model", LLAMA_8B, "--format", "github").out)
    assert problems == [batch]


def test_annotations_of_plans() -> None:
    """A stale plan is an error on its file, a change a notice, and what is right says nothing."""
    a, b = written_plans()
    asked = ("check", a, "--model", LLAMA_8B, "--format", "github")
    assert command(*asked).out == ""
    done = command(*asked, "--gpus", "24GiB,16GiB")
    ((kind, properties, message),) = commands_in(done.out)
    assert (done.code, kind) == (1, "error")
    assert properties == {"file": a, "title": "the plan is stale (devices)"}
    assert message.startswith("the plan is for other devices than those that were named\n3 of 5 splits change; ")
    ((kind, properties, message),) = commands_in(command("diff", a, b, "--format", "github").out)
    assert (kind, properties["file"]) == ("notice", b)
    document = json.loads(command("diff", a, b, "--json").out)
    assert message == f"{document['summary']}\n{document['unpredicted']}"
    for name, gpus in (("fast.json", "RTX3090"), ("dark.json", "24GiB")):
        command("plan", LLAMA_8B, "--gpus", gpus, "--context", 4096, "-o", name)
    ((_, _, message),) = commands_in(command("diff", "fast.json", "dark.json", "--format", "github").out)
    document = json.loads(command("diff", "fast.json", "dark.json", "--json").out)
    (change,) = document["speed"]
    (rate,) = re.findall("(\\d+) +→ +unknown", command("diff", "fast.json", "dark.json").out)
    assert message.splitlines()[1:] == [f"batch 1: {rate} → unknown tokens/s", document["unpredicted"]]
    assert change == {"prefill": False, "rows": 1, "before_tokens_per_second": int(rate)}
    fields = {each["path"]: each for device in document["devices"] for each in device["fields"]}
    assert fields["bandwidth_bytes_per_second"].keys() == {"path", "before"}
    assert all("delta_reads_bytes" not in one for one in document["memory"])
    piped = command("diff", a, "-", "--format", "github", stdin=Path(b).read_bytes())
    assert "file" not in commands_in(piped.out)[0][1]
    assert command("diff", a, a, "--format", "github").out == ""


def test_annotations_name_files_from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GitHub takes paths from the root of the repository, wherever the command runs and however they are typed."""
    plan = dumps(attrs.evolve(PLAN, request=attrs.evolve(PLAN.request, batch=0)))
    for name in ("clone/.git", "clone/team/plans"):
        Path(name).mkdir(parents=True)
    Path("clone/team/plans/a.json").write_text(plan, encoding="utf-8")
    Path("clone/team/plans/b.json").write_text(dumps(PLAN), encoding="utf-8")
    monkeypatch.chdir("clone/team")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    asked = ("plans/a.json", "--format", "github")
    assert commands_in(command("validate", *asked).out)[0][1]["file"] == "team/plans/a.json"
    assert commands_in(command("validate", str(Path("plans/a.json").resolve()), *asked[1:]).out)[0][1]["file"] == (
        "team/plans/a.json"
    )
    changed = dumps(attrs.evolve(PLAN, model=attrs.evolve(PLAN.model, name="other")))
    Path("plans/a.json").write_text(changed, encoding="utf-8")
    found = commands_in(command("diff", "plans/b.json", *asked).out)
    assert found[0][1]["file"] == "team/plans/a.json"
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert commands_in(command("diff", "plans/b.json", *asked).out)[0][1]["file"] == "clone/team/plans/a.json"
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    assert commands_in(command("diff", "plans/b.json", *asked).out)[0][1]["file"] == "team/plans/a.json"


def test_errors_in_every_form() -> None:
    """What keeps a command from an answer is on standard output in the form that was asked for, too."""
    for asked in (("diff", "a.json", "b.json"), ("diff", "a.json")):
        told = command(*asked).err
        assert command(*asked, "--format", "text").out == ""
        assert command(*asked, "--format", "markdown").out == fenced(told)
        ((kind, properties, message),) = commands_in(command(*asked, "--format=github").out)
        assert (kind, properties) == ("error", {"title": "tpplan"})
        assert f"error: {message}".replace("\n", "\nhint: ") == told.rstrip()
        assert command(*asked, "--format", "json").out == command(*asked, "--json").out


def test_verdicts_as_markdown() -> None:
    """A verdict is a paragraph that stands out where it is bad, and what is wrong a list below it."""
    a, _ = written_plans()
    Path("bad.json").write_text(Path(a).read_text(encoding="utf-8").replace('"batch": 1', '"batch": 0'), "utf-8")
    text = command("validate", a, "bad.json", "--format", "markdown").out
    assert text == (
        "a.json: valid\n\nbad.json: **1 problem**\n\n"
        "- **TP008** at request.batch: is 0, expected 1 or more\n\n**1 of 2 plans valid**\n"
    )
    stale = command("check", a, "--model", LLAMA_8B, "--gpus", "24GiB,16GiB", "--format", "markdown").out
    assert stale.startswith("a.json: **stale (devices)**\n\n- the plan is for other devices")
