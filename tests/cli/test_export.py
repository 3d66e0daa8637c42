"""``tpplan export``: screens, files, documents, exit codes, and hints that work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli_cases import LLAMA_8B, ROOT, conforms, folder, refused  # noqa: F401 (for every test)
from tests.command import command
from tpplan.export.export import ENGINES

EVEN = ROOT / "examples/plans/Llama-3.1-8B/2xRTX3060.json"
UNEVEN = ROOT / "examples/plans/Llama-3.1-8B/RTX4090+RTX3060.json"


def test_a_command_comes_first() -> None:
    """The screen begins with what a shell runs, and then says what differs."""
    done = command("export", EVEN, "--for", "vllm")
    assert (done.code, done.err) == (0, "")
    shell, _, rest = done.out.partition("\n\n")
    assert shlex.split(shell.replace("\\\n", " "))[:5] == [
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=0,1",
        "vllm",
        "serve",
        "MODEL",
    ]
    assert rest.startswith("differs from the plan:\n- ")
    assert rest.endswith("\nread: vLLM 0.33.0. MODEL stands for the path of Llama-3.1-8B\n")


def test_a_file_comes_first() -> None:
    """The screen begins with the file, and that with the command that reads it, as a comment."""
    done = command("export", UNEVEN, "--for", "accelerate")
    assert (done.code, done.err) == (0, "")
    text, _, rest = done.out.partition("\ndiffers from the plan:\n")
    first, *_ = text.splitlines()
    assert first == "# CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1 python load.py"
    compile(text, "load.py", "exec")
    assert "- the devices get 21 and 11 of 32 layers" in rest


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("plan", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_documents(plan: Path, engine: str) -> None:
    """Each is described by the schema and has what the screen has; exit code 1 says that it cannot be."""
    done = command("export", plan, "--for", engine, "--json")
    document = conforms(done.out, "export-report")
    assert document["engine"] == engine
    assert done.code == (0 if document["possible"] else 1)
    assert document["possible"] == (plan == EVEN or engine not in {"vllm", "sglang", "transformers"})
    screen = " ".join(command("export", plan, "--for", engine).out.split())
    for sentence in document.get("differences", ()) or document["reasons"]:
        assert sentence in screen


@pytest.mark.parametrize("engine", ["llama.cpp", "exllamav3", "accelerate"])
def test_output(engine: str) -> None:
    """A file has what is to be copied, and the screen what differs; standard output takes the first alone."""
    whole = command("export", UNEVEN, "--for", engine).out
    done = command("export", UNEVEN, "--for", engine, "-o", "there/out")
    assert (done.code, done.err) == (0, "wrote: there/out\n")
    text = Path("there/out").read_text(encoding="utf-8")
    assert whole == f"{text}\n{done.out}"
    stream = command("export", UNEVEN, "--for", engine, "-o", "-")
    assert (stream.code, stream.out) == (0, text)
    assert stream.err.count("differs: ") == done.out.count("\n- ")
    both = command("export", UNEVEN, "--for", engine, "-o", "again", "--json")
    assert conforms(both.out, "export-report")["possible"]
    assert Path("again").read_text(encoding="utf-8") == text


def test_a_refusal() -> None:
    """The answer is no, with names and numbers; nothing is written, and the hints are commands that work."""
    for options in ([], ["-o", "out"], ["-o", "-"]):
        done = command("export", UNEVEN, "--for", "vllm", *options)
        assert done.code == 1
        assert done.out.startswith("no, vllm cannot run this plan for Llama-3.1-8B, because\n- its devices are not")
        assert not Path("out").exists()
    first, planned, others = done.err.splitlines()
    assert first == "hint: it can run a plan for RTX4090, which this command makes"
    assert (
        others == "hint: this plan can be run by --for llama.cpp, llama.cpp-layer, exllamav3, exllamav2 or accelerate"
    )
    words = shlex.split(planned.replace("MODEL", str(LLAMA_8B)))
    assert command(*words[1:]).code == 0
    assert command("export", "even.json", "--for", "vllm").code == 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_suggested_plan_has_room_for_what_drafts(engine: str) -> None:
    """The hint asks for that room again, not for the bytes that it took on other devices, and its command works."""
    deepseek = ROOT / "examples/models/DeepSeek-V3"
    gpus = ("--gpus", "4xH200,8xH100", "--context", 32768)
    assert command("plan", deepseek, *gpus, "--mtp", "-o", "dm.json").code == 0
    hint, planned, _ = command("export", "dm.json", "--for", engine).err.splitlines()
    assert planned.strip() == "tpplan plan MODEL --mtp --gpus 8xH200 --context 32768 -o even.json"
    assert hint == "hint: it can run a plan for 8xH200, which this command makes"
    assert command(*planned.replace("MODEL", str(deepseek)).split()[1:]).code == 0
    assert command("export", "even.json", "--for", engine).code == 0
    Path("even.json").unlink()
    small = ("--draft", LLAMA_8B, "--reserve", "1GiB@2")
    assert (
        command("plan", LLAMA_8B, "--gpus", "2xRTX4090,A100-80GB", *small, "--context", 4096, "-o", "d.json").code == 0
    )
    hint, planned, _ = command("export", "d.json", "--for", engine).err.splitlines()
    assert planned.split("--gpus")[0].strip() == "tpplan plan MODEL --reserve 1GiB@2 --draft DRAFT"
    assert "DRAFT stands for the path of the draft model" in hint
    words = shlex.split(planned.replace("MODEL", str(LLAMA_8B)).replace("DRAFT", str(LLAMA_8B)))
    assert command(*words[1:]).code == 0
    assert command("export", "even.json", "--for", engine).code == 0


def test_standard_input() -> None:
    """``-`` is a plan from standard input."""
    done = command("export", "-", "--for", "sglang", stdin=EVEN.read_bytes())
    assert done.out == command("export", EVEN, "--for", "sglang").out


def test_what_cannot_be_asked() -> None:
    """An unknown engine gets the list; the plan is not written over; one document at a time."""
    assert "engines are llama.cpp, llama.cpp-layer, exllamav3" in refused("export", EVEN, "--for", "ollama")
    assert "tpplan export needs --for" in refused("export", EVEN)
    assert "--for is empty" in refused("export", EVEN, "--for", "")
    Path("plan.json").write_bytes(EVEN.read_bytes())
    assert "is read or written" in refused("export", "plan.json", "--for", "vllm", "-o", "plan.json")
    done = command("export", EVEN, "--for", "vllm", "--json", "-o", "-")
    assert done.code == 2
    assert "standard output would be several documents" in done.err
