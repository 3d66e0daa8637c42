"""The sines and cosines of rotary embeddings are those of transformers, to the bit."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.exec.rope.cases import EDGES, GEMMA3_FORMS, LLAMA, LONGROPE, MIXTURES, MODELS, ORIGINAL, Json
from tests.exec.rope.reference import reference, same
from tpplan.exec.rope.scaling import Default
from tpplan.exec.rope.tables import Rope

if TYPE_CHECKING:
    from torch import Tensor


#: Families whose rotation takes the first half of a row, each entry for a pair.
HALVES = {
    *("deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe_lite", "glm_moe_dsa"),
    "helium",
}


def styled(config: Json, table: Tensor) -> Tensor:
    """Return transformers' table with an entry for every element of a pair, as its rotation then expands it."""
    if config["model_type"] == "gpt_oss":  # its rotation takes half a row, once for each half
        return torch.cat((table, table), dim=1)
    if config["model_type"] in HALVES:
        return table[:, : table.shape[1] // 2].repeat_interleave(2, dim=1)
    return table


def assert_tables(config: Json, positions: int, layer_type: str | None = None) -> None:
    """Assert that our tables are those of transformers."""
    sin, cos = Rope.from_config(deepcopy(config), layer_type).tables(positions)
    their_sin, their_cos = reference(config, positions, layer_type)
    assert same(sin, styled(config, their_sin))
    assert same(cos, styled(config, their_cos))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_models(config: Json) -> None:
    """Published models, and those whose config leaves the base or the part to the class, get transformers' tables."""
    for positions in (1, 4099):
        assert_tables(config, positions)


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
def test_mixtures(config: Json) -> None:
    """So do mixtures of experts."""
    assert_tables(config, 99)


@pytest.mark.parametrize("name", ["Llama-3.1", "DeepSeek-V3", "falcon, dynamic", "Phi-3-mini-128k"])
def test_long_context(name: str) -> None:
    """The last of 131,073 positions is as exact as the first, although the tables are computed in parts."""
    assert_tables(MODELS[name], 131073)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("config", GEMMA3_FORMS.values(), ids=GEMMA3_FORMS)
def test_layer_types(config: Json, layer_type: str) -> None:
    """Layers of different type have tables of their own, in the old form of Gemma 3's config and in the new one."""
    assert_tables(config, 3001, layer_type)


def test_nested_text_config() -> None:
    """A model whose language part is nested has the tables of that part."""
    text = GEMMA3_FORMS["old"]
    nested = {
        "model_type": "gemma3",
        "rope_theta": 5,
        "text_config": {k: v for k, v in text.items() if k != "model_type"},
    }
    assert Rope.from_config(nested, "full_attention") == Rope.from_config(text, "full_attention")


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_sections_of_images_change_nothing_for_texts(kind: str) -> None:
    """The three positions that a place in an image has are equal in a text; the old form calls that mrope."""
    config = {"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "rope_theta": 1e6}
    text = Rope.from_config({**config, "rope_scaling": {"type": kind, "mrope_section": [16, 24, 24]}})
    assert text == Rope(1e6, 128, Default())
    assert text == Rope.from_config({"model_type": "qwen2_vl", "text_config": {"num_attention_heads": 64}})


def test_other_layer_types_are_ignored() -> None:
    """Where the layers do not differ, naming a type changes nothing."""
    assert Rope.from_config(LLAMA, "sliding_attention") == Rope.from_config(LLAMA)


numbers = st.floats(0.5, 64, width=32) | st.integers(1, 64)
contexts = st.integers(2, 3000)
maybe_one = st.none() | st.just(0) | st.floats(0.01, 2)


def parameters(kind: str, pairs: int) -> dict[str, st.SearchStrategy[Any]]:
    """Return what a kind of scaling may have."""
    factors = st.lists(st.floats(0.5, 64), min_size=pairs, max_size=pairs)
    kinds: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "default": {},
        "linear": {"factor": numbers},
        "dynamic": {"factor": numbers},
        "llama3": {
            "factor": numbers,
            "low_freq_factor": st.floats(0.1, 4),
            "high_freq_factor": st.floats(4.1, 64),
            ORIGINAL: contexts,
        },
        "yarn": {
            "factor": st.none() | numbers,
            "attention_factor": maybe_one,
            "beta_fast": st.none() | st.just(0) | st.floats(1, 64),
            "beta_slow": st.none() | st.just(0) | st.floats(0.1, 8),
            "mscale": maybe_one,
            "mscale_all_dim": maybe_one,
            "truncate": st.booleans(),
            ORIGINAL: contexts,
        },
        "longrope": {
            "short_factor": factors,
            "long_factor": factors,
            "factor": st.none() | numbers,
            "attention_factor": maybe_one,
            ORIGINAL: contexts,
        },
    }
    return kinds[kind]


@st.composite
def configs(draw: st.DrawFn, kind: str) -> tuple[Json, Json]:
    """Return the same model with any scaling of a kind in the old form of a config and in the new one."""
    head, part = 2 * draw(st.integers(2, 80)), draw(st.sampled_from([1.0, 0.25, 0.334, 0.5, 0.75]))
    dim = int(head * part)
    if (kind == "yarn" and dim % 2) or (kind == "dynamic" and dim <= 2):  # neither can be had
        part, dim = 1.0, head
    scaling = {"rope_type": kind, **draw(st.fixed_dictionaries(parameters(kind, -(-dim // 2))))}
    own = {"rope_theta": draw(st.floats(10, 1e8) | st.integers(100, 10**7)), "partial_rotary_factor": part}
    common = {
        "model_type": "phi",  # one that turns a part of a head with every kind
        "hidden_size": 4 * head,
        "num_attention_heads": 4,
        "max_position_embeddings": draw(st.integers(64, 3000)),
    }
    if ORIGINAL in scaling and draw(st.booleans()):
        common[ORIGINAL] = draw(contexts)
    return {**common, **own, "rope_scaling": scaling}, {**common, "rope_parameters": {**scaling, **own}}


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
@settings(max_examples=examples(50))
@given(data=st.data(), positions=st.integers(1, 4000))
def test_any_parameters(kind: str, data: st.DataObject, positions: int) -> None:
    """Any parameters, parts and lengths give transformers' tables, in the old form of a config and in the new one."""
    old, new = data.draw(configs(kind))
    assert Rope.from_config(old) == Rope.from_config(new)
    assert_tables(new, positions)


@pytest.mark.parametrize("scaling", EDGES.values(), ids=EDGES)
def test_edges(scaling: Json) -> None:
    """Scalings at their edges give transformers' tables, for a sequence as long as the context or one more."""
    config = {**LLAMA, "rope_scaling": scaling}
    for positions in (64, 65, 256, 257):
        assert_tables(config, positions)


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 3.0}, {**LONGROPE, ORIGINAL: 256}])
def test_length_matters(scaling: Json) -> None:
    """With dynamic scaling and LongRoPE, a sequence beyond the context turns differently from its start on."""
    rope = Rope.from_config({**LLAMA, "rope_scaling": scaling})
    within, beyond = rope.tables(256)[0], rope.tables(257)[0]
    assert same(within[:9], rope.tables(9)[0])
    assert not same(within[:9], beyond[:9])
