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


def test_shares_of_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of a list fall into four groups, by weight; a name that is there twice weighs what both do."""
    lines = ["# downloads", "LlamaForCausalLM 50", "BloomForCausalLM 25  # ALiBi", "", "QWenLMHeadModel"]
    lines += ["NoSuchForCausalLM 20", "LlavaForConditionalGeneration 3", "LlamaForCausalLM"]
    (tmp_path / "list").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["config_coverage", "--architectures", str(tmp_path / "list")])
    assert config_coverage.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "decoder: 2 of 5, 54.0%: LlamaForCausalLM, LlavaForConditionalGeneration",
        "transformers: 1 of 5, 25.0%: BloomForCausalLM",
        "planned only: 1 of 5, 1.0%: QWenLMHeadModel",
        "refused: 1 of 5, 20.0%: NoSuchForCausalLM",
        "4 of 5 architectures are planned, 80.0%",
    ]
