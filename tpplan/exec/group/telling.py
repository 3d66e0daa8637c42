"""Telling all processes plain data: its form in bytes, what is sent, and the checks of what arrives. Nothing is run."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final, TypeVar

import tpplan
from tpplan.errors import ExecutionError
from tpplan.exec.group.members import differing
from tpplan.files.jsontext import NotJSONError, read_json, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: Maximum bytes of what a process tells.
MOST_BYTES: Final = 16 * 2**20
#: Maximum depth of lists, tuples and dictionaries in each other.
_DEEPEST: Final = 32
#: Whole numbers are below it; so many digits are read.
_LARGEST: Final = 10**40

#: Plain data in words.
KINDS: Final = "None, bool, int, float, str, bytes, and lists, tuples and dictionaries of these"


class NotPlainError(ValueError):
    """Something is no plain data, or bytes are none; the message is the rest of a sentence."""


def encode(value: object) -> bytes:
    """Return plain data as bytes: JSON, in which an object is a tuple, a dictionary or bytes, by the name of its key.

    Types are exact, as the receiver gets them: a ``NamedTuple`` is no plain data.

    Raises:
        NotPlainError: the value has something else in it, a whole number of more than 40 digits or 32 levels, or takes
            more than ``MOST_BYTES``.
    """
    data = json.dumps(_packed(value, _DEEPEST), separators=(",", ":")).encode()
    if len(data) > MOST_BYTES:
        raise NotPlainError(f"has {len(data)} bytes, the most is {MOST_BYTES}")
    return data


def decode(data: bytes) -> Any:
    """Return the plain data that bytes encode.

    Raises:
        NotPlainError: they encode none.
    """
    try:
        return _unpacked(read_json(data, constants=True, most_values=MOST_BYTES), _DEEPEST)
    except (NotJSONError, TypeError, ValueError) as error:  # such as keys that cannot be keys, and odd base64
        raise NotPlainError("has bytes that are no plain data") from error


def _packed(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in {bool, float, str}:
        return value
    if kind is int:
        if abs(value) >= _LARGEST:
            raise NotPlainError("has a whole number of more than 40 digits")
        return value
    if kind is bytes:
        return {"bytes": b64encode(value).decode()}
    if not depth:
        raise NotPlainError(f"has more than {_DEEPEST} levels")
    if kind is list:
        return [_packed(each, depth - 1) for each in value]
    if kind is tuple:
        return {"tuple": [_packed(each, depth - 1) for each in value]}
    if kind is dict:
        return {"dict": [[_packed(key, depth - 1), _packed(each, depth - 1)] for key, each in value.items()]}
    raise NotPlainError(f"has an object of type {kind.__module__}.{kind.__qualname__}")


def _unpacked(data: Any, depth: int) -> Any:
    if not isinstance(data, (list, dict)):
        return data
    if isinstance(data, dict):
        ((name, inside),) = data.items()
        if name == "bytes":
            return b64decode(inside, validate=True)
    else:
        name, inside = "", data
    if not depth or not isinstance(inside, list):
        raise NotPlainError("has too many levels, or other objects")
    if name == "dict":
        return {_unpacked(key, depth - 1): _unpacked(each, depth - 1) for key, each in inside}
    values = [_unpacked(each, depth - 1) for each in inside]
    if name == "tuple":
        return tuple(values)
    if not name and isinstance(data, list):
        return values
    raise NotPlainError(f"has an object {name!r:.40}")


_Told = TypeVar("_Told")
_T = TypeVar("_T")

#: A message starts with these bytes, the sender's version of tpplan, and the number of bytes of its data: negative if
#: these are the words of why there is none.
MAGIC: Final = b"tpplan:1"
_VERSION: Final = slice(8, 56)
_SIZE: Final = slice(56, 64)
_START: Final = 64
#: Bytes of every first message; a second one has what does not fit.
FIRST_BYTES: Final = 1024
#: Maximum characters of a reason that comes from another process.
_SHOWN: Final = 400
_FOREIGN: Final = "let only processes of this program reach the ports of torch.distributed"
_CONVERT: Final = f"plain data is {KINDS}"


class Telling(ABC):
    """What tells all processes something.

    Attributes:
        process: index of this process.
        count: number of processes.
    """

    process: int
    count: int

    def tell(self, mine: _Told) -> list[_Told]:
        """Tell all processes plain data, and return what each of them has told.

        Args:
            mine: see :mod:`tpplan.exec.group.telling`.

        Raises:
            ExecutionError: torch.distributed failed, as when a process has ended; or a process told no plain data or
                has another version of tpplan, which is the same error in all.
        """
        try:
            data = encode(mine)
            size = len(data)
        except NotPlainError as error:
            data = str(error).encode(errors="replace")[: FIRST_BYTES - _START]
            size = -len(data)
        version = tpplan.__version__.encode().ljust(_VERSION.stop - _VERSION.start, b"\0")[: _VERSION.stop - 8]
        head = MAGIC + version + size.to_bytes(8, "little", signed=True)
        first = self._exchanged((head + data).ljust(FIRST_BYTES, b"\0")[:FIRST_BYTES])
        sizes = self._sizes(first)
        longest = max(sizes) + _START
        rest = [b""] * self.count
        if longest > FIRST_BYTES:
            rest = self._exchanged(data[FIRST_BYTES - _START :].ljust(longest - FIRST_BYTES, b"\0"))
        told: list[Any] = []
        odd = []
        for process, (size, start, end) in enumerate(zip(sizes, first, rest, strict=True)):
            try:
                told.append(decode((start[_START:] + end)[:size]))
            except NotPlainError as error:
                odd.append((process, str(error)))
        _refuse(odd)
        return told

    def tell_and_read(self, mine: object, read: Callable[[Any], _T]) -> list[_T]:
        """Tell all processes plain data, and return what ``read`` makes of what each of them has told.

        Raises:
            ExecutionError: see :meth:`tell`; or ``read`` takes what a process has told for something else.
        """
        made, odd = [], []
        for i, told in enumerate(self.tell(mine)):
            try:
                made.append(read(told))
            except (AttributeError, LookupError, TypeError, ValueError):
                odd.append((i, "is not what this call exchanges"))
        _refuse(odd)
        return made

    def _sizes(self, heads: Sequence[bytes]) -> list[int]:
        """Return the number of bytes that each process tells.

        Raises:
            ExecutionError: one tells nothing, or has another version of tpplan.
        """
        _refuse([(i, "has bytes of another program") for i, x in enumerate(heads) if not x.startswith(MAGIC)])
        versions = [visible(x[_VERSION].rstrip(b"\0").decode(errors="replace")) for x in heads]
        if different := differing([{"tpplan": version} for version in versions]):
            raise ExecutionError(f"the processes have different versions of {different[0]}", "install the same one")
        sizes = [int.from_bytes(x[_SIZE], "little", signed=True) for x in heads]
        words = [x[_START:][: -min(0, size)].decode(errors="replace") for size, x in zip(sizes, heads, strict=True)]
        _refuse([(i, f"{visible(each):.{_SHOWN}}") for i, each in enumerate(words) if each], _CONVERT)
        limit = f"bytes, the most is {MOST_BYTES}"
        _refuse([(i, f"has {size} {limit}") for i, size in enumerate(sizes) if not 0 < size <= MOST_BYTES])
        return sizes

    @abstractmethod
    def _exchanged(self, mine: bytes) -> list[bytes]:
        """Return as many bytes of each process; all call it at once."""


class Alone(Telling):
    """A single process, for which the same is plain data as for several."""

    process, count = 0, 1

    def _exchanged(self, mine: bytes) -> list[bytes]:
        return [mine]


def _refuse(problems: Sequence[tuple[int, str]], hint: str = _FOREIGN) -> None:
    """Raise an error if any process tells what it should not.

    Args:
        problems: a process, and what it tells as the rest of a sentence.
        hint: what to do.

    Raises:
        ExecutionError: there are problems.
    """
    if problems:
        listed = "; ".join(f"process {i} tells what {problem}" for i, problem in problems)
        raise ExecutionError(f"processes tell each other plain data only: {listed}", hint)
