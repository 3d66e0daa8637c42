"""Plan files that are refused: each departure from the format, with its path."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.codec_cases import TEXT, refused
from tests.strategies import plans
from tpplan.errors import PlanError
from tpplan.files.codec import dumps
from tpplan.planfile import codec
from tpplan.planfile.verify import problems

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.plan import SplitPlan


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
        ('"batch": 2', '"batches": 2', 'TP000 at request: has the unknown key "batches"; did you mean batch?'),
        ('"batch": 2', '"rows": 2', 'TP000 at request: has the unknown key "rows"; known are layout, strategy, '),
        ('  "format_version": "1.0",\n', "", "TP000 at format_version: is missing"),
        ('"format_version": "1.0"', '"format_version": 1', "TP000 at format_version: expected a text, got 1"),
        (
            '  "$schema": "urn:tpplan:split-plan:1",\n',
            "",
            "TP000 at $schema: is missing",
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
    """A gigabyte of spaces is refused by its size on disk; a text or what has no size by its length."""
    path = tmp_path / "spaces.json"
    with path.open("wb") as file:
        file.truncate(2**30)  # sparse
    with pytest.raises(PlanError, match="has 1073741824 bytes, the most is 16777216"):
        codec.load(path)
    assert refused(" " * (2**24 + 1)) == ["TP000 at top level: has 16777217 characters, the most is 16777216"]
    reading, writing = os.pipe()
    with ThreadPoolExecutor() as threads, os.fdopen(reading):
        threads.submit(_flood, writing)
        with pytest.raises(PlanError, match="has more than 16777216 bytes"):
            codec.load(f"/dev/fd/{reading}")


def _flood(number: int) -> None:
    """Write into a pipe until nobody reads it any more."""
    with suppress(BrokenPipeError), os.fdopen(number, "wb") as file:
        while True:
            file.write(bytes(2**16))


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
    data["splits"][0]["bounds"] = ["x"] * 500_000
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
    document = json.loads(dumps(plan))
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
