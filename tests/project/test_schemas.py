"""The JSON Schemas: current, valid, and agreeing with what is written and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from schemas import generate
from tests.codec_cases import PLAN, TEXT
from tests.examples import examples
from tests.strategies import plans
from tpplan.errors import PlanError
from tpplan.files.codec import dumps
from tpplan.files.jsontext import render
from tpplan.planfile import codec
from tpplan.planfile.rules import RULES
from tpplan.reports.diff import diff

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan

SPLIT_PLAN = Draft202012Validator(generate.schema("split-plan"))
PLAN_DIFF = Draft202012Validator(generate.schema("plan-diff"))


@pytest.mark.parametrize("name", generate.DOCUMENTS)
def test_current(name: str) -> None:
    """The committed schemas are those of the classes; ``just schema`` writes them."""
    path = generate.FOLDER / f"{name}.schema.json"
    assert path.read_text(encoding="utf-8") == render(generate.schema(name))


def test_no_orphans() -> None:
    """There is no schema of a document that no longer exists."""
    assert {path.name for path in generate.FOLDER.glob("*.json")} == {f"{n}.schema.json" for n in generate.DOCUMENTS}


@pytest.mark.parametrize("name", generate.DOCUMENTS)
def test_well_formed(name: str) -> None:
    """Each schema is valid, has its own name, closes every object, describes every key and knows no null."""
    schema = generate.schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:tpplan:{name}:1"
    assert '"null"' not in render(schema)
    for part in (schema, *schema.get("$defs", {}).values()):
        assert part["description"]
        if part.get("type") == "object":
            assert part["additionalProperties"] is False
            assert all("description" in key or "const" in key for key in part["properties"].values())


@settings(max_examples=examples(40))
@given(plans(), plans())
def test_documents_conform(a: SplitPlan, b: SplitPlan) -> None:
    """Every plan and every diff that is written conforms to its schema."""
    SPLIT_PLAN.validate(json.loads(dumps(a)))
    PLAN_DIFF.validate(json.loads(dumps(diff(a, b))))


def test_fixture_conforms() -> None:
    """The frozen plan conforms, and so does the empty diff."""
    SPLIT_PLAN.validate(json.loads(TEXT))
    PLAN_DIFF.validate(json.loads(dumps(diff(PLAN, PLAN))))


WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    (("$schema",), "urn:tpplan:split-plan:2"),
    (("format_version",), "2.0"),
    (("extra",), 1),
    (("model", "layers"), "6"),
    (("model", "layers"), 0),
    (("model", "fingerprint"), "sha256:0"),
    (("model", "dtype"), "int8"),
    (("model", "name"), ""),
    (("request", "layout"), "cut"),
    (("request", "strategy"), "best"),
    (("request", "kv"), "copy"),
    (("request", "cache", "kind"), "q5"),
    (("request", "batch"), 1.5),
    (("request", "batch"), True),
    (("request", "batch"), None),
    (("request", "max_rows"), 2**63),
    (("devices",), []),
    (("devices", 0, "budget_bytes"), 0),
    (("devices", 0, "capability"), "sm_89"),
    (("splits", 0, "axis"), "heads"),
    (("splits", 0, "layers"), "all"),
    (("splits", 0, "bounds"), []),
    (("splits", 0, "bounds", 1), -1),
    (("splits", 0, "bounds", 1), "2"),
    (("splits", 0, "extra"), 1),
    (("memory", 0, "free_bytes"), -1),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_wrong_plans_do_not_conform(path: tuple[str | int, ...], value: object) -> None:
    """What the schema refuses, loading refuses as well."""
    document = json.loads(TEXT)
    node: Any = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert not SPLIT_PLAN.is_valid(document)
    with pytest.raises(PlanError):
        codec.loads(json.dumps(document))


@pytest.mark.parametrize(
    "path",
    [("$schema",), ("format_version",), ("model",), ("request", "batch"), ("request", "cache", "kind"), ("memory",)],
)
def test_required_keys(path: tuple[str, ...]) -> None:
    """A key that is always written is required by the schema and by loading."""
    document = json.loads(TEXT)
    node: Any = document
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    assert not SPLIT_PLAN.is_valid(document)
    with pytest.raises(PlanError, match=r"is missing|\$schema: expected"):
        codec.loads(json.dumps(document))


PAGE = (Path(__file__).parents[2] / "docs/plan-format.md").read_text(encoding="utf-8")


def test_documented_example() -> None:
    """The example of the documentation is a valid plan, written as tpplan writes it."""
    example = PAGE.partition("```json\n")[2].partition("```")[0]
    assert dumps(codec.loads(example)) == example


def test_documented_keys() -> None:
    """The documentation has a row for every key of a plan, and none for others."""
    schema = generate.schema("split-plan")
    parts = schema["$defs"]
    keys = [*schema["properties"]]
    keys += [key for part in ("PlanModel", "Device", "Split", "DeviceMemory") for key in parts[part]["properties"]]
    keys += [key for key in parts["Request"]["properties"] if key != "cache"]
    keys += [f"cache.{key}" for key in parts["Cache"]["properties"]]
    assert sorted(re.findall(r"^\| `([$\w.]+)` \|", PAGE, re.MULTILINE)) == sorted(keys)


def test_documented_rules() -> None:
    """The documentation has every rule with the sentence that the rule itself says."""
    rows = dict(re.findall(r"^\| (TP\d+) \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows.pop("TP000")
    assert rows == {name: rule.__doc__ for name, rule in RULES.items()}
