"""The manifest of a team's plans, ``tpplan.toml``: which plan files there are, and what each is made of."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from tpplan.errors import FORM, Problem, RequestError, TpplanError, refusal
from tpplan.files.jsontext import shown
from tpplan.files.text import read_bytes, unknown_key
from tpplan.files.tomltext import parse_toml
from tpplan.hardware.spec import is_file
from tpplan.models.hub import is_name
from tpplan.planner.options import CHOICES, USUAL, Options, parse_reserve

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The manifest that commands take if none is named.
MANIFEST: Final = "tpplan.toml"

_DEFAULTS: Final = "defaults"
#: What each plan has beside options; only the file may not be a default.
_INPUTS: Final = ("file", "model", "gpus")
_DRAFT: Final = "draft"
_DRAFT_FILE: Final = "draft-output"
#: Plan files, which defaults do not have.
_FILES: Final = ("file", _DRAFT_FILE)
_KEYS: Final = (*_INPUTS, _DRAFT, _DRAFT_FILE, *USUAL)
#: What a key names, where that is not the key.
_NAMED: Final = {"gpus": "GPUs", _DRAFT: "a draft model", _DRAFT_FILE: "the file of the draft model's plan"}
_MOST: Final = 2**40
_CORRECT: Final = (
    "correct it; keys are file, model, gpus, draft, draft-output and the options of tpplan plan without their dashes"
)


@frozen
class Entry:
    """A plan of a manifest.

    Attributes:
        file: path of the plan's file.
        model: path of the model, or its name on the hub.
        gpus: the devices, as :func:`tpplan.hardware.spec.parse_devices` takes them.
        options: what is asked.
        draft: path or name of the draft model to leave room for; empty for none.
        is_split: whether that is split like the model; else all of it is on every device.
        is_draft: whether the plan is that of the draft model, which is split, and not of the model.
    """

    file: str
    model: str
    gpus: str
    options: Options
    draft: str = ""
    is_split: bool = False
    is_draft: bool = False


@frozen
class Manifest:
    """A team's plans; all paths are as seen from the current directory.

    Attributes:
        path: of the manifest.
        plans: its entries, in order.
    """

    path: str
    plans: tuple[Entry, ...]

    def naming(self, paths: tuple[str, ...]) -> Manifest:
        """Return the manifest with the entries of some plan files only.

        Raises:
            RequestError: one of these files is no entry's.
        """
        known = {os.path.realpath(entry.file): entry for entry in self.plans}
        for path in paths:
            if os.path.realpath(path) not in known:
                near = get_close_matches(path, [entry.file for entry in self.plans], n=1)
                hint = f"did you mean {near[0]}?" if near else f"add a [[plan]] with this file to {self.path}"
                raise RequestError(f"{self.path} has no plan {path[:60]!r}", hint)
        return evolve(self, plans=tuple(known[path] for path in dict.fromkeys(map(os.path.realpath, paths))))


def load(path: str) -> Manifest:
    """Read a manifest.

    Raises:
        PlanError: listing every problem, each with the entry and the key.
        TpplanError: the file cannot be read.
    """
    if not Path(path).exists():
        above = next((each for each in Path.cwd().parents if (each / MANIFEST).is_file()), None)
        hint = "name it with --manifest FILE; docs/review-plans.md says what is in it"
        if path == MANIFEST and above:
            hint = f"there is one above: --manifest {os.path.relpath(above / MANIFEST)}"
        raise TpplanError(f"there is no manifest {path!r}", hint)
    return loads(read_bytes(path), path)


def loads(data: bytes, path: str) -> Manifest:
    """Parse a manifest; what it names is relative to the folder of ``path``.

    Raises:
        PlanError: listing every problem, each with the entry and the key.
    """
    document = parse_toml(data, path)
    found = list(_unknown(document, (_DEFAULTS, "plan"), ""))
    usual, tables = document.get(_DEFAULTS, {}), document.get("plan", [])
    if not isinstance(usual, dict):
        found.append(Problem(FORM, _DEFAULTS, f"is {_said(usual)}, expected a table, as [{_DEFAULTS}] begins one"))
        usual = {}
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        found.append(Problem(FORM, "plan", "is no list of plans: begin each with [[plan]], in two brackets"))
        tables = []
    elif not tables:
        found.append(Problem(FORM, "", "has no plan: begin each with [[plan]]"))
    found += _problems(usual, tuple(key for key in _KEYS if key not in _FILES), f"[{_DEFAULTS}]")
    folder = os.path.dirname(path)  # noqa: PTH120 (which stays empty)
    names: dict[str, str] = {}
    for number, table in enumerate(tables, 1):
        file = table.get("file")
        where = f"[[plan]] {number}" + (f" ({file})" if isinstance(file, str) else "")
        found += _problems(table, _KEYS, where)
        found += _draft_problems(table, {**usual, **table}, where)
        missing = [key for key in _INPUTS if key not in {*usual, *table}]
        found += [Problem(FORM, where, f"has no {key}") for key in missing]
        found += _file_problems(table, folder, where, names)
    if found:
        raise refusal(path, found, _CORRECT)
    return Manifest(path, tuple(entry for table in tables for entry in _entries(usual | table, folder)))


def _entries(table: dict[str, Any], folder: str) -> Iterator[Entry]:
    """Yield the entry of a table without problems, and that of its draft model if this is split."""
    gpus = table["gpus"].strip()
    options = {key.replace("-", "_"): table[key] for key in USUAL if key in table}
    reserve = options.get("reserve", ())
    options["reserve"] = (reserve,) if isinstance(reserve, str) else tuple(reserve)
    entry = Entry(
        file=_from(folder, table["file"]),
        model=_model(folder, table["model"]),
        gpus=_from(folder, gpus) if is_file(gpus) or Path(_from(folder, gpus)).is_file() else gpus,
        options=Options(**options),
        draft=_model(folder, table[_DRAFT]) if table.get(_DRAFT) else "",
        is_split=_DRAFT_FILE in table,
    )
    yield entry
    if entry.is_split:
        yield evolve(entry, file=_from(folder, table[_DRAFT_FILE]), is_draft=True)


def _model(folder: str, name: str) -> str:
    return name if is_name(name, folder) else _from(folder, name)


def _from(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))  # noqa: PTH118 (which would not drop ..)


def _problems(table: dict[str, Any], known: tuple[str, ...], where: str) -> Iterator[Problem]:
    """Yield what is wrong with the keys and values of a table."""
    yield from _unknown(table, known, where)
    for key in known:
        if key in table and (message := _problem(key, table[key])):
            yield Problem(FORM, where, f"{key} is {_said(table[key])}, {message}")


def _draft_problems(table: dict[str, Any], both: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yield what does not go together of what a plan is to have room for; ``both`` has the defaults, too."""
    if both.get("mtp") is True and both.get(_DRAFT):
        yield Problem(FORM, where, f"has {_DRAFT} and mtp, of which a model drafts by one")
    if _DRAFT_FILE in table and not both.get(_DRAFT):
        yield Problem(FORM, where, f"has {_DRAFT_FILE} and no {_DRAFT}, of which that is to be the plan")


def _file_problems(table: dict[str, Any], folder: str, where: str, names: dict[str, str]) -> Iterator[Problem]:
    """Yield which files of a plan are elsewhere, or another's of ``names``, to which they are added."""
    for key in _FILES:
        if isinstance(file := table.get(key), str):
            place = os.path.realpath(_from(folder, file))
            if not _no_plan_file(file) and not Path(place).is_relative_to(os.path.realpath(folder)):
                yield Problem(FORM, where, f"{key} leads by a link to {place!r}, outside the manifest's folder")
            if place in names:
                yield Problem(FORM, where, f"has the same file as {names[place]}")
            names[place] = where


def _unknown(table: dict[str, Any], known: tuple[str, ...], where: str) -> Iterator[Problem]:
    for key in table:
        if key not in known:
            yield Problem(FORM, where, unknown_key(key, known))


def _problem(key: str, value: object) -> str:
    """Return what is wrong with a value, as the rest of a sentence; empty if nothing is."""
    if key not in USUAL:
        return _no_input(key, value)
    usual = USUAL[key]
    if key in CHOICES:
        return _no_choice(value, CHOICES[key])
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "expected true or false"
    if isinstance(usual, tuple):
        return _no_reserve(value)
    is_whole = type(value) is int and 1 <= value <= _MOST
    return "" if is_whole else f"expected a whole number from 1 to {_MOST}, such as 32768"


def _no_input(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        is_none = (key, value) == (_DRAFT, "")  # where the defaults have one
        return "" if is_none else f"expected a text that names {_NAMED.get(key, f'a {key}')}"
    return _no_plan_file(value) if key in _FILES else _not_everywhere(value) if key == "gpus" else ""


def _no_plan_file(value: str) -> str:
    path = PurePath(os.path.normpath(value))
    if path.is_absolute() or ".." in path.parts:
        return "expected a path within the folder of the manifest"
    return "" if path.suffix == ".json" else "expected a plan's file, which ends in .json"


def _not_everywhere(value: str) -> str:
    if value.strip().casefold() == "auto":
        return "which differs between machines; tpplan devices -o machine.json writes a file to name here"
    return ""


def _no_choice(value: object, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return ""
    near = get_close_matches(value.casefold(), choices, n=1) if isinstance(value, str) else ()
    return f"expected {', '.join(choices[:-1])} or {choices[-1]}" + (f"; did you mean {near[0]}?" if near else "")


def _no_reserve(value: object) -> str:
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, str):
            return 'expected a text such as "2GiB" or "2GiB@0", or a list of them'
        try:
            parse_reserve(each)
        except RequestError as error:
            return f'expected sizes such as "2GiB" or "2GiB@0": {error.message}'
    return ""


def _said(value: object) -> str:
    """Return a value as an error shows it."""
    if isinstance(value, (str, bool)):
        return shown(value)
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return "a very long number" if isinstance(value, int) and abs(value) > _MOST**2 else str(value)
