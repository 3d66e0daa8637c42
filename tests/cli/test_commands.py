"""The commands: exit codes, documents, streams, and that nothing is said where it does not belong."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import attrs
import pytest

from tests.cli_cases import LLAMA_8B, LLAMA_70B, ROOT, conforms, folder, refused, written_plans  # noqa: F401 (for every test)
from tests.codec_cases import FIXTURE, PLAN, TEXT
from tests.command import command
from tests.nvml_replay import Replay
from tests.render_cases import data as report_of
from tests.render_cases import plain
from tpplan import __version__
from tpplan.cli.commands import app
from tpplan.hardware import probe
from tpplan.hardware.probe import nvml
from tpplan.planfile import codec
from tpplan.render.devices import devices as render_devices
from tpplan.render.show import show

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def plans() -> tuple[str, str]:
    """Return plans of one model for different GPUs."""
    return written_plans()


@pytest.fixture
def gpus() -> Iterator[None]:
    """Pretend that this machine has two uneven GPUs, as they were recorded."""
    replay = Replay("nvidia_uneven")
    with patch.object(probe, "probe", lambda: nvml.read(replay, os.environ, 1)):
        yield


def test_show(plans: tuple[str, str]) -> None:
    """``show`` prints the plain view off a terminal, and the report as a document whose plan is the file's."""
    done = command("show", plans[0])
    assert (done.code, done.err) == (0, "")
    assert done.out == plain(show(report_of(codec.load(plans[0]))))
    report = conforms(command("show", plans[0], "--json").out, "show-report")
    assert codec.loads(json.dumps(report["plan"])) == codec.load(plans[0])


def test_show_draws(plans: tuple[str, str]) -> None:
    """--svg and --html write files instead of the screen, or standard output for ``-``."""
    done = command("show", plans[0], "--svg", "a.svg", "--html", "a.html")
    assert (done.code, done.out, done.err) == (0, "", "wrote: a.svg\nwrote: a.html\n")
    assert Path("a.svg").read_text(encoding="utf-8").startswith("<svg ")
    assert Path("a.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert command("show", plans[0], "--svg", "-").out == Path("a.svg").read_text(encoding="utf-8")


def test_show_draws_neither_over_the_plan_nor_twice_into_one_file(plans: tuple[str, str]) -> None:
    """The plan is still there, and so would be the first of two drawings."""
    for options in (["--svg", plans[0]], ["--html", f"./{plans[0]}"], ["--svg", "x", "--html", "./x"]):
        assert f"{options[-1]!r} is read or written by the same command" in refused("show", plans[0], *options)


def test_standard_input(plans: tuple[str, str]) -> None:
    """``-`` is standard input wherever a plan is read."""
    data = Path(plans[0]).read_bytes()
    assert command("show", "-", stdin=data).out == command("show", plans[0]).out
    assert command("diff", "-", plans[0], stdin=data).code == 0
    assert command("diff", plans[1], "-", stdin=data).code == 1
    assert command("validate", plans[1], "-", stdin=data).out.endswith("2 of 2 plans valid\n")
    assert command("check", "-", "--model", LLAMA_8B, stdin=data).code == 0
    assert "standard input" in command("show", "-", stdin=b"{}x").err.splitlines()[0]
    assert "is empty" in command("show", "-", stdin=b"\n").err


def test_diff(plans: tuple[str, str]) -> None:
    """Equal plans exit 0, different ones 1, and the document has the same summary as the screen."""
    a, b = plans
    assert (command("diff", a, a).code, command("diff", a, a).out) == (0, "the plans are equal\n")
    done = command("diff", a, b)
    assert done.code == 1
    document = conforms(command("diff", a, b, "--json").out, "plan-diff")
    assert document["reasons"] == ["devices"]
    assert "".join(done.out.split()).endswith("".join(document["summary"].split()))


def test_validate(plans: tuple[str, str]) -> None:
    """Every file gets its verdict and every problem its rule; one that is invalid makes the exit code 1."""
    Path("bad.json").write_text(TEXT.replace('"batch": 2', '"batch": 0').replace("2048, 2048]", "2016, 2016]", 1))
    Path("wide.json").write_text(TEXT.replace('"batch": 2', '"batch":  2'))
    done = command("validate", plans[0], "bad.json", "wide.json")
    assert done.code == 1
    assert f"{plans[0]}: valid\n" in done.out
    assert "  TP008 at request.batch: is 0, expected 1 or more\n" in done.out
    assert "  TP004 at splits[4].bounds: " in done.out
    line = 1 + TEXT[: TEXT.index('"batch"')].count("\n")
    assert f"wide.json: valid\n  non-canonical formatting at line {line}\n" in done.out
    assert done.out.endswith("2 of 3 plans valid\n")
    assert "hint: " in done.err
    document = conforms(command("validate", plans[0], "bad.json", "wide.json", "--json").out, "validation-report")
    assert [(file["ok"], len(file["problems"])) for file in document["files"]] == [(True, 0), (False, 2), (True, 0)]
    assert document["files"][2]["uncanonical_line"] == line
    assert command("validate", *plans).code == 0
    told = command("validate", "wide.json")
    assert told.err == "hint: in Python, tpplan.load(path).save(path) formats a plan as tpplan does\n"
    codec.load("wide.json").save("wide.json")
    done = command("validate", "wide.json")
    assert (done.out, done.err) == ("wide.json: valid\n", "")


def test_check(plans: tuple[str, str]) -> None:
    """A plan is current for its model under any name, and stale for another one or after an edit by hand."""
    Path("copy").mkdir()
    Path("copy/config.json").write_bytes((LLAMA_8B / "config.json").read_bytes())
    done = command("check", *plans, "--model", "copy")
    assert (done.code, done.out) == (0, "a.json: current\nb.json: current\n2 of 2 plans current\n")

    edited = codec.load("a.json")
    split = edited.split("residual")
    bounds = (0, split.bounds[1] - split.unit, split.size)
    splits = tuple(attrs.evolve(s, bounds=bounds) if s is split else s for s in edited.splits)
    codec.save(attrs.evolve(edited, splits=splits), "a.json")
    done = command("check", *plans, "--model", LLAMA_8B)
    assert done.code == 1
    assert done.out.startswith("a.json: stale (planning)\n  the same inputs give another plan\n")
    assert "b.json: current" in done.out
    assert "hint: " in done.err

    document = conforms(command("check", "b.json", "--model", LLAMA_70B, "--json").out, "check-report")
    (verdict,) = document["plans"]
    assert (document["current"], verdict["reasons"]) == (False, ["model", "infeasible"])
    assert f"is for {LLAMA_8B.name} with the fingerprint {codec.load('b.json').model.fingerprint}" in verdict["message"]
    assert f"{LLAMA_70B.name} has sha256:" in verdict["message"]
    assert "does not fit" in verdict["message"]
    told = " ".join(command("check", "b.json", "--model", LLAMA_70B).out.split())
    assert re.search(r"fingerprint sha256:[0-9a-f]{12}…, .* has sha256:[0-9a-f]{12}…;", told)  # whole ones help nobody


def test_a_plan_that_cannot_be_judged_keeps_no_other_from_it(plans: tuple[str, str]) -> None:
    """What is missing or no valid plan is told beside the verdicts on the others, and the exit code is the worst."""
    Path("bad.json").write_text(TEXT.replace('"batch": 2', '"batch": 0'))
    asked = ("missing.json", plans[0], "bad.json", plans[1])
    done = command("validate", *asked)
    assert done.code == 2
    assert done.out.startswith("missing.json: cannot be read\n  ")
    assert "a.json: valid\nbad.json: 1 problem\n" in done.out
    assert done.out.endswith("b.json: valid\n2 of 4 plans valid\n")
    assert len(done.err.splitlines()) == 2  # a hint for what is wrong, and one for what is missing
    files = conforms(command("validate", *asked, "--json").out, "validation-report")["files"]
    assert [file.get("error", {}).get("kind") for file in files] == ["file", None, None, None]

    done = command("check", *asked, "--model", LLAMA_8B)
    assert done.code == 2
    assert done.out.startswith("missing.json: not checked\n  ")
    assert (
        "a.json: current\nbad.json: not checked, 1 problem\n  TP008 at request.batch: is 0, expected 1 or more\n"
        in done.out
    )
    assert done.out.endswith("b.json: current\n2 of 4 plans current\n")
    document = conforms(command("check", *asked, "--model", LLAMA_8B, "--json").out, "check-report")
    assert not document["current"]
    assert [plan.get("error", {}).get("kind") for plan in document["plans"]] == ["file", None, "plan", None]
    assert [problem["rule"] for problem in document["plans"][2]["error"]["problems"]] == ["TP008"]
    stale = command("check", *asked, "--model", LLAMA_8B, "--gpus", "24GiB,12GiB")
    assert stale.code == 2
    assert "tpplan plan" in stale.err


def test_check_holds_plans_against_devices(plans: tuple[str, str]) -> None:
    """With --gpus a plan is stale once it is for other devices, and the document tells what planning again changes."""
    assert command("check", "a.json", "--model", LLAMA_8B, "--gpus", "24GiB,12GiB").code == 0
    done = command("check", *plans, "--model", LLAMA_8B, "--gpus", "24GiB,12GiB")
    assert done.code == 1
    assert done.out.startswith("a.json: current\nb.json: stale (devices)\n  the plan is for other devices than those")
    document = conforms(
        command("check", "b.json", "--model", LLAMA_8B, "--gpus", "24GiB,12GiB", "--json").out, "check-report"
    )
    again = json.loads(command("diff", "b.json", "a.json", "--json").out)
    assert document["plans"][0]["diff"] == again
    document = conforms(command("check", "b.json", "--model", LLAMA_8B, "--gpus", "1GiB", "--json").out, "check-report")
    assert document["plans"][0]["reasons"] == ["devices", "infeasible"]


def test_check_says_what_makes_stale_plans_again(plans: tuple[str, str]) -> None:
    """The hint has a command for each stale plan, with all that was asked; following it makes the plan current."""
    devices = [{"name": "odd", "memory_bytes": 2**35, "budget_bytes": 2**35, "overhead_bytes": 7}] * 2
    Path("devices.json").write_text(json.dumps({"format_version": "1.0", "devices": devices}))
    asked = ["--context", 512, "--batch", 8, "--cache", "q4", "--layout", "gather", "--strategy", "exllamav2"]
    asked += ["--max-rows", 64, "--kv", "replicate", "--reserve", "100MiB", "--reserve", "7B@1"]
    assert command("plan", LLAMA_8B, "--gpus", "2x24GiB,RTX3060", *asked, "-o", "of all.json").code == 0
    first = codec.load("of all.json").request
    for gpus in ((), ("--gpus", "devices.json"), ("--gpus", "24GiB,20GiB,12GiB")):
        edited = codec.load("of all.json")
        codec.save(attrs.evolve(edited, request=attrs.evolve(edited.request, max_rows=65)), "of all.json")
        done = command("check", plans[0], "of all.json", "--model", LLAMA_8B, *gpus)
        hint, *commands = done.err.splitlines()
        assert hint == "hint: make it again with tpplan plan, and see with tpplan diff what that changes"
        assert len(commands) == done.out.count(": stale (")
        for text in commands:
            name, *words = shlex.split(text)
            assert name == "tpplan"
            assert command(*words).code == 0
        assert command("check", "of all.json", "--model", LLAMA_8B, *gpus).code == 0
    assert codec.load("of all.json").request == attrs.evolve(first, max_rows=65)


@pytest.mark.parametrize("gpus", ["8xH200", "16xH100", "12xH100"])
def test_check_makes_room_for_what_drafts_again(gpus: str) -> None:
    """The printed command has room for it on the devices that are named, fewer than there were too."""
    deepseek = ROOT / "examples/models/DeepSeek-V3"
    asked = ("--context", 32768, "--mtp", "-o", "dm.json")
    assert command("plan", deepseek, "--gpus", "4xH200,8xH100", *asked).code == 0
    hint, again = command("check", "dm.json", "--model", deepseek, "--gpus", gpus).err.splitlines()
    assert hint == "hint: make it again with tpplan plan, and see with tpplan diff what that changes"
    assert shlex.split(again)[3:] == ["--mtp", "--gpus", gpus, *map(str, asked[:2]), "-o", "dm.json"]
    assert command(*shlex.split(again)[1:]).code == 0
    assert command("check", "dm.json", "--model", deepseek, "--gpus", gpus).code == 0


def test_check_plans_the_room_of_prediction_layers_again(tmp_path: Path) -> None:
    """Prediction layers that the model has not had make a plan stale, as by a manifest; the command mends it."""
    config = json.loads((ROOT / "examples/models/DeepSeek-V3/config.json").read_text())
    model, plan = tmp_path / "config.json", tmp_path / "dm.json"
    model.write_text(json.dumps(config))
    assert command("plan", model, "--gpus", "8xH200", "--context", 4096, "--mtp", "-o", plan).code == 0
    assert command("check", plan, "--model", model).code == 0
    (before, *_) = codec.load(plan).request.draft.room_bytes  # type: ignore[union-attr]
    model.write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    done = command("check", plan, "--model", model)
    assert (done.code, "stale (draft)" in done.out) == (1, True), done.out
    assert "their room is" in done.out
    again = done.err.splitlines()[-1]
    assert command(*shlex.split(again)[1:]).code == 0
    assert command("check", plan, "--model", model).code == 0
    (after, *_) = codec.load(plan).request.draft.room_bytes  # type: ignore[union-attr]
    assert after > before
    model.write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    assert "model has no prediction layers" in " ".join(command("check", plan, "--model", model).out.split())


@pytest.mark.parametrize(
    "asked",
    [
        ("--tokens", 4099, "--context", 1025, "--batch", 4),  # equal parts that leave a rest
        ("--tokens", 40960, "--batch", 4),
        ("--tokens", 40960, "--context", 20480, "--batch", 4, "--full-window", "--cache", "q8"),
        ("--context", 65536, "--beyond", "--full-window"),
    ],
)
def test_check_makes_plans_of_pools_again(asked: tuple[object, ...]) -> None:
    """The printed command says all that was asked of the cache."""
    config = {"model_type": "mistral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 32768}
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps({**config, "sliding_window": 4096}))
    assert command("plan", "small", "--gpus", "4GiB,3GiB", *asked, "-o", "p.json").code == 0
    request = codec.load("p.json").request
    assert command("check", "p.json", "--model", "small").code == 0
    done = command("check", "p.json", "--model", "small", "--gpus", "3GiB,2GiB")
    again = shlex.split(done.err.splitlines()[1])[1:]
    assert command(*again).code == 0
    assert codec.load("p.json").request == request
    assert command("check", "p.json", "--model", "small", "--gpus", "3GiB,2GiB").code == 0


@pytest.mark.parametrize(
    ("gpus", "told", "one"),
    [
        ("65x1MiB", "this command makes a plan", ",64x1MiB "),
        ("RTX3060", "each of these commands makes a plan", "--gpus 2xRTX3060 "),
        ("RTX3090:16.3GiB", "each of these commands makes a plan", "--cache fp8 "),
    ],
)
def test_check_says_what_fits_where_a_stale_plan_cannot_be_made_again(
    gpus: str, told: str, one: str, plans: tuple[str, str]
) -> None:
    """The hint has no command that fails: each makes a plan, with less or on more than was asked for."""
    asked = ("check", plans[0], "--model", LLAMA_8B, "--gpus", gpus)
    done = command(*asked)
    assert done.out.startswith("a.json: stale (devices, infeasible)\n")
    hint, *commands = done.err.splitlines()
    assert hint == f"hint: a.json cannot be made again as it was asked for; {told}"
    assert (len(commands) > 1) == told.startswith("each")
    for text in commands:
        assert command(*shlex.split(text)[1:-2]).code == 0, text
    assert any(one in text for text in commands)
    document = conforms(command(*asked, "--json").out, "check-report")
    assert document["plans"][0]["refused"]["kind"] == "infeasible"
    assert len(document["plans"][0]["refused"]["suggestions"]) >= len(commands)


def test_check_makes_a_plan_again_for_its_model_under_another_name(plans: tuple[str, str]) -> None:
    """The fingerprint says that it is the plan's own model; the hint has the command, of the folder that was named."""
    Path("copy").mkdir()
    Path("copy/config.json").write_bytes((LLAMA_8B / "config.json").read_bytes())
    asked = ("check", *plans, "--model", "copy", "--gpus", "24GiB,12GiB")
    hint, again = command(*asked).err.splitlines()
    assert hint == "hint: make it again with tpplan plan, and see with tpplan diff what that changes"
    assert command(*shlex.split(again)[1:]).code == 0
    assert command(*asked).code == 0


def test_check_proposes_nothing_that_would_be_wrong(plans: tuple[str, str]) -> None:
    """No command is proposed that would write over a plan of another model, or for devices that no list can name."""
    done = command("check", *plans, "--model", LLAMA_70B)
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    first = f"hint: name with --model the model that the plan is for, {LLAMA_8B.name}; or make it again"
    assert done.err.startswith(first)
    plan = codec.load(plans[0])
    memory = tuple(
        attrs.evolve(m, overhead_bytes=7, free_bytes=m.free_bytes + m.overhead_bytes - 7) for m in plan.memory
    )
    devices = tuple(attrs.evolve(device, overhead_bytes=7) for device in plan.devices)
    codec.save(
        attrs.evolve(plan, devices=devices, memory=memory, request=attrs.evolve(plan.request, max_rows=9)), "x.json"
    )
    done = command("check", "x.json", "--model", LLAMA_8B)
    assert (done.code, len(done.err.splitlines())) == (1, 1)


def test_check_explains_a_request_that_lost_its_meaning(plans: tuple[str, str]) -> None:
    """A plan whose context the model no longer has is stale, not an error."""
    config = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    Path("config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    document = conforms(command("check", plans[0], "--model", "config.json", "--json").out, "check-report")
    assert document["plans"][0]["reasons"][-1] == "request"
    assert "are more than the 2048 that " in document["plans"][0]["message"]
    Path("Llama-3.1-8B").mkdir()
    Path("config.json").rename("Llama-3.1-8B/config.json")
    hint = "a.json cannot be made again as it was asked for; ask for at most 2048 per sequence"
    assert command("check", plans[0], "--model", "Llama-3.1-8B").err.startswith(f"hint: {hint}, or go beyond ")


def test_inspect_document() -> None:
    """``inspect --json`` is one document of its schema."""
    assert conforms(command("inspect", LLAMA_8B, "--json").out, "inspection")["kv_heads"] == 8


def test_devices(gpus: None) -> None:
    """The GPUs, their links and other programs are on the screen and in the document; -o writes a devices file."""
    done = command("devices")
    assert done.code == 0
    for words in ("RTX 3060", "RTX 4090", "0–1  pcie through numa node, peer access no", "/usr/bin/python3", "4242"):
        assert words in done.out
    assert done.out.startswith("2 GPUs, NVIDIA ")
    report = conforms(command("devices", "--json").out, "device-report")
    assert render_devices(report | {"devices": report["devices"][:1]})[0][0][0].startswith("1 GPU, NVIDIA ")
    assert [d["name"] for d in report["devices"]] == ["RTX 3060", "RTX 4090"]
    assert command("devices", "-o", "devices.json").err == "wrote: devices.json\n"
    conforms(Path("devices.json").read_text(encoding="utf-8"), "devices-file")
    assert command("devices", "-o", "-").out == Path("devices.json").read_text(encoding="utf-8")
    assert command("plan", LLAMA_8B, "--gpus", "devices.json", "--context", 4096).code == 0
    done = command("plan", LLAMA_8B, "--gpus", "auto", "--context", 4096, "-o", "a.json")
    assert done.code == 0
    for told in (done, command("devices", "-o", "-")):  # where the screen with the notes is not shown
        assert told.err.startswith("note: GPUs are numbered by PCI bus here; ")


def test_newer_minor_version_is_shown_with_a_warning() -> None:
    """A plan of a newer minor version is shown and diffed with a warning, but is not valid and not checked."""
    text = TEXT.replace('"format_version": "1.0"', '"format_version": "1.7"').replace('"batch"', '"new": 1, "batch"')
    Path("newer.json").write_text(text)
    for done in (command("show", "newer.json"), command("diff", "newer.json", FIXTURE)):
        assert done.code in {0, 1}
        assert done.err.startswith("warning: newer.json has format 1.7, newer than ")
    (told,) = conforms(command("show", "newer.json", "--json").out, "show-report")["notes"]
    assert told.startswith("newer.json has format 1.7, newer than ")
    assert command("show", "newer.json").out == plain(show(report_of(attrs.evolve(PLAN, format_version="1.7"))))
    for code, asked in ((1, ("validate",)), (2, ("check", "--model", LLAMA_8B))):
        done = command(*asked, "newer.json")
        assert (done.code, done.err) == (code, "hint: upgrade tpplan, or make the plan again with this one\n")


def test_version_and_help() -> None:
    """--version is one line; help is on standard output, exits 0, and names every command and option."""
    assert command("--version").out == f"tpplan {__version__}\n"
    done = command("--help")
    assert done.code == 0
    for name in ("inspect", "devices", "plan", "show", "diff", "validate", "check"):
        assert name in done.out
    options = (
        "--gpus",
        "-o",
        "--context",
        "--batch",
        "--cache",
        "--layout",
        "--strategy",
        "--max-rows",
        "--kv",
        "--json",
    )
    for option in options:
        assert option in command("plan", "--help").out
    assert command().out == done.out
    places = [done.out.index(words) for words in ("Show a model", "Split a model", "Show a plan", "Time every")]
    assert places == sorted(places)
    assert command("check", "--help").out.startswith("Usage: tpplan check [OPTIONS] [PLANS...]\n")


def test_help_is_wrapped_by_the_terminal_alone() -> None:
    """A line of a docstring that goes on below would be broken there too, in the middle of a column."""
    for name in (name for name in app if not name.startswith("-")):
        told = (app[name].default_command.__doc__ or "").expandtabs().splitlines()
        assert told, name
        assert [line for line in told if line.startswith(" " * 9)] == [], name


def test_bug_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw asks to be reported; only TPPLAN_DEBUG shows where it came from."""
    with patch("tpplan.models.reader.read_model", side_effect=ZeroDivisionError("by nought")):
        done = command("inspect", "model")
        assert done.code == 2
        assert "tpplan has a bug: ZeroDivisionError: by nought" in done.err
        assert "please report it" in done.err
        assert "Traceback" not in done.err
        monkeypatch.setenv("TPPLAN_DEBUG", "1")
        assert "Traceback" in command("inspect", "model").err


def test_interrupt_exits_130() -> None:
    """Ctrl-C ends a command quietly."""
    with patch("tpplan.models.reader.read_model", side_effect=KeyboardInterrupt):
        done = command("inspect", "model")
    assert (done.code, done.out, done.err) == (130, "", "")
