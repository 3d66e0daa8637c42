"""The style in which a head is turned is that of transformers' code for the model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest
import torch

from tests.exec.rope.cases import MIXTURES, MODELS
from tests.exec.rope.reference import modeling, reference, same
from tpplan.exec.rope.scaling import Default
from tpplan.exec.rope.tables import Rope

if TYPE_CHECKING:
    from torch import Tensor


def rotated(rope: Rope, x: Tensor) -> Tensor:
    """Turn a head by the definition of the style: out = x · cos + (x with each pair turned by 90°) · sin."""
    sin, cos = rope.tables(x.shape[0])
    if rope.style == "neox":
        turned = torch.cat((-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]), dim=1)
    else:
        turned = torch.stack((-x[:, 1::2], x[:, 0::2]), dim=2).flatten(1)
    return x * cos + turned * sin


@pytest.mark.parametrize(
    "name",
    [
        *("Llama-3.1", "DeepSeek-V3", "GLM-4", "Command-R", "ERNIE-4.5, silent", "GLM-4-9B, silent", "Helium, silent"),
        *("cohere2_moe", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2"),
    ],
)
def test_style(name: str) -> None:
    """The style read from the config is the one by which transformers' code for the model turns a head."""
    config = (MODELS | MIXTURES)[name]
    rope = Rope.from_config(config)
    _, module = modeling(config)
    x = torch.randn(33, rope.width, generator=torch.Generator().manual_seed(5))
    sin, cos = reference(config, 33)
    turn = getattr(module, "apply_rotary_pos_emb_interleave", None) or module.apply_rotary_pos_emb
    theirs, _ = turn(x[None, None], x[None, None], cos[None], sin[None])
    ours = rotated(rope, x)
    if name in {
        "DeepSeek-V3",
        "glm4_moe_lite",
        "glm_moe_dsa",
    }:  # they leave the first of all pairs before the second of all
        ours = torch.cat((ours[:, 0::2], ours[:, 1::2]), dim=1)
    assert torch.equal(ours, theirs[0, 0])


def test_style_of_llama_4() -> None:
    """Its code turns pairs as complex numbers."""
    config = {"model_type": "llama4_text", "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    theirs, module = modeling(config)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(5))
    by = module.Llama4TextRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(33)[None])
    expected, _ = module.apply_rotary_emb(x[None, :, None], x[None, :, None], by)
    torch.testing.assert_close(rotated(Rope.from_config(config), x), expected[0, :, 0])


def test_latent_attention_turns_its_rotary_part() -> None:
    """With MLA only the rotary part of a head is turned, also if the config tells the size of the whole."""
    config = MODELS["DeepSeek-V3"]
    assert Rope.from_config({**config, "head_dim": 192}) == Rope.from_config(config)


def test_deepseek_may_be_stored_in_halves() -> None:
    """A config that says that pairs are not interleaved gets the other style."""
    assert Rope.from_config({**MODELS["DeepSeek-V3"], "rope_interleave": False}).style == "neox"


def test_gptj() -> None:
    """GPT-J's own tables, which are made without a config, are the default ones in its style."""
    module = importlib.import_module("transformers.models.gptj.modeling_gptj")
    sin, cos = module.create_sinusoidal_positions(2048, 64).chunk(2, dim=1)
    config = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "rope_theta": 10000}
    rope = Rope.from_config(config)
    assert rope == Rope(10000.0, 64, Default(), "gptj") == Rope.from_config({**config, "rotary_dim": None})
    ours = rope.tables(2048)
    assert same(ours[0], sin.repeat_interleave(2, dim=1))
    assert same(ours[1], cos.repeat_interleave(2, dim=1))
