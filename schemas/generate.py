"""Write the JSON Schemas of all documents from the classes that they are made of."""

from __future__ import annotations

import re
from inspect import cleandoc
from pathlib import Path
from typing import Any

import attrs
import msgspec

from tpplan.core.limits import CAPABILITY, DTYPES, FINGERPRINT, LEAST, LONGEST_NAME, MOST
from tpplan.core.plan import CACHE_KINDS, KV_MODES, LAYOUTS, STRATEGIES, SplitPlan
from tpplan.exec.cuda.tuning_cache import SurveyReport
from tpplan.files.codec import SCHEMAS, STATED
from tpplan.files.jsontext import render
from tpplan.files.text import save_text
from tpplan.hardware.file import DevicesFile
from tpplan.hardware.probe.report import DeviceReport
from tpplan.reports.bench import BenchReport
from tpplan.reports.check import CheckReport
from tpplan.reports.diff import PlanDiff
from tpplan.reports.error import ErrorReport
from tpplan.reports.export import ExportReport
from tpplan.reports.fit import FitReport
from tpplan.reports.generate import GenerateReport
from tpplan.reports.inspect import Inspection
from tpplan.reports.manifest import ManifestReport
from tpplan.reports.revision import RevisionDiff
from tpplan.reports.selftest import SelftestReport
from tpplan.reports.show import ShowReport
from tpplan.reports.validate import ValidationReport

#: Every document that tpplan writes, by the name of its schema.
DOCUMENTS: dict[str, type] = {
    SCHEMAS[cls].split(":")[2]: cls
    for cls in (
        SplitPlan,
        PlanDiff,
        DevicesFile,
        DeviceReport,
        SurveyReport,
        Inspection,
        FitReport,
        ShowReport,
        ValidationReport,
        CheckReport,
        ManifestReport,
        RevisionDiff,
        SelftestReport,
        BenchReport,
        GenerateReport,
        ExportReport,
        ErrorReport,
    )
}

FOLDER = Path(__file__).parent
_DRAFT = "https://json-schema.org/draft/2020-12/schema"

_NAME = {"minLength": 1, "maxLength": LONGEST_NAME}
#: What a class's annotations do not say, by field, or by class and field where a name means several things.
_CONSTRAINTS: dict[str, dict[str, Any]] = {
    "layout": {"enum": list(LAYOUTS)},
    "strategy": {"enum": list(STRATEGIES)},
    "kv": {"enum": list(KV_MODES)},
    "dtype": {"enum": list(DTYPES)},
    "fingerprint": {"pattern": f"^{FINGERPRINT}$"},
    "capability": {"pattern": f"^{CAPABILITY}$"},
    "format_version": {"pattern": r"^1\.(0|[1-9][0-9]*)$"},
    "Cache.kind": {"enum": list(CACHE_KINDS)},
    "PlanModel.name": _NAME,
    "PlanModel.architecture": _NAME,
    "Draft.name": _NAME,
    "Draft.room_bytes": {"items": {"type": "integer", "minimum": 0, "maximum": MOST}, "minItems": 1},
    "Device.name": _NAME,
    "Split.layers": {"pattern": "^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$"},
    "Split.bounds": {"items": {"type": "integer", "minimum": 0, "maximum": MOST}, "minItems": 2},
    "SplitPlan.devices": {"minItems": 1},
    "GpuProcess.device": {"minimum": -1},  # unknown
    "Advice.device": {"minimum": -1},  # not about a device
    "Fault.device": {"minimum": -1},  # the host
    "Limit.source": {"minimum": -1},  # likewise
    "Limit.target": {"minimum": -1},
}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    cls = DOCUMENTS[name]
    classes = {c.__name__: c for c in _classes(cls)}
    raw = msgspec.json.schema(cls)
    parts = {part: _part(body, classes.get(part)) for part, body in sorted(raw["$defs"].items())}
    head = parts.pop(cls.__name__)
    document = {"$schema": _DRAFT, "$id": SCHEMAS[cls], **head}
    return {**document, "$defs": parts} if parts else document


def _part(body: dict[str, Any], cls: type | None) -> dict[str, Any]:
    """Return the schema of a class or an enum with what msgspec leaves out."""
    summary = _plain(body.get("description", "").partition("\n")[0])
    if cls is None:
        return {**body, "description": summary}
    texts = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", cleandoc(cls.__doc__ or ""), re.MULTILINE))
    fields = attrs.fields(cls)
    always = [f.name for f in fields if f.default is attrs.NOTHING or f.name in STATED]
    first = {"$schema": {"const": SCHEMAS[cls]}} if cls in SCHEMAS else {}
    return {
        "title": body["title"],
        "description": summary,
        "type": "object",
        "properties": first
        | {
            f.name: {**_property(cls, f.name, body["properties"][f.name]), "description": _plain(texts[f.name])}
            for f in fields
        },
        "required": [*(first if cls is not DevicesFile else ()), *always],  # people write these
        "additionalProperties": False,
    }


def _property(cls: type, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field with its limits; null is never written."""
    choices = [choice for choice in body.get("anyOf", ()) if choice != {"type": "null"}]
    body = dict(choices[0]) if len(choices) == 1 else {"anyOf": choices} if choices else dict(body)
    if body.get("type") == "integer":
        limits = {} if name.startswith("delta_") else {"minimum": LEAST.get(cls, {}).get(name, 0), "maximum": MOST}
        body.update(limits)
    return body | _CONSTRAINTS.get(name, {}) | _CONSTRAINTS.get(f"{cls.__name__}.{name}", {})


def _classes(cls: type) -> set[type]:
    """Return the attrs classes that a document is made of."""
    found, left = set(), [cls]
    while left:
        one = left.pop()
        if attrs.has(one) and one not in found:
            found.add(one)
            left += [kind for field in attrs.fields(attrs.resolve_types(one)) for kind in _mentioned(field.type)]
    return found


def _mentioned(kind: Any) -> list[type]:
    """Return the classes in a type such as ``tuple[Split, ...]``."""
    inner = getattr(kind, "__args__", ())
    return [c for part in inner for c in _mentioned(part)] if inner else [kind] if isinstance(kind, type) else []


def _plain(text: str) -> str:
    """Return a docstring's words on one line and without markup."""
    return re.sub(r"\s+", " ", text).replace("``", "")


def main() -> None:
    """Write all schemas."""
    for name in DOCUMENTS:
        save_text(render(schema(name)), FOLDER / f"{name}.schema.json")


if __name__ == "__main__":
    main()
