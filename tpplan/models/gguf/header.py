"""Reading the header of a GGUF file: its metadata, and names, types, shapes and positions of its tensors.

Source of the format: https://github.com/ggml-org/ggml (docs/gguf.md), versions 2 and 3, little endian. Files are
untrusted: every number in them is checked against the size of the file before it is used. Long lists, such as the
vocabulary's, are passed over; the weights are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from struct import Struct, error
from typing import IO, Final

from attrs import define, frozen

from tpplan.errors import ModelError
from tpplan.files.content import ContentError, opened

#: Most bytes, keys, tensors and elements of lists that the headers of one model have: those of 2026 have a third at
#: most, and usually a fiftieth.
MAX_HEADER_BYTES: Final = 64 * 2**20
MAX_KEYS, MAX_TENSORS, MAX_ELEMENTS = 10_000, 200_000, 4_000_000
#: Longest list and text that are kept, and most dimensions of a tensor.
_KEPT, LONGEST_TEXT, _MOST_DIMS = 4096, 2**16, 8
#: Most files that one model is split into.
MAX_FILES: Final = 1000
_PIECE: Final = 2**20
_HINT: Final = "the file is damaged, incomplete or not made by llama.cpp's tools: fetch it again"
#: Name of one of the files that a model is split into.
SPLIT: Final = re.compile(r"(?P<start>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

#: Types of values by their number: the struct's letter of plain ones.
_PLAIN: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST = 8, 9

#: Types of tensors by their number: name, elements of a block, bytes of a block (ggml's ``type_traits``).
TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

Value = int | float | bool | str | tuple["Value", ...]


@frozen
class GgufTensor:
    """A tensor as a header describes it.

    Attributes:
        kind: name of its type, such as ``Q4_K``.
        shape: elements per dimension, rows first, as torch has them.
        block: elements of a block, which are behind each other in the last dimension.
        block_bytes: bytes of a block.
        file: name of the file that holds it.
        start: offset in that file, in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    block: int
    block_bytes: int
    file: str
    start: int

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return prod(self.shape) // self.block * self.block_bytes


@frozen
class Gguf:
    """A model's GGUF files.

    Attributes:
        path: the file, of several the first.
        metadata: values by key, without those of lists of more than 4,096 elements; their lengths are in ``lengths``.
        lengths: number of elements of each list.
        tensors: tensors by name, in the order of files and headers.
        file_bytes: total size of the files in bytes.
    """

    path: Path
    metadata: Mapping[str, Value]
    lengths: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]
    file_bytes: int


@define
class _Room:
    """What the headers of a model's files may have yet."""

    bytes: int = MAX_HEADER_BYTES
    keys: int = MAX_KEYS
    tensors: int = MAX_TENSORS
    elements: int = MAX_ELEMENTS


class _Reader:
    """Reads a header from its start on, and never more than it may have."""

    def __init__(self, file: IO[bytes], size: int, name: str, room: _Room) -> None:
        self._file, self._size, self.name, self.room = file, size, name, room
        self._data, self._at, self._start = b"", 0, 0

    @property
    def place(self) -> int:
        """Bytes read so far."""
        return self._start + self._at

    def fail(self, what: str) -> ModelError:
        """Return the error that says what is wrong with the file."""
        return ModelError(f"{self.name} {what}", _HINT)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        left = len(self._data) - self._at
        if count > left:
            if self.place + count > self._size:
                raise self.fail(f"ends within its header, at {self._size} bytes")
            if self.place + count > self.room.bytes:
                raise self.fail(f"has a header that is larger than {MAX_HEADER_BYTES} bytes{self._together}")
            rest = self._data[self._at :]
            self._start += self._at
            self._data, self._at = rest + self._file.read(max(_PIECE, count - left)), 0
            if len(self._data) < count:
                raise self.fail("became shorter while it was read")
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def number(self, letter: str = "Q") -> int:
        """Return the next number of a struct's kind."""
        form = _FORMS[letter]
        (found,) = form.unpack(self.take(form.size))
        return found  # type: ignore[no-any-return]

    def text(self) -> str:
        """Return the next text, or its start."""
        length = self.number()
        if length > min(self._size, MAX_HEADER_BYTES):
            raise self.fail(f"has a text of {length} bytes at {self.place}")
        return self.take(length)[:LONGEST_TEXT].decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        """Pass over the next texts."""
        number, size = _FORMS["Q"].unpack_from, _FORMS["Q"].size
        while count:
            data, at, end = self._data, self._at, len(self._data)
            last = end - size
            while count and at <= last:
                (length,) = number(data, at)
                if length > last - at:
                    break
                at += size + length
                count -= 1
            self._at = at
            if count:  # the next one is not in memory, at least not all of it
                self.text()
                count -= 1

    def spend(self, what: str, count: int) -> None:
        """Check that there is room for so many keys, tensors or elements, and count them."""
        left = getattr(self.room, what) - count
        if left < 0:
            raise self.fail(f"has {count} {what}, the most is {_MOST[what]}{self._together}")
        setattr(self.room, what, left)

    @property
    def _together(self) -> str:
        return " in all files together" if SPLIT.fullmatch(self.name) else ""


_MOST: Final = {"keys": MAX_KEYS, "tensors": MAX_TENSORS, "elements": MAX_ELEMENTS}
_FORMS: Final = {letter: Struct(f"<{letter}") for letter in {*_PLAIN.values()}}


def read_gguf(path: Path) -> Gguf:
    """Read the header of a GGUF file, and of all files that the model is split into.

    Args:
        path: the file; of a split model any of its files.

    Raises:
        ModelError: a file is missing, cannot be read, breaks the format, or contradicts another.
    """
    split = SPLIT.fullmatch(path.name)
    paths = [path]
    if split:
        count = int(split["count"])
        if not 0 < count <= MAX_FILES:
            raise ModelError(f"{path.name} is of {count} files, the most is {MAX_FILES}", _HINT)
        paths = [path.with_name(f"{split['start']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
        if missing := [each.name for each in paths if not each.exists()]:
            hint = "the download is incomplete: fetch the missing files"
            raise ModelError(f"{len(missing)} of {count} files are not there, such as {missing[0]}", hint)
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    tensors: dict[str, GgufTensor] = {}
    size, room = 0, _Room()
    for each in paths:
        values, counts, found, length = _read_file(each, room)
        metadata, lengths = {**values, **metadata}, {**counts, **lengths}
        if twice := next((name for name in found if name in tensors), None):
            raise ModelError(f"{twice[:80]!r} is in {tensors[twice].file} and in {each.name}", _HINT)
        tensors |= found
        size += length
    total = metadata.get("split.tensors.count")
    if split and isinstance(total, int) and total != len(tensors):
        raise ModelError(f"{path.name} and its other files have {len(tensors)} tensors, expected {total}", _HINT)
    return Gguf(paths[0], metadata, lengths, tensors, size)


def _read_file(path: Path, room: _Room) -> tuple[dict[str, Value], dict[str, int], dict[str, GgufTensor], int]:
    try:
        with opened(path) as (file, size):
            return *_read_header(_Reader(file, size, path.name, room)), size
    except ContentError as problem:
        raise ModelError(f"{path.name} {problem}", problem.hint or _HINT) from problem
    except error as problem:
        raise ModelError(f"{path.name} breaks the format: {problem}", _HINT) from problem
    except OSError as problem:
        raise ModelError(
            f"{path.name} cannot be read: {problem.strerror}", "check the path and its permissions"
        ) from problem


def _read_header(reader: _Reader) -> tuple[dict[str, Value], dict[str, int], dict[str, GgufTensor]]:
    tensor_count, key_count = _counts(reader)
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(key_count):
        key = reader.text()
        value, length = _value(reader, reader.number("I"))
        if length is not None:
            lengths[key] = length
        if value is not None:
            metadata[key] = value
    raw = [_tensor(reader) for _ in range(tensor_count)]
    reader.room.bytes -= reader.place
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _PIECE:
        raise reader.fail(f"has the alignment {alignment!r:.40}")
    begin = -(-reader.place // alignment) * alignment
    tensors = {name: _placed(reader, name, shape, kind, begin + offset) for name, shape, kind, offset in raw}
    if len(tensors) < tensor_count:
        raise reader.fail("has two tensors of one name")
    return metadata, lengths, tensors


def _counts(reader: _Reader) -> tuple[int, int]:
    """Return the numbers of tensors and of keys of a file of a version that is known."""
    if reader.take(4) != b"GGUF":
        raise ModelError(f"{reader.name} does not begin with GGUF", _HINT)
    version = reader.number("I")
    if version not in {2, 3}:
        what = "is in big endian" if version and version & 0xFFFF == 0 else f"has version {version}, expected 2 or 3"
        raise ModelError(f"{reader.name} {what}", "convert the model again with llama.cpp's tools")
    tensor_count, key_count = reader.number(), reader.number()
    reader.spend("tensors", tensor_count)
    reader.spend("keys", key_count)
    return tensor_count, key_count


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, count = reader.text(), reader.number("I")
    if count > _MOST_DIMS:
        raise reader.fail(f"has a tensor of {count} dimensions, {name[:80]!r}")
    dims = tuple(reader.number() for _ in range(count))
    return name, dims[::-1], reader.number("I"), reader.number()


def _placed(reader: _Reader, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    """Return a tensor, checked against the size of the file."""
    if kind not in TYPES:
        raise ModelError(
            f"{reader.name}: {name[:80]!r} has the type {kind}, which tpplan does not know",
            "convert the model with one of " + ", ".join(name for name, block, _ in TYPES.values() if block > 1),
        )
    text, block, size = TYPES[kind]
    if not shape or not all(shape) or shape[-1] % block:
        raise reader.fail(f"has {name[:80]!r} of shape {list(shape)}, which are no whole blocks of {block} ({text})")
    tensor = GgufTensor(text, shape, block, size, reader.name, start)
    if start + tensor.nbytes > reader._size:  # noqa: SLF001
        end = start + tensor.nbytes
        raise reader.fail(f"has {reader._size} bytes, but {name[:80]!r} ends at {end}")  # noqa: SLF001
    return tensor


def _value(reader: _Reader, kind: int) -> tuple[Value | None, int | None]:
    """Return the next value, and the number of its elements if it is a list; None for a long list."""
    if kind in _PLAIN:
        return reader.number(_PLAIN[kind]), None
    if kind == _TEXT:
        return reader.text(), None
    if kind != _LIST:
        raise reader.fail(f"has a value of the unknown type {kind}")
    inner, count = reader.number("I"), reader.number()
    reader.spend("elements", count)
    keep = count <= _KEPT
    if inner in _PLAIN:
        form = Struct(f"<{count}{_PLAIN[inner]}")
        data = reader.take(form.size)
        return (form.unpack(data) if keep else None), count
    if inner != _TEXT:
        raise reader.fail(f"has a list of values of the type {inner}")
    if not keep:
        reader.skip_texts(count)
        return None, count
    return tuple(reader.text() for _ in range(count)), count
