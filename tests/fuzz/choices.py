"""Choices made by bytes, so that whoever makes the bytes, makes documents: nearly valid ones, of any size."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")

_NUMBERS: Final = (0, 1, -1, 2, 3, 7, 255, 256, 2**16, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**39, 10**40)
_OTHERS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0.5,
    1e999,
    float("nan"),
    "",
    "a",
    "\0",
    "\ud800",
    "é" * 50,
    [],
    {},
    [[]],
    [0],
    [1, 2],
)
_MOST_CHANGES: Final = 6


class Choices:
    """Bytes that are read one choice at a time; when they are used up, each choice is the first."""

    def __init__(self, data: bytes) -> None:
        """Read from the start."""
        self._data = data
        self._at = 0

    def rest(self) -> bytes:
        """Return the bytes that no choice was made with."""
        return self._data[self._at :]

    def below(self, count: int) -> int:
        """Return a number from 0, below ``count``."""
        size = (max(1, count - 1).bit_length() + 7) // 8
        piece = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(piece, "little") % count

    def pick(self, options: Sequence[_T]) -> _T:
        """Return one of the options."""
        return options[self.below(len(options))]

    def value(self, like: Any, others: Sequence[Any]) -> Any:
        """Return a value to put in the place of another: near it, of another type, or from another place."""
        kind = self.below(6)
        if kind == 0 and type(like) is int:
            return self.pick((like + 1, like - 1, -like, like * 2, like // 2, 2**31 - like))
        if kind == 1 and isinstance(like, (list, str)):
            return self.pick((like[1:], like[:-1], like[::-1], like * self.pick((2, 1000 if len(like) < 1000 else 2))))
        if kind == 2 and others:
            return deepcopy(self.pick(others))
        if kind == 3:
            return self.pick(_NUMBERS)
        if kind == 4:
            return self.below(2**24)
        return deepcopy(self.pick(_OTHERS))

    def changed(self, document: Any) -> Any:
        """Return a document of JSON with some of its values, keys and items changed."""
        document = deepcopy(document)
        for _ in range(1 + self.below(_MOST_CHANGES)):
            places = list(_places(document))
            if not places:
                break
            holder, key = self.pick(places)
            action = self.below(8)
            if action == 0:
                del holder[key]
            elif action == 1 and isinstance(holder, list):
                holder.insert(key, deepcopy(holder[key]))
            elif action == 1:
                holder[f"{key}{self.pick(('', '_', '2', 's'))}"] = holder[key]
            else:
                holder[key] = self.value(holder[key], [h[k] for h, k in places])
        return document

    def text(self, document: Any) -> bytes:
        """Return a document as JSON, in one of the ways in which that can be written."""
        indent, ascii_only = self.pick((None, 1)), bool(self.below(2))
        text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        return text[: self.below(len(text))] if not self.below(16) else text


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return every object and array of a document with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(document, (dict, list)):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            found += [(document, key), *_places(document[key])]
    return found
