"""The text part of models of text and images, against transformers: it is loaded and computed as a model of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.decoder_cases import CONFIGS, SIZES, answered, check, plan_of, request_of, with_random_weights
from tests.family_configs import VISION
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.decoder.settings import AROUND

if TYPE_CHECKING:
    from pathlib import Path

#: The language model that each of them has.
INNER = {
    "gemma3": "gemma3_text",
    "internvl": "qwen3",
    "llava": "llama",
    "llava_next": "mistral",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "vipllava": "llama",
}


@pytest.mark.parametrize("model_type", AROUND)
def test_the_text_part_as_transformers(model_type: str, tmp_path: Path) -> None:
    """Logits of prompts without images, and the tokens that follow, however the text part is cut."""
    inner = INNER[model_type]
    text = {"model_type": inner, **SIZES, **CONFIGS[inner]}
    is_tied = model_type == "gemma3"
    torch.manual_seed(len(model_type))
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=VISION[model_type], tie_word_embeddings=is_tied, dtype="float32"
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with_random_weights(model).save_pretrained(tmp_path)
    found = answered(model, tmp_path, 8)
    for devices, layout in ((1, "reduce"), (3, "gather")):
        check(found, plan_of(tmp_path, devices, request_of(layout), {}, seed=devices), "peer", new=8)
