"""Reading config.json: whatever the file holds, the answer is a value of the right type or a clear error."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpplan.errors import ModelError
from tpplan.files import content
from tpplan.models import families
from tpplan.models.config import MAX_CONFIG_BYTES, MAX_COUNT, Config, parse_config, read_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def config(**data: object) -> Config:
    """Return a config with these keys."""
    return Config(data, "config.json")


def test_a_directory_or_a_file_may_be_named(tmp_path: Path) -> None:
    """A model's directory stands for the config.json in it."""
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 8}')
    assert [read_config(path).count("hidden_size") for path in (tmp_path, file, str(file))] == [8, 8, 8]


def _empty_directory(path: Path) -> Path:
    path.mkdir()
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _dangling(path: Path) -> Path:
    path.symlink_to(path.with_name("nowhere"))
    return path


def _circle(path: Path) -> Path:
    path.symlink_to(path)
    return path


def _sparse_gigabyte(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(2**30)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path, "does not exist"),
        (lambda path: path / "deeper", "does not exist"),
        (lambda path: path.with_name("a\0b"), "a\\0b"),
        (lambda path: path.with_name("a\x1b[31m\nb"), "a\\u001b[31m\\nb does not exist"),
        (lambda path: path.with_name("x" * 5000), "xxx"),
        (_empty_directory, "config.json does not exist"),
        (_pipe, "is a pipe that did not end within "),
        (_dangling, "does not exist"),
        (_circle, "model"),
        (_sparse_gigabyte, f"has {2**30} bytes"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, make: Callable[[Path], Path], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing, special or huge file is named, with what is wrong with it, and never waited for."""
    monkeypatch.setattr(content, "PIPE_SECONDS", 0.05)
    with pytest.raises(ModelError) as caught:
        read_config(make(tmp_path / "model"))
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n" * 500, "is empty"),
        (b"\x80\x81\x82", "is no UTF-8 text: byte 0 is 0x80"),
        (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
        (b"{", "ends before its JSON does, at line 1, column 2"),
        (b"[1]", "holds [1], expected an object"),
        (b"null", "holds None, expected an object"),
        (b'"config"', "holds 'config', expected an object"),
        (b'{"a": 1, "a": 2}', 'has the key "a" twice in one object'),
        (b'{"b": {"a": 1, "a": 1}}', 'has the key "a" twice in one object'),
        (b'{"a": ' + b"9" * 5000 + b"}", "has a number of 5000 digits"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (b"[" * 1_000_000, "is nested too deeply"),
        (b'\xef\xbb\xbf{"a": 1}', "starts with a byte order mark"),
        (
            b'{"a": 1, "b": ' + b"9" * 41 + b', "a": 2}',
            'has a number of 41 digits, and has the key "a" twice in one obj',
        ),
        (b'{"a": 1} x', "is not JSON: extra data, at line 1, column 10"),
    ],
    ids=range(16),
)
def test_content_that_is_no_config(tmp_path: Path, content: bytes, words: str) -> None:
    """Bytes that are not an object in strict JSON are refused with the reason."""
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_config(file)
    assert words in caught.value.message
    assert str(file)[-100:] in caught.value.message
    assert caught.value.hint


def test_numbers_as_python_writes_them() -> None:
    """Configs may have Infinity and NaN where tpplan reads nothing: three models of NVIDIA's do."""
    read = parse_config(b'{"time_step_limit": [0.0, Infinity], "a": -Infinity, "b": NaN, "hidden_size": 8}', "it")
    assert read.count("hidden_size") == 8
    with pytest.raises(ModelError, match="a is -inf, which is not a whole number"):
        read.count("a")


def test_a_file_at_the_limit_is_read(tmp_path: Path) -> None:
    """16 MiB are accepted, one byte more is not."""
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": 1}'.ljust(MAX_CONFIG_BYTES))
    assert read_config(file).count("a") == 1
    file.write_bytes(b'{"a": 1}'.ljust(MAX_CONFIG_BYTES + 1))
    with pytest.raises(ModelError, match=f"has {MAX_CONFIG_BYTES + 1} bytes"):
        read_config(file)


def test_counts() -> None:
    """A count is a whole number in range; a default stands in for what is missing, and for null in ``count`` only."""
    data = config(a=7, b=None)
    assert data.count("a") == 7
    assert data.count("b", default=3) == data.count("c", default=3) == 3
    assert data.optional_count("b", default=3) is None
    assert data.optional_count("c", default=3) == 3
    assert data.optional_count("c") is None
    assert config(a=0).count("a", minimum=0) == 0
    assert config(a=MAX_COUNT).count("a") == MAX_COUNT


@pytest.mark.parametrize("value", [True, False, 7.0, "7", [7], {"a": 7}, 0, -7, MAX_COUNT + 1, 10**400])
def test_what_is_no_count(value: object) -> None:
    """Booleans, floats, strings and numbers out of range are no counts; the error has file, key and value."""
    with pytest.raises(ModelError) as caught:
        config(layers=value).count("layers", default=1)
    assert caught.value.message.startswith("config.json: layers is ")
    assert str(value)[:10] in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({}, "hidden_size is missing"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"model_type": "llama", "n_embd": None}, "hidden_size is null"),
        ({"model_type": "gpt2"}, "n_embd (or hidden_size) is missing"),
        ({"model_type": "bloom"}, "n_embed (or hidden_size) is missing"),
    ],
)
def test_a_missing_count_has_the_names_of_the_models_type(data: dict[str, object], names: str) -> None:
    """Without value and default the error lists what the type calls the key, and no names that only others have."""
    with pytest.raises(ModelError) as caught:
        config(**data).count("hidden_size")
    assert caught.value.message == f"config.json: {names}"


def test_other_names_of_a_key() -> None:
    """Old names are read, a value beats a null, and two names must agree."""
    assert config(n_embd=8).count("hidden_size") == 8
    assert config(hidden_size=None, n_embd=8).count("hidden_size") == 8
    assert config(hidden_size=8, n_embd=8).count("hidden_size") == 8
    assert "hidden_size" in config(n_embd=None)
    with pytest.raises(ModelError, match="hidden_size is 8 but n_embd, which means the same, is 9"):
        config(hidden_size=8, n_embd=9).count("hidden_size")


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (lambda c: c.flag("a"), True, (1, "true", [], {})),
        (lambda c: c.text("a"), "x", (1, True, ["x"], {})),
        (lambda c: c.texts("a"), ["x", "y"], ("x", [1], [None], {"x": 1})),
        (lambda c: c.numbers("a"), [1, 2], (1, ["1"], [True], [1.0], {})),
        (lambda c: c.section("a").count("b"), {"b": 1}, (1, [], "b", None)),
    ],
)
def test_other_types(read: Callable[[Config], object], good: object, bad: tuple[object, ...]) -> None:
    """Each getter takes its own type and refuses all others."""
    assert read(config(a=good))
    for value in bad:
        with pytest.raises(ModelError, match=r"config.json: a(\[0\])? is "):
            read(config(a=value))


def test_absent_and_null_are_empty() -> None:
    """Flags have a default, texts and lists are empty."""
    for data in (config(), config(a=None)):
        assert data.flag("a", default=True)
        assert (data.text("a"), data.texts("a"), data.numbers("a")) == ("", (), ())


def test_errors_in_a_section_name_it() -> None:
    """An error inside ``text_config`` says so."""
    with pytest.raises(ModelError, match=r"config.json: text_config: hidden_size is 'x'"):
        config(text_config={"hidden_size": "x"}).section("text_config").count("hidden_size")


def _describe(content: bytes) -> None:
    """Read bytes as a model's config, which may only fail with a ModelError that has a hint."""
    try:
        families.spec_from_config(parse_config(content, "config.json"), "model")
    except ModelError as error:
        str(error).encode()
        if not error.hint:
            raise


@given(st.binary(max_size=60))
def test_random_bytes_give_a_clear_error(content: bytes) -> None:
    """Bytes are refused or read, nothing else."""
    _describe(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(("model_type", "architectures", "torch_dtype", "hidden_size", "vocab_size", "text_config")),
        JSON | st.sampled_from(families.supported()),
    )
)
def test_random_json_gives_a_clear_error(data: dict[str, object]) -> None:
    """Any JSON is refused or read, lone surrogates and NaN included."""
    _describe(json.dumps(data).encode())


def test_lone_surrogates_can_be_printed() -> None:
    """A string that is no valid text is escaped in the message."""
    with pytest.raises(ModelError) as caught:
        families.spec_from_config(parse_config(rb'{"model_type": "\ud800"}', "config.json"), "model")
    assert "\\ud800" in str(caught.value).encode().decode()


def test_keys_that_the_file_lacks_are_no_slips() -> None:
    """Defaults that are filled in are not told as keys of the file; what is there is."""
    filled, there = Config({}, "it").filled({"hidden_sizes": 1}), Config({"hidden_sizes": 1}, "it")
    assert "hidden_size" not in filled
    assert "hidden_size" not in there
    assert list(filled.mistaken_keys()) == []
    assert list(there.mistaken_keys()) == [("hidden_sizes", "hidden_size")]
