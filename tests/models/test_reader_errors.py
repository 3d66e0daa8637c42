"""Models that are refused: files that are not there, and configs and checkpoints that disagree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, tensor_bytes, write_checkpoint
from tests.examples import examples
from tests.models.reader_cases import plain, save, small
from tpplan.errors import ModelError, TpplanError
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("make", ["nothing", "empty directory"])
def test_missing_model_is_an_error_with_a_hint(tmp_path: Path, make: str) -> None:
    """A path without a config.json says so, and what to point to."""
    if make == "empty directory":
        (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match="does not exist") as caught:
        read_model(tmp_path / "m")
    assert "config.json" in caught.value.hint


def test_untied_config_without_output_matrix_is_refused(tmp_path: Path) -> None:
    """A config that says false while the checkpoint has no lm_head cannot be right."""
    path = write_checkpoint(tmp_path / "m", LLAMA, llama_outside(head=False) | llama_layers(plain))
    with pytest.raises(ModelError, match="tie_word_embeddings is false, but the checkpoint has no lm_head"):
        read_model(path)


def test_a_misspelt_key_that_files_contradict_is_told(tmp_path: Path) -> None:
    """In the hint: the default of the right one is what the files contradict; with the key as proposed they do not."""
    wrong = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    tensors = llama_outside(head=False) | llama_layers(plain)
    path = write_checkpoint(tmp_path / "m", wrong | {"num_key_value_head": 2, "tie_word_embeddings": True}, tensors)
    with pytest.raises(ModelError, match=r"self_attn.k_proj.weight .* \[128, 256\]") as caught:
        read_model(path)
    assert caught.value.hint.startswith("is num_key_value_head meant as num_key_value_heads? if not, ")


CONTRADICTIONS: dict[str, tuple[dict[str, Any], Tensors, set[str], tuple[str, ...]]] = {
    "query heads": (
        {"num_attention_heads": 4},
        {},
        set(),
        ("self_attn.q_proj.weight", "[384, 256]", "[256, 256]"),
    ),
    "key heads": ({"num_key_value_heads": 3}, {}, set(), ("self_attn.k_proj.weight", "[128, 256]", "[192, 256]")),
    "vocabulary": ({"vocab_size": 321}, {}, set(), ("embed_tokens.weight", "[320, 256]", "[321, 256]")),
    "norm": ({}, {"model.norm.weight": ("F16", (255,))}, set(), ("model.norm.weight", "[255]", "[256]")),
    "fewer layers": ({"num_hidden_layers": 2}, {}, set(), ("has 3 layers", "asks for 2", "num_hidden_layers")),
    "more layers": ({"num_hidden_layers": 7}, {}, set(), ("has 3 layers", "asks for 7", "num_hidden_layers")),
    "biases that are not there": (
        {"attention_bias": True},
        {},
        set(),
        ("lacks 12 tensors", "model.layers.0.self_attn.q_proj.bias"),
    ),
    "biases that nobody asked for": (
        {},
        {"model.layers.1.self_attn.q_proj.bias": ("F16", (384,))},
        set(),
        ("has 1 tensors", "does not ask for: 'model.layers.1.self_attn.q_proj.bias'"),
    ),
    "missing tensor": (
        {},
        {},
        {"model.layers.1.mlp.up_proj.weight"},
        ("lacks 1 tensors", "model.layers.1.mlp.up_proj.weight"),
    ),
    "unexpected tensor": (
        {},
        {"odd.patch.weight": ("F16", (3, 3))},
        set(),
        ("has 1 tensors", "odd.patch.weight"),
    ),
    "another model": ({}, {"transformer.h.0.x": ("F16", (1,))}, set(llama_layers(plain)), ("lacks 27", "h.0.x")),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradiction_names_both_sides(tmp_path: Path, case: str) -> None:
    """Where config and checkpoint disagree, the error names the tensor or the count, and both numbers."""
    changes, extra, without, words = CONTRADICTIONS[case]
    tensors = llama_outside() | llama_layers(plain) | extra
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    with pytest.raises(ModelError) as caught:
        read_model(write_checkpoint(tmp_path / "m", small(**changes), tensors))
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "model.layers." + "9" * 5000 + ".x", "a" * 5000, "", "é"])
def test_strange_names_are_refused_in_plain_letters(tmp_path: Path, name: str) -> None:
    """A name from a file never reaches the terminal as it is."""
    tensors = llama_outside() | llama_layers(plain) | {name: ("F16", (1,))}
    with pytest.raises(ModelError, match="has 1 tensors") as caught:
        read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert str(caught.value).replace("\n", "").isprintable()
    assert len(str(caught.value)) < 1000


def test_number_of_experts_is_compared(tmp_path: Path) -> None:
    """A config with more or fewer experts than the checkpoint is refused with both numbers."""
    torch.manual_seed(0)
    data = {
        "model_type": "mixtral",
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
    }
    save(tmp_path / "m", data, torch.float32, "5GB")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for count in (3, 6):
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"num_local_experts": count}))
        with pytest.raises(ModelError, match=rf"has 4 experts, but .* asks for {count} \(in each layer\)"):
            read_model(tmp_path / "m")


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_pair_of_config_and_header_raises_anything_but_tpplan_errors(tmp_path: Path, data: st.DataObject) -> None:
    """Tensors of any name, dtype and shape beside any small config are read to the byte, or refused."""
    tensors = llama_outside() | llama_layers(plain)
    names = st.sampled_from(sorted(tensors)).map(lambda name: name.removesuffix(".weight"))
    ends = (".weight", ".qweight", ".qzeros", ".scales", ".q_weight", ".trellis", ".weight.absmax", ".weight_scale", "")
    entry = st.tuples(
        st.sampled_from(("F16", "I32", "U8", "F8_E4M3")),
        st.lists(st.sampled_from((0, 1, 2, 32, 128, 256, 384)), max_size=3).map(tuple),
    )
    changed = data.draw(st.dictionaries(st.builds(str.__add__, names, st.sampled_from(ends)), entry, max_size=4))
    gone = data.draw(st.sets(st.sampled_from(sorted(tensors)), max_size=3))
    tensors = {name: tensor for name, tensor in (tensors | changed).items() if name not in gone}
    methods = st.sampled_from(("gptq", "awq", "fp8", "exl2", "bitsandbytes", "mxfp4", "compressed-tensors", "odd"))
    values = (
        st.none()
        | st.integers(-2, 9)
        | st.booleans()
        | st.text(max_size=3)
        | st.lists(st.integers(-1, 200), max_size=2)
    )
    keys = st.sampled_from(
        ("bits", "group_size", "desc_act", "weight_block_size", "ignore", "config_groups", "lm_head")
    )
    quantization = data.draw(
        st.none() | st.builds(lambda q, m: q | {"quant_method": m}, st.dictionaries(keys, values), methods)
    )
    config = small(**({"quantization_config": quantization} if quantization else {}))
    path = write_checkpoint(tmp_path / "m", config, tensors)
    for source in (path, path / "config.json"):
        try:
            spec = read_model(source)
        except TpplanError:
            continue
        if source is path:
            assert spec.weight_bytes == tensor_bytes(tensors)
