"""Plans as canonical JSON and back, and the fingerprint of a model."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

import attrs

from tpplan.core.plan import SplitPlan
from tpplan.core.versions import OTHER_VERSION, is_newer, version_of, version_problem
from tpplan.errors import FORM, PlanError, Problem, refusal
from tpplan.files.codec import dumps, structure, unstructure
from tpplan.files.jsontext import lines_of
from tpplan.files.kinds import PLAN, mistaken
from tpplan.files.text import parse_json, read_text, save_text
from tpplan.planfile.verify import verify

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec


def fingerprint(spec: ModelSpec) -> str:
    """Return ``sha256:`` and the hash of a model, without its name, and what is told of its context and its files.

    Fields with their default value are not hashed, so later versions of tpplan can add fields without changing the
    fingerprints of models that do not use them.
    """
    data = unstructure(attrs.evolve(spec, context_basis="", not_planned=(), assumed="", notes=()))
    del data["name"]
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def loads(text: str | bytes, what: str = "the plan", *, allow_newer: bool = False) -> SplitPlan:
    """Parse a plan and check every rule.

    Args:
        text: text of a plan file.
        what: name of the document in errors, such as its file's name.
        allow_newer: also accept a newer minor version and ignore its unknown keys. Such a plan is only for showing: it
            keeps its ``format_version``, so :func:`tpplan.problems` returns TP001 for it, and it is neither executed
            nor saved.

    Raises:
        PlanError: listing every problem, also as its ``problems``, with their lines in the text.
    """
    try:
        return _loads(text, what, allow_newer=allow_newer)
    except PlanError as error:
        known = text if isinstance(text, str) else text.decode(errors="replace")
        lines = lines_of(known, [problem.path for problem in error.problems])
        error.problems = tuple(attrs.evolve(one, line=n) for one, n in zip(error.problems, lines, strict=True))
        raise


def _loads(text: str | bytes, what: str, *, allow_newer: bool) -> SplitPlan:
    data = parse_json(text, what)
    version = data.get("format_version") if isinstance(data, dict) else None
    version = version if isinstance(version, str) and version_of(version) else ""
    newer = allow_newer and is_newer(version)
    if version and not newer and (message := version_problem(version)):
        # the only problem to report, because the meaning of that version's keys is unknown
        raise refusal(what, [Problem("TP001", "format_version", message)], OTHER_VERSION)
    if message := mistaken(data, PLAN):
        raise refusal(what, [Problem(FORM, "", message)], "tpplan plan makes a plan of a model and devices")
    plan = structure(data, SplitPlan, what, allow_unknown=newer)
    verify(plan, what, allow_newer=newer)
    return plan


def load(path: str | os.PathLike[str], *, allow_newer: bool = False) -> SplitPlan:
    """Read a plan file and check every rule; see :func:`loads`.

    Raises:
        PlanError: listing every problem.
        TpplanError: the file cannot be read.
    """
    return loads(read_text(path), os.fspath(path), allow_newer=allow_newer)


def save(plan: SplitPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan file atomically; see :func:`tpplan.files.text.save_text`.

    Raises:
        PlanError: the plan breaks a rule, so it could not be loaded.
        TpplanError: the file cannot be written; its previous content is unchanged.
    """
    verify(plan)
    save_text(dumps(plan), path)
