"""The commands: exit codes, documents, streams, and that nothing is said where it does not belong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import attrs
import pytest
from jsonschema import Draft202012Validator

from tests.command import command
from tests.nvml_replay import Replay
from tests.test_codec import FIXTURE, PLAN, TEXT
from tests.test_render import data as report_of
from tests.test_render import plain
from tpplan import __version__, codec, probe
from tpplan.devices import parse_devices
from tpplan.probe import nvidia
from tpplan.render.devices import devices as render_devices
from tpplan.render.show import show

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
LLAMA_8B = ROOT / "examples/models/Llama-3.1-8B"
LLAMA_70B = ROOT / "examples/models/Llama-3.1-70B"
COLOUR = re.compile(r"\x1b\[")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty directory, as nobody's terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "TPPLAN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return tmp_path


@pytest.fixture
def plans() -> tuple[str, str]:
    """Write plans of one model for different GPUs."""
    for name, gpus in (("a.json", "24GiB,12GiB"), ("b.json", "24GiB,24GiB")):
        assert command("plan", LLAMA_8B, "--gpus", gpus, "--context", 4096, "-o", name).code == 0
    return "a.json", "b.json"


@pytest.fixture
def gpus() -> Iterator[None]:
    """Pretend that this machine has two uneven GPUs, as they were recorded."""
    nvml = Replay("nvidia_uneven")
    with patch.object(probe, "probe", lambda: nvidia.read(nvml, os.environ, 1)):
        yield


def conforms(text: str, schema: str) -> Any:
    """Return the one document that a text is, after checking it against a schema of the project."""
    document = json.loads(text)
    rules = json.loads((ROOT / f"schemas/{schema}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator(rules).validate(document)
    assert text == codec.render(document)
    return document


def test_plan_saves_what_it_planned(plans: tuple[str, str]) -> None:
    """A saved plan is valid, canonical, for the GPUs and the context that were named, and within the budgets."""
    plan = codec.load(plans[0])
    assert codec.dumps(plan) == Path(plans[0]).read_text(encoding="utf-8")
    assert [device.budget_bytes for device in plan.devices] == [24 * 2**30, 12 * 2**30]
    assert plan.request.cache.tokens == 4096
    assert all(entry.free_bytes >= 0 for entry in plan.memory)


def test_plan_says_little_where_it_saves() -> None:
    """With -o FILE standard output stays empty, and standard error says what was written and how full it gets."""
    done = command("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096, "-o", "a.json")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("wrote: a.json\nLlama-3.1-8B on 2 devices: ")
    assert " % of all budgets used, at most " in done.err


def test_plan_without_a_file_shows_it_and_says_how_to_save_it() -> None:
    """Without -o the plan is on the screen and nowhere else."""
    done = command("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096)
    assert done.code == 0
    assert done.out.startswith("Llama-3.1-8B on 2 devices\n")
    assert "-o FILE" in done.err
    assert not list(Path().iterdir())


def test_plan_to_standard_output_is_the_file(plans: tuple[str, str]) -> None:
    """``-o -`` and ``--json`` print the bytes that ``-o FILE`` writes."""
    text = Path(plans[0]).read_text(encoding="utf-8")
    asked = ("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", 4096)
    assert command(*asked, "-o", "-").out == text
    assert command(*asked, "--json").out == text
    assert command(*asked, "--json", "-o", "-").out == text
    assert command(*asked, "--json", "-o", "c.json").out == Path("c.json").read_text(encoding="utf-8") == text


def test_context_is_per_sequence() -> None:
    """The cache has room for the context of every sequence, and without a context for the model's longest."""
    asked = ("plan", LLAMA_8B, "--gpus", "4x80GiB", "--batch", 3, "--json")
    assert json.loads(command(*asked, "--context", 1000).out)["request"]["cache"]["tokens"] == 3000
    assert json.loads(command(*asked).out)["request"]["cache"]["tokens"] == 3 * 131072


def test_options_reach_the_planner() -> None:
    """Each option of ``plan`` is in the plan's request."""
    options = ("--cache", "q6", "--layout", "gather", "--strategy", "latency", "--max-rows", 512, "--kv", "replicate")
    done = command("plan", LLAMA_8B, "--gpus", "2xRTX4090", "--context", 2048, "--batch", 2, *options, "--json")
    assert json.loads(done.out)["request"] == {
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
    with patch("tpplan.reader.read_model", lambda _: spec):
        asked = ("plan", "model", "--gpus", "24GiB,12GiB", "--context", 4096, "--json")
        done = command(*asked)
        assert json.loads(done.out)["request"]["layout"] == "gather"
        assert "layout gather, because rows cannot be cut: GPTQ with a permutation" in done.err
        assert command(*asked, "--layout", "gather").err == ""


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


def test_single_advice_is_not_told_as_one_of_many() -> None:
    """Where one change alone would help, the hint says so."""
    done = command("plan", LLAMA_8B, "--gpus", "65x1MiB", "--context", 1024)
    hint, *options = done.err.partition("hint: ")[2].splitlines()
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


def test_more_memory_than_a_gpu_has_is_no_option() -> None:
    """No list of devices names a GPU with more memory than it has, so that advice stays in words."""
    done = command("plan", LLAMA_70B, "--gpus", "RTX5090,RTX4090", "--context", 4096, "--json")
    suggestions = json.loads(done.out)["error"]["suggestions"]
    assert [s["kind"] for s in suggestions if "option" not in s] == ["memory"]
    assert "hint: " in done.err
    assert "more, " in done.err


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
    assert codec.load("b.json").model.fingerprint in verdict["message"]
    assert "does not fit" in verdict["message"]


def test_check_explains_a_request_that_lost_its_meaning(plans: tuple[str, str]) -> None:
    """A plan whose context the model no longer has is stale, not an error."""
    config = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    Path("config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    document = conforms(command("check", plans[0], "--model", "config.json", "--json").out, "check-report")
    assert document["plans"][0]["reasons"][-1] == "request"
    assert "2048" in document["plans"][0]["message"]


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
    assert command("show", "newer.json").out == plain(show(report_of(attrs.evolve(PLAN, format_version="1.7"))))
    assert command("validate", "newer.json").code == 1
    assert command("check", "newer.json", "--model", LLAMA_8B).code == 2


def test_colour_only_on_a_terminal(plans: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Colour is for terminals, adds nothing but colour, and goes with NO_COLOR, --plain or a dumb terminal."""
    off = command("show", plans[0]).out
    assert not COLOUR.search(off)
    on = command("show", plans[0], terminal=True).out
    assert COLOUR.search(on)
    monkeypatch.setattr("shutil.get_terminal_size", lambda _: os.terminal_size((100, 24)))
    on = command("show", plans[0], terminal=True).out
    assert [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", on).splitlines()] == off.splitlines()
    assert command("show", plans[0], "--plain", terminal=True).out == off
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert command("show", plans[0], terminal=True).out == off
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert COLOUR.search(command("show", plans[0]).out)


def test_terminal_width_is_used(plans: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide terminal gets longer bars."""
    monkeypatch.setenv("NO_COLOR", "1")
    bars = []
    for columns in (80, 130):
        monkeypatch.setattr("shutil.get_terminal_size", lambda _, n=columns: os.terminal_size((n, 24)))
        bars.append(command("show", plans[0], terminal=True).out.count("█"))
    assert bars[0] < bars[1]


def test_terminal_shows_progress_and_cleans_up(plans: tuple[str, str]) -> None:
    """On a terminal long work says what it is doing and takes it back; in a pipe it is silent."""
    assert command("check", *plans, "--model", LLAMA_8B).err == ""
    err = command("check", *plans, "--model", LLAMA_8B, terminal=True).err
    assert err.startswith(f"reading {LLAMA_8B} …")
    assert err.rpartition("\r")[2] == ""


def test_progress_stays_on_one_line() -> None:
    """A long or odd path is shortened and escaped, because what has been wrapped cannot be taken back."""
    with patch("tpplan.console.get_terminal_size", lambda: os.terminal_size((60, 24))):
        err = command("inspect", f"no\x1b[2J/{'long/' * 30}model", terminal=True).err
    said = err.partition("\r")[0]
    assert said.startswith("reading no\\u001b[2J/")
    assert said.endswith("model …")
    assert len(said) == 59


def test_ascii_stream(plans: tuple[str, str]) -> None:
    """A stream that cannot write block characters gets ASCII; a document stays UTF-8."""
    assert "####" in command("show", plans[0], encoding="ascii").out
    Path("ü.json").write_text(TEXT, encoding="utf-8")
    assert b"RTX 3060 (B\xc3\xbcro)".decode() in command("show", "ü.json", "--json").out


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shw"], "show"),
        (["show"], "PLAN"),
        (["show", "a.json", "b.json"], "'b.json'"),
        (["plan", "model"], "--gpus"),
        (["plan", "model", "--gpu", "24GiB"], "--gpus"),
        (["plan", "model", "--gpus", "24GiB", "--context", "many"], '"many"'),
        (["plan", "model", "--gpus", "24GiB", "--context"], "--context"),
        (["show", "a.json", "--bogus"], "--bogus"),
        (["validate"], "no plan was named"),
        (["check", "a.json"], "--model"),
        (["inspect", ""], "model is empty"),
        (["plan", "model", "--gpus", "24GiB", "-o", ""], "output is empty"),
        (["validate", "a.json", ""], "plans is empty"),
        (["diff", "-", "-"], "standard input"),
        (["validate", "-", "a.json", "-"], "standard input"),
        (["show", "a.json", "--svg", "-", "--html", "-"], "standard output"),
    ],
)
def test_usage(arguments: list[str], words: str) -> None:
    """Wrong arguments exit 2 with one paragraph that names what is wrong, and where to look."""
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")
    document = conforms(command(*arguments, "--json").out, "error-report")
    assert document["error"]["kind"] == "usage"


def test_bug_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw asks to be reported; only TPPLAN_DEBUG shows where it came from."""
    with patch("tpplan.reader.read_model", side_effect=ZeroDivisionError("by nought")):
        done = command("inspect", "model")
        assert done.code == 2
        assert "tpplan has a bug: ZeroDivisionError: by nought" in done.err
        assert "please report it" in done.err
        assert "Traceback" not in done.err
        monkeypatch.setenv("TPPLAN_DEBUG", "1")
        assert "Traceback" in command("inspect", "model").err


def test_interrupt_exits_130() -> None:
    """Ctrl-C ends a command quietly."""
    with patch("tpplan.reader.read_model", side_effect=KeyboardInterrupt):
        done = command("inspect", "model")
    assert (done.code, done.out, done.err) == (130, "", "")


def _shell(line: str) -> subprocess.CompletedProcess[str]:
    tpplan = f"{sys.executable} -m tpplan"
    return subprocess.run(
        ["bash", "-c", line.replace("TPPLAN", tpplan)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_closed_pipe_is_quiet() -> None:
    """A reader that leaves early is no error worth a word."""
    done = _shell(f"TPPLAN show {FIXTURE} --html - | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_an_error() -> None:
    """What standard output cannot take makes the exit code 2."""
    done = _shell(f"TPPLAN show {FIXTURE} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write")
    assert "Traceback" not in done.stderr


def test_closed_streams_are_no_bug(tmp_path: Path) -> None:
    """A service may close any standard stream; what is written to it goes nowhere, and files are written."""
    assert _shell(f"TPPLAN show {FIXTURE} --svg a.svg --json >&- 2>&-").returncode == 0
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").endswith("</svg>\n")
    assert _shell("TPPLAN show missing.json --json >&- 2>&-").returncode == 2
    done = _shell("TPPLAN show - <&-")
    assert done.returncode == 2
    assert "standard input" in done.stderr.splitlines()[0]


def test_module_is_the_command() -> None:
    """``python -m tpplan`` does what the script does, and pipes into itself."""
    gpus = "--gpus 24GiB,12GiB --context 4096"
    done = _shell(f"TPPLAN plan {LLAMA_8B} {gpus} -o - | TPPLAN validate - && TPPLAN --version")
    assert done.stdout == f"-: valid\ntpplan {__version__}\n"
    assert done.returncode == 0
