"""Random checkpoints that are measured: what is in them, and folders that have one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import tpplan
from benchmarks.common import random_checkpoint
from benchmarks.common.rows import ROOT
from benchmarks.decode.checkpoint import checkpoint
from benchmarks.decode.random_codes import quantised
from tests.bench_decode_cases import CONFIG, different, order
from tests.checkpoints import saved_values
from tests.weight_plans import fine_units
from tpplan.decoder import Decoder
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from benchmarks.decode.order import Order

__all__ = ["fine_units", "order"]  # fixtures


def test_a_checkpoint_has_what_its_config_says(order: Order) -> None:
    """Matrices are normal with deviation 0.02, norms are ones, and no two tokens have the same row."""
    values = saved_values(Path(order.directory))
    model = tpplan.read_model(order.directory)  # which holds the headers against the config
    assert random_checkpoint.size_of(CONFIG) == sum(value.nbytes for value in values.values())
    assert model.layer_count == 2
    for name, value in values.items():
        if value.ndim == 1:
            assert (value == 1).all(), name
        else:
            assert (value.std() / 0.02 - 1).abs() < 0.1, name
    assert different(values["lm_head.weight"]) == 203


def test_fewer_layers_have_fewer_types() -> None:
    """A config such as gpt-oss-20b's has a list with an entry for each layer, and other lists."""
    config = CONFIG | {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "eos_token_id": [1, 2]}
    found = random_checkpoint.shortened(config, 2)
    assert found == config | {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert random_checkpoint.shortened(config, 0) == config


@pytest.mark.parametrize(
    ("method", "name"), [("awq", "AWQ 4-bit"), ("gptq", "GPTQ 4-bit"), ("fp8", "FP8 block 128x128")]
)
def test_a_quantised_checkpoint_has_codes_of_such_matrices(tmp_path: Path, method: str, name: str) -> None:
    """What its codes stand for has the same deviation and is as much below 0 as above; all else is as it is else."""
    config = quantised(CONFIG | {"hidden_size": 256, "intermediate_size": 384}, method)
    random_checkpoint.write(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    model, values = tpplan.read_model(tmp_path), saved_values(tmp_path)
    assert model.weight_format.startswith(name)
    assert random_checkpoint.size_of(config) == model.weight_bytes == sum(value.nbytes for value in values.values())
    assert (values["model.norm.weight"] == 1).all()
    assert (values["lm_head.weight"].std() / 0.02 - 1).abs() < 0.1
    plan = tpplan.plan(model, [tpplan.Device(name="one", budget_bytes=2**40)], max_rows=1)
    with compile_plan(plan, backend="cpu") as context:
        held = Decoder(context, tmp_path, load_weights(plan, tmp_path, context)).weights[0]
    for stem, (rows, columns) in {"self_attn.o_proj": (256, 64), "mlp.down_proj": (256, 384)}.items():
        matrix = held.matrix(f"model.layers.1.{stem}")
        assert not isinstance(matrix, torch.Tensor)
        dense = matrix.dense(0, rows, torch.float32)
        assert dense.shape == (rows, columns)
        assert (dense.std() / 0.02 - 1).abs() < 0.1
        assert dense.mean().abs() < 0.001
        assert different(dense) == rows


def test_a_checkpoint_larger_than_the_block_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of an odd length is repeated without a gap, and rows differ all the same."""
    monkeypatch.setattr(random_checkpoint, "_BLOCK", 1001)
    random_checkpoint.write(tmp_path, CONFIG)
    head = saved_values(tmp_path)["lm_head.weight"]
    flat = head.flatten()
    assert torch.equal(flat[:1001], flat[1001:2002])
    assert different(head) == len(head)


@pytest.mark.parametrize(("asked", "is_there"), [(True, True), (True, False), (False, False)])
def test_another_models_folder_is_left_alone(asked: bool, is_there: bool, tmp_path: Path) -> None:
    """A config that is not the one asked for, or has no weights yet, is neither run nor written over."""
    random_checkpoint.write(tmp_path, CONFIG)
    if not is_there:
        (tmp_path / "model.safetensors").unlink()
    other = CONFIG | {"num_hidden_layers": 1}
    with (
        pytest.raises(SystemExit, match="of another model or size\nhint: leave out --config, --layers and --quantise"),
        checkpoint(other, str(tmp_path), asked=asked),
    ):
        pass
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert (tmp_path / "model.safetensors").exists() is is_there


def test_a_checkpoint_that_was_not_finished_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends halfway through leaves nothing that counts as a checkpoint, and is no obstacle to the next time."""

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(random_checkpoint, "_put", full)
        with pytest.raises(OSError, match="is full"), checkpoint(CONFIG, str(tmp_path), asked=True):
            pass
    assert not list(tmp_path.glob("*.safetensors"))
    with checkpoint(CONFIG, str(tmp_path), asked=True):
        assert different(saved_values(tmp_path)["lm_head.weight"]) == 203
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a checkpoint with as many layers as asked for, and over no other model."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    made = tmp_path / "made"
    arguments = ["random_checkpoint", str(tmp_path / "config.json"), str(made), "--layers", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    random_checkpoint.main()
    config = CONFIG | {"num_hidden_layers": 1}
    assert json.loads((made / "config.json").read_text(encoding="utf-8")) == config
    assert capsys.readouterr().out == f"{random_checkpoint.size_of(config):,} bytes of weights in {made}\n"
    monkeypatch.setattr("sys.argv", [*arguments[:2], str(tmp_path / "codes"), "--quantise", "awq"])
    random_checkpoint.main()
    assert tpplan.read_model(tmp_path / "codes").weight_format.startswith("AWQ")
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        random_checkpoint.main()
    assert "has a config.json already" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["random_checkpoint", "missing.json", str(tmp_path / "other")])
    with pytest.raises(SystemExit, match=r"error: .*missing\.json"):
        random_checkpoint.main()


def test_the_command_without_numpy(tmp_path: Path) -> None:
    """It takes no numpy and says nothing of it, and the config.json of a folder that is named; same weights."""
    random_checkpoint.write(tmp_path, CONFIG)
    code = "import sys; sys.modules['numpy'] = None; from benchmarks.common.random_checkpoint import main; main()"
    words = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "made")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_the_command_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a config.json, which would be in the way, nor a part of the weights; the error goes on."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    made = tmp_path / "made"

    def fail(*_: object) -> None:
        assert len(list(made.iterdir())) == 2
        raise error

    monkeypatch.setattr(random_checkpoint, "_put", fail)
    monkeypatch.setattr("sys.argv", ["random_checkpoint", str(tmp_path), str(made)])
    with pytest.raises(error):
        random_checkpoint.main()
    assert not list(made.iterdir())


def test_a_file_for_a_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is a file is one line, and the file stays."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["random_checkpoint", str(tmp_path), str(config)])
    with pytest.raises(SystemExit, match="error: "):
        random_checkpoint.main()
    assert config.exists()


@pytest.mark.parametrize(("config", "layers"), [([], "1"), ({"model_type": "bert"}, "0"), (CONFIG, "-1")])
def test_what_the_command_refuses_leaves_nothing(
    config: object, layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json that is none of a model's is told, and the directory can be named again."""
    given, made = tmp_path / "config.json", tmp_path / "made"
    given.write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["random_checkpoint", str(given), str(made), "--layers", layers])
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"error: .*config\.json"):
            random_checkpoint.main()
    assert not list(made.iterdir())
