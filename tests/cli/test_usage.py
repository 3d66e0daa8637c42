"""Wrong arguments on the command line: what is wrong with them, and what was probably meant."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli_cases import LLAMA_8B, conforms, folder  # noqa: F401 (for every test here)
from tests.command import command
from tpplan.core.plan import CACHE_KINDS, KV_MODES, LAYOUTS, STRATEGIES
from tpplan.exec.options import BACKENDS, TRANSPORTS, TRANSPORTS_OR_AUTO
from tpplan.export.export import ENGINES
from tpplan.export.names import EngineName

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shw"], "unknown command 'shw'"),
        (["--quiet"], "the first argument is '--quiet', expected a command"),
        (["show"], "tpplan show needs PLAN"),
        (["show", "a.json", "b.json"], "'b.json'"),
        (["plan", "model"], "tpplan plan needs --gpus"),
        (["plan", "model", "--gpu", "24GiB"], "tpplan plan has no option --gpu"),
        (["plan", "--all", "model"], "MODEL does not go with --all"),
        (["plan", "--all", "--batch", "2"], "--batch does not go with --all"),
        (["plan", "--manifest", "m.toml", "-o", "a.json"], "-o does not go with --manifest"),
        (["check", "--gpus", "24GiB"], "tpplan check needs --model"),
        (["diff", "--against", "HEAD", "--manifest", "nowhere/m.toml"], "there is no folder 'nowhere'"),
        (["check", "--all", "a.json"], "PLANS does not go with --all"),
        (["check", "--manifest", "m.toml", "--gpus", "24GiB"], "--gpus does not go with --manifest"),
        (["diff", "a.json"], "tpplan diff compares two plans, and 1 are named"),
        (["diff", "a.json", "--against", "HEAD", "--manifest", "m.toml"], "--manifest does not go with PLANS"),
        (["validate", "none/*.json"], "no plan file is named by 'none/*.json'"),
        (["plan", "model", "--gpus", "24GiB", "--context", "many"], "--context is 'many', expected a whole number"),
        (["plan", "model", "--gpus", "24GiB", "--context", "1.5"], "--context is '1.5', expected a whole number"),
        (["plan", "model", "--gpus", "24GiB", "--batch", "0x10"], "--batch is '0x10', expected a whole number"),
        (["bench", "a.json", "--rounds", "2.5"], "--rounds is '2.5', expected a whole number"),
        (["generate", "a.json", "--model", "m", "--temperature", "warm"], "--temperature is 'warm', expected a number"),
        (["plan", "model", "--gpus", "24GiB", "--json=maybe"], "--json takes no value"),
        (["plan", "model", "--gpus", "24GiB", "--gpus", "12GiB"], "--gpus is there twice"),
        (["plan", "model", "--gpus", "24GiB", "12GiB"], "tpplan plan takes no further argument '12GiB'"),
        (["plan", "model", "--gpus", "24GiB", "--context"], "--context has no value"),
        (["show", "a.json", "--bogus"], "--bogus"),
        (["validate"], "no plan was named"),
        (["check", "a.json"], "--model"),
        (["inspect", ""], "MODEL is empty"),
        (["plan", "model", "--gpus", "24GiB", "-o", ""], "--output is empty"),
        (["validate", "a.json", ""], "PLANS is empty"),
        (["diff", "-", "-"], "standard input"),
        (["validate", "-", "a.json", "-"], "standard input"),
        (["show", "a.json", "--svg", "-", "--html", "-"], "standard output"),
        (["show", "a.json", "--svg", "-", "--format", "markdown"], "standard output"),
        (["plan", "m", "--gpus", "24GiB", "--cache", "q9"], "--cache is 'q9', expected fp16, fp8, q8, q6 or q4"),
        (["plan", "m", "--gpus", "24GiB", "--cache", ""], "--cache is empty"),
        (["show", "a.json", "--format", "github"], "--format is 'github', expected text, json or markdown"),
        (["check", "a.json", "--model", "m", "--json", "--format", "json"], "--json does not go with --format json"),
        (["--install-completion", "--shell", "tcsh"], "--shell is 'tcsh', expected bash, zsh or fish"),
    ],
)
def test_usage(arguments: list[str], words: str) -> None:
    """Wrong arguments exit 2 with one paragraph that names what is wrong, and where to look."""
    done = command(*arguments)
    assert done.code == 2
    assert {"--json", "--format"} & {*arguments} or not done.out
    error, hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")
    form = () if "--json" in arguments else ("--json",)
    document = conforms(command(*arguments, *form).out, "error-report")
    assert document["error"]["kind"] == "usage"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["shw"], "did you mean show?"),
        (
            ["zzz"],
            "commands are inspect, devices, plan, fit, show, diff, validate, check, selftest, generate, bench,",
        ),
        (["plan", "m", "--gpu", "24GiB"], "did you mean --gpus? tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--contxt", "5"], "did you mean --context? tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--gpus", "12GiB"], "separate GPUs by commas, as in --gpus RTX4090,RTX3060;"),
        (["plan", "m", "--gpus", "24GiB", "12GiB"], "separate GPUs by commas, as in --gpus RTX4090,RTX3060;"),
        (["show", "a.json", "b.json"], "tpplan show --help lists what there is"),
        (["plan", "m", "24GiB"], "separate GPUs by commas, as in --gpus RTX4090,RTX3060; tpplan plan --help lists"),
        (["plan", "m"], "write it as in --gpus RTX4090,RTX3060; tpplan plan --help lists"),
        (["plan", "m", "--gpus"], "write it as in --gpus RTX4090,RTX3060; tpplan plan --help lists"),
        (["check", "a.json"], "write it as in --model models/llama; tpplan check --help lists"),
        (["plan", "--gpus", "24GiB", "--model", "m"], "write MODEL without --model; tpplan plan --help lists"),
        (["show", "--plan", "a.json"], "write PLAN without --plan; tpplan show --help lists"),
        (["show", "a.json", "-svg", "a.svg"], "did you mean --svg? tpplan show --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--context", "1.5k"], "tpplan plan --help lists what there is"),
        (["plan", "m", "--gpus", "24GiB", "--context", "8G"], "tpplan plan --help lists what there is"),
        (["plan", "m", "--gpus", "24GiB", "--context", "131,072"], "did you mean 131072? tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--context", "1.048.576"], "did you mean 1048576? tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--batch", "1.000"], "tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--context", "1.5"], "tpplan plan --help lists what there is"),
        (["plan", "m", "--gpus", "24GiB", "--strategy", "latncy"], "did you mean latency? tpplan plan --help lists"),
        (["fit", "m", "--gpus", "24GiB", "--cache", "FP8"], "did you mean fp8? tpplan fit --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--layout", "gathr"], "did you mean gather? tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--kv", "replica"], "did you mean replicate? tpplan plan --help lists"),
        (["plan", "m", "--gpus", "24GiB", "--cache", "fp4"], "did you mean q4? tpplan plan --help lists"),
        (
            ["plan", "m", "--gpus", "24GiB", "--reserve", "1GiB", "2GiB@0"],
            "name each with an option of its own, as in --reserve 1GiB --reserve 2GiB@0; tpplan plan --help lists",
        ),
        (
            ["export", "p", "--for", "exl"],
            "did you mean exllamav3 or exllamav2? engines are llama.cpp, llama.cpp-layer,",
        ),
        (["export", "p", "--for", "llamacpp"], "did you mean llama.cpp? engines are llama.cpp, llama.cpp-layer,"),
        (["bench", "p", "--transport", "pear"], "did you mean peer? tpplan bench --help lists"),
        (["selftest", "p", "--backend", "gpu"], "did you mean cuda? tpplan selftest --help lists"),
        (["diff", "a", "b", "--format", "markdwn"], "did you mean markdown? tpplan diff --help lists"),
        (["generate", "p", "--model", "m", "--temperature", "32k"], "tpplan generate --help lists what there is"),
    ],
)
def test_usage_hints(arguments: list[str], hint: str) -> None:
    """The hint names what was probably meant, and where all is listed."""
    assert f"\nhint: {hint}" in command(*arguments).err


@pytest.mark.parametrize(("text", "tokens"), [("8k", 8192), ("8K", 8192), ("128k", 131072), ("8Ki", 8192), ("0k", 0)])
def test_contexts_as_people_write_them(text: str, tokens: int) -> None:
    """``k`` is 1024, as in the names of contexts; the plan says the number."""
    done = command("plan", LLAMA_8B, "--gpus", "80GiB", "--context", text, "--json")
    if tokens:
        assert json.loads(done.out)["plan"]["request"]["cache"]["tokens"] == tokens
    else:
        assert "--context is 0" in done.err


def test_the_largest_contexts() -> None:
    """``M`` is 1024², and leads to the model's own limit like the number."""
    done = command("plan", LLAMA_8B, "--gpus", "80GiB", "--context", "1M")
    assert "1048576 tokens per sequence are more than the 131072" in done.err


@pytest.mark.parametrize(
    ("name", "choices"),
    [("plan", (*CACHE_KINDS, *LAYOUTS, *STRATEGIES, "auto", *KV_MODES)), ("bench", (*BACKENDS, *TRANSPORTS_OR_AUTO)),
     ("selftest", TRANSPORTS), ("export", ENGINES), ("check", ("text", "json", "markdown", "github"))],
)  # fmt: skip
def test_help_lists_choices(name: str, choices: Iterable[str]) -> None:
    """The help of a command has every value of options that take no others."""
    words = {word.strip("[],│") for word in command(name, "--help").out.split()}
    assert words >= {*choices}


def test_engines_have_their_names() -> None:
    """What the command line lists are the engines that there are."""
    assert [*ENGINES] == [*EngineName]


def test_beside_pydantic() -> None:
    """Where a program has loaded pydantic, cyclopts checks by it also what was left out, which is right there, too."""
    pytest.importorskip("pydantic")
    for name in ("plan", "fit"):
        assert command(name, LLAMA_8B, "--gpus", "80GiB").code == 0
    for name in ("show", "selftest", "bench"):
        assert "cannot read 'none.json'" in command(name, "none.json").err


@pytest.mark.parametrize("name", ["torch", "transformers", "greenlet"])
def test_what_transformers_needs_is_told_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a plan or a model is read, which here are not even there."""
    monkeypatch.setitem(sys.modules, name, None)
    done = command("generate", "none.json", "--model", "none", "--prompt", "x", "--engine", "transformers")
    assert (done.code, f"running a plan by transformers needs {name}, which is not installed" in done.err) == (2, True)


def test_help_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that name a model say what for."""
    monkeypatch.setenv("COLUMNS", "200")
    for name, option, words in (
        ("plan", "--draft", "leave room for all of it"),
        ("fit", "--draft", "leave room for all of it"),
        ("check", "--model", "plans are checked by the manifest"),
    ):
        text = " ".join(command(name, "--help").out.replace("│", " ").split())
        assert words in text.split(f"{option} PATH", 1)[1]


def test_one_of_something_is_no_plural(tmp_path: Path) -> None:
    """Screens say 1 layer and 1 token."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1}))
    asked = (tmp_path, "--gpus", "RTX4090", "--context", "1", "--max-rows", "1")
    for name, words in (("plan", ("1 layer,", "1 token,", "1 row")), ("fit", ("1 token in",))):
        text = " ".join(command(name, *asked).out.split())
        assert all(each in text for each in words), text
        assert not [each for each in ("layers", "tokens", "rows") if f" 1 {each}" in text]
    text = command("inspect", tmp_path).out
    assert "1 token " in text
    assert "1 tokens" not in text


def test_the_current_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing in it is not named as a file of somewhere else."""
    monkeypatch.chdir(tmp_path)
    assert "there is no config.json in the current directory" in command("inspect", ".").err
