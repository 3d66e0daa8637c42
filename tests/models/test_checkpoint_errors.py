"""Headers of safetensors files that are refused."""

from __future__ import annotations

import json
import os
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.examples import examples
from tests.models.header_cases import INDEX, entry, write, write_index
from tpplan.errors import ModelError
from tpplan.models import checkpoint
from tpplan.models.checkpoint import MAX_HEADER_BYTES, read_headers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


HOSTILE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "seven bytes": (b"\0" * 7, "has 7 bytes"),
    "truncated header": ((1000).to_bytes(8, "little") + b"{}", "claims a header of 1000 bytes"),
    "header longer than any file": (b"\xff" * 8 + b"{}", "claims a header of 18446744073709551615 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_file_that_is_too_short_is_refused(tmp_path: Path, case: str) -> None:
    """A length is held against the size of the file before anything is read."""
    content, message = HOSTILE_FILES[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_headers(tmp_path)
    assert "model.safetensors" in caught.value.message


def test_header_beyond_the_cap_is_refused(tmp_path: Path) -> None:
    """A header above the cap is refused unread, even where the file is long enough for it (it is sparse here)."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    with pytest.raises(ModelError, match=f"can have {MAX_HEADER_BYTES}"):
        read_headers(tmp_path)


HOSTILE_HEADERS: dict[str, tuple[Any, str]] = {
    "not JSON": (b"hello", "is not JSON: expecting value, at line 1, column 1"),
    "not UTF-8": (b'{"\xff": 1}', "is no UTF-8 text: byte 2 is 0xff"),
    "a list": ([1, 2], "is no object"),
    "duplicate tensor": (b'{"a": {}, "a": {}}', 'has the key "a" twice in one object'),
    "duplicate key": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', 'has the key "dtype" twice in one object'),
    "NaN": (b'{"a": NaN}', "has NaN, which is not JSON"),
    "deep nesting": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deeply"),
    "endless number": (b'{"a": ' + b"9" * 10_000 + b"}", "has a number of 10000 digits"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__"),
    "tensor is a number": ({"a": 3}, "tensor 'a' needs exactly"),
    "missing key": ({"a": {"dtype": "F32", "shape": [1]}}, "tensor 'a' needs exactly"),
    "extra key": ({"a": {**entry(), "more": 1}}, "tensor 'a' needs exactly"),
    "unknown dtype": ({"a": entry(dtype="F12")}, "unknown dtype 'F12'"),
    "dtype is a list": ({"a": entry(dtype=["F32"])}, "unknown dtype"),
    "negative shape": ({"a": entry(shape=[-2, -3])}, r"shape \[-2, -3\]"),
    "boolean shape": ({"a": entry(shape=[True, 6])}, r"shape \[True, 6\]"),
    "float shape": ({"a": entry(shape=[2.0, 3])}, r"shape \[2.0, 3\]"),
    "shape is a number": ({"a": entry(shape=6)}, "shape 6"),
    "three offsets": ({"a": entry(offsets=[0, 12, 24])}, "data_offsets"),
    "float offset": ({"a": entry(offsets=[0, 24.0])}, "data_offsets"),
    "negative offset": ({"a": entry(offsets=[-24, 0])}, "data_offsets"),
    "backwards": ({"a": entry(offsets=[24, 0])}, "span -24 bytes"),
    "beyond the file": ({"a": entry(shape=[7], offsets=[0, 28])}, "has 94 B of 98 B: the download or copy is inc"),
    "shape and offsets disagree": ({"a": entry(shape=[2, 2])}, "span 24 bytes"),
    "huge shape": ({"a": entry(shape=[2**62] * 1000)}, "span 24 bytes"),
    "huge shape with a zero": ({"a": entry(shape=[2**62, 0])}, "span 24 bytes"),
    "overlap": ({"a": entry(), "b": entry(shape=[1], offsets=[20, 24])}, "'b' starts at byte 20 and overlaps"),
    "gap": ({"a": entry(shape=[1], offsets=[20, 24])}, "'a' starts at byte 20 and leaves a gap"),
    "unused bytes": ({"a": entry(shape=[5], offsets=[0, 20])}, "24 bytes of data, but its tensors fill 20"),
}


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
def test_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    """What a header claims is checked against the format and the file; the error names the file and the numbers."""
    header, message = HOSTILE_HEADERS[case]
    write(tmp_path / "model.safetensors", header, bytes(24))
    with pytest.raises(ModelError, match=message) as caught:
        read_headers(tmp_path)
    assert "model.safetensors" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..", "", "a\0b", 7, None]
)
def test_index_may_only_name_files_beside_it(tmp_path: Path, file: Any) -> None:
    """A path that leads anywhere else is refused, whether or not a file is there."""
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    write_index(tmp_path, {"a": file})
    with pytest.raises(ModelError, match="no safetensors file beside it"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": NaN}}']
)
def test_index_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    """An index without a weight map is an error that names the index."""
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match=INDEX):
        read_headers(tmp_path)


INDEX_CONTRADICTIONS: dict[str, tuple[dict[str, str], str]] = {
    "file is missing": (
        {"a": "1.safetensors", "z": "3.safetensors"},
        "1 of 2 files that are not there, .*3.safetensors",
    ),
    "tensor is missing": ({"a": "1.safetensors", "z": "1.safetensors"}, "'z' in 1.safetensors, which does not have it"),
    "wrong file": ({"a": "2.safetensors", "b": "1.safetensors"}, "'a' into 2.safetensors, but 1.safetensors has it"),
    "tensor left out": ({"a": "1.safetensors"}, "leaves out 1 tensors of its files, such as 'c' in 1.safetensors"),
}


@pytest.mark.parametrize("case", INDEX_CONTRADICTIONS)
def test_index_that_contradicts_the_files_is_refused(tmp_path: Path, case: str) -> None:
    """Files and index have to agree about every tensor."""
    weight_map, message = INDEX_CONTRADICTIONS[case]
    first = {"a": torch.zeros(2)} | ({"c": torch.zeros(1)} if case == "tensor left out" else {})
    save_file(first, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "2.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelError, match=message):
        read_headers(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Two files of one checkpoint never have the same tensor."""
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "2.safetensors")
    with pytest.raises(ModelError, match=r"'a' is both in 1\.safetensors and in 2\.safetensors"):
        read_headers(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Directories, pipes and links to nothing are errors, not waits."""
    path = tmp_path / "model.safetensors"
    makers: tuple[Callable[[], None], ...] = (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("nowhere"),
    )
    for make in makers:
        make()
        with pytest.raises(ModelError, match="not a regular file"):
            read_headers(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_file_names_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    """A file's name never reaches the terminal as it is."""
    (tmp_path / "\x1b[2J\udcff.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="no name for a file") as caught:
        read_headers(tmp_path)
    assert caught.value.message.isprintable()


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    """A missing directory is an error with the reason."""
    with pytest.raises(ModelError, match="No such file"):
        read_headers(tmp_path / "nowhere")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "BF16", "U8"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "I64"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 32), min_size=2, max_size=2) | JSON,
    },
)
HEADERS = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), ENTRY | JSON, max_size=4)
FILES = st.one_of(
    st.binary(max_size=64),
    st.builds(lambda text, n: n.to_bytes(8, "little") + text, st.binary(max_size=64), st.integers(0, 2**64 - 1)),
    st.builds(
        lambda header, data: len(text := json.dumps(header).encode()).to_bytes(8, "little") + text + data,
        HEADERS,
        st.binary(max_size=32),
    ),
)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=FILES, index=st.none() | JSON | st.dictionaries(st.text(max_size=6), st.just("model.safetensors")))
def test_no_bytes_raise_anything_but_model_error(tmp_path: Path, content: bytes, index: Any) -> None:
    """Whatever the files hold, they are either read, with every byte accounted for, or refused."""
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / INDEX).unlink(missing_ok=True)
    if index is not None:
        write_index(tmp_path, index)
    try:
        headers = read_headers(tmp_path)
    except ModelError:
        return
    assert headers is not None
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    assert sum(tensor.nbytes for tensor in headers.tensors.values()) == len(content) - header_bytes


def _outcome(directory: Path, text: bytes, data: bytes) -> object:
    """Return the tensors of a file with this header, or why it is refused; positions are those behind the header."""
    write(directory / "model.safetensors", text, data)
    try:
        headers = read_headers(directory)
    except ModelError:
        return None
    assert headers is not None
    return {name: tensor._replace(start=tensor.start - 8 - len(text)) for name, tensor in headers.tensors.items()}


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(header=st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), ENTRY, max_size=4), fill=st.booleans())
def test_every_form_of_a_header_means_the_same(tmp_path: Path, header: dict[str, Any], fill: bool) -> None:
    """Blanks, escapes and the order of keys in JSON change neither what is read nor what is refused."""
    end = 0
    for each in header.values():
        if fill and type(each.get("shape")) is list and all(type(n) is int and n >= 0 for n in each["shape"]):
            start, end = end, end + prod(each["shape"])
            each |= {"dtype": "U8", "data_offsets": [start, end]}
    end = min(end, 2**20)  # less than the header says is refused, whatever its form
    compact, lines = json.dumps(header, separators=(",", ":")).encode(), json.dumps(header, indent=1).encode()
    plain = json.dumps(header, ensure_ascii=False).encode(errors="surrogatepass")
    turned = json.dumps({name: dict(reversed(each.items())) for name, each in header.items()}).encode()
    outcomes = [_outcome(tmp_path, text, bytes(end or 24)) for text in (compact, lines, turned, compact + b" " * 7)]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    if not any("\ud800" <= letter <= "\udfff" for name in header for letter in name):
        assert _outcome(tmp_path, plain, bytes(end or 24)) == outcomes[0]


def test_how_many_tensors_a_checkpoint_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no checkpoint has is refused before it is parsed, in one file and over all of them, and so many files."""
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 4)
    monkeypatch.setattr(checkpoint, "MAX_FILES", 3)
    for i in range(3):
        save_file({f"{i}.{j}": torch.zeros(1) for j in range(2)}, tmp_path / f"{i}.safetensors")
        if i < 2:
            assert len(read_headers(tmp_path).tensors) == 2 * i + 2  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="has more than 4 tensors"):
        read_headers(tmp_path)
    (tmp_path / "3.safetensors").touch()
    with pytest.raises(ModelError, match="has 4 safetensors files, the most is 3"):
        read_headers(tmp_path)
    save_file({str(j): torch.zeros(1) for j in range(5)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors has more than 4 tensors"):
        read_headers(tmp_path)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_file_raises_nothing_but_model_error(tmp_path: Path, position: int, value: int, cut: bool) -> None:
    """One changed byte, or a cut, of a real file never gives a traceback, nor tensors that do not fill the file."""
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.int64)}, path, metadata={"format": "pt"})
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position] = value
    path.write_bytes(content[:position] if cut else content)
    try:
        headers = read_headers(tmp_path)
    except ModelError:
        return
    assert headers is not None
    assert not cut
    assert sum(tensor.nbytes for tensor in headers.tensors.values()) == 64
