"""Zero points of auto-round, which packs them as they are or less 1, as its config has said in several ways.

The words are those that the packing of auto-round 0.4.5 and 0.16 and of AutoGPTQ 0.7.1, which 0.4.5 calls, made of a
matrix of 32 x 32 in one group: code (row + column) % 16, zero point 1 + row % 15, and scale 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpplan.decoder.weights.convert import matrices_of
from tpplan.errors import ModelError
from tpplan.models.config import Config
from tpplan.models.formats.tools import read_scheme
from tpplan.weights import TensorSlice

_ROWS = torch.arange(32)
_CODES = (_ROWS[:, None] + _ROWS) % 16
_AS_THEY_ARE = (0x87654321, 0x1FEDCBA9, 0x98765432, 0x21FEDCBA)
_LESS_ONE = (0x76543210, 0x0EDCBA98, 0x87654321, 0x10EDCBA9)

#: What configs say, with the first version that does, and the words of zero points that it goes with.
SAID = {
    "0.2": ({"backend": "gptq:exllamav2"}, _LESS_ONE),
    "0.3": ({"backend": "auto_round:exllamav2"}, _AS_THEY_ARE),
    "0.3, Triton": ({"backend": "auto_round:tritonv2"}, _AS_THEY_ARE),
    "0.3, AutoGPTQ": ({"backend": "auto_gptq:cuda"}, _LESS_ONE),
    "0.3.1": ({"backend": "auto_round:gptq:exllamav2"}, _LESS_ONE),
    "0.4": ({"backend": "auto_round:auto_gptq:exllamav2"}, _LESS_ONE),
    "0.5": ({"packing_format": "auto_round:auto_gptq:exllamav2"}, _LESS_ONE),
    "0.5, asymmetric": ({"packing_format": "auto_round:exllamav2"}, _AS_THEY_ARE),
    "0.16": ({"packing_format": "auto_round:auto_gptq", "backend": "auto"}, _LESS_ONE),
    "0.16, asymmetric": ({"packing_format": "auto_round", "backend": "auto_gptq:exllamav2"}, _AS_THEY_ARE),
    "transformers": ({"packing_format": "auto_round:gptq", "backend": "auto"}, _LESS_ONE),
    "neither": ({"backend": "auto"}, _LESS_ONE),
}


def _config(said: dict[str, Any]) -> Config:
    method = "auto-round" if "packing_format" in said else "intel/auto-round"
    return Config({"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32, **said}}, "config.json")


@pytest.mark.parametrize("version", SAID)
def test_zero_points_are_those_that_were_packed(version: str) -> None:
    """A matrix that auto-round packed is the one that it was given, whichever way the config says how."""
    said, zeros = SAID[version]
    signed = torch.tensor([word - (word >> 31 << 32) for word in zeros], dtype=torch.int32)
    words = sum(_CODES.T.reshape(4, 8, 32)[:, place].long() << 4 * place for place in range(8))
    assert isinstance(words, torch.Tensor)
    weights = {
        "m.qweight": (words - (words >> 31 << 32)).int().contiguous(),
        "m.qzeros": signed.view(1, 4),
        "m.scales": torch.ones(1, 32),
    }
    slices = {name: TensorSlice(name, 0, "I32", tuple(tensor.shape)) for name, tensor in weights.items()}
    found = matrices_of(weights, slices, read_scheme(_config(said)))["m.weight"].dense(0, 32, torch.float32)
    assert torch.equal(found, (_CODES - (1 + _ROWS % 15)[:, None]).float())


@pytest.mark.parametrize("said", [{"packing_format": "auto_round:gptqmodel"}, {"backend": "auto_round:qbits"}])
def test_other_packings_are_refused(said: dict[str, str]) -> None:
    """A packing of which it is not known what zero points are is named: 0.5 and 0.16 differ in what gptqmodel's are."""
    problem = read_scheme(_config(said)).problem
    assert isinstance(problem, ModelError)
    assert all(key in problem.message and value in problem.message for key, value in said.items())
