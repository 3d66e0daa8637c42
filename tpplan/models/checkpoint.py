"""Reading the headers of a checkpoint's safetensors files: names, dtypes, shapes and positions of its tensors.

Source of the format: https://github.com/huggingface/safetensors (README, "Format"). Files are untrusted: every number
in them is checked against the size of the file before it is used. The weights are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from attrs import frozen

from tpplan.core.model import DTYPE_BITS
from tpplan.core.sizes import format_apart
from tpplan.errors import ModelError
from tpplan.files.content import ContentError, foreign, opened
from tpplan.files.jsontext import MOST_VALUES, NotJSONError, read_json

if TYPE_CHECKING:
    from pathlib import Path

#: Most tensors of a checkpoint, and most bytes of all its headers together, and of its index. The largest checkpoints
#: of 2026 have 280,000 (1.0 T parameters in NVFP4: four for each matrix of 384 experts in 60 layers), in 50 MiB.
MAX_TENSORS = 400_000
MAX_HEADER_BYTES = 64 * 2**20

#: Most files of a checkpoint; the largest checkpoints of 2026 have some hundreds.
MAX_FILES = 10_000

#: An entry of a header as the safetensors library writes it, blanks aside, and what may be before the first.
_WHOLE = rb"(?:0|[1-9][0-9]{0,17})"
_ENTRY = re.compile(
    rb'[{,] ?"([^"\\\0-\x1f]++)": ?\{"dtype": ?"([A-Z0-9_]++)", ?'
    rb'"shape": ?\[(|%b(?:, ?%b){0,15})\], ?"data_offsets": ?\[(%b), ?(%b)\]\}' % ((_WHOLE,) * 4)
)
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_METADATA = re.compile(rb'\{ ?"__metadata__": ?(\{(?:,? ?%b: ?%b)*+\})' % ((_STRING,) * 2))
_END = re.compile(rb"\}[ \t\r\n]*")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_MIXED = "the directory mixes two checkpoints: keep the files of one"
_HINT = "the file is damaged, incomplete or not made by safetensors: fetch it again"
_AGAIN = "fetch it again; hf download completes what was cut off"
_LESS = "no known checkpoint has so many: check what the directory holds"
_KEYS = {"dtype", "shape", "data_offsets"}
#: Bytes after the first that tell what another file is.
_HEAD_BYTES = 512


class Tensor(NamedTuple):
    """A tensor as a header describes it.

    Attributes:
        dtype: dtype in the notation of safetensors, such as ``BF16``.
        shape: elements per dimension.
        nbytes: size in the file, in bytes.
        file: name of the file that holds it.
        start: offset in that file, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    start: int


@frozen
class Headers:
    """The tensors of a checkpoint.

    Attributes:
        tensors: tensors by name, in the order of files and headers.
        file_bytes: total size of the files in bytes, headers included.
    """

    tensors: Mapping[str, Tensor]
    file_bytes: int

    @property
    def files(self) -> frozenset[str]:
        """The names of the files that have the tensors."""
        return frozenset(tensor.file for tensor in self.tensors.values())

    def renamed(self, starts: Mapping[str, str]) -> Headers:
        """Return the same tensors with prefixes of their names replaced.

        Args:
            starts: replacement for each prefix; no tensor's name may have more than one of the prefixes. What begins
                with a dot is replaced within names.

        Raises:
            ModelError: two tensors would have the same name.
        """
        tensors: dict[str, Tensor] = {}
        inner = [part for part in starts if part.startswith(".")]
        for name, tensor in self.tensors.items():
            start = next(filter(name.startswith, starts), "")
            own = starts.get(start, "") + name.removeprefix(start)
            for part in inner:
                own = own.replace(part, starts[part])
            if own in tensors:
                raise ModelError(f"the checkpoint has {own[:120]!r} twice, also as {name[:120]!r}", _MIXED)
            tensors[own] = tensor
        return Headers(tensors, self.file_bytes)


def read_headers(directory: Path) -> Headers | None:
    """Read the headers of all safetensors files of a model's directory.

    The files are those that ``model.safetensors.index.json`` names; without it ``model.safetensors``; without that
    every ``*.safetensors``. If none of the files in the index exists but other files do, the index belongs to the model
    that these files were converted from (EXL2 conversions copy it), and is ignored.

    Returns:
        None if the directory has no safetensors files.

    Raises:
        ModelError: a file or the index cannot be read, breaks the format, or contradicts another.
    """
    try:
        present = sorted(path.name for path in directory.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise ModelError(
            f"{directory} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from None
    if not present:
        return None
    if odd := next((name for name in present if not name.isprintable()), None):
        raise ModelError(f"{odd!a:.120} is no name for a file of a checkpoint", "rename it, or move it elsewhere")
    index = _read_index(directory / _INDEX) if (directory / _INDEX).exists() else {}
    if index.keys() and set(index.values()).isdisjoint(present):
        index = {}
    files = sorted(set(index.values())) or _without_index(present)
    if missing := sorted(set(files).difference(present)):
        message = f"{_INDEX} names {len(missing)} of {len(files)} files that are not there, such as {missing[0]!r}"
        raise ModelError(message, "the download is incomplete: fetch the missing files")

    if len(files) > MAX_FILES:
        raise ModelError(f"{directory} has {len(files)} safetensors files, the most is {MAX_FILES}", _LESS)

    tensors: dict[str, Tensor] = {}
    file_bytes = header_bytes = 0
    for name in files:
        found, size, length = _read_file(directory / name, MAX_HEADER_BYTES - header_bytes)
        header_bytes += length
        if twice := found.keys() & tensors.keys():
            tensor = min(twice)
            message = f"tensor {tensor!r} is both in {tensors[tensor].file} and in {name} ({len(twice)} such tensors)"
            raise ModelError(message, _MIXED)
        tensors |= found
        file_bytes += size
        _check_count(len(tensors), directory.name)
    if index:
        _check_index(index, tensors)
    return Headers(tensors, file_bytes)


def _without_index(present: list[str]) -> list[str]:
    """Choose the files of a checkpoint without an index: neither an adapter's nor Mistral's ``consolidated`` copies."""
    if _SINGLE in present:
        return [_SINGLE]
    return [name for name in present if not name.startswith(("consolidated", "adapter_"))] or present


def _read_index(path: Path) -> dict[str, str]:
    """Return the weight map of an index: the file of each tensor, always in the index's own directory."""
    with _opened(path) as (file, size):
        if size > MAX_HEADER_BYTES:
            raise ModelError(f"{path.name} has {size} bytes, more than {MAX_HEADER_BYTES}", _HINT)
        text = file.read(size)
    weight_map = _parse(text, path.name, 2 * MAX_TENSORS).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path.name} has no weight_map from tensors to files", _HINT)
    checked: set[str] = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not (name in checked or _is_plain(name)):
            message = (
                f"{path.name} puts tensor {tensor[:80]!r} into {name!r:.120}, which is no safetensors file beside it"
            )
            raise ModelError(message, "an index may only name files of its own directory")
        checked.add(name)
    return weight_map


def _is_plain(name: str) -> bool:
    """Return whether a name is that of a safetensors file in the same directory, on every operating system."""
    path = PurePath(name)
    return path.name == name and path.suffix == ".safetensors" and not {"\\", "\0", ":"}.intersection(name)


def _check_index(index: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Check the weight map against the tensors of the files."""
    for name, file in index.items():
        if name not in tensors:
            raise ModelError(f"{_INDEX} names tensor {name!r} in {file}, which does not have it", _HINT)
        if tensors[name].file != file:
            raise ModelError(f"{_INDEX} puts tensor {name!r} into {file}, but {tensors[name].file} has it", _HINT)
    if extra := tensors.keys() - index.keys():
        name = min(extra)
        message = f"{_INDEX} leaves out {len(extra)} tensors of its files, such as {name!r} in {tensors[name].file}"
        raise ModelError(message, "fetch the index again, and remove files that do not belong to this checkpoint")


def _check_count(tensors: int, where: str) -> None:
    if tensors > MAX_TENSORS:
        raise ModelError(f"{where} has more than {MAX_TENSORS} tensors", _LESS)


def _read_file(path: Path, most: int) -> tuple[dict[str, Tensor], int, int]:
    """Return the tensors of a safetensors file, its size, and that of its header, which has ``most`` bytes at most."""
    with _opened(path) as (file, size):
        if size < _LENGTH_BYTES:
            raise ModelError(f"{path.name} has {size} bytes, too few for a safetensors file", _AGAIN)
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        limit = min(size - _LENGTH_BYTES, most)
        if length > limit:
            what, hint = foreign(start + file.read(_HEAD_BYTES))
            if what:
                raise ModelError(f"{path.name} {what}", hint)
            message = f"{path.name} claims a header of {length} bytes, but the file of {size} bytes can have {limit}"
            raise ModelError(message, _HINT)
        text = file.read(length)
    _check_count(text.count(b'"data_offsets"'), path.name)
    tensors = _tensors(text, path.name, _LENGTH_BYTES + length)
    _check_spans(tensors, path.name, _LENGTH_BYTES + length, size)
    return tensors, size, length


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file, or a link to one (as in hub caches), and yield it with its size in bytes."""
    try:
        with opened(path) as found:
            yield found
    except ContentError as error:
        raise ModelError(f"{path.name} {error}", _HINT) from None
    except (FileNotFoundError, IsADirectoryError):
        raise ModelError(f"{path.name} is a directory or a link to nothing, not a regular file", _HINT) from None
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}", "check the file's permissions") from None


def _parse(text: bytes, name: str, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """Parse a JSON object strictly; ``name`` is its name in messages."""
    try:
        document = read_json(text, most_values=most_values)
    except NotJSONError as error:
        raise ModelError(f"{name} {error}", error.hint or _HINT) from error
    if not isinstance(document, dict):
        raise ModelError(f"{name} is no object of JSON", _HINT)
    return document


def _tensors(text: bytes, file: str, data_start: int) -> dict[str, Tensor]:
    """Parse a header to tensors whose positions are not yet checked."""
    tensors: dict[str, Tensor] = {}
    try:
        if _read_entries(text, file, data_start, tensors):
            return tensors
    except ValueError:
        pass  # said below, by name
    header = _parse(text, f"the header of {file}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{file}: __metadata__ is no map from text to text", _HINT)
    tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = _tensor(entry, file, data_start)
        except ValueError as error:
            raise ModelError(f"{file}: tensor {name[:120]!r} {error!s:.300}", _HINT) from None
    return tensors


def _read_entries(text: bytes, file: str, data_start: int, tensors: dict[str, Tensor]) -> bool:
    """Read a header's entries one by one, in a quarter of the time and memory that any other JSON takes.

    Returns:
        Whether all of the header is read; False if it is not as the safetensors library writes it.

    Raises:
        ValueError: an entry is invalid, or not UTF-8.
    """
    metadata = _METADATA.match(text)
    if metadata:
        read_json(metadata[1])
    end = metadata.end() if metadata else 0
    shapes: dict[bytes, tuple[int, ...]] = {}
    count = 0
    while match := _ENTRY.match(text, end):
        end = match.end()
        name, dtype, lengths, start, stop = match.groups()
        if (shape := shapes.get(lengths)) is None:
            shape = shapes[lengths] = tuple(map(int, filter(None, lengths.split(b","))))
        tensors[name.decode()] = _checked(dtype.decode(), shape, (int(start), int(stop)), file, data_start)
        count += 1
    tensors_only = count == len(tensors) and "__metadata__" not in tensors
    return tensors_only and bool(count) and _END.fullmatch(text, end) is not None


def _check_spans(tensors: Mapping[str, Tensor], file: str, data_start: int, size: int) -> None:
    """Check that every byte of a file's data belongs to exactly one tensor."""
    end = data_start
    if all(a.start + a.nbytes == b.start for a, b in pairwise(tensors.values())):  # no need to sort
        ordered = list(tensors)
    else:
        ordered = sorted(tensors, key=lambda name: (tensors[name].start, tensors[name].nbytes))
    for name in ordered:
        tensor = tensors[name]
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a gap after"
            message = (
                f"{file}: tensor {name[:120]!r} starts at byte {tensor.start - data_start} and {what} the one before "
                f"it, to byte {end - data_start}"
            )
            raise ModelError(message, _HINT)
        end += tensor.nbytes
    if end > size:
        there, whole = format_apart(size, end)
        raise ModelError(f"{file} has {there} of {whole}: the download or copy is incomplete", _AGAIN)
    if end != size:
        message = f"{file} has {size - data_start} bytes of data, but its tensors fill {end - data_start}"
        raise ModelError(message, _HINT)


def _tensor(entry: Any, file: str, data_start: int) -> Tensor:
    """Parse a header's entry.

    Raises:
        ValueError: the entry is invalid; the message is the rest of a sentence.
    """
    if type(entry) is not dict or entry.keys() != _KEYS:
        raise ValueError("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str:
        raise ValueError(f"has the unknown dtype {dtype!r:.40}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != len(("start", "end")):
        raise ValueError(f"has shape {shape!r:.80} and data_offsets {offsets!r:.80}, not lists of whole numbers from 0")
    return _checked(dtype, tuple(shape), offsets, file, data_start)


def _checked(dtype: str, shape: tuple[int, ...], offsets: Sequence[int], file: str, data_start: int) -> Tensor:
    """Return a tensor whose size is that of its shape; see :func:`_tensor`."""
    if dtype not in DTYPE_BITS:
        raise ValueError(f"has the unknown dtype {dtype!r:.40}")
    start, end = offsets
    span = 8 * (end - start)
    bits = 0 if 0 in shape else DTYPE_BITS[dtype]
    for length in shape:
        bits *= length
        if bits > span:
            break
    if bits != span:
        raise ValueError(f"is {dtype} of shape {list(shape)!r:.80}, but its data_offsets span {end - start} bytes")
    return Tensor(dtype, shape, end - start, file, data_start + start)


def _counts(numbers: Any) -> bool:
    return type(numbers) is list and (not numbers or ({*map(type, numbers)} == {int} and min(numbers) >= 0))
