"""The lines of values in a document."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec_cases import TEXT
from tests.examples import examples
from tpplan.files.jsontext import lines_of, render

KEYS = st.text('ab"\\{}[],:1 é', max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | KEYS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("request.batch", '    "batch": 2'),
        ("splits[6].bounds[2]", '    {"axis": "expert_intermediate", "layers": "5"'),
        ("devices[3]", '    {"name": "RTX A2000"'),
        ("devices[1].nothing.at.all", '    {"name": "RTX 4080"'),
        ("devices[9]", '  "devices": ['),
        ("line 3, column 5", '  "format_version"'),
    ],
)
def test_lines_of_a_plan(path: str, start: str) -> None:
    """A value has the line where it is written, one that is missing that of what is around it."""
    assert TEXT.splitlines()[lines_of(TEXT, [path])[0] - 1].startswith(start)


def test_what_has_no_line() -> None:
    """The whole document, and what is nowhere, have none; a text that is no JSON is not read for them."""
    assert lines_of(TEXT, ["", "nothing", "nothing[1].more"]) == [0, 0, 0]
    assert lines_of("]}{", ["", "line 1, column 1"]) == [0, 1]


@settings(max_examples=examples(100))
@given(st.dictionaries(KEYS, VALUES), st.integers(0, 5))
def test_any_document(before: dict[str, object], place: int) -> None:
    """Whatever is in front of a value, with whatever in its texts, its line is found."""
    document = {"first": before, "wanted": [[n, {"x": [n, f"mark {n}"]}] for n in range(6)]}
    for text in (json.dumps(document, indent=1), render(document)):
        end = text.index(f'"mark {place}"')
        assert lines_of(text, [f"wanted[{place}][1].x[1]"]) == [1 + text.count("\n", 0, end)]
