"""Frozen classes as canonical JSON and back: strict, with the path of every problem."""

from __future__ import annotations

from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import attrs
from cattrs import Converter
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from tpplan.core.plan import SCHEMA_URN, SplitPlan
from tpplan.errors import FORM, MOST_PROBLEMS, Problem, refusal
from tpplan.files.jsontext import render, shown
from tpplan.files.text import unknown_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")


#: Fields that are required in files, and written even with their default value so that a reviewer sees them.
STATED = frozenset({"format_version", "kind", "tokens"}) | {
    *(f"{way}_{kind}_bytes" for way in ("peer", "host") for kind in ("fans", "exchanges", "sums")),
    "peer_one_shot_bytes",
    *("copies_fans_bytes", "copies_exchanges_bytes", "passed_on_bytes", "gathers_bytes"),
}


#: Value of the key ``$schema`` for each class of documents. Only plans must have it when they are read.
SCHEMAS: dict[type, str] = {SplitPlan: SCHEMA_URN}
_Class = TypeVar("_Class", bound=type)


def document(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator for the class of a document.

    Args:
        name: of its schema, such as ``fit-report``.
    """

    def named(cls: _Class) -> _Class:
        SCHEMAS[cls] = f"urn:tpplan:{name}:1"
        return cls

    return named


def dumps(obj: object) -> str:
    """Return the canonical JSON of a plan or another document; equal objects give equal bytes."""
    return render(unstructure(obj))


def uncanonical_line(text: str, obj: object) -> int:
    """Return the first line, from 1, where ``text`` differs from the canonical JSON of ``obj``; 0 if it does not."""
    pairs = zip([*text.split("\n"), None], [*dumps(obj).split("\n"), None], strict=False)
    return next((i for i, (a, b) in enumerate(pairs, 1) if a != b), 0)


def structure(data: object, cls: type[T], what: str, *, allow_unknown: bool = False) -> T:
    """Convert JSON data to an object of a frozen class, without converting scalar types.

    Args:
        data: the data, as :func:`tpplan.files.text.parse_json` returns it.
        cls: class of the object.
        what: name of the document in errors, such as its file's name.
        allow_unknown: ignore keys that the class does not have.

    Raises:
        PlanError: listing every missing key, unknown key and wrong type with its path, also as its ``problems``.
    """
    try:
        return _converter(strict=not allow_unknown).structure(data, cls)
    except (BaseValidationError, ValueError) as error:
        raise refusal(what, list(_flat(error, ""))) from None


def unstructure(obj: object) -> dict[str, Any]:
    """Convert an object of a frozen class to JSON data, in the order of its fields.

    Fields with their default value are omitted, except those in :data:`STATED`.
    """
    data: dict[str, Any] = _converter(strict=True).unstructure(obj)
    return data


def _flat(error: Exception, path: str) -> Iterator[Problem]:
    """Yield the problems in a tree of cattrs errors, each with its path."""
    if isinstance(error, ClassValidationError):
        fields, others = error.group_exceptions()
        for inner, field in fields:
            yield from _flat(inner, f"{path}.{field.name}" if path else field.name)
        for rest in others:
            yield from _flat(rest, path)
    elif isinstance(error, IterableValidationError):
        for inner, item in error.group_exceptions()[0]:
            yield from _flat(inner, f"{path}[{item.index}]")
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        for key in sorted(error.extra_fields)[:MOST_PROBLEMS]:
            yield Problem(FORM, path, unknown_key(key, known))
    elif isinstance(error, KeyError):
        yield Problem(FORM, path, "is missing")
    else:
        yield Problem(FORM, path, str(error))


@cache
def _converter(*, strict: bool) -> Converter:
    """Return the converter, which never coerces JSON types; with ``strict`` it rejects unknown keys."""
    converter = Converter(forbid_extra_keys=strict, omit_if_default=True)
    for plain in (bool, int, str):
        converter.register_structure_hook(plain, _to_plain)
    converter.register_structure_hook_factory(_is_tuple, partial(_to_tuple, converter))
    converter.register_structure_hook_factory(attrs.has, partial(_to_object, converter))
    converter.register_unstructure_hook_factory(attrs.has, partial(_from_object, converter))
    return converter


def _is_tuple(cls: Any) -> bool:
    """Return whether a type is a tuple of items of one type."""
    return get_origin(cls) is tuple


def _to_object(converter: Converter, cls: type) -> Callable[[object, object], object]:
    """Return the hook that structures an object of a frozen class."""
    from_fields: Callable[[Any, Any], object] = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=converter.forbid_extra_keys
    )
    stated = [f.name for f in attrs.fields(cls) if f.name in STATED and f.default is not attrs.NOTHING]
    urn = SCHEMAS.get(cls)

    def hook(value: object, _: object) -> object:
        data = _expect(dict, value)
        errors = [_at(name, KeyError(name)) for name in stated if name not in data]
        if urn:
            data = dict(data)
            if "$schema" not in data:
                errors[:0] = [_at("$schema", KeyError("$schema"))] if cls is SplitPlan else []
            elif (given := data.pop("$schema")) != urn:
                errors.insert(0, _at("$schema", ValueError(f'expected "{urn}", got {shown(given)}')))
        try:
            obj = from_fields(data, cls)
        except ClassValidationError as error:
            raise ClassValidationError("", [*errors, *error.exceptions], cls) from None
        if errors:
            raise ClassValidationError("", errors, cls)
        return obj

    return hook


def _at(name: str, error: Exception) -> Exception:
    """Attach the name of the field to an error, as cattrs does."""
    error.add_note(AttributeValidationNote("", name, None))
    return error


def _to_tuple(converter: Converter, cls: Any) -> Callable[[object, object], object]:
    """Return the hook that structures a tuple from an array; it stops after ``MOST_PROBLEMS`` invalid items."""
    item = get_args(cls)[0]
    structure_item = converter.get_structure_hook(item)

    def hook(value: object, _: object) -> tuple[object, ...]:
        items, errors = [], []
        for i, element in enumerate(_expect(list, value)):
            try:
                items.append(structure_item(element, item))
            except (BaseValidationError, ValueError) as error:
                error.add_note(IterableValidationNote("", i, item))
                errors.append(error)
                if len(errors) == MOST_PROBLEMS:
                    break
        if errors:
            raise IterableValidationError("", errors, cls)
        return tuple(items)

    return hook


def _to_plain(value: object, cls: type) -> object:
    """Return a number, string or boolean unchanged, or the StrEnum member with that value."""
    if not issubclass(cls, StrEnum):
        return _expect(cls, value)
    known = list(map(str, cls))
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"expected {', '.join(known[:-1])} or {known[-1]}, got {shown(value)}")
    return cls(value)


def _from_object(converter: Converter, cls: type) -> Callable[[Any], dict[str, Any]]:
    """Return the hook that unstructures an object to JSON data."""
    kept = {f.name: override(omit_if_default=False) for f in attrs.fields(cls) if f.name in STATED}
    to_data: Callable[[Any], dict[str, Any]] = make_dict_unstructure_fn(
        cls,
        converter,
        _cattrs_omit_if_default=True,
        **kept,  # type: ignore[arg-type]
    )
    names = [field.name for field in attrs.fields(cls)]
    head = {"$schema": SCHEMAS[cls]} if cls in SCHEMAS else {}

    def hook(obj: Any) -> dict[str, Any]:
        data = to_data(obj)  # which puts the optional fields last
        return head | {name: data[name] for name in names if name in data}

    return hook


_KINDS = {dict: "an object", list: "an array", bool: "true or false", int: "a whole number", str: "a text"}


def _expect(kind: type[T], value: object) -> T:
    """Return ``value`` if it has exactly the type ``kind``: ``true`` is not 1, and 7.0 is not 7."""
    if type(value) is not kind:
        raise ValueError(f"expected {_KINDS[kind]}, got {shown(value)}")
    return value
