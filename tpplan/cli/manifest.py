"""The commands that take a team's manifest: they make, check and compare all of its plans."""

from __future__ import annotations

import os
import shlex
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.cli import console
from tpplan.cli import plans as on_plans
from tpplan.cli.arguments import lacking
from tpplan.errors import PlanError, UsageError
from tpplan.files.codec import dumps
from tpplan.files.places import SUFFIX, is_other
from tpplan.files.text import save_text
from tpplan.hardware.spec import links_of, parse_devices
from tpplan.models.reader import read_prediction_layers
from tpplan.planner.manifest import MANIFEST, load, loads
from tpplan.render import github, verdicts
from tpplan.reports.check import check_manifest
from tpplan.reports.manifest import Inputs, make

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.core.plan import SplitPlan
    from tpplan.errors import TpplanError
    from tpplan.files.revision import Revision
    from tpplan.planner.manifest import Entry, Manifest
    from tpplan.reports.check import CheckReport
    from tpplan.reports.error import ErrorBody
    from tpplan.reports.manifest import ManifestReport


def plan(path: str, given: Mapping[str, object], *, json: bool) -> ManifestReport:
    """Make every plan of a manifest, show what became of each, and say what to do about those that do not fit.

    Args:
        path: of the manifest; the usual one if empty.
        given: what else the command was given, by name; a manifest has it all.
        json: show one JSON document.
    """
    _refuse(path, given)
    manifest = load(path or MANIFEST)
    read = dict.fromkeys(name for entry in manifest.plans for name in (entry.model, entry.gpus, entry.draft) if name)
    on_plans.apart(*(entry.file for entry in manifest.plans), reading=(manifest.path, *read))
    entries, inputs = {entry.file: entry for entry in manifest.plans}, _inputs()
    made: dict[str, SplitPlan] = {}

    def save(plan: SplitPlan, file: str) -> bool:
        is_written = save_text(dumps(plan), file)
        made[file] = plan
        return is_written

    report = make(manifest, inputs, _stored, save)
    for file, found in made.items():
        known = inputs(entries[file])
        if known.drafted_for:  # of whose plan all else is told
            on_plans.note_idle_draft(found, file)
            continue
        on_plans.note_draft(known, found, file)
        on_plans.note_all(found, known.model, entries[file].options, known.links, file)
        on_plans.note_uncounted(found, on_screen=False, of=file)
    console.present(evolve(report, notes=console.noted()), verdicts.made, "json" if json else "text")
    for each in report.plans:
        if each.error:
            _advise(each.path, each.error, manifest)
    return report


def check(path: str, named: tuple[str, ...], given: Mapping[str, object], form: str) -> CheckReport:
    """Check the plans of a manifest, show what is found, and say which command makes stale ones again.

    Args:
        path: of the manifest; the usual one if empty.
        named: plan files; all of the manifest's if none is named.
        given: what else the command was given, by name, which does not go with a manifest.
        form: ``text``, ``json``, ``markdown`` or ``github``.
    """
    _refuse(path, given)
    if named and not path and not Path(MANIFEST).exists():
        raise lacking("check", "--model", f"and no {MANIFEST} is here that says which")
    whole = load(path or MANIFEST)
    manifest = whole.naming(on_plans.many(named)) if named else whole
    stored = {entry.file: _stored(entry.file) for entry in manifest.plans}
    report = check_manifest(manifest, stored, _inputs(), () if named else _unlisted(manifest))
    console.present(evolve(report, notes=console.noted()), verdicts.check, form, annotate=github.check)
    for each in report.plans:
        if error := each.error or each.refused:
            _advise(each.path, error, manifest)
    if any(each.reasons and not each.refused for each in report.plans):
        command = ["tpplan", "plan", "--all", *(["--manifest", path] if path else [])]
        text = "this command makes them, and tpplan diff --against HEAD shows what that changes"
        console.say("hint", text, "hint", [shlex.join(command)])
    return report


def files_since(path: str, revision: Revision) -> tuple[str, ...]:
    """Return the plan files of a manifest, and those that it had in a revision.

    Args:
        path: of the manifest; the usual one if empty.
        revision: the revision.
    """
    path = path or MANIFEST
    manifests = [load(path)]
    for content in revision.files((path,)).values():
        try:
            manifests.append(loads(revision.read(content, path), path))
        except PlanError as error:
            text = error.message.splitlines()[0]
            on_plans.note(f"in {revision.name}, {text}: plans that only that manifest names are not compared")
    return tuple(dict.fromkeys(entry.file for manifest in manifests for entry in manifest.plans))


def _refuse(path: str, given: Mapping[str, object]) -> None:
    """Refuse what does not go with a manifest.

    Raises:
        UsageError: naming it.
    """
    if wrong := [name for name, value in given.items() if value]:
        option = "--manifest" if path else "--all"
        hint = f"leave out {option}, or write it into the manifest: {path or MANIFEST}"
        raise UsageError(f"{wrong[0]} does not go with {option}", hint)


def _inputs() -> Callable[[Entry], Inputs]:
    """Return a function that reads what an entry is planned with, each model and each list of devices once."""
    model, predicting, devices, links = (
        cache(on_plans.read_model),
        cache(read_prediction_layers),
        cache(partial(parse_devices, tell=on_plans.note)),
        cache(links_of),
    )

    def read(entry: Entry) -> Inputs:
        with console.busy(f"planning {entry.file}"):
            spec, mtp = model(entry.model), entry.options.mtp
            draft = predicting(entry.model) if mtp else model(entry.draft) if entry.draft else None
            named = devices(entry.gpus), links(entry.gpus)
            if draft and entry.is_draft:
                return Inputs(draft, *named, drafted_for=spec)
            return Inputs(spec, *named, draft, is_split=mtp or entry.is_split)

    return read


def _stored(path: str) -> SplitPlan | TpplanError | None:
    """Return the plan in a file, why it cannot be read, or None if there is no file."""
    return on_plans.plan_or_error(path) if os.path.lexists(path) else None


def _unlisted(manifest: Manifest) -> tuple[str, ...]:
    """Return the plan files in the folders of a manifest's plans that it does not name."""
    folders = dict.fromkeys(Path(entry.file).parent for entry in manifest.plans)
    known = {os.path.realpath(entry.file) for entry in manifest.plans}
    beside = (path for folder in folders if folder.is_dir() for path in sorted(folder.glob(f"*{SUFFIX}")))
    return tuple(str(path) for path in beside if os.path.realpath(path) not in known and not is_other(str(path)))


def _advise(path: str, error: ErrorBody, manifest: Manifest) -> None:
    """Say on standard error what would help an entry."""
    lines = [_as_keys(advice.option) for advice in error.suggestions if advice.option]
    if lines:
        these = "each of these lines" if len(lines) > 1 else "this line"
        console.say("hint", f"{these} in the [[plan]] of {path} in {manifest.path} makes it fit", "hint", lines)
    elif error.hint:
        console.say("hint", f"{path}: {error.hint}", "hint")


def _as_keys(option: str) -> str:
    """Return options of the command line as a manifest has them: ``cache = "q8"``."""
    words = shlex.split(option)
    pairs = zip(words[::2], words[1::2], strict=True)
    return " and ".join(
        f"{key.removeprefix('--')} = " + (value if value.isdecimal() else f'"{value}"') for key, value in pairs
    )
