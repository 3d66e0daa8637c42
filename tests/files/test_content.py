"""Files that are not what was expected are named as what they are, whatever reads them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import socket
import zipfile
from threading import Timer
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.checkpoints import LLAMA, llama_outside, write_checkpoint
from tests.codec_cases import PLAN, TEXT
from tpplan.decoder.text.files import end_tokens
from tpplan.decoder.text.tokenizer import Tokenizer
from tpplan.errors import PlanError, TpplanError
from tpplan.files import content
from tpplan.hardware import file as devices_file
from tpplan.models.checkpoint import read_headers
from tpplan.models.config import read_config
from tpplan.planfile import codec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4976698672\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html class=''>\n<head><meta charset='utf-8' /></head><body>404</body></html>\n"


def _zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    return data.getvalue()


#: What is in place of a file, what that is called, and a part of the hint.
FOREIGN: dict[str, tuple[bytes, str, str]] = {
    "pointer": (POINTER, "is a pointer of Git LFS", "git lfs pull"),
    "page": (PAGE, "is a web page", "/resolve/"),
    "page in capitals": (PAGE.upper(), "is a web page", "hf download"),
    "error": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is a web page", "hf download"),
    "refusal": (b"Invalid username or password.", "is a hub's refusal", "hf auth login"),
    "gguf": (b"GGUF\x03\0\0\0\x23\x01\0\0\0\0\0\0\x1a\0\0\0", "is a GGUF file", "end in .gguf"),
    "gzip": (gzip.compress(b"{}"), "is a compressed file", "unpack"),
    "xz": (lzma.compress(b"{}"), "is a compressed file", "unpack"),
    "bzip2": (bz2.compress(b"{}"), "is a compressed file", "unpack"),
    "zip": (_zipped(), "is a zip archive", "unpack"),
    "pickle": (pickle.dumps({"a": 1}), "is a pickle of Python", "in safetensors"),
    "zeros": (bytes(4096), "starts with zeros", "fetch it again"),
}


def _plan(path: Path) -> object:
    return codec.load(path)


def _devices(path: Path) -> object:
    return devices_file.load(path)


def _config(path: Path) -> object:
    return read_config(path)


def _weights(path: Path) -> object:
    path.rename(path.with_name("model.safetensors"))
    return read_headers(path.parent)


def _index(path: Path) -> object:
    save_file({"a": torch.zeros(2)}, path.with_name("a.safetensors"))
    path.rename(path.with_name("model.safetensors.index.json"))
    return read_headers(path.parent)


def _generation(path: Path) -> object:
    path.with_name("config.json").write_text(json.dumps(LLAMA))
    path.rename(path.with_name("generation_config.json"))
    return end_tokens(path.parent)


def _tokenizer(path: Path) -> object:
    path.rename(path.with_name("tokenizer.json"))
    return Tokenizer(path.parent)


READERS = (_plan, _devices, _config, _weights, _index, _generation, _tokenizer)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_in_place_of_another(case: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    """What comes in place of a file when it was fetched wrongly is told by name, with what to do about it."""
    data, what, hint = FOREIGN[case]
    path = tmp_path / "file"
    path.write_bytes(data)
    if (read, case) == (_weights, "zeros"):
        what, hint = "the header of model.safetensors is empty", "fetch"
    with pytest.raises(TpplanError) as caught:
        read(path)
    assert what in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("read", [_plan, _devices, _config, _index, _generation])
def test_half_a_document(read: Callable[[Path], object], tmp_path: Path) -> None:
    """A file that ends in the middle is called incomplete, and not wrong."""
    path = tmp_path / "file"
    path.write_text(TEXT[: len(TEXT) // 2])
    with pytest.raises(TpplanError, match="ends before its JSON does") as caught:
        read(path)
    assert "the file is incomplete" in caught.value.hint


def test_half_a_checkpoint(tmp_path: Path) -> None:
    """A file that ends before its last tensor does is a download that was cut off; sizes tell how much is there."""
    write_checkpoint(tmp_path, LLAMA, {"a": ("BF16", (2**20, 1536)), **llama_outside()})
    path = tmp_path / "model.safetensors"
    os.truncate(path, 5 * 2**28)
    with pytest.raises(TpplanError, match=r"has 1\.25 GiB of 3\.00 GiB: the download or copy is incomplete"):
        read_headers(tmp_path)
    write_checkpoint(tmp_path, LLAMA, {"a": ("BF16", (2**20, 1536))})
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(TpplanError, match=f"has {size - 1} bytes of {size} bytes: the download"):
        read_headers(tmp_path)


def test_a_merge_that_is_not_finished() -> None:
    """Conflict markers are what is wrong with a plan, wherever they are, and not its JSON."""
    line = '    "batch": 2,'
    assert line in TEXT
    ours = TEXT.replace(line, f'<<<<<<< HEAD\n{line}\n=======\n    "batch": 4,\n>>>>>>> theirs')
    number = ours[: ours.index("<<<")].count("\n") + 1
    with pytest.raises(PlanError, match=f"has the conflict markers of a Git merge, from line {number}\n") as caught:
        codec.loads(ours)
    assert "git checkout --ours" in caught.value.hint


def test_a_pipe_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's ``<(command)`` may write in pieces; one that does not end in time is refused, not waited for."""
    reading, writing = os.pipe()
    text = TEXT.encode()
    os.write(writing, text[:100])
    later = Timer(0.1, _finish, (writing, text[100:]))
    later.start()
    assert codec.load(f"/dev/fd/{reading}") == PLAN
    later.join()
    os.close(reading)
    monkeypatch.setattr(content, "PIPE_SECONDS", 0.05)
    reading, writing = os.pipe()
    os.write(writing, text[:100])
    with pytest.raises(TpplanError, match="is a pipe that did not end within ") as caught:
        codec.load(f"/dev/fd/{reading}")
    assert "named -" in caught.value.hint
    os.close(reading)
    os.close(writing)


def _finish(number: int, rest: bytes) -> None:
    os.write(number, rest)
    os.close(number)


@pytest.mark.parametrize("read", READERS[:3])
@pytest.mark.parametrize("kind", ["a character device", "a socket"])
def test_special_files(kind: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    """Devices and sockets are refused by what they are, unopened."""
    path = tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "a socket":
            os.chdir(tmp_path)  # a socket's path is short
            other.bind("file")
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(TpplanError, match=f"is {kind}, not a regular file"):
            read(path)


@given(st.binary(max_size=600))
def test_nothing_else_is_named(data: bytes) -> None:
    """JSON is never taken for another kind of file, whatever is in it."""
    assert content.foreign(b'{"a": "' + data) == ("", "")
    assert content.foreign(b" [" + data) == ("", "")
