"""Rotary embeddings of a config that is wrong are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.exec.rope.cases import LLAMA, LLAMA3, LONGROPE, ORIGINAL, WRONG, YARN, Json
from tpplan.errors import ModelError
from tpplan.exec.rope.tables import Rope


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_config(changes: Json, words: tuple[str, ...]) -> None:
    """A config that is wrong is refused with the name of the key and what it is."""
    with pytest.raises(ModelError) as caught:
        Rope.from_config({**LLAMA, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_parameters_that_a_scaling_lacks_are_told_at_once() -> None:
    """With what they usually are, or what was probably meant as them."""
    told = {"rope_type": "llama3", ORIGINAL: 8192, "low_frq_factor": 1.0}
    with pytest.raises(ModelError, match="factor, low_freq_factor and high_freq_factor are missing") as caught:
        Rope.from_config({**LLAMA, "rope_scaling": told})
    hint = "is low_frq_factor meant as low_freq_factor? for the others, add factor, by which the longest context is "
    assert caught.value.hint.startswith(hint)
    assert "such as 4.0; high_freq_factor, which is 4.0 in Llama 3.1; or set rope_type to default" in caught.value.hint
    with pytest.raises(ModelError, match="short_factor and long_factor are missing"):
        Rope.from_config({**LLAMA, "rope_scaling": {"rope_type": "longrope", "factor": 4.0}})


KEYS = (
    *("model_type", "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type", "factor", ORIGINAL),
    *("max_position_embeddings", "partial_rotary_factor", "head_dim", "qk_rope_head_dim", "rotary_dim", "hidden_size"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "attention_factor", "truncate", "text_config", "rotary_emb_base", "rotary_pct", "alibi"),
    *("full_attention", "sliding_attention", "rope_local_base_freq", "rope_interleave", "num_attention_heads"),
)
words = st.sampled_from(
    ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "gemma3", "llama", "gpt_oss", ""]
)
small = st.integers(-1, 70) | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1e-300, 1e300, 10**400])
values = st.none() | st.booleans() | words | small | st.lists(small, max_size=3)
objects = st.dictionaries(st.sampled_from(KEYS), values | st.dictionaries(st.sampled_from(KEYS), values, max_size=6))


@settings(max_examples=examples(300))
@given(
    junk=objects,
    scaling=st.sampled_from([YARN, LLAMA3, LONGROPE, {"type": "dynamic", "factor": 2}]),
    more=st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
    layer_type=st.sampled_from([None, "full_attention"]),
)
def test_anything(junk: Json, scaling: Json, more: Json, layer_type: str | None) -> None:
    """Whatever a config.json holds, it is refused with a ModelError, or makes tables without another error."""
    for config in (junk, {**LLAMA, **junk}, {**LLAMA, "rope_scaling": {**scaling, **more}}):
        try:
            rope = Rope.from_config(config, layer_type)
        except ModelError:
            continue
        assert rope.tables(300)[0].shape == (300, rope.width)
