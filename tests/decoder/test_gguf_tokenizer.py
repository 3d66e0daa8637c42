"""The tokenizer that a GGUF file holds is converted once, and again when the file or a converter changes."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import tokenizers
import transformers

from tpplan.decoder.text import gguf as text
from tpplan.decoder.text import tokenizer
from tpplan.errors import ModelError
from tpplan.models.gguf.header import Gguf, GgufTensor, read_gguf

if TYPE_CHECKING:
    from pathlib import Path


def _write(path: Path, word: str, *tensors: str) -> None:
    """Write a model of tensors of eight elements with a byte-level vocabulary in which a word is one token."""
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcd", word[:2], word])
    writer.add_token_types([gguf.TokenType.NORMAL] * 6)
    writer.add_token_merges([f"{word[0]} {word[1]}", f"{word[:2]} {word[2]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name in tensors:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _id(data: bytes, word: str) -> int | None:
    token: int | None = tokenizers.Tokenizer.from_buffer(data).token_to_id(word)
    return token


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Keep what is converted in a folder of this test, whose setting is returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    return monkeypatch


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_is_converted_once(
    tmp_path: Path, settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second start does without transformers' conversion, which the log tells before it takes its time.

    Another vocabulary under the same name has its own.
    """
    caplog.set_level(logging.INFO, "tpplan")
    path = tmp_path / "model.gguf"
    _write(path, "abc", "output_norm.weight")
    first, origin = text.tokenizer_in(read_gguf(path))
    assert origin == path
    assert (_id(first, "abc"), _id(first, "bcd")) == (5, None)
    with settings.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
        assert text.tokenizer_in(read_gguf(path))[0] == first
    assert caplog.messages == ["converting the tokenizer of model.gguf, which is kept for the next start"]
    _write(path, "bcd", "output_norm.weight")
    assert _id(text.tokenizer_in(read_gguf(path))[0], "bcd") == 5
    assert len([*(tmp_path / "kept/tpplan/tokenizers").iterdir()]) == 2


@pytest.mark.filterwarnings("ignore")
def test_another_version_converts_again(tmp_path: Path, settings: pytest.MonkeyPatch) -> None:
    """What an older transformers made of a vocabulary is not taken."""
    path = tmp_path / "model.gguf"
    _write(path, "abc", "output_norm.weight")
    text.tokenizer_in(read_gguf(path))
    settings.setattr(text, "version", lambda _: "0")
    settings.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    with pytest.raises(ModelError, match="transformers does not read"):
        text.tokenizer_in(read_gguf(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "damaged", [b"", b"{}", b"version https://git-lfs.github.com/spec/v1", b"[" + b"1," * 2_000_001]
)
def test_a_kept_tokenizer_that_is_damaged_is_named(
    tmp_path: Path, settings: pytest.MonkeyPatch, damaged: bytes
) -> None:
    """The GGUF file is whole, and not blamed; the hint works when followed."""
    path = tmp_path / "model.gguf"
    _write(path, "abc", "output_norm.weight")
    settings.setattr(tokenizer, "gguf_of", lambda _: SimpleNamespace(file=read_gguf(path)))
    tokens = tokenizer.Tokenizer(path).encode("abc")
    (kept,) = (tmp_path / "kept/tpplan/tokenizers").iterdir()
    kept.write_bytes(damaged)
    with pytest.raises(ModelError, match=f"^{re.escape(str(kept))} ") as caught:
        tokenizer.Tokenizer(path)
    assert caught.value.hint.startswith("delete it: ")
    kept.unlink()
    assert tokenizer.Tokenizer(path).encode("abc") == tokens


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", ["", "tpplan/tokenizers"])
def test_without_a_place_it_is_converted_each_time(
    tmp_path: Path, settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inside: str
) -> None:
    """A cache that cannot be read or written costs time only, which the log says without an error's hint."""
    caplog.set_level(logging.INFO, "tpplan")
    path, taken = tmp_path / "model.gguf", tmp_path / "taken"
    _write(path, "abc", "output_norm.weight")
    (taken / inside).parent.mkdir(parents=True, exist_ok=True)
    (taken / inside).touch()
    settings.setenv("XDG_CACHE_HOME", str(taken))
    assert _id(text.tokenizer_in(read_gguf(path))[0], "abc") == 5
    assert str(taken / inside) in caplog.messages[-1]
    assert "hint" not in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_a_first_file_without_tensors(tmp_path: Path, settings: pytest.MonkeyPatch) -> None:
    """The first of several files may have the vocabulary alone, which is converted once, too."""
    path = tmp_path / "model-00001-of-00002.gguf"
    _write(path, "abc")
    others = {"output_norm.weight": GgufTensor("F32", (8,), 1, 4, "model-00002-of-00002.gguf", 0)}
    file = Gguf(path, {}, {}, others, path.stat().st_size)
    first, _ = text.tokenizer_in(file)
    assert _id(first, "abc") == 5
    settings.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    assert text.tokenizer_in(file)[0] == first
