"""The script that counts which models of a folder are planned."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from scripts import config_coverage
from tests.checkpoints import LLAMA, llama_layers, llama_outside, tensor_bytes, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans that the files confirm, a refusal with its reason, and a count that another one contradicts."""
    tensors = llama_outside() | llama_layers(lambda rows, columns, _: {".weight": ("F16", (columns, rows))})
    write_checkpoint(tmp_path / "a/files", LLAMA, tensors)
    for name, size in (("b-index", tensor_bytes(tensors)), ("c-other-index", tensor_bytes(tensors) + 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}}))
    (tmp_path / "d-unknown").mkdir()
    (tmp_path / "d-unknown/config.json").write_text(json.dumps(LLAMA | {"model_type": "mamba"}))
    monkeypatch.setattr(sys, "argv", ["config_coverage", str(tmp_path), "--transformers"])
    assert config_coverage.main() == 1
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split(":")[0].split() for row in rows] == [
        ["planned", "a/files"],
        ["planned", "b-index"],
        ["wrong", "c-other-index"],
        ["refused", "d-unknown"],
    ]
    assert f"{tensor_bytes(tensors)} bytes, model.safetensors.index.json has {tensor_bytes(tensors) + 2}" in rows[2]
    assert "'mamba'" in rows[3]
    assert last == "4 models: 2 planned (2 confirmed by another count), 1 refused, 1 wrong"
