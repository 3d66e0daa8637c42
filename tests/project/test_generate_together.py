"""The example that generates with several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import tpplan
from tests.decoder_cases import LENGTH, model_of
from tpplan.cli.main import main
from tpplan.exec.tools.bench.between import children

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def test_the_first_process_prints_what_one_alone_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes with a virtual device each say the tokens that ``tpplan generate`` says."""
    directory, path = model_of("mistral").directory, tmp_path / "plan.json"
    devices = tpplan.parse_devices("2x3GiB")
    tpplan.plan(tpplan.read_model(directory), devices, cache=tpplan.Cache("fp16", LENGTH), max_rows=8).save(path)
    lines: list[str] = []
    words = [sys.executable, "examples/generate_together.py", str(path), str(directory), "5,17,99", "cpu"]
    assert not children.run(words, 2, 120, lines.append, ROOT)
    arguments = ["--model", str(directory), "--token-ids", "5,17,99", "--max-new-tokens", "32", "--backend", "cpu"]
    assert main(["generate", str(path), *arguments]) == 0
    assert ",".join(lines) == capsys.readouterr().out.strip()
    assert len(lines) == 32
