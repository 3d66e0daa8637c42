"""Plan files: canonical to the byte, and strict to read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.strategies import plans
from tpplan import codec
from tpplan.axes import Axis
from tpplan.errors import PlanError
from tpplan.plan import Cache, SplitPlan
from tpplan.verify import problems

FIXTURE = Path(__file__).parent / "data/formats/plan-1.0.json"
TEXT = FIXTURE.read_text(encoding="utf-8")
PLAN = codec.loads(TEXT)


def refused(text: str | bytes) -> list[str]:
    """Return the problems for which a text is refused."""
    with pytest.raises(PlanError) as caught:
        codec.loads(text)
    assert caught.value.problems
    assert caught.value.hint
    return [str(problem) for problem in caught.value.problems]


def changed(**changes: Any) -> str:
    """Return the fixture as JSON with some keys of its top level replaced."""
    return json.dumps(json.loads(TEXT) | changes)


# The canonical form


@given(plans())
def test_round_trip(plan: SplitPlan) -> None:
    """What is written is read back equal, and written again byte for byte."""
    text = codec.dumps(plan)
    assert codec.loads(text) == plan
    assert codec.loads(text.encode()) == plan
    assert codec.dumps(codec.loads(text)) == text
    assert codec.uncanonical_line(text, plan) == 0


@given(plans())
def test_layout_is_reviewable(plan: SplitPlan) -> None:
    """Lines stay within 120 columns, hold no floats or nulls, and objects of a list never share one."""
    text = codec.dumps(plan)
    assert text.startswith('{\n  "$schema": "urn:tpplan:split-plan:1",\n  "format_version": "1.0",\n  "model": {')
    assert text.endswith("\n}\n")
    assert "\r" not in text
    assert "null" not in re.sub(r'"(\\.|[^"\\])*"', "", text)  # a name may be null
    for line in text.splitlines():
        assert len(line) <= 120
        assert line == line.rstrip()
        assert line.count('"axis"') <= 1
    assert [float] not in [list(map(type, s["bounds"])) for s in json.loads(text)["splits"]]


def test_fixture_1_0() -> None:
    """The frozen plan of format 1.0 means what it meant, and is written as it was."""
    assert codec.dumps(PLAN) == TEXT
    assert PLAN.model.layers == 6
    assert PLAN.request.cache.tokens == 32768
    assert PLAN.devices[2].name == "RTX 3060 (Büro)"
    assert PLAN.devices[2].overhead_bytes == 512 * 2**20
    assert PLAN.bounds(Axis.EX, layer=5) == (0, 256, 512, 768, 768)
    assert PLAN.split(Axis.KV).replicas == 2
    assert PLAN.memory[1].free_bytes == 11003756467


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ({}, ["{}"]),
        ({"a": 1}, ["{", '  "a": 1', "}"]),
        ({"a": {"b": [1, 2]}}, ["{", '  "a": {"b": [1, 2]}', "}"]),
        ({"a": [{"b": 1}]}, ["{", '  "a": [', '    {"b": 1}', "  ]", "}"]),
        ({"a": {"b": [{"c": []}]}}, ["{", '  "a": {', '    "b": [', '      {"c": []}', "    ]", "  }", "}"]),
        ({"a": "x\u202e\x7fé"}, ["{", '  "a": "x\\u202e\\u007fé"', "}"]),
        ({"a": "x\U000e0041😀"}, ["{", '  "a": "x\\udb40\\udc41😀"', "}"]),
        ({"a": "\ud800"}, ["{", '  "a": "\\ud800"', "}"]),
        (["x" * 109, [1]], ["[", f'  "{"x" * 109}",', "  [1]", "]"]),
    ],
)
def test_render(data: object, lines: list[str]) -> None:
    """The document and lists of objects are broken over lines, all else stays on one, unseen characters escaped."""
    assert codec.render(data) == "\n".join(lines) + "\n"
    assert json.loads(codec.render(data)) == data


def test_render_breaks_at_120_columns() -> None:
    """An array takes one line of up to 120 columns with its comma; one column more, and each item has a line."""
    fits = codec.render({"a": ["x" * 108], "b": 0})
    assert max(map(len, fits.splitlines())) == 120
    assert codec.render({"a": ["x" * 109], "b": 0}).splitlines()[1:4] == ['  "a": [', f'    "{"x" * 109}"', "  ],"]


def test_defaults_are_left_out() -> None:
    """Optional fields with their default are not written; version and cache always are; order is field order."""
    assert codec.unstructure(Cache()) == {"kind": "fp16", "tokens": 0}
    data = codec.unstructure(PLAN)
    assert list(data) == ["$schema", *(field.name for field in attrs.fields(SplitPlan))]
    assert list(data["splits"][0]) == ["axis", "layers", "size", "unit", "width", "replicas", "bounds"]
    assert list(data["splits"][3]) == ["axis", "size", "unit", "bounds"]
    assert list(data["devices"][2]) == ["name", "budget_bytes"]


def test_uncanonical_line() -> None:
    """The first line that is not as tpplan writes it is found."""
    assert codec.uncanonical_line(TEXT, PLAN) == 0
    assert codec.uncanonical_line(TEXT.replace('"batch": 2', '"batch":  2'), PLAN) == 15
    assert codec.uncanonical_line(TEXT.replace("\n", "\r\n"), PLAN) == 1
    assert codec.uncanonical_line(TEXT + "\n", PLAN) == TEXT.count("\n") + 2
    assert codec.uncanonical_line(TEXT[:-1], PLAN) == TEXT.count("\n") + 1


# Strict loading


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"7"', 'expected a whole number, got "7"'),
        ("7.0", "expected a whole number, got 7.0"),
        ("2e0", "expected a whole number, got 2.0"),
        ("true", "expected a whole number, got true"),
        ("null", "expected a whole number, got null"),
        ("[2]", "expected a whole number, got an array"),
        ("{}", "expected a whole number, got an object"),
        (f'"{"9" * 60}"', f'expected a whole number, got "{"9" * 40}…"'),
    ],
)
def test_no_conversion(value: str, message: str) -> None:
    """A number is a number: no text, fraction, truth or null passes for it."""
    assert refused(TEXT.replace('"batch": 2', f'"batch": {value}')) == [f"TP000 at request.batch: {message}"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"name": "RTX A2000"', '"name": 2000', "TP000 at devices[3].name: expected a text, got 2000"),
        ("[0, 256, 512, 768, 768]", '"0"', 'TP000 at splits[6].bounds: expected an array, got "0"'),
        ("[0, 256, 512, 768, 768]", '{"0": 1}', "TP000 at splits[6].bounds: expected an array, got an object"),
        ("[0, 256, 512,", "[0, 256, 512.5,", "TP000 at splits[6].bounds[2]: expected a whole number, got 512.5"),
        ('{"kind": "q8", "tokens": 32768}', "[]", "TP000 at request.cache: expected an object, got an array"),
        ('"axis": "vocab"', '"axis": "words"', "TP000 at splits[3].axis: expected kv_heads, q_heads, intermediate, "),
        ('"axis": "vocab"', '"axis": ["vocab"]', "TP000 at splits[3].axis: expected kv_heads, "),
        ('"dtype": "bfloat16",', "", "TP000 at model.dtype: is missing"),
        ('"kind": "q8", ', "", "TP000 at request.cache.kind: is missing"),
        (', "tokens": 32768', ', "token": 1', "TP000 at request.cache.tokens: is missing"),
        ('"batch": 2', '"batches": 2', 'TP000 at request: has the unknown key "batches"; known are layout, strategy, '),
        ('  "format_version": "1.0",\n', "", "TP000 at format_version: is missing"),
        ('"format_version": "1.0"', '"format_version": 1', "TP000 at format_version: expected a text, got 1"),
        (
            '  "$schema": "urn:tpplan:split-plan:1",\n',
            "",
            'TP000 at $schema: expected "urn:tpplan:split-plan:1", got null',
        ),
        ("split-plan:1", "split-plan:2", 'TP000 at $schema: expected "urn:tpplan:split-plan:1", got "urn:tpplan:split'),
        ('"batch": 2', '"batch": 2, "batch": 2', 'TP000 at top level: has the key "batch" twice in one object'),
        ('"batch": 2', '"batch": NaN', "TP000 at top level: has NaN, which is not JSON"),
        ('"batch": 2', '"batch": -Infinity', "TP000 at top level: has -Infinity, which is not JSON"),
        ('"batch": 2', f'"batch": {"9" * 5000}', "TP000 at top level: has a number of 5000 digits"),
        ('"batch": 2', f'"batch": {2**63}', "TP009 at request.batch: is beyond 9223372036854775807"),
        ('"batch": 2', '"batch": 1e999', "TP000 at request.batch: expected a whole number, got Infinity"),
        ('"batch": 2,', '"batch": 2', "TP000 at line 16, column 5: is not JSON: expecting ',' delimiter"),
        ('"format_version": "1.0"', '"format_version": "1.0.0"', "TP001 at format_version: is '1.0.0'"),
    ],
)
def test_refused(old: str, new: str, expected: str) -> None:
    """Each departure from the format is refused with its path and what was expected."""
    assert old in TEXT
    found = refused(TEXT.replace(old, new))
    assert any(problem.startswith(expected) for problem in found), found


@pytest.mark.parametrize("text", ["", "[]", "7", "null", '"plan"', "{}", "{]", b"\xff\xfe{}", b"\x00", "\ufeff{}"])
def test_not_a_plan(text: str | bytes) -> None:
    """JSON of another shape, and what is no JSON, is refused."""
    assert all(problem.startswith("TP000 at ") for problem in refused(text))


def test_byte_order_mark() -> None:
    """A byte order mark is refused by name, before and after decoding."""
    assert refused(b"\xef\xbb\xbf" + TEXT.encode()) == [
        "TP000 at top level: starts with a byte order mark, which JSON does not have"
    ]
    assert "BOM" in refused("\ufeff" + TEXT)[0]


def test_deep_nesting() -> None:
    """Nesting that would overflow the stack is refused."""
    assert refused("[" * 100_000) == ["TP000 at top level: is nested too deeply"]
    assert refused('{"model":' * 100_000) == ["TP000 at top level: is nested too deeply"]


def test_size_is_looked_at_first(tmp_path: Path) -> None:
    """A gigabyte of spaces is refused by its size on disk; a text or a device too long is refused by its length."""
    path = tmp_path / "spaces.json"
    with path.open("wb") as file:
        file.truncate(2**30)  # sparse
    with pytest.raises(PlanError, match="has 1073741824 bytes, the most is 16777216"):
        codec.load(path)
    assert refused(" " * (2**24 + 1)) == ["TP000 at top level: has 16777217 characters, the most is 16777216"]
    with pytest.raises(PlanError, match="has more than 16777216 bytes"):
        codec.load("/dev/zero")


def test_everything_at_once() -> None:
    """All problems of the form are listed together, all broken rules are listed together."""
    data = json.loads(TEXT)
    data["request"]["batch"] = "2"
    del data["model"]["layers"]
    data["splits"][1]["bounds"][2] = 12.0
    data["extra"] = 1
    assert [problem.partition(":")[0] for problem in refused(json.dumps(data))] == [
        "TP000 at model.layers",
        "TP000 at request.batch",
        "TP000 at splits[1].bounds[2]",
        "TP000 at top level",
    ]
    data = json.loads(TEXT)
    data["request"]["batch"] = 0
    data["splits"][4]["bounds"][3:] = [2080, 2080]
    assert [problem.partition(":")[0] for problem in refused(json.dumps(data))] == [
        "TP004 at splits[4].bounds",
        "TP008 at request.batch",
    ]


def test_millions_of_problems() -> None:
    """A hostile array is given up after its first hundred bad items."""
    data = json.loads(TEXT)
    data["splits"][0]["bounds"] = ["x"] * 1_000_000
    assert len(refused(json.dumps(data))) == 100


@given(st.text() | st.binary() | st.from_regex(r'[\[\]{}",:0-9.eE+-]*'))
@example('{"format_version": "1.0"}')
@example('{"": ' * 50 + "1" + "}" * 50)
def test_fuzz_text(text: str | bytes) -> None:
    """Whatever the text, it is refused, and in no other way than a PlanError."""
    with pytest.raises(PlanError):
        codec.loads(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("0-5"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(plans(), st.data())
def test_fuzz_plans(plan: SplitPlan, data: st.DataObject) -> None:
    """Whatever is put anywhere in a plan, it is read or refused; what is read obeys every rule."""
    document = json.loads(codec.dumps(plan))
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    if data.draw(st.booleans()):
        node[key] = data.draw(JSON)
    else:
        del node[key]
    try:
        read = codec.loads(json.dumps(document))
    except PlanError:
        return
    assert problems(read) == ()


# Versions


@pytest.mark.parametrize("version", ["2.0", "3.7"])
@pytest.mark.parametrize("allow_newer", [False, True])
def test_unknown_major(version: str, allow_newer: bool) -> None:
    """Another major version is refused before anything else is said about it, also for showing."""
    with pytest.raises(PlanError) as caught:
        codec.loads(changed(format_version=version, model=None), allow_newer=allow_newer)
    assert caught.value.message == (
        f"the plan has a problem:\n  TP001 at format_version: is '{version}', this tpplan reads 1.x"
    )
    assert "upgrade" in caught.value.hint


def test_newer_minor(tmp_path: Path) -> None:
    """A newer minor version loads only for showing: unknown keys pass, and nothing executes or saves the plan."""
    text = changed(format_version="1.1", topology={"links": []}, request=json.loads(TEXT)["request"] | {"new": 1})
    with pytest.raises(PlanError, match=r"TP001 at format_version: is 1.1, this tpplan knows 1.x up to 1.0"):
        codec.loads(text)
    plan = codec.loads(text, allow_newer=True)
    assert plan == attrs.evolve(PLAN, format_version="1.1")
    assert [problem.rule for problem in problems(plan)] == ["TP001"]
    with pytest.raises(PlanError, match="TP001"):
        codec.save(plan, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_newer_minor_still_obeys_the_rules() -> None:
    """Showing a newer plan is no way around the rules, or the types of the keys that are known."""
    data = json.loads(TEXT) | {"format_version": "1.1"}
    data["request"]["batch"] = 0
    with pytest.raises(PlanError, match=r"TP008 at request.batch") as caught:
        codec.loads(json.dumps(data), allow_newer=True)
    assert [problem.rule for problem in caught.value.problems] == ["TP008"]
    data["request"]["batch"] = "0"
    with pytest.raises(PlanError, match=r"TP000 at request.batch"):
        codec.loads(json.dumps(data), allow_newer=True)


# Other documents


@attrs.frozen
class Item:
    """A part of a document.

    Attributes:
        flag: true or false.
        name: text.
    """

    flag: bool
    name: str = "none"


@attrs.frozen
class Document:
    """A document that is no plan.

    Attributes:
        items: its parts.
        item: one more.
        format_version: of it.
    """

    items: tuple[Item, ...]
    item: Item | None = None
    format_version: str = "1.0"


def test_any_document() -> None:
    """Any frozen class is written and read by the same rules; truth is not 1."""
    document = Document((Item(flag=True), Item(flag=False, name="a")))
    data = {"items": [{"flag": True}, {"flag": False, "name": "a"}], "format_version": "1.0"}
    assert codec.unstructure(document) == data
    assert codec.structure(data, Document, "it") == document
    with pytest.raises(
        PlanError, match=r"it has a problem:\n  TP000 at items\[0\].flag: expected true or false, got 1"
    ):
        codec.structure(data | {"items": [{"flag": 1}]}, Document, "it")
    with pytest.raises(PlanError, match=r"TP000 at items\[1\]: expected an object, got an array"):
        codec.structure(data | {"items": [{"flag": True}, []]}, Document, "it")
