"""The text part of models of text and images, against transformers: it is loaded and computed as a model of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.decoder_cases import CONFIGS, FURTHER, SIZES, answered, check, plan_of, request_of, with_random_weights
from tests.family_configs import VISION
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.decoder.model.settings import AROUND

if TYPE_CHECKING:
    from pathlib import Path

#: The language model that each of them has.
INNER = {
    "gemma3": "gemma3_text",
    "internvl": "qwen3",
    "kimi_k25": "deepseek_v3",
    "llava": "llama",
    "llava_next": "mistral",
    "llava_onevision": "qwen2",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "mistral3": "ministral3",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "vipllava": "llama",
}

#: Settings of those that are in no other models.
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PARTS: dict[str, dict[str, Any]] = {
    "glm4v_text": {
        "hidden_size": 128,
        "head_dim": 16,
        "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5},
    },
    "glm4v_moe_text": {
        **CONFIGS["glm4_moe"],
        "hidden_size": 128,
        "head_dim": 16,
        "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5},
    },
    "qwen2_vl_text": {"hidden_size": 64, "rope_parameters": _SECTIONS},
    "qwen2_5_vl_text": {"hidden_size": 64, "rope_parameters": _SECTIONS},
    "qwen3_vl_text": {"head_dim": 32, "rope_parameters": {**_SECTIONS, "mrope_section": [6, 5, 5]}},
}


@pytest.mark.parametrize("model_type", AROUND)
def test_the_text_part_as_transformers(model_type: str, tmp_path: Path) -> None:
    """Logits of prompts without images, and the tokens that follow, however the text part is cut."""
    inner = INNER[model_type]
    text = {"model_type": inner, **SIZES, **(CONFIGS | FURTHER | PARTS)[inner]}
    is_tied = model_type == "gemma3"
    torch.manual_seed(len(model_type))
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text, vision_config=VISION[model_type], tie_word_embeddings=is_tied, dtype="float32"
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with_random_weights(model).save_pretrained(tmp_path)
    found = answered(model, tmp_path, 8)
    for devices, layout in ((1, "reduce"), (3, "gather")):
        check(found, plan_of(tmp_path, devices, request_of(layout), {}, seed=devices), "peer", new=8)
