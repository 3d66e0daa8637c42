"""Plan files and other documents: canonical to the byte."""

from __future__ import annotations

import json
import re

import attrs
import pytest
from hypothesis import given

from tests.codec_cases import PLAN, TEXT
from tests.strategies import plans
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, SplitPlan
from tpplan.errors import PlanError
from tpplan.files.codec import dumps, structure, uncanonical_line, unstructure
from tpplan.files.jsontext import render
from tpplan.planfile import codec


@given(plans())
def test_round_trip(plan: SplitPlan) -> None:
    """What is written is read back equal, and written again byte for byte."""
    text = dumps(plan)
    assert codec.loads(text) == plan
    assert codec.loads(text.encode()) == plan
    assert dumps(codec.loads(text)) == text
    assert uncanonical_line(text, plan) == 0


@given(plans())
def test_layout_is_reviewable(plan: SplitPlan) -> None:
    """Lines stay within 120 columns, hold no floats or nulls, and objects of a list never share one."""
    text = dumps(plan)
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
    assert dumps(PLAN) == TEXT
    assert PLAN.model.layers == 6
    assert PLAN.request.cache.tokens == 32768
    assert PLAN.devices[2].name == "RTX 3060 (Büro)"
    assert PLAN.devices[2].overhead_bytes == 512 * 2**20
    assert PLAN.bounds(Axis.EXPERT_INTERMEDIATE, layer=5) == (0, 256, 512, 768, 768)
    assert PLAN.split(Axis.KV_HEADS).replicas == 2
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
    assert render(data) == "\n".join(lines) + "\n"
    assert json.loads(render(data)) == data


def test_render_breaks_at_120_columns() -> None:
    """An array takes one line of up to 120 columns with its comma; one column more, and each item has a line."""
    fits = render({"a": ["x" * 108], "b": 0})
    assert max(map(len, fits.splitlines())) == 120
    assert render({"a": ["x" * 109], "b": 0}).splitlines()[1:4] == ['  "a": [', f'    "{"x" * 109}"', "  ],"]


def test_defaults_are_left_out() -> None:
    """Optional fields with their default are not written; version and cache always are; order is field order."""
    assert unstructure(Cache()) == {"kind": "fp16", "tokens": 0}
    data = unstructure(PLAN)
    assert list(data) == ["$schema", *(field.name for field in attrs.fields(SplitPlan) if field.name != "speed")]
    assert list(data["splits"][0]) == ["axis", "layers", "size", "unit", "width", "replicas", "bounds"]
    assert list(data["splits"][3]) == ["axis", "size", "unit", "bounds"]
    assert list(data["devices"][2]) == ["name", "budget_bytes"]


def test_uncanonical_line() -> None:
    """The first line that is not as tpplan writes it is found."""
    assert uncanonical_line(TEXT, PLAN) == 0
    assert uncanonical_line(TEXT.replace('"batch": 2', '"batch":  2'), PLAN) == 15
    assert uncanonical_line(TEXT.replace("\n", "\r\n"), PLAN) == 1
    assert uncanonical_line(TEXT + "\n", PLAN) == TEXT.count("\n") + 2
    assert uncanonical_line(TEXT[:-1], PLAN) == TEXT.count("\n") + 1


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
    assert unstructure(document) == data
    assert structure(data, Document, "it") == document
    with pytest.raises(
        PlanError, match=r"it has a problem:\n  TP000 at items\[0\].flag: expected true or false, got 1"
    ):
        structure(data | {"items": [{"flag": 1}]}, Document, "it")
    with pytest.raises(PlanError, match=r"TP000 at items\[1\]: expected an object, got an array"):
        structure(data | {"items": [{"flag": True}, []]}, Document, "it")
