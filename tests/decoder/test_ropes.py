"""Which kind of RoPE a layer has, by its type, whatever else a config.json says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoder_cases import CONFIGS, SIZES
from tests.family_models import spec_of
from tpplan.config import Config
from tpplan.decoder.layers import angles
from tpplan.decoder.ropes import FIRST, NONE, SECOND, Ropes
from tpplan.errors import ModelError


def ropes_of(model_type: str, **changes: Any) -> Ropes:
    """Return the RoPE of a small model's layers."""
    data = SIZES | CONFIGS[model_type] | {"model_type": model_type} | changes
    return Ropes.read(Config(data, "config.json"), model_type, spec_of(data))


def test_layers_with_windows_have_the_second_kind() -> None:
    """In Gemma 3, also where the window is as long as the text; a model without such layers has one kind."""
    assert ropes_of("gemma3_text").kinds == (SECOND, FIRST, SECOND)
    assert ropes_of("gemma3_text", sliding_window=None).kinds == (SECOND, FIRST, SECOND)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert ropes_of("gemma3_text", layer_types=types).kinds == (FIRST, SECOND, FIRST)
    plain = ropes_of("gemma3_text", layer_types=["full_attention"] * 3)
    assert plain.kinds == (FIRST,) * 3
    assert plain.rope.beside is None
    assert ropes_of("mistral").kinds == (FIRST,) * 3


def test_layers_without_rope_turn_nothing() -> None:
    """Their sines are 0 and their cosines 1; those of the others are from the tables."""
    ropes = ropes_of("smollm3")
    assert ropes.kinds == (FIRST, NONE, FIRST)
    sin, cos = ropes.rope.tables(5)
    found = ropes.angles(sin, cos)
    half = ropes.rope.width // 2
    assert torch.equal(found[FIRST], angles(sin[:, :half], cos[:, half:]))
    assert torch.equal(found[NONE], angles(torch.zeros(5, half), torch.ones(5, half)))


@pytest.mark.parametrize("part", ["full_attention", "sliding_attention"])
def test_heads_that_transformers_turns_whole(part: str) -> None:
    """Are not turned in part; neither kind may ask for it."""
    parameters = CONFIGS["gemma3_text"]["rope_parameters"]
    changed = parameters | {part: parameters[part] | {"partial_rotary_factor": 0.5}}
    with pytest.raises(ModelError, match="RoPE turns 16 of 32 elements of a head"):
        ropes_of("gemma3_text", rope_parameters=changed)
