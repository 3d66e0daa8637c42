"""Reading the headers of a checkpoint's safetensors files: names, dtypes, shapes and positions of its tensors.

Source of the format: https://github.com/huggingface/safetensors (README, "Format"). Files are untrusted: every number
in them is checked against the size of the file before it is used. The weights are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from attrs import frozen

from tpplan.errors import ModelError
from tpplan.jsontext import NotJSONError, read_json
from tpplan.model import DTYPE_BITS

if TYPE_CHECKING:
    from pathlib import Path

#: Size limit of a header or index (the safetensors library has the same limit for headers).
MAX_HEADER_BYTES = 100 * 2**20

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_MIXED = "the directory mixes two checkpoints: keep the files of one"
_HINT = "the file is damaged, incomplete or not made by safetensors: fetch it again"


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

    def renamed(self, starts: Mapping[str, str]) -> Headers:
        """Return the same tensors with prefixes of their names replaced.

        Args:
            starts: replacement for each prefix; no tensor's name may have more than one of the prefixes.

        Raises:
            ModelError: two tensors would have the same name.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            start = next(filter(name.startswith, starts), "")
            own = starts.get(start, "") + name.removeprefix(start)
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

    tensors: dict[str, Tensor] = {}
    file_bytes = 0
    for name in files:
        found, size = _read_file(directory / name)
        if twice := found.keys() & tensors.keys():
            tensor = min(twice)
            message = f"tensor {tensor!r} is both in {tensors[tensor].file} and in {name} ({len(twice)} such tensors)"
            raise ModelError(message, _MIXED)
        tensors |= found
        file_bytes += size
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
        weight_map = _parse(file.read(size), path.name).get("weight_map")
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
        raise ModelError(message, "the index and the files are of different checkpoints: fetch both again")


def _read_file(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a safetensors file, and its size in bytes."""
    with _opened(path) as (file, size):
        if size < _LENGTH_BYTES:
            raise ModelError(f"{path.name} has {size} bytes, too few for a safetensors file", _HINT)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        limit = min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
        if length > limit:
            message = f"{path.name} claims a header of {length} bytes, but the file of {size} bytes can have {limit}"
            raise ModelError(message, _HINT)
        header = _parse(file.read(length), f"the header of {path.name}")
    return _tensors(header, path.name, _LENGTH_BYTES + length, size), size


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a regular file, or a link to one (as in hub caches), and yield it with its size in bytes."""
    try:
        if not path.is_file():
            raise ModelError(f"{path.name} is not a regular file, or a link to nothing", _HINT)
        with path.open("rb") as file:
            yield file, path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}", "check the file's permissions") from None


def _parse(text: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object strictly; ``name`` is its name in messages."""
    try:
        document = read_json(text)
    except NotJSONError as error:
        raise ModelError(f"{name} {error}", _HINT) from error
    if not isinstance(document, dict):
        raise ModelError(f"{name} is no object of JSON", _HINT)
    return document


def _tensors(header: dict[str, Any], file: str, data_start: int, size: int) -> dict[str, Tensor]:
    """Check a header against the data that follows it: every byte must belong to exactly one tensor."""
    data_bytes = size - data_start
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{file}: __metadata__ is no map from text to text", _HINT)
    tensors = {}
    spans = []
    for name, entry in header.items():
        try:
            tensor = _tensor(entry, file, data_bytes)
        except ValueError as error:
            raise ModelError(f"{file}: tensor {name[:120]!r} {error!s:.300}", _HINT) from None
        tensors[name] = tensor._replace(start=data_start + tensor.start)
        spans.append((tensor.start, tensor.start + tensor.nbytes, name))
    end = 0
    for start, next_end, name in sorted(spans):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            message = (
                f"{file}: tensor {name[:120]!r} starts at byte {start} and {what} the one before it, to byte {end}"
            )
            raise ModelError(message, _HINT)
        end = next_end
    if end != data_bytes:
        raise ModelError(f"{file} has {data_bytes} bytes of data, but its tensors fill {end}", _HINT)
    return tensors


def _tensor(entry: Any, file: str, data_bytes: int) -> Tensor:
    """Parse a header's entry to a tensor whose ``start`` counts from the first byte of data.

    Raises:
        ValueError: the entry is invalid; the message is the rest of a sentence.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"has the unknown dtype {dtype!r:.40}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != len(("start", "end")):
        raise ValueError(f"has shape {shape!r:.80} and data_offsets {offsets!r:.80}, not lists of whole numbers from 0")
    start, end = offsets
    if not start <= end <= data_bytes:
        raise ValueError(f"has data_offsets {offsets} outside the {data_bytes} bytes of data")
    bits = 0 if 0 in shape else DTYPE_BITS[dtype]
    for length in shape:
        bits *= length
        if bits > 8 * data_bytes:
            break
    if bits != 8 * (end - start):
        raise ValueError(f"is {dtype} of shape {shape!r:.80}, but its data_offsets span {end - start} bytes")
    return Tensor(dtype, tuple(shape), end - start, file, start)


def _counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
