"""Tensors that files of other tools have in unusual forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quant_shape_to_byte_shape

import tpplan
from tests.models.gguf import test_gguf as files
from tpplan.decoder.weights.gguf import _whole
from tpplan.models.gguf.reader import _label

if TYPE_CHECKING:
    from pathlib import Path


def test_a_dimension_of_one_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp writes the gate of a shared expert; any other shape of as many elements is refused."""
    files.write(tmp_path / "whole.gguf", "qwen2moe", kinds=(Q.F16,))
    whole, name = tpplan.read_model(tmp_path / "whole.gguf"), "blk.0.ffn_gate_inp_shexp.weight"
    shapes = files.shapes_of

    def other(shape: tuple[int, ...]) -> Any:
        return lambda model, arch: shapes(model, arch) | {name: shape}

    monkeypatch.setattr(files, "shapes_of", other((512,)))
    files.write(tmp_path / "squeezed.gguf", "qwen2moe", kinds=(Q.F16,))
    assert tpplan.read_model(tmp_path / "squeezed.gguf").parameter_count == whole.parameter_count
    monkeypatch.setattr(files, "shapes_of", other((2, 256)))
    files.write(tmp_path / "other.gguf", "qwen2moe", kinds=(Q.F16,))
    with pytest.raises(tpplan.ModelError, match=r"has the shape \[2, 256\], by the metadata it is \[1, 512\]"):
        tpplan.read_model(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("number", "what"), [("2", "prediction layers"), ("1", "other tensors"), ("9" * 5000, "other tensors")]
)
def test_numbers_of_layers(number: str, what: str) -> None:
    """A number that Python does not even convert is none of a layer."""
    assert _label(f"blk.{number}.attn_q.weight", 2) == what


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_rows_of_a_device_without_any(kind: str) -> None:
    """They are as wide as the matrix, by the sizes of blocks that the gguf package knows."""
    (width,) = quant_shape_to_byte_shape((512,), Q[kind])
    found = _whole(torch.empty(0, width, dtype=torch.uint8), "x", kind, torch.float16)
    assert (found.shape, found.dtype) == ((0, 512), torch.float16)
