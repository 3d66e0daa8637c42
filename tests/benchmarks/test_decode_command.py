"""The command that measures a whole model: its document, its folder, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve
from safetensors.torch import save_file

import tpplan
from benchmarks import bench_decode
from benchmarks.decode import checkpoint
from benchmarks.decode.order import WARM, Order
from tests.bench_decode_cases import CONFIG, generated, order, run_command
from tests.checkpoints import saved_values
from tests.weight_plans import fine_units

if TYPE_CHECKING:
    import pytest

__all__ = ["fine_units", "order"]  # fixtures


def test_what_is_run(order: Order) -> None:
    """One GPU has no cuts to choose from, and NCCL has nothing to move there; it knows no layout but reduce."""
    order = evolve(order, backend="cuda")
    found = list(bench_decode.runs(order, (1, 2), ("even", "gather"), bench_decode.PEERS))
    assert [(who, one.gpus, one.cut, one.nccl) for who, one in found] == [
        ("tpplan", 1, "even", False),
        ("transformers", 1, "even", False),
        ("torch", 1, "even", False),
        ("tpplan", 2, "even", True),
        ("tpplan", 2, "gather", False),
        ("transformers", 2, "even", False),
        ("torch", 2, "even", False),
    ]
    assert [who for who, _ in bench_decode.runs(order, (2,), ("even",), ())] == ["tpplan"]


def _command(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> int:
    """Run the command for a tiny model, and return how it exits."""
    sizes = ["--batches", "1", "--tokens", "2", "--prefill", "40", "--layers", "1", "--peers", "", "--gpus", "1"]
    return run_command(bench_decode.main, monkeypatch, folder, CONFIG, *sizes, *more)


def test_the_command_prints_a_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rows are in it; the checkpoint, of fewer layers, stays in the folder that was named, and is used again."""
    folder = tmp_path / "model"
    assert _command(monkeypatch, tmp_path, "--json", "--folder", str(folder)) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["layers"] == tpplan.read_model(folder).layer_count == 1
    assert [row["what"] for row in document["rows"]][-2:] == ["decode, batch 1", "prefill of 40 tokens"]
    assert said.err.count("| 1 | even | tpplan |") == len(document["rows"])
    before = (folder / "model.safetensors").stat()
    with checkpoint.checkpoint({}, str(folder), asked=False) as directory:
        assert directory == folder
    assert (folder / "model.safetensors").stat() == before


def test_the_command_quantises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document says how weights are stored."""
    assert _command(monkeypatch, tmp_path, "--json", "--quantise", "gptq") == 0
    assert json.loads(capsys.readouterr().out)["weights"].startswith("GPTQ 4-bit")


def test_others_do_not_run_codes_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They want other packages for them, or have no kernels."""
    for options, peers in (
        ([], ("nccl", "transformers", "torch")),
        (["--quantise", "awq"], ("nccl",)),
        (["--quantise", "awq", "--peers", "transformers"], ("transformers",)),
    ):
        monkeypatch.setattr("sys.argv", ["bench_decode", *options])
        assert bench_decode._parse().peers == peers


def test_a_checkpoint_of_many_files_is_taken_as_it_is(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written beside it, its own layers are told, and its weights run."""
    values = saved_values(Path(order.directory))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for i, name in enumerate(values):
        save_file({name: values[name]}, folder / f"model-{i}.safetensors")
    before = sorted(folder.iterdir())
    assert _command(monkeypatch, tmp_path, "--json", "--config", "", "--layers", "0", "--folder", str(folder)) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["layers"], sorted(folder.iterdir())) == (2, before)
    (tokens,) = (row["tokens"] for row in document["rows"] if row["what"] == "decode, batch 1")
    assert tokens == generated(order, order.plan())[: len(tokens)]
    assert len(tokens) == 1 + WARM + 2


def test_the_command_fails_if_a_run_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that takes too long becomes a row, and nothing is left of the checkpoint."""
    monkeypatch.setattr(checkpoint, "room_for", lambda _: tmp_path)
    assert _command(monkeypatch, tmp_path, "--watchdog", "0.1") == 1
    assert "| 1 | even | tpplan | the whole run | failed |" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
