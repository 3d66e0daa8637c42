"""The command that plans: what it saves, shows and says, and what it asks for where nothing fits."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import attrs
import pytest

from tests.checkpoints import LLAMA, llama_layers, llama_outside, write_checkpoint
from tests.cli_cases import LLAMA_8B, LLAMA_70B, conforms, folder, refused, written_plans  # noqa: F401 (for every test)
from tests.command import command
from tests.models.reader_cases import plain
from tpplan.files.codec import dumps
from tpplan.hardware.spec import parse_devices
from tpplan.planfile import codec


@pytest.fixture
def plans() -> tuple[str, str]:
    """Return plans of one model for different GPUs."""
    return written_plans()


def test_plan_saves_what_it_planned(plans: tuple[str, str]) -> None:
    """A saved plan is valid, canonical, for the GPUs and the context that were named, and within the budgets."""
    plan = codec.load(plans[0])
    assert dumps(plan) == Path(plans[0]).read_text(encoding="utf-8")
    assert [device.budget_bytes for device in plan.devices] == [24 * 2**30, 12 * 2**30]
    assert plan.request.cache.tokens == 4096
    assert all(entry.free_bytes >= 0 for entry in plan.memory)


def test_plan_says_little_where_it_saves() -> None:
    """With -o FILE standard output stays empty, and standard error says what was written and how full it gets."""
    done = command("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096, "-o", "a.json")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("wrote: a.json\nLlama-3.1-8B on 2 devices: ")
    assert " % of all budgets used, at most " in done.err
    why = "; no tokens/s, because the bandwidth of device 0 (24GiB GPU), 1 (12GiB GPU) is unknown\n"
    assert done.err.count(why) == 1
    assert "no tokens/s" not in command("plan", LLAMA_8B, "--gpus", "RTX4090", "--context", 4096, "-o", "b.json").err
    again = command("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096, "-o", "a.json")
    assert again.err == done.err.replace("wrote: ", "unchanged: ")


def test_plan_without_a_file_shows_it_and_says_how_to_save_it() -> None:
    """Without -o the plan is on the screen and nowhere else."""
    done = command("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096)
    assert done.code == 0
    assert done.out.startswith("Llama-3.1-8B on 2 devices\n")
    assert "-o FILE" in done.err
    assert not list(Path().iterdir())


def test_plan_to_standard_output_is_the_file(plans: tuple[str, str]) -> None:
    """``-o -`` prints the bytes that ``-o FILE`` writes; ``--json`` prints what ``show --json`` does."""
    text = Path(plans[0]).read_text(encoding="utf-8")
    asked = ("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096)
    assert command(*asked, "-o", "-").out == text
    assert command(*asked, "--json", "-o", "-").out == text
    shown = command("show", plans[0], "--json").out
    assert command(*asked, "--json").out == command(*asked, "--json", "-o", "c.json").out == shown
    assert Path("c.json").read_text(encoding="utf-8") == text
    assert conforms(shown, "show-report")["plan"] == json.loads(text)
    Path("d.json").write_text(shown, encoding="utf-8")
    assert "is a report on a plan, such as tpplan plan --json prints, expected a plan" in refused("show", "d.json")


def test_a_plan_is_not_written_over_what_it_is_made_of() -> None:
    """Neither over the model, by whatever name, nor over the devices; a plan beside the model is replaced."""
    Path("model").mkdir()
    Path("model/config.json").write_bytes((LLAMA_8B / "config.json").read_bytes())
    Path("link").symlink_to("model/config.json")
    device = {"name": "x", "memory_bytes": 2**36, "budget_bytes": 2**36, "overhead_bytes": 0}
    Path("gpus.json").write_text(json.dumps({"format_version": "1.0", "devices": [device]}))
    for path, output in (("model", "model/config.json"), ("model", "link"), ("link", "./link"), ("model", "gpus.json")):
        err = refused("plan", path, "--gpus", "gpus.json", "-o", output)
        assert f"'{output}' is read or written by the same command" in err
    for context in (1024, 2048):
        asked = ("plan", "model", "--gpus", "gpus.json", "--context", context, "-o", "model/plan.json")
        assert command(*asked).err.startswith("wrote: model/plan.json")


def test_reserves_are_kept_and_shown(plans: tuple[str, str]) -> None:
    """For every device or for one; a plan without any has neither the key nor the column."""
    asked = ("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096)
    done = command(*asked, "--reserve", "1GiB", "--reserve", "1.5GiB@0")
    assert done.code == 0
    assert "  reserved  " in done.out
    assert "reserved" not in command(*asked).out
    plan = json.loads(command(*asked, "--reserve", "1GiB", "--reserve=1.5GiB@0", "-o", "-").out)
    assert plan["request"]["reserve"] == [{"bytes": 2**30}, {"bytes": 3 * 2**29, "device": 0}]
    assert [entry["reserved_bytes"] for entry in plan["memory"]] == [3 * 2**29, 2**30]
    assert plan["format_version"] == "1.1"
    assert '"1.0"' in Path(plans[0]).read_text(encoding="utf-8")
    for wrong, words in (("2", "has no unit"), ("1GiB@9", "device 9"), ("30GiB", "has a budget of 24.00 GiB")):
        assert words in refused(*asked, "--reserve", wrong)


def test_what_does_not_fit_beside_a_reserve() -> None:
    """The table has the reserve, and the hint that it fits without."""
    asked = ("plan", LLAMA_8B, "--gpus", "RTX4090", "--context", 4096)
    err = refused(*asked, "--reserve", "8GiB", "--reserve", "9GiB@0", code=1)
    assert "beside 9.00 GiB that are reserved, and" in err
    assert "  reserved  budget  missing" in err
    assert "\n  reserve nothing" in err


def seeing(directory: str) -> None:
    """Write the config of a small model that reads images, too."""
    text = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "bfloat16"}
    Path(directory).mkdir()
    Path(directory, "config.json").write_text(json.dumps(config | {"text_config": text}))


def test_what_is_not_planned_is_told_wherever_a_plan_is(tmp_path: Path) -> None:
    """On the screen, or beside what is saved or printed; with a hint how to keep room for it, until some is kept."""
    seeing("model")
    asked = ("plan", "model", "--gpus", "24GiB", "--context", 4096)
    told = "not planned: vision tower, of unknown size\n"
    done = command(*asked)
    assert done.out.startswith(f"model on 1 device\n  {told}")
    assert "cache and workspace of what is planned are exact" in done.out
    assert done.err.startswith("hint: --reserve SIZE@0 keeps room on device 0 for what is not planned")
    for more in (("-o", "a.json"), ("--json",), ("-o", "-")):
        assert f"note: {told}hint: --reserve" in command(*asked, *more).err
    done = command(*asked, "--reserve", "1GiB@0", "-o", "a.json")
    assert f"note: {told}" in done.err
    assert "hint" not in done.err
    shown = conforms(command("show", "a.json", "--json").out, "show-report")
    assert shown["plan"]["model"]["not_planned"] == [{"what": "vision tower"}]
    assert told in command("show", "a.json").out
    assert "  not planned" in command("inspect", "model").out
    report = conforms(command("inspect", "model", "--json").out, "inspection")
    assert report["not_planned"] == [{"what": "vision tower"}]
    tensors = llama_outside() | llama_layers(plain) | {"vision_tower.x.weight": ("F16", (3, 2**20))}
    known = ("plan", write_checkpoint(tmp_path / "m", LLAMA, tensors), "--gpus", "1GiB")
    hint = command(*known).err.splitlines()[0]
    assert hint.startswith("hint: --reserve 6MiB@0 keeps room on device 0")
    assert command(*known, "--reserve", "6MiB@0").code == 0
    tensors = llama_outside() | llama_layers(plain) | {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (32,))}
    done = command("plan", write_checkpoint(tmp_path / "m", LLAMA, tensors), "--gpus", "1GiB")
    assert "  not planned: buffers, 128 B\n" in done.out
    assert "--reserve" not in done.err


def test_notes_on_a_model_are_told(tmp_path: Path) -> None:
    """By whatever reads it, on standard error and in its document; the plan's file has none of them."""
    directory = write_checkpoint(tmp_path / "m", LLAMA, llama_outside() | llama_layers(plain))
    (directory / "consolidated.safetensors").write_bytes(bytes(2048))
    note = "not read, taken for further copies of the same weights: consolidated.safetensors (2.00 KiB)"
    for asked in (("inspect", directory), ("plan", directory, "--gpus", "1GiB", "-o", "a.json"),
                  ("check", "a.json", "--model", directory)):  # fmt: skip
        assert command(*asked).err.startswith(f"note: {note}\n")
    assert conforms(command("inspect", directory, "--json").out, "inspection")["notes"] == [note]
    Path("tpplan.toml").write_text(f'[[plan]]\nfile = "b.json"\nmodel = "{directory}"\ngpus = "1GiB,1MiB"\n')
    for schema, words in (
        ("show-report", ("plan", directory, "--gpus", "1GiB,1MiB")),
        ("fit-report", ("fit", directory, "--gpus", "1GiB")),
        ("manifest-report", ("plan", "--all")),
        ("check-report", ("check", "b.json", "--model", directory)),
        ("check-report", ("check",)),
        ("error-report", ("plan", directory, "--gpus", "1MiB")),
    ):
        done = command(*words, "--json")
        told = [line.removeprefix("note: ") for line in done.err.splitlines() if line.startswith("note: ")]
        assert (note in told, conforms(done.out, schema)["notes"]) == (True, told)
    assert any("no part of the model is on device 1" in line for line in command("plan", "--all").err.splitlines())
    assert note not in Path("b.json").read_text(encoding="utf-8")


def test_context_is_per_sequence() -> None:
    """The cache has room for the context of every sequence, and without a context for the model's longest."""
    asked = ("plan", LLAMA_8B, "--gpus", "4x80GiB", "--batch", 3, "-o", "-")
    assert json.loads(command(*asked, "--context", 1000).out)["request"]["cache"]["tokens"] == 3000
    assert json.loads(command(*asked).out)["request"]["cache"]["tokens"] == 3 * 131072


def test_options_reach_the_planner() -> None:
    """Each option of ``plan`` is in the plan's request."""
    options = ("--cache", "q6", "--layout", "gather", "--strategy", "latency", "--max-rows", 512, "--kv", "replicate")
    done = command("plan", LLAMA_8B, "--gpus", "2xRTX4090", "--context", 2048, "--batch", 2, *options, "--json")
    assert json.loads(done.out)["plan"]["request"] == {
        "layout": "gather",
        "strategy": "latency",
        "cache": {"kind": "q6", "tokens": 4096},
        "batch": 2,
        "max_rows": 512,
        "kv": "replicate",
    }
    assert done.err == ""


def test_gather_is_explained_where_rows_cannot_be_cut() -> None:
    """Where only ``gather`` works, planning says so and does so; where it was asked for, it says nothing."""
    spec = attrs.evolve(__import__("tpplan").read_model(LLAMA_8B), gather_only="GPTQ with a permutation of rows")
    with patch("tpplan.models.reader.read_model", lambda _: spec):
        asked = ("plan", "model", "--gpus", "24GiB,12GiB", "--context", 4096, "--json")
        done = command(*asked)
        assert json.loads(done.out)["plan"]["request"]["layout"] == "gather"
        assert "layout gather, because rows cannot be cut: GPTQ with a permutation" in done.err
        assert command(*asked, "--layout", "gather").err == ""


@pytest.mark.parametrize(
    ("stored", "is_told"),
    [
        ("NVFP4", True),
        ("EXL2 4.15 bpw", True),
        ("MXFP4", True),
        ("NF4", True),
        ("GPTQ 4-bit g128", False),
        ("BF16", False),
    ],
)
def test_formats_that_are_slower_than_predicted_are_told(stored: str, is_told: bool) -> None:
    """Where tokens/s are predicted, and the decoder has no kernels for weights; of MXFP4 it has some for experts."""
    spec = attrs.evolve(__import__("tpplan").read_model(LLAMA_8B), weight_format=stored)
    with patch("tpplan.models.reader.read_model", lambda _: spec):
        asked = ("plan", "model", "--context", 4096, "-o", "x.json", "--gpus")
        assert (f"no kernels for {stored}, so it is slower" in command(*asked, "RTX4090").err) == is_told
        assert "kernels" not in command(*asked, "24GiB").err


def test_devices_without_a_part_are_told() -> None:
    """A device that was asked for and got nothing is named, of many the first."""
    asked = ("plan", LLAMA_8B, "--context", 4096, "-o", "x.json", "--gpus")
    assert "note: " not in command(*asked, "24GiB,12GiB").err
    assert command(*asked, "24GiB,1MiB").err.startswith("note: no part of the model is on device 1 (1MiB GPU)\nhint: ")
    told = command(*asked, "24GiB,5x1MiB").err.splitlines()[0]
    assert told.endswith("on device 1 (1MiB GPU), 2 (1MiB GPU), 3 (1MiB GPU) and 2 more")


def test_more_memory_is_advised_where_it_helps() -> None:
    """To devices without a part that would get one with the memory of others, not where a model has no more parts."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "num_attention_heads": 2, "head_dim": 32}
    config = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    Path("tiny.json").write_text(json.dumps(config | sizes | {"num_key_value_heads": 1}), encoding="utf-8")
    for gpus, hints in {
        "8GiB,1MiB,1MiB": ["hint: leave them out of --gpus, as in --gpus 8GiB, or give them a budget of 8GiB"],
        "2x8GiB,1MiB": ["hint: leave it out of --gpus, as in --gpus 2x8GiB, or give it a budget of 8GiB"],
        "3x8GiB,1MiB": ["hint: leave it out of --gpus, as in --gpus 3x8GiB"],
        "5x8GiB": ["hint: leave them out of --gpus, as in --gpus 3x8GiB"],
        "3x8GiB": ["hint: the model fits on device 0 alone, as in --gpus 8GiB"],  # a part for each
        "8GiB,7GiB,6GiB": ["hint: leave them out of --gpus, as in --gpus 8GiB, or give them a budget of 8GiB"],
        "RTX4090,RTX3060,RTX3060": [
            "hint: leave them out of --gpus, as in --gpus RTX4090"
        ],  # which have no more memory
        "3x1000MiB,8GiB": ["hint: leave them out of --gpus, as in --gpus 8GiB"],  # one of four has none in any case
        "RTX4090": [],
    }.items():
        done = command("plan", "tiny.json", "--context", 64, "--gpus", gpus, "-o", "plan.json")
        assert [line for line in done.err.splitlines() if line.startswith("hint: ")] == hints


def small(**sizes: object) -> str:
    """Write a config.json with other sizes than those of Llama 3.1 8B, and return its path."""
    config = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    Path("small.json").write_text(json.dumps(config | sizes), encoding="utf-8")
    return "small.json"


def test_what_one_device_computes_alone_is_told() -> None:
    """Where nothing is predicted, with what divides it: an option that does when followed, or that device alone."""
    # One KV head, of 256 columns and 8 query heads, as in Gemma 2B.
    model = small(num_key_value_heads=1, num_attention_heads=8, head_dim=256, hidden_size=2048, num_hidden_layers=18)
    asked = ("plan", model, "--context", 4096, "-o", "x.json", "--gpus")
    told = command(*asked, "24GiB,16GiB").err.splitlines()
    assert told[:3] == [
        "note: all attention on device 0 (24GiB GPU): the other one waits for it in every layer",
        "hint: the model fits on device 0 alone, as in --gpus 24GiB",
        "hint: with --kv replicate more devices share it",
    ]
    assert "note: " not in command(*asked, "24GiB,16GiB", "--kv", "replicate").err
    assert "note: " not in command(*asked, "24GiB").err
    assert "note: all attention on device 0 (24GiB GPU): the others wait for it" in command(*asked, "3x24GiB").err
    assert "alone" not in command(*asked, "RTX4090,RTX4090", "--kv", "replicate").err


def test_parts_that_are_on_a_device_each_are_told() -> None:
    """Of SmolLM2's three KV heads on two equal devices one has two, and the other one makes up for it with the MLPs."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = small(**sizes, head_dim=64, num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True)
    done = command("plan", model, "--context", 32768, "--gpus", "2x24GiB", "-o", "x.json")
    note, *hints = [line for line in done.err.splitlines() if line.startswith(("note", "hint"))]
    assert note == "note: all MLPs on device 1 (24GiB GPU): the other one waits for it in every layer"
    assert hints[0] == "hint: the model fits on device 1 alone, as in --gpus 24GiB"
    assert hints[1].startswith("hint: with bandwidths more devices may share it: name GPUs of the catalogue in --gpus")
    # Following it divides everything, whatever the bandwidth: here of two cards of the catalogue.
    followed = ("--gpus", "2xRTX3090", "-o", "y.json")
    assert command("plan", model, "--context", 32768, *followed).code == 0
    splits = codec.load("y.json").splits
    assert all(0 < split.bounds[1] < split.size for split in splits)


def test_the_least_budget_is_advised_that_gives_idle_devices_a_part() -> None:
    """A GiB less gives them none: the whole memory of the largest device is no advice where a quarter does."""
    asked = ("plan", LLAMA_8B, "--context", 8192, "--reserve", "4200MiB", "-o", "x.json", "--gpus")
    (budget,) = re.findall(r"a budget of (\w+)", " ".join(command(*asked, "RTX3090,5GiB").err.split()))
    assert budget == "6GiB"
    assert "no part" not in command(*asked, f"RTX3090,{budget}").err


def test_devices_that_are_left_out_change_the_numbers_of_reserves() -> None:
    """What is advised gives each device the reserve that it had."""
    asked = ("plan", LLAMA_8B, "--context", 4096, "-o", "x.json", "--gpus")
    done = command(*asked, "900MiB,24GiB,12GiB", "--reserve", "1GiB@2", "--reserve", "2GiB", "--reserve", "1MiB@0")
    hint = next(line for line in done.err.splitlines() if line.startswith("hint: leave it out"))
    words = hint.partition("as in --gpus ")[2].partition(", or ")[0].split()
    assert words == ["24GiB,12GiB", "--reserve", "1GiB@1", "--reserve", "2GiB"]
    memory = codec.load("x.json").memory
    assert command(*asked, *words).code == 0
    assert [entry.reserved_bytes for entry in codec.load("x.json").memory] == [e.reserved_bytes for e in memory[1:]]


def test_infeasible_says_what_is_missing_and_what_helps() -> None:
    """What does not fit exits 1, with a table by device and bucket and options that, followed, do give a plan."""
    asked = ["plan", str(LLAMA_8B), "--gpus", "12GiB,6GiB"]
    done = command(*asked, "-o", "x.json")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: Llama-3.1-8B does not fit: ")
    assert re.search(r"weights +cache +workspace +overhead +budget +missing\n +0 +12GiB GPU", done.err)
    assert "hint: each of these alone makes it fit\n" in done.err
    options = re.findall(r"^  (--\w+) (\S+)  ", done.err, re.MULTILINE)
    assert {name for name, _ in options} >= {"--context", "--gpus"}
    assert not Path("x.json").exists()
    for name, value in options:
        again = ["plan", str(LLAMA_8B), "--gpus", value] if name == "--gpus" else [*asked, name, value]
        assert command(*again, "--json").code == 0, (name, value)


def test_weights_beyond_all_budgets_are_told() -> None:
    """Where no cache could be small enough, the error says that weights alone are too much, and how many bits do."""
    words = ": with these budgets it needs a checkpoint with fewer bits per weight: at most "
    alone = "; its weights alone are 14.96 GiB"
    assert alone + words in command("plan", LLAMA_8B, "--gpus", "6GiB,8GiB", "--context", 4096).err
    beside = f"{alone}, beside an overhead of 1.74 GiB{words}"
    assert beside in command("plan", LLAMA_8B, "--gpus", "7GiB,8.5GiB", "--context", 1).err
    for gpus in ("9GiB,8GiB", "400MiB"):  # more than the weights need; not even the overhead
        done = command("plan", LLAMA_8B, "--gpus", gpus, "--context", 4096)
        assert done.code == 1
        assert "weights alone" not in done.err


def test_infeasible_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is missing of each bucket has no room it is left out, and a long list of GPUs has its own line."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    err = command("plan", LLAMA_8B, "--gpus", "RTX4060Ti16GB,RTX3060", terminal=True).err
    assert "  Needs, GiB\n" in err
    assert re.search(r"\n  0  RTX 4060 Ti 16GB +7.65 +10.00 +0.18 +0.87 +15.38 +3.32\n", err)
    assert re.search(r"\n  --cache fp8 +cache the keys and values as fp8\n", err)
    assert re.search(r"\n  --gpus RTX4060Ti16GB,RTX3060,RTX4060Ti16GB\n +add 1 more RTX 4060 Ti 16GB\n", err)
    assert max(map(len, err.partition("Needs")[2].splitlines())) <= 80


def test_single_advice_is_not_told_as_one_of_many() -> None:
    """Where one change alone would help, the hint says so."""
    done = command("plan", LLAMA_8B, "--gpus", "65x1MiB", "--context", 1024)
    hint, *lines = done.err.partition("hint: ")[2].splitlines()
    options = [line for line in lines if line.lstrip().startswith("--")]  # with its words below where it is long
    assert (hint, len(options)) == ("this makes it fit", 1)


def test_infeasible_document() -> None:
    """With --json what is missing and what helps is one document, and the exit code says no all the same."""
    done = command("plan", LLAMA_8B, "--gpus", "12GiB,6GiB", "--json")
    error = conforms(done.out, "error-report")["error"]
    assert (done.code, error["kind"]) == (1, "infeasible")
    assert [s["missing_bytes"] > 0 for s in error["shortfalls"]] == [True, True]
    for s in error["shortfalls"]:
        parts = sum(s[f"missing_{bucket}_bytes"] for bucket in ("weights", "cache", "workspace", "overhead"))
        assert parts == s["missing_bytes"]
    memory = next(s for s in error["suggestions"] if s["kind"] == "memory")
    budget = parse_devices(memory["option"].removeprefix("--gpus "))[memory["device"]].budget_bytes
    assert str(budget) == memory["value"]


def test_advice_that_leaves_a_device_empty_says_so() -> None:
    """What makes a small model fit may make it fit on one device; followed, it does what it says."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 256}
    asked = ("plan", small(**sizes, num_key_value_heads=2, num_hidden_layers=2), "--context", 131072, "-o", "x.json")
    told = command(*asked, "--gpus", "900MiB,500MiB", "--json").out
    found = json.loads(told)["error"]["suggestions"]
    assert found
    for one in found:
        gpus = () if "--gpus" in one["option"] else ("--gpus", "900MiB,500MiB")
        assert command(*asked, *gpus, *one["option"].split()).code == 0
        idle = [entry.device for entry in codec.load("x.json").memory if not entry.used_bytes]
        assert ("which leaves device" in one["message"]) == bool(idle)
        assert all(f" {i} (" in one["message"].partition("which leaves")[2] for i in idle)
    assert any("which leaves device 1 (500MiB GPU) without a part" in one["message"] for one in found)


def test_more_memory_than_a_gpu_has_is_another_gpu() -> None:
    """No hint names a GPU with more memory than it has (a modified card is its owner's word), but another in its place.

    Where the strategy needs its bandwidth, no list names that one, and it stays in words.
    """
    asked = ("plan", LLAMA_70B, "--gpus", "RTX5090,RTX4090", "--context", 4096)
    (memory,) = (s for s in json.loads(command(*asked, "--json").out)["error"]["suggestions"] if s["kind"] == "memory")
    budget = int(memory["value"])
    assert memory["message"] == f"take a GPU with {budget / 2**30:.2f} GiB instead of device 0 (RTX 5090)"
    assert memory["option"] == f"--gpus {budget // 2**20}MiB,RTX4090"
    assert command(*asked[:2], *memory["option"].split(), *asked[4:]).code == 0
    done = command(*asked, "--strategy", "latency", "--json")
    (memory,) = (s for s in json.loads(done.out)["error"]["suggestions"] if s["kind"] == "memory")
    assert (" GiB and a known bandwidth instead of device " in memory["message"], "option" in memory) == (True, False)


@pytest.mark.parametrize(
    "cards", ["RTX3060,3xRTX4090:12GiB", "2xH100:10GiB,H100", "RTX4090:20GiB,RTX4090", "8xRTX4090"]
)
@pytest.mark.parametrize("strategy", ["auto", "balanced", "latency"])
def test_advice_for_idle_devices_leaves_none_idle(cards: str, strategy: str) -> None:
    """Whatever of it is followed: named cards without them, or with the budget that it says, all get a part."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 256}
    config = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    Path("tiny.json").write_text(json.dumps(config | sizes | {"num_key_value_heads": 2}), encoding="utf-8")
    asked = ("plan", "tiny.json", "--context", 64, "--strategy", strategy, "-o", "plan.json", "--gpus")
    idle = "no part of the model is on"
    told = " ".join(command(*asked, cards).err.split())
    plan = codec.load("plan.json")
    if idle not in told:
        assert strategy == "latency"
        return
    (kept,) = re.findall(r"leave \w+ out of --gpus, as in --gpus ([^ ,]+(?:,[^ ,]+)*)", told)
    assert idle not in command(*asked, kept).err
    for budget in re.findall(r"a budget of (\w+)", told):
        places = zip(plan.devices, plan.memory, strict=True)
        given = [f"{device.budget_bytes}B" if entry.used_bytes else budget for device, entry in places]
        names = [device.name.replace(" ", "") for device in plan.devices]
        assert idle not in command(*asked, ",".join(map(":".join, zip(names, given, strict=True)))).err
