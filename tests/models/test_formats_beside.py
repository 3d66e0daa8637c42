"""What files hold beside the matrices of a model: scales of its attention, and parts that are not planned."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, tensor_bytes, write_checkpoint
from tests.format_cases import CASES, stored
from tpplan.core.axes import Axis
from tpplan.core.model import NotPlanned
from tpplan.errors import ModelError
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from pathlib import Path

FORMS = ("gptq, no config", "fp8 tensor", "fp8 channel", "awq, no config", "int8")


def checkpoint(case: str = "") -> Tensors:
    """Return a small Llama's tensors, in 16 bits or as in a case of the formats."""
    if case:
        return llama_outside() | llama_layers(CASES[case][1])
    return llama_outside() | llama_layers(lambda i, o, _layer: {".weight": ("F16", (o, i))})


@pytest.mark.parametrize("case", ["", *FORMS])
@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.prob_output_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale", "self_attn.attn.k_zero_point"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.kv_scale",),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
def test_calibrated_scales_are_counted(
    tmp_path: Path, case: str, names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    """Scales of a cache, of queries and of probabilities are parameters that live where the KV heads do."""
    tensors = checkpoint(case)
    tensors |= {f"model.layers.{layer}.{name}": ("F32", shape) for name in names for layer in range(3)}
    quantised = CASES[case][0] if case else None
    config = LLAMA | ({"quantization_config": quantised} if quantised else {})
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors))
    assert stored(spec) == tensors
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert [block.layers for block in spec.blocks] == [(0, 1, 2)]
    assert not spec.not_planned
    scales = [p for p in spec.blocks[0].parameters if p.name.endswith(names)]
    assert len(scales) == len(names)
    assert {p.home for p in scales} <= {Axis.KV_HEADS, Axis.RESIDUAL}
    if shape == (2, 1, 1) and "fp8" not in case:
        assert {p.dims[0][0].axis for p in scales} == {Axis.KV_HEADS}


def test_scales_of_layers_that_are_called_mixers_are_counted(tmp_path: Path) -> None:
    """NVIDIA's FP8 of Nemotron 3 has scales of keys and values beside projections in 16 bits, named as Mamba's are."""
    config: dict[str, Any] = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": 64}
    config |= {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 16}
    config |= {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scales: Tensors = {f"backbone.layers.2.mixer.{part}_proj.{part}_scale": ("F32", ()) for part in "kv"}
    tensors = stored(read_model(tmp_path / "config.json"))
    assert tensors["backbone.layers.2.mixer.k_proj.weight"] == ("BF16", (64, 128))
    spec = read_model(write_checkpoint(tmp_path / "m", config, tensors | scales))
    assert stored(spec) == tensors | scales
    assert {p.home for p in spec.blocks[2].parameters if p.name.endswith("_scale")} == {Axis.KV_HEADS}


def test_layers_with_scales_are_blocks_of_their_own(tmp_path: Path) -> None:
    """Where only some layers have a quantised cache, only these are counted with scales."""
    tensors = checkpoint() | {"model.layers.1.self_attn.k_scale": ("F32", (1,))}
    spec = read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert [block.layers for block in spec.blocks] == [(0, 2), (1,)]
    assert stored(spec) == tensors


BESIDE: dict[str, Tensors] = {
    "vision tower": {
        "vision_tower.blocks.0.weight": ("F32", (7, 5)),
        "model.vision_tower.x": ("F16", (3,)),
        "visual.merger.mlp.0.weight": ("BF16", (2, 2)),
        "model.visual.patch_embed.proj.weight": ("F16", (4, 4)),
        "vision_model.encoder.bias": ("F16", (4,)),
    },
    "image projector": {
        "multi_modal_projector.linear_1.weight": ("F16", (4, 4)),
        "model.mm_projector.0.bias": ("F16", (4,)),
        "image_newline": ("F16", (4,)),
    },
    "audio tower": {"audio_tower.conv1.weight": ("F16", (4, 4)), "thinker.audio_tower.x": ("F32", (1,))},
    "prediction layers": {"mtp.layers.0.mlp.down_proj.weight": ("F16", (4, 4)), "model.mtp_block.x": ("F32", (3,))},
    "adapters": {
        "model.layers.0.self_attn.q_proj.lora_A.vision.weight": ("F16", (4, 4)),
        "model.layers.0.self_attn.q_proj.lora_B.default.weight": ("F16", (4, 4)),
    },
    "buffers": {
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (32,)),
        "model.rotary_emb.cos_cached": ("F32", (128, 64)),
        "model.layers.1.attn.masked_bias": ("F32", ()),
        "model.layers.1.attention.bias": ("BOOL", (1, 1, 16, 16)),
    },
}


@pytest.mark.parametrize("case", ["", "gptq, no config"])
def test_what_is_not_planned_is_told_in_bytes(tmp_path: Path, case: str) -> None:
    """Whatever a file holds is counted or told: both together are all of its data."""
    tensors = checkpoint(case)
    own = tensor_bytes(tensors)
    for each in BESIDE.values():
        tensors |= each
    spec = read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert spec.weight_bytes == own
    assert spec.not_planned == tuple(NotPlanned(what, tensor_bytes(BESIDE[what])) for what in sorted(BESIDE))


def test_layers_for_prediction_are_told(tmp_path: Path) -> None:
    """Of families that have them as layers behind the others; of the others, more layers are a contradiction."""
    tensors = checkpoint() | {"model.layers.3.mlp.down_proj.weight": ("F16", (256, 512))}
    with pytest.raises(ModelError, match=r"has 4 layers, but .* asks for 3") as caught:
        read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert "different models" in caught.value.hint


def test_fewer_layers_are_no_accusation(tmp_path: Path) -> None:
    """A file without the last layer may be half of a download."""
    tensors = {name: tensor for name, tensor in checkpoint().items() if ".layers.2." not in name}
    with pytest.raises(ModelError, match=r"has 2 layers, but .* asks for 3") as caught:
        read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert "incomplete" in caught.value.hint


def test_unknown_tensors_are_still_refused(tmp_path: Path) -> None:
    """A matrix of a layer that no table has would be missing from a plan."""
    tensors = checkpoint() | {"model.layers.0.self_attn.extra.weight": ("F16", (4, 4))}
    with pytest.raises(ModelError, match=r"does not ask for: 'model\.layers\.0\.self_attn\.extra\.weight'") as caught:
        read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert "variant" in caught.value.hint
