"""Bad models, documents and requests on the command line: a clear error with numbers or names, a hint, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import LLAMA, llama_layers, llama_outside, write_checkpoint
from tests.cli_cases import LLAMA_8B, folder, refused  # noqa: F401 (for every test here)
from tests.codec_cases import TEXT
from tests.command import command

CONFIG: dict[str, Any] = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))


def with_config(**changes: Any) -> Path:
    """Write a config with changes and return its path."""
    path = Path("config.json")
    path.write_text(json.dumps(CONFIG | changes))
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "config.json"),
        (b"\x81\x03binary\x00", "UTF-8"),
        (b"{", "line 1"),
        (b"[1, 2]", "config.json"),
        (b'"text"', "config.json"),
        (b"null", "config.json"),
        (b"{}", "model_type"),
        (b'{"model_type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"model_type": "llama", "model_type": "llama"}', "model_type"),
        (b'{"model_type": NaN}', "model_type is nan, expected a string"),
    ],
    ids=["missing", "empty", "binary", "cut", "list", "text", "null", "nothing", "deep", "twice", "nan"],
)
def test_config_file(content: bytes | None, words: str) -> None:
    """A config that is missing, empty, binary or of the wrong shape is named, and what is wrong with it."""
    if content is not None:
        Path("config.json").write_bytes(content)
    for asked in (("inspect", "config.json"), ("plan", "config.json", "--gpus", "24GiB", "-o", "x.json")):
        err = refused(*asked)
        assert "config.json" in err
        assert words in err


def test_config_directory() -> None:
    """A directory without a config, and one that is not there, are named."""
    Path("empty").mkdir()
    assert "config.json" in refused("inspect", "empty")
    assert "nowhere" in refused("inspect", "nowhere")


@pytest.mark.parametrize("inside", ["some/model", "models--some--model/snapshots/1f"])
def test_a_directory_of_models(inside: str) -> None:
    """Who names what models are in, such as one of Hugging Face's cache, is told where the first of them is."""
    Path(inside).mkdir(parents=True)
    (Path(inside) / "config.json").write_text("{}", encoding="utf-8")
    assert refused("inspect", inside.partition("/")[0]).endswith(f"came with the model, such as {inside}\n")


def test_a_slip_in_the_name_of_a_directory() -> None:
    """What is there under nearly the same name is proposed; where nothing is near, nothing is."""
    Path("Llama-3.1-8B").mkdir()
    for name in ("llama-3.1-8b", "Lama-3.1-8B"):
        assert refused("inspect", name).endswith("hint: did you mean Llama-3.1-8B?\n")
    assert "did you mean" not in refused("inspect", "Mixtral")
    Path("models/llama").mkdir(parents=True)
    assert refused("inspect", "model/llama").endswith("hint: did you mean models/llama?\n")


def test_the_name_of_a_model_on_a_hub() -> None:
    """Whoever names a repository is told how to fetch the one file that planning takes."""
    name = "meta-llama/Llama-3.1-8B"
    for asked in (name, f"https://huggingface.co/{name}", f"https://huggingface.co/{name}/tree/main"):
        err = refused("inspect", asked)
        assert err.startswith(f"error: {asked} does not exist\n")
        assert f"hf download {name} config.json fetches a config" in err
    Path("meta-llama").mkdir()  # somebody's own folder
    assert "hf download" not in refused("inspect", "meta-llama/Llama-3.1-8B")


def test_gguf() -> None:
    """A damaged GGUF file, a directory with one or with several of them, and one that is only named like a file."""
    Path("named.gguf").mkdir()
    assert "GGUF" not in refused("inspect", "named.gguf")
    Path("quantised").mkdir()
    file = Path("quantised/model-Q4_K_M.gguf")
    file.write_bytes(b"GGUF\x03\x00\xff")
    for asked in ("quantised", str(file)):
        err = refused("inspect", asked)
        assert "model-Q4_K_M.gguf ends within its header, at 7 bytes" in err
        assert "fetch it again" in err
    Path("quantised/model-Q8_0.gguf").touch()
    err = refused("inspect", "quantised")
    assert "quantised has 2 models in GGUF: model-Q4_K_M.gguf, model-Q8_0.gguf" in err
    assert "name one of the files" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"hidden_size": 10**30}, ["hidden_size", "1000000"]),
        ({"vocab_size": False}, ["vocab_size", "False"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_attention_heads": 32.5}, ["num_attention_heads", "32.5"]),
        ({"num_key_value_heads": 7}, ["32", "7"]),
        ({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, ["mamba2", "the README lists all"]),
        ({"model_type": "lama"}, ["'lama'", "llama"]),
    ],
)
def test_config_values(changes: dict[str, Any], words: list[str]) -> None:
    """Counts that are negative, zero, huge or boolean, heads that do not divide, unknown architectures: all named."""
    err = refused("plan", with_config(**changes), "--gpus", "24GiB", "-o", "x.json")
    assert all(word in err for word in words), err


def test_config_contradicts_headers() -> None:
    """A checkpoint whose tensors are not what the config says is an error with both numbers."""
    tensors = llama_outside() | llama_layers(lambda rows, columns, _: {".weight": ("F16", (columns, rows))})
    directory = write_checkpoint(Path("model"), LLAMA, tensors)
    assert command("inspect", directory).code == 0
    write_checkpoint(Path("model"), LLAMA | {"num_key_value_heads": 3}, tensors)
    err = refused("inspect", directory)
    assert "k_proj" in err
    assert "128" in err
    assert "192" in err


@pytest.mark.parametrize("length", [2**63, 2**40, 10, 0])
def test_hostile_headers(length: int) -> None:
    """A header's length is not believed."""
    directory = write_checkpoint(Path("model"), LLAMA, llama_outside())
    (directory / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    assert "model.safetensors" in refused("inspect", directory)


@pytest.mark.parametrize(
    ("document", "arguments", "words"),
    [
        ("plan", ("plan", LLAMA_8B, "--gpus", "it.json"), "is a plan, expected a devices file"),
        ("plan", ("inspect", "it.json"), "it.json is a plan, expected a model's config.json"),
        ("devices", ("show", "it.json"), "is a devices file, expected a plan"),
        ("devices", ("inspect", "it.json"), "it.json is a devices file, expected a model's config.json"),
        ("config", ("diff", "it.json", "it.json"), "is a model's config.json, expected a plan"),
        ("config", ("plan", LLAMA_8B, "--gpus", "it.json"), "is a model's config.json, expected a devices file"),
    ],
)
def test_mistaken_documents(document: str, arguments: tuple[object, ...], words: str) -> None:
    """A plan, a devices file and a config.json in each other's place are told apart in a sentence, not key by key."""
    devices = '{"format_version": "1.0", "devices": []}'
    config = (LLAMA_8B / "config.json").read_text(encoding="utf-8")
    Path("it.json").write_text({"plan": TEXT, "devices": devices, "config": config}[document], encoding="utf-8")
    err = refused(*arguments)
    assert words in err
    assert "is missing" not in err


@pytest.mark.parametrize("text", ["{}", '{"name": "x", "scripts": {}}'])
def test_documents_of_others(text: str) -> None:
    """JSON with no key of a plan, or of a devices file, is told in a sentence, too."""
    Path("it.json").write_text(text, encoding="utf-8")
    for asked, kind, key in (
        (("show", "it.json"), "a plan", "$schema"),
        (("plan", LLAMA_8B, "--gpus", "it.json"), "a devices file", "format_version"),
    ):
        assert f"at top level: has none of the keys of {kind}, which are {key}, " in (err := refused(*asked))
        assert "is missing" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "it.json: model_type is missing, so this is probably no config.json of a language model"),
        ('{"weight_map": {}}', "it.json is an index of safetensors files, expected a model's config.json"),
        ('{"version": "1.0", "added_tokens": []}', "it.json is a tokenizer.json, expected"),
        ('{"tokenizer_class": "GPT2Tokenizer"}', "it.json is a tokenizer_config.json, expected"),
        ('{"peft_type": "LORA"}', "it.json is the config of an adapter, expected"),
        ('{"_from_model_config": true}', "it.json is a generation_config.json, expected"),
        ('{"image_processor_type": "A"}', "it.json is a preprocessor_config.json, expected"),
    ],
)
def test_other_files_of_a_checkpoint(text: str, words: str) -> None:
    """What is no config.json is told by what it is, if that can be seen, and not by the models that are supported."""
    Path("it.json").write_text(text, encoding="utf-8")
    err = refused("inspect", "it.json")
    assert words in err
    assert err.endswith("hint: point to a model's directory, or to the config.json that came with the model\n")


def test_a_config_may_have_any_further_keys() -> None:
    """Also those by which other documents are told."""
    assert command("inspect", with_config(splits=[], devices=[])).code == 0


@pytest.mark.parametrize("option", [("--kv", "copy"), ("--layout", "cut"), ("--strategy", "fast"), ("--cache", "q5")])
def test_unknown_choices(option: tuple[str, str]) -> None:
    """An unknown choice is quoted among those that there are."""
    err = refused("plan", LLAMA_8B, "--gpus", "24GiB", "--context", 4096, *option, "-o", "x.json")
    assert repr(option[1]) in err
    assert {"--kv": "replicate", "--layout": "gather", "--strategy": "latency", "--cache": "q6"}[option[0]] in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--context", "131073"],
            ["error: 131073 tokens per sequence are more than the 131072 that Llama-3.1-8B was made"],
        ),
        (["--context", "0"], ["--context is 0"]),
        (["--context", "-4"], ["--context is -4"]),
        (["--context", "9" * 30], ["9999", "1099511627776"]),
        (["--context", "4096", "--batch", "0"], ["batch is 0"]),
        (["--context", "4096", "--batch", "-1"], ["batch is -1"]),
        (["--context", "4096", "--max-rows", "0"], ["max_rows is 0"]),
        (["--context", "4096", "--max-rows", "99999999999"], ["max_rows is 99999999999"]),
        (["--context", "4096", "--batch", "64", "--max-rows", "32"], ["max_rows 32", "64"]),
        (["--context", "4096", "--strategy", "latency"], ["bandwidth", "24GiB GPU"]),
    ],
)
def test_numbers(options: list[str], words: list[str]) -> None:
    """Contexts, batches and rows out of range are quoted with their limits."""
    err = refused("plan", LLAMA_8B, "--gpus", "24GiB", *options, "-o", "x.json")
    assert all(word in err for word in words), err


def test_unwritable_output() -> None:
    """Where no file can be written, the error names it and the system's reason, and what was there stays."""
    Path("folder").mkdir()
    Path("file").write_text("mine")
    asked = ("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096, "-o")
    assert "'folder': Is a directory\nhint: name a file in it\n" in refused(*asked, "folder")
    assert "file/x.json" in (err := refused(*asked, "file/x.json"))
    assert "hint: choose another file" in err
    Path("a.json").write_text(TEXT, encoding="utf-8")
    assert "'file/a.svg'" in refused("show", "a.json", "--svg", "file/a.svg")
    assert Path("file").read_text() == "mine"


def test_output_in_new_directories() -> None:
    """Every file that a command writes may be in directories that are not there yet."""
    asked = ("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096, "-o", "plans/new/a.json")
    assert command(*asked).code == 0
    assert command("show", "plans/new/a.json", "--svg", "pictures/new/a.svg").code == 0
    assert Path("pictures/new/a.svg").is_file()
    assert refused("plan", LLAMA_8B, "--gpus", "1GiB", "-o", "not/made.json", code=1)
