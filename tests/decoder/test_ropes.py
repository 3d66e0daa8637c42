"""Which kind of RoPE a layer has, by its type, whatever else a config.json says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoder_cases import CONFIGS, FURTHER, SIZES
from tests.family_models import spec_of
from tpplan.decoder.math import angles
from tpplan.decoder.model.ropes import FIRST, NONE, SECOND, Growth, Ropes
from tpplan.errors import ModelError
from tpplan.models.config import Config


def ropes_of(model_type: str, **changes: Any) -> Ropes:
    """Return the RoPE of a small model's layers."""
    data = SIZES | (CONFIGS | FURTHER)[model_type] | {"model_type": model_type} | changes
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
    found = ropes.angles(sin, cos, torch.arange(5))
    half = ropes.rope.width // 2
    assert torch.equal(found.by_kind[FIRST], angles(sin[:, :half], cos[:, half:]))
    assert torch.equal(found.by_kind[NONE], angles(torch.zeros(5, half), torch.ones(5, half)))
    assert found.growth is None


def test_layers_of_exaone_without_windows_turn_nothing_where_others_have_windows() -> None:
    """All of its layers turn if the config has no window."""
    assert ropes_of("exaone4").kinds == (FIRST, NONE, FIRST)
    whole = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    assert ropes_of("exaone4", **whole).kinds == (FIRST,) * 3


def test_queries_grow_with_positions() -> None:
    """From the original context on, at each multiple of it; nothing is computed if no text is that long."""
    ropes = ropes_of("ministral3")
    assert ropes.growth == Growth(0.4, 32)
    positions = torch.tensor([0, 31, 32, 63, 64, 95])
    growth = ropes.angles(*ropes.rope.tables(96), positions).growth
    assert growth is not None
    torch.testing.assert_close(growth.flatten(), 1 + 0.4 * torch.tensor([1, 1, 2, 2, 3, 3]).log())
    assert ropes.angles(*ropes.rope.tables(32), positions[:2]).growth is None
    silent = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    config = {"model_type": "ministral3", "max_position_embeddings": 2**18, **silent}
    read = Ropes.read(Config(config, "config.json"), "ministral3", spec_of(config))
    assert read.growth == Growth(0.1, 16384)


def test_growth_is_not_guessed() -> None:
    """A config with parameters of its own says how queries grow."""
    parameters = FURTHER["ministral3"]["rope_parameters"] | {"llama_4_scaling_beta": None}
    with pytest.raises(ModelError, match="llama_4_scaling_beta is null"):
        ropes_of("ministral3", rope_parameters=parameters)


@pytest.mark.parametrize(("model_type", "key"), [("llama", True), ("glm4", False)])
def test_pairs_are_those_of_transformers(model_type: str, key: bool) -> None:
    """Neighbours, or elements of both halves, whatever a config says that transformers does not read."""
    assert ropes_of(model_type).are_neighbours is not key
    with pytest.raises(ModelError, match=f"rope_interleave is {str(key).lower()}"):
        ropes_of(model_type, rope_interleave=key)


@pytest.mark.parametrize("part", ["full_attention", "sliding_attention"])
def test_heads_that_transformers_turns_whole(part: str) -> None:
    """Are not turned in part; neither kind may ask for it."""
    parameters = CONFIGS["gemma3_text"]["rope_parameters"]
    changed = parameters | {part: parameters[part] | {"partial_rotary_factor": 0.5}}
    with pytest.raises(ModelError, match="RoPE turns 16 of 32 elements of a head"):
        ropes_of("gemma3_text", rope_parameters=changed)
