"""The family tables describe the same tensors and caches as transformers' models."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.family_configs import FAMILY_KEYS, INNER, SECTIONS, configs
from tests.family_models import (
    INCOMPLETE_DEFAULTS,
    NOT_IN_TRANSFORMERS,
    SAME,
    UNLIKE_HUB,
    assert_consistent,
    assert_same_tensors,
    build,
    cached_windows,
    hub_config,
    meta_model,
    parameters_of,
    saved_tensors,
    spec_of,
)
from tpplan.models import families
from tpplan.models.families.parts import PARTS
from tpplan.models.reader import read_checkpoint

if TYPE_CHECKING:
    from tpplan.models.families.table import Family


#: What transformers knows by name and can build.
KNOWN = sorted({*families.supported()} - SAME.keys() - NOT_IN_TRANSFORMERS)


@pytest.mark.parametrize("model_type", KNOWN)
def test_default_config_gives_the_tensors_of_transformers(model_type: str) -> None:
    """The default config of every family gives exactly the names, shapes and count of transformers' model."""
    config = hub_config({"model_type": model_type, **INCOMPLETE_DEFAULTS.get(model_type, {})})
    spec = spec_of(config.to_dict())
    assert_same_tensors(spec, saved_tensors(meta_model(config)))
    assert_consistent(spec)


@pytest.mark.parametrize("model_type", KNOWN)
@settings(max_examples=examples(8))
@given(data=st.data())
def test_small_configs_give_the_tensors_and_windows_of_transformers(model_type: str, data: st.DataObject) -> None:
    """Any documented form of a family gives transformers' tensors and sliding windows, keys left out or not."""
    raw = data.draw(configs(model_type))
    config = hub_config(raw)
    spec = spec_of(raw)
    assert_same_tensors(spec, saved_tensors(meta_model(config)))
    assert_consistent(spec)
    windows = {layer: block.attention.window for block in spec.blocks for layer in block.layers if block.attention}
    assert windows == cached_windows(config)
    assert evolve(spec_of(config.to_dict()), not_planned=spec.not_planned) == spec


@pytest.mark.parametrize("model_type", sorted(UNLIKE_HUB))
@settings(max_examples=examples(2), phases=[Phase.generate])
@given(data=st.data())
def test_what_transformers_saves_is_read(model_type: str, data: st.DataObject) -> None:
    """Every byte that ``save_pretrained`` writes in a form of its own is counted, or told as not planned."""
    model = build(hub_config(data.draw(configs(model_type))))
    with TemporaryDirectory() as name:
        model.save_pretrained(name)
        spec, headers = read_checkpoint(Path(name))
    assert headers is not None
    beside = {part.what: part.bytes for part in spec.not_planned}
    assert spec.weight_bytes + sum(beside.values()) == sum(tensor.nbytes for tensor in headers.tensors.values())
    assert "vision tower" in beside


def test_every_family_is_drawn() -> None:
    """No family escapes the comparison."""
    assert {*FAMILY_KEYS, *SECTIONS} == {*families.LANGUAGE_MODELS, *families.supported()}
    assert {inner for each in INNER.values() for inner in each} >= set(PARTS)


@pytest.mark.parametrize(("model_type", "same"), SAME.items())
def test_families_of_two_names_are_one(model_type: str, same: str) -> None:
    """Kimi K2 is DeepSeek-V3 in all but the name in its config, alone and around images, and MiMo is Qwen2."""
    family, other = families.FAMILIES[model_type], families.FAMILIES[same]
    assert evolve(family, architectures=other.architectures, ignored=other.ignored) == other
    assert {*family.ignored} >= {*other.ignored}
    config = hub_config({"model_type": same}).to_dict()
    spec = spec_of(config | {"model_type": model_type})
    assert spec == evolve(spec_of(config), model_type=model_type, architecture=family.architectures[0])
    inside = {"model_type": "kimi_k25", "text_config": config | {"model_type": model_type}}
    assert {p.name.removeprefix("language_model.") for p in parameters_of(spec_of(inside))} == {
        p.name for p in parameters_of(spec)
    }


#: Flags that are no keys of a config: what families make of theirs.
DERIVED = {"one_kv_head", "two_norms", "q_lora_rank", "shared_experts", "biased", "xielu", "latent_experts"}
DERIVED |= {"attn_res_block_size", "per_layer_inputs", "same_vocab", "gate_per_head", "more", "qwen3", "padded_decays"}


@pytest.mark.parametrize(("model_type", "family"), families.LANGUAGE_MODELS.items())
def test_rows_test_only_flags_that_exist(model_type: str, family: Family) -> None:
    """A flag that is misspelt in a table would silently drop a tensor."""
    derived = DERIVED if family.adapt else set()
    rows = (*family.outside, *family.layer, *family.linear_layer, *family.dense, *family.sparse)
    tested = {flag.removeprefix("!") for row in rows for flag in row.when.split()}
    assert tested <= {*family.flags, "tie_word_embeddings", "stacked_experts", *derived}, model_type
    assert set(family.flags) <= tested | {"new_decoder_architecture", "multi_query"}


def test_tolerated_names_are_no_tensors_of_the_model() -> None:
    """Buffers and vision towers that checkpoints are known for are ignored, and no tensor of a model is."""
    assert any(fnmatch("h.0.attn.bias", pattern) for pattern in families.tolerated("gpt2").ignored)
    assert any(fnmatch("vision_tower.x.weight", pattern) for pattern in families.tolerated("gemma3").ignored)
    assert "model.mtp_layers.*" in families.tolerated("mimo").ignored
    for model_type in (*KNOWN, *SAME):
        record = families.tolerated(model_type)
        config = hub_config({"model_type": model_type, **INCOMPLETE_DEFAULTS.get(model_type, {})})
        parameters = parameters_of(spec_of(config.to_dict()))
        assert not [p.name for p in parameters for pattern in record.ignored if fnmatch(p.name, pattern)]
        assert all(p.name.startswith((record.prefix, "lm_head.", "embed_out.", "head.", "output.")) for p in parameters)


def test_the_language_model_in_a_wrapper_says_what_is_tolerated() -> None:
    """Around another language model than the usual one a wrapper tolerates what that does, and its own images."""
    record = families.tolerated("llava", "gpt_neox")
    assert any(fnmatch("language_model.gpt_neox.layers.0.attention.rotary_emb.inv_freq", p) for p in record.ignored)
    assert any(fnmatch("vision_tower.x.weight", pattern) for pattern in record.ignored)
    assert families.tolerated("llava", "deepseek_v3").extra_layers
    assert families.tolerated("llava", "llama") == families.tolerated("llava")


def test_extra_layers_are_tolerated_where_checkpoints_have_them() -> None:
    """DeepSeek-V3 comes with a layer for predicting a second token, which its config does not count."""
    assert {name for name in families.supported() if families.tolerated(name).extra_layers} == {
        *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "hy_v4"),
        *(
            "axk1",
            "axk2",
            "bailing_hybrid",
            "glm5_next",
            "kimi_k3",
            "kimi_linear",
            "bailing_moe",
            "kimi_k2",
            "kimi_k25",
            "kimi_vl",
            "minimax_m2",
            "step3p5",
        ),
        "step3p7",
    }


def test_nested_text_config_may_leave_out_nearly_everything() -> None:
    """gemma-3-4b's config.json states six keys of its text model; the rest are the defaults of its class."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"model_type": "gemma3", "text_config": text, "torch_dtype": "float16"}
    spec = spec_of(raw)
    tensors = saved_tensors(meta_model(hub_config({key: raw[key] for key in ("model_type", "text_config")})))
    assert_same_tensors(spec, tensors)
    sliding, full = spec.blocks
    assert full.layers == (5, 11, 17, 23, 29)
    assert sliding.attention
    assert (sliding.attention.window, spec.max_context, spec.dtype) == (1024, 131_072, "float16")


@pytest.mark.parametrize(
    "inner", ["cohere2", "gemma", "gemma2", "gemma3_text", "llama", "ministral3", "mistral", "qwen2", "qwen3"]
)
def test_language_models_of_wrappers_may_leave_out_all_keys(inner: str) -> None:
    """What is as in the configuration class of the language model is in no nested config that transformers saves."""
    tied = inner.startswith(("gemma", "cohere"))
    raw = {"model_type": "llava", "text_config": {"model_type": inner}, "tie_word_embeddings": tied}
    config = hub_config(raw)
    assert_same_tensors(spec_of(raw), saved_tensors(meta_model(config)))
    assert spec_of(raw) == spec_of(config.to_dict())
    assert spec_of(raw).max_context == config.text_config.max_position_embeddings


def test_a_wrapper_that_does_not_say_is_tied_as_its_language_model() -> None:
    """Mistral-Small-3.1's config.json has no such key, and its checkpoint an output matrix of its own."""
    text = {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40}
    spec = spec_of({"model_type": "mistral3", "text_config": text | {"head_dim": 128, "vocab_size": 131072}})
    assert not spec.tied_embeddings
    assert "language_model.lm_head.weight" in {parameter.name for parameter in spec.parameters}
    assert spec.parameter_count == 23_572_403_200  # what the model card calls 24B, without what reads images
