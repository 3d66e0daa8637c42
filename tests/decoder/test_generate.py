"""The command ``tpplan generate``: what it prints, and what it refuses before it loads anything."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from jsonschema import Draft202012Validator

import tpplan
from tests.command import command
from tests.decoder.generate_cases import PROMPT, TIME, bytes_of, generate, write_checkpoint
from tests.decoder.quantised_checkpoints import stored
from tests.decoder_cases import LENGTH, VOCAB, model_of, plan_of, request_of
from tests.edited_plans import EDITS
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.missing import install_command
from tpplan.core.workspace import areas
from tpplan.decoder.generation import command as run
from tpplan.decoder.text.tokenizer import Stream, Tokenizer
from tpplan.errors import ModelError
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext
    from tpplan.weights import Weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint, with a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


def test_tokens(checkpoint: Path) -> None:
    """Tokens in, the tokens that follow them out, in the form in which they are read; nothing else."""
    prompt = ",".join(map(str, model_of("mistral").prompts[0]))
    done = generate(checkpoint, "--token-ids", prompt, "--max-new-tokens", 8)
    assert done.code == 0
    assert re.fullmatch(TIME.format(prompt=len(model_of("mistral").prompts[0]), new=8), done.err)
    tokens = done.out.removesuffix("\n").split(",")
    assert len(tokens) == 8
    again = generate(checkpoint, "--token-ids", ",".join([prompt, *tokens[:4]]), "--max-new-tokens", 4)
    assert again.out == ",".join(tokens[4:]) + "\n"


@pytest.mark.parametrize("model_type", ["glm4_moe", "minimax_m2"])
def test_the_decoder_is_taken_where_it_knows_the_model(model_type: str, tmp_path: Path) -> None:
    """Without being asked for, also for mixtures; the tokens are those of transformers."""
    model = model_of(model_type)
    plan_of(model.directory, 3, request_of(batch=1), {}, seed=4).save(tmp_path / "plan.json")
    tokens = ",".join(map(str, model.prompts[1]))
    arguments = ("--model", model.directory, "--backend", "cpu", "--token-ids", tokens, "--max-new-tokens", 8)
    done = command("generate", tmp_path / "plan.json", *arguments)
    assert done.code == 0, done.err
    assert [*map(int, done.out.split(","))] == model.tokens[1][:8]
    assert "transformers" not in done.err


def test_scratch_is_left_to_the_decoder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's scratch is allocated by nobody but the decoder, whose activations take it as they come."""
    contexts: list[TPContext] = []

    def load(plan: SplitPlan, directory: str, context: TPContext) -> Weights:
        contexts.append(context)
        return load_weights(plan, directory, context)

    monkeypatch.setattr(run, "load_weights", load)
    assert generate(checkpoint, "--token-ids", "1,2", "--max-new-tokens", 1).code == 0
    plan = tpplan.load(checkpoint / "plan.json")
    divided = areas(plan.splits, plan.model.dtype, plan.request)
    rests = [memory.workspace_bytes - area.scratch_bytes for memory, area in zip(plan.memory, divided, strict=True)]
    assert [device.arena.size_bytes for device in contexts[0].devices.values()] == rests


def test_a_document(checkpoint: Path) -> None:
    """With --json there is one document, as the schema describes it, with the text that is printed without."""
    rules = json.loads((ROOT / "schemas/generate-report.schema.json").read_text(encoding="utf-8"))
    asked = ("--prompt", PROMPT, "--max-new-tokens", 12)
    document = json.loads(generate(checkpoint, *asked, "--json").out)
    Draft202012Validator(rules).validate(document)
    assert document["text"] + "\n" == generate(checkpoint, *asked).out
    assert (document["devices"], document["backend"], document["ended"]) == (3, "cpu", False)
    assert Tokenizer(checkpoint).decode(document["prompt_tokens"]) == PROMPT
    assert Tokenizer(checkpoint).decode(document["new_tokens"]) == document["text"]


def test_a_document_of_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """Tokens that are given need no tokenizer, and their document has no text: an empty one would be another answer."""
    rules = json.loads((ROOT / "schemas/generate-report.schema.json").read_text(encoding="utf-8"))
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    (directory / "tokenizer.json").unlink()
    asked = ("--token-ids", "5,17,9", "--max-new-tokens", 4)
    document = json.loads(generate(directory, *asked, "--json").out)
    Draft202012Validator(rules).validate(document)
    assert "text" not in document
    prompted = ("--prompt", PROMPT, "--max-new-tokens", 1, "--json")
    stop = json.loads(generate(checkpoint, *prompted).out)["text"]
    assert json.loads(generate(checkpoint, *prompted, "--stop", stop).out)["text"] == ""
    assert ",".join(map(str, document["new_tokens"])) + "\n" == generate(directory, *asked).out


def test_a_plan_of_another_model(checkpoint: Path) -> None:
    """Two fingerprints are told by their first digits on the screen, and whole in the document."""
    plan = checkpoint / "other.json"
    text = (checkpoint / "plan.json").read_text(encoding="utf-8")
    plan.write_text(re.sub("sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, text), encoding="utf-8")
    asked = ("generate", plan, "--model", checkpoint, "--backend", "cpu", "--token-ids", "1")
    assert re.search(r"fingerprint sha256:[0-9a-f]{12}… and not sha256:0{12}…\n", command(*asked).err)
    assert "sha256:" + "0" * 64 in json.loads(command(*asked, "--json").out)["error"]["message"]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan(edit: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is imported that needs torch, with the values and with commands that help."""
    monkeypatch.setitem(sys.modules, "tpplan.decoder.generation.command", None)
    edited, starts = EDITS[edit](tpplan.load(checkpoint / "plan.json"))
    plan = checkpoint / "edited.json"
    edited.save(plan)
    done = command("generate", plan, "--model", checkpoint, "--token-ids", "1")
    assert (done.code, done.out) == (2, "")
    first, *lines, hint = done.err.splitlines()
    assert first == f"error: the plan for tiny is not right for {checkpoint}:"
    assert all(any(line.strip().startswith(start) for line in lines) for start in starts)
    assert hint.startswith(f"hint: tpplan check {plan} --model {checkpoint} compares them, tpplan plan ")
    assert command("check", plan, "--model", checkpoint).code == 1


def test_a_draft_model_is_not_used_which_is_told(checkpoint: Path, tmp_path: Path) -> None:
    """Of a plan with room for one, and of the plan of one, which names the model that it drafts for."""
    files = ("--draft-output", tmp_path / "d.json", "-o", tmp_path / "p.json")
    asked = ("plan", checkpoint, "--gpus", "2x2GiB", "--context", 64, "--draft", checkpoint, *files)
    assert command(*asked).code == 0
    for name, told in (
        ("p.json", "the plan has room for tiny, which generate does not use"),
        ("d.json", "this plan is for a draft model of tiny"),
    ):
        words = ("--model", checkpoint, "--backend", "cpu", "--token-ids", "1,2", "--max-new-tokens", 1)
        done = command("generate", tmp_path / name, *words)
        assert (done.code, f"note: {told}" in done.err) == (0, True), done.err


@pytest.mark.parametrize(
    ("key", "slip", "code"), [("rms_norm_eps", "rms_norm_epss", 0), ("torch_dtype", "torch_dtpye", 2)]
)
def test_keys_that_are_misspelt_are_told(key: str, slip: str, code: int, checkpoint: Path, tmp_path: Path) -> None:
    """As by other commands; also where the plan is of another model, as the key may be why it is."""
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config[slip] = config.pop({"torch_dtype": "dtype"}.get(key, key))
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = checkpoint / "plan.json"
    if code:
        text = plan.read_text(encoding="utf-8")
        plan = tmp_path / "other.json"
        plan.write_text(re.sub("sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, text), encoding="utf-8")
    asked = ("--backend", "cpu", "--token-ids", "1", "--max-new-tokens", 1)
    done = command("generate", plan, "--model", directory, *asked)
    assert (done.code, f"is {slip} meant as {key}?" in done.err) == (code, True), done.err


@pytest.mark.parametrize(
    ("scaling", "hint"), [({}, "add factor, by which "), ({"facter": 2.0}, "is facter meant as factor?")]
)
def test_a_scaling_without_its_factor_is_not_left_to_transformers(
    scaling: dict[str, float], hint: str, checkpoint: Path, tmp_path: Path
) -> None:
    """It needs the factor, too, and does not say what to do."""
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] |= {"rope_type": "linear", **scaling}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = generate(directory, "--token-ids", "1")
    assert done.code == 2
    assert f"error: config.json: rope_parameters: factor is missing\nhint: {hint}" in done.err
    done = generate(directory, "--token-ids", "1", "--engine", "transformers")
    assert "hint: compare it with the config.json that the model came with" in done.err  # a newer version needs it, too


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', expected a number from 1e-12 to 1e+09"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number from 1e-12 to 1e+09"),
        ({"rope_parameters": {**_LLAMA3, "factor": "8"}}, "factor is '8'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta is '1e4'"),
    ],
)
def test_values_that_cannot_be_right_are_not_left_to_transformers(
    keys: dict[str, object], told: str, checkpoint: Path, tmp_path: Path
) -> None:
    """It refuses some of them as well, and computes something with others."""
    done = generate(_edited(checkpoint, tmp_path, keys), "--token-ids", "1")
    assert (done.code, "computed by transformers" in done.err) == (2, False), done.err
    assert told in done.err
    assert "hint: compare it with the config.json that the model came with" in done.err


def test_a_config_that_transformers_refuses_is_no_bug_of_tpplan(checkpoint: Path, tmp_path: Path) -> None:
    """Whatever kind of error it raises."""
    asked = ("--token-ids", "1", "--engine", "transformers")
    done = generate(_edited(checkpoint, tmp_path, {"rms_norm_eps": "1e-5"}), *asked)
    assert done.code == 2
    assert "error: transformers does not read the config of models of type " in done.err
    assert "rms_norm_eps" in done.err
    assert "hint: compare it with the config.json that the model came with" in done.err


def test_what_neither_engine_computes_has_the_hint_of_the_decoder(checkpoint: Path, tmp_path: Path) -> None:
    """Which is not to take the decoder."""
    done = generate(_edited(checkpoint, tmp_path, {"hidden_act": "sillu"}), "--token-ids", "1")
    assert done.code == 2
    assert "note: computed by transformers, as " in done.err
    assert done.err.endswith("hint: known are silu, gelu, gelu_pytorch_tanh\n"), done.err


def _edited(checkpoint: Path, tmp_path: Path, keys: dict[str, object]) -> Path:
    """Return a copy of a checkpoint whose config.json has other values."""
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    return directory


def test_a_text_of_standard_input(checkpoint: Path) -> None:
    """A prompt of - is read from standard input, to the byte."""
    asked = ("--max-new-tokens", 5)
    done = generate(checkpoint, "--prompt", "-", *asked, stdin=PROMPT.encode())
    assert (done.code, done.out) == (0, generate(checkpoint, "--prompt", PROMPT, *asked).out)


def test_a_text_ends(checkpoint: Path, tmp_path: Path) -> None:
    """A token of generation_config.json ends it, or one of config.json where that says nothing."""
    asked = ("--prompt", PROMPT, "--json", "--max-new-tokens", 9)
    tokens: list[int] = json.loads(generate(checkpoint, *asked).out)["new_tokens"]
    last = next(token for token in tokens if token != tokens[0])
    for name, value in (("config.json", last), ("generation_config.json", [last])):
        directory = shutil.copytree(checkpoint, tmp_path / name)
        for file in ("config.json", "generation_config.json"):
            data: dict[str, Any] = json.loads((directory / file).read_text(encoding="utf-8"))
            data["eos_token_id"] = value if file == name else None
            (directory / file).write_text(json.dumps(data), encoding="utf-8")
        document = json.loads(generate(directory, *asked).out)
        assert document["new_tokens"] == tokens[: tokens.index(last) + 1]
        assert document["ended"]


def test_the_seed_decides_what_is_drawn(checkpoint: Path) -> None:
    """The same text for the same seed, another for another, and the likeliest tokens where few may be drawn."""
    asked = ("--prompt", PROMPT, "--max-new-tokens", 8, "--temperature", 1.5)
    first, again, other = (generate(checkpoint, *asked, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other
    assert generate(checkpoint, *asked, "--top-p", 0.001).out == generate(checkpoint, *asked[:4]).out != first


def test_as_much_as_there_is_room_for(checkpoint: Path) -> None:
    """Without a number there are 128 new tokens, or as many as the plan's cache takes."""
    done = generate(checkpoint, "--token-ids", "1,2,3")
    assert len(done.out.split(",")) == LENGTH - 3


def test_virtual_devices_are_told_of(checkpoint: Path) -> None:
    """Where the machine lacks the GPUs, the text is computed on virtual devices, and that is said beside it."""
    asked = ("generate", checkpoint / "plan.json", "--model", checkpoint, "--token-ids", "1", "--max-new-tokens", 2)
    with patch("torch.cuda.is_available", return_value=False):
        done = command(*asked)
    assert done.code == 0
    first, *last = done.err.splitlines(keepends=True)
    assert first == "note: on virtual devices, because the plan has 3 and this machine 0 CUDA devices\n"
    assert re.fullmatch(TIME.format(prompt=1, new=2).replace("prompt tokens", "prompt token"), "".join(last))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "generate has neither a prompt nor tokens to continue hint: add --prompt"),
        (("--prompt", "a", "--token-ids", "1"), "generate continues one thing, --prompt and --token-ids are given"),
        (
            ("--prompts", "x", "--token-ids", "1"),
            "one thing, --prompts and --token-ids are given hint: leave out all but one of them",
        ),
        (
            ("--prompt", "a", "--prompts", "x", "--token-ids", "1"),
            "one thing, --prompt, --prompts and --token-ids are given hint: leave out all but one of them",
        ),
        (("--chat",), "generate has neither a prompt nor tokens to continue hint: add --prompt"),
        (("--token-ids", "1", "--stop", "a"), "--stop takes a prompt, not tokens"),
        (("--prompt", "a", "--stop", "\udcff"), r"a stop string has '\udcff' at character 0"),
        (("--token-ids", "1", "--top-k", 5), "--top-k takes effect with --temperature above 0"),
        (("--token-ids", "1", "--repetition-penalty", 0), "the repetition penalty is 0.0"),
        (("--prompt", "a", "--chat-template-kwargs", "{}"), "--chat-template-kwargs is a part of a chat"),
        (
            ("--prompt", "a", "--chat", "--chat-template-kwargs", "{"),
            "--chat-template-kwargs ends before its JSON does",
        ),
        (("--prompt", "a", "--chat", "--chat-template-kwargs", "[]"), "is '[]', expected an object"),
        (("--prompt", "a", "--chat", "--chat-template-kwargs", '{"messages": 1}'), "has messages, which the prompt is"),
        (("--token-ids", "1", "--top-p", 1), "--top-p takes effect with --temperature above 0"),
        (("--token-ids", "1", "--temperature", 0, "--seed", 0), "--seed takes effect with --temperature above 0"),
        (("--token-ids", "1,,2"), "--token-ids is '1,,2', expected numbers"),
        (("--token-ids", "1,-2"), "--token-ids is '1,-2', expected numbers"),
        (("--token-ids", "9" * 5000), "expected numbers"),
        (("--token-ids", f"1,{VOCAB}"), f"token {VOCAB}, the model's are 0 to {VOCAB - 1}"),
        (("--prompt", "a\udcff"), r"the prompt has '\udcff' at character 1"),
        (("--token-ids", "1", "--max-new-tokens", 0), "--max-new-tokens is 0, expected 1 or more hint: leave it out"),
        (("--token-ids", "1", "--max-new-tokens", LENGTH), f"1 token and {LENGTH} new ones, the plan caches {LENGTH}"),
        (("--token-ids", "1", "--temperature", -1), "the temperature is -1.0"),
        (("--token-ids", "1", "--temperature", 1, "--top-p", 2), "top-p is 2.0"),
        (("--token-ids", "1", "--backend", "gpu"), "--backend is 'gpu', expected auto, cpu or cuda"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_refused(
    arguments: tuple[object, ...], problem: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error with the names and numbers, before anything is imported that needs torch."""
    monkeypatch.setitem(sys.modules, "tpplan.decoder.generation.command", None)
    done = command("generate", checkpoint / "plan.json", "--model", checkpoint, *arguments)
    assert done.code == 2
    assert done.out == ""
    assert problem in done.err.replace("\n", " ")
    assert "hint: " in done.err


@pytest.mark.parametrize(("form", "is_told"), [("nvfp4 modelopt", True), ("gptq 4 g128", False)])
def test_weights_that_are_slower_than_predicted(form: str, is_told: bool, tmp_path: Path) -> None:
    """A plan's prediction of weights that the decoder has no kernels for is said not to hold."""
    directory, _ = stored("llama", form, 1)
    assert not command("plan", directory, "--gpus", "RTX4090", "--context", 16, "-o", tmp_path / "plan.json").code
    asked = ("--model", directory, "--token-ids", "1", "--max-new-tokens", 2, "--backend", "cpu")
    done = command("generate", tmp_path / "plan.json", *asked)
    assert done.code == 0
    assert ("no kernels for NVFP4, so it is slower" in done.err) == is_told


def test_tokens_that_cannot_end_a_text(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation_config.json that is broken is refused before anything is imported that needs torch."""
    monkeypatch.setitem(sys.modules, "tpplan.decoder.generation.command", None)
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    for content, problem in (("{", "generation_config.json cannot be read"), ('{"eos_token_id": "a"}', "is a, exp")):
        (directory / "generation_config.json").write_text(content, encoding="utf-8")
        done = generate(directory, "--token-ids", "1")
        assert (done.code, done.out) == (2, "")
        assert problem in done.err


@pytest.mark.parametrize(
    ("plan", "change", "problem"),
    [
        ({"kind": "q8"}, {}, "the decoder has no cache of kind q8 for heads of 8 elements"),
        ({}, {"rope_interleave": True}, "rope_interleave is true"),
        ({}, {"rope_parameters": {"rope_type": "new", "rope_theta": 1e4}}, "rope_type is 'new'"),
        ({}, {"vocab_size": VOCAB + 1}, "config.json"),
    ],
    ids=["cache", "pairs", "rope", "model"],
)
def test_what_the_decoder_does_not_compute(
    plan: dict[str, Any], change: dict[str, Any], problem: str, checkpoint: Path, tmp_path: Path
) -> None:
    """It is refused before the plan is compiled, let alone the weights are read."""
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    plan_of(directory, 3, request_of(batch=1, **plan), {}, seed=4).save(directory / "plan.json")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with patch("tpplan.decoder.generation.command.compiler", side_effect=AssertionError("too late")):
        done = generate(directory, "--token-ids", "1", "--engine", "tpplan")
    assert (done.code, done.out) == (2, "")
    assert problem in done.err.replace("\n", " ")


def test_without_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    """A missing file, a broken one and a missing library are named, with what does without."""
    directory = shutil.copytree(checkpoint, tmp_path / "tiny")
    with patch.dict("sys.modules", {"tokenizers": None}):
        done = generate(directory, "--prompt", "a")
    assert (done.code, "tokenizers, which is not installed" in done.err) == (2, True)
    assert f"hint: {install_command('generate')}, or give --token-ids\n" in done.err
    (directory / "tokenizer.json").write_text("{", encoding="utf-8")
    assert "cannot be read" in generate(directory, "--prompt", "a").err
    (directory / "tokenizer.json").unlink()
    done = generate(directory, "--prompt", "a")
    assert "does not exist" in done.err
    assert "--token-ids" in done.err
    with pytest.raises(ModelError, match="does not exist"):
        Tokenizer(directory)


def test_pieces_are_whole_characters(checkpoint: Path) -> None:
    """A character of several tokens is told with its last one; what is incomplete in the end is told as such."""
    tokenizer = Tokenizer(checkpoint)
    letters = {
        text: token
        for text, token in json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"][
            "vocab"
        ].items()
        if len(text) == 1
    }
    tokens = [letters[char] for char in bytes_of("ñ fox Ω")]
    stream = Stream(tokenizer, tokenizer.encode("The"))
    pieces = [stream.add(token) for token in tokens]
    assert pieces == ["", "ñ", " ", "f", "o", "x", " ", "", "Ω"]
    assert stream.rest() == ""
    assert stream.add(tokens[0]) == ""
    assert stream.rest() == "\ufffd"
