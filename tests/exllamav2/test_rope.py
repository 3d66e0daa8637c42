"""The RoPE tables of ExLlamaV2's configs."""

from __future__ import annotations

import math
from enum import IntEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.exllamav2.models import (
    HALF,
    SHAPES,
    finalized,
    small_model,
)
from tpplan.errors import ModelError
from tpplan.exllamav2 import (
    TPContext,
)

if TYPE_CHECKING:
    from torch import Tensor


class RopeStyle(IntEnum):
    """The original's."""

    NONE = 0
    GPTJ = 1
    NEOX = 2


def _arch(style: object, **keys: object) -> Any:
    return SimpleNamespace(lm=SimpleNamespace(supports_tp=True, rope_style=style, **keys))


def _llama3(f: Tensor) -> Tensor:
    """Frequencies stretched 8 times for waves longer than 64 positions, not at all for those under 16."""
    smooth = (64 / (2 * math.pi / f) - 1) / 3
    blended = ((1 - smooth) / 8 + smooth) * f
    return torch.where(smooth > 1, f, torch.where(smooth < 0, f / 8, blended))


F = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
LONG = [1.0 + i / 4 for i in range(16)]
ROPES: dict[str, tuple[dict[str, Any], Tensor, float]] = {
    "default": ({}, F, 1),
    "base": ({"rotary_embedding_base": 500000.0}, 1 / 500000.0 ** (torch.arange(0, 32, 2) / 32), 1),
    "linear": ({"scale_pos_emb": 4.0}, F / 4, 1),
    "alpha": ({"scale_alpha_value": 2.5}, 1 / (10000.0 * 2.5 ** (32 / 30)) ** (torch.arange(0, 32, 2) / 32), 1),
    "llama3": (
        {
            "alt_rope_method": "llama3",
            "l3_rope_factor": 8.0,
            "l3_rope_low_freq_factor": 1.0,
            "l3_rope_high_freq_factor": 4.0,
            "l3_rope_original_max_position_embeddings": 64,
        },
        _llama3(F),
        1,
    ),
    "llama3, compressed": (
        {
            "alt_rope_method": "llama3",
            "l3_rope_factor": 8.0,
            "l3_rope_low_freq_factor": 1.0,
            "l3_rope_high_freq_factor": 4.0,
            "l3_rope_original_max_position_embeddings": 64,
            "scale_pos_emb": 2.0,
        },
        _llama3(F) / 2,
        1,
    ),
    "su, long": (
        {
            "alt_rope_method": "su",
            "scale_long_factor": LONG,
            "scale_short_factor": [1.0] * 16,
            "original_max_seq_len": 64,
        },
        F / torch.tensor(LONG),
        math.sqrt(1 + math.log(4) / math.log(64)),
    ),
    "su, short": (
        {
            "alt_rope_method": "su",
            "scale_long_factor": [1.0] * 16,
            "scale_short_factor": LONG,
            "original_max_seq_len": 256,
        },
        F / torch.tensor(LONG),
        1,
    ),
    "yarn, within the context": (
        {"alt_rope_method": "yarn", "yarn_rope_factor": 4.0, "yarn_rope_original_max_position_embeddings": 256},
        F,
        1,
    ),
}


@pytest.mark.parametrize("style", [RopeStyle.NEOX, RopeStyle.GPTJ])
@pytest.mark.parametrize(("keys", "frequencies", "attention"), ROPES.values(), ids=ROPES)
def test_sin_cos(keys: dict[str, Any], frequencies: Tensor, attention: float, style: RopeStyle) -> None:
    """The tables equal sines and cosines computed here, on each device with KV heads, for every position."""
    gpu_split, shape = SHAPES["a GPU without heads"]
    tp = finalized(gpu_split, **shape, **keys, arch=_arch(style))
    angles = torch.arange(256)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1) if style == RopeStyle.NEOX else angles.repeat_interleave(2, -1)
    sin, cos = tp.get_sin_cos()
    assert (tp.sin, tp.cos) == (sin, cos)
    assert len(sin) == len(cos) == 4
    assert {(x.is_meta, x.numel()) for x in (*sin[2:], *cos[2:])} == {(True, 0)}
    for tables, expected in ((sin, angles.sin()), (cos, angles.cos())):
        for table in tables[:2]:
            assert table.dtype == HALF
            assert table.shape == (1, 1, 256, 32)
            torch.testing.assert_close(table[0, 0].float(), expected * attention, atol=6e-4, rtol=1e-3)
    assert tp.get_sin_cos()[0][0] is sin[0]


def test_yarn_stretches_by_the_trained_context() -> None:
    """YaRN's ramp lies where the trained context puts it, as in the paper; the original took the new context."""
    tp = finalized((1.0,), alt_rope_method="yarn", yarn_rope_factor=4.0, yarn_rope_original_max_position_embeddings=64)
    sin, cos = tp.get_sin_cos()
    first, last = (32 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1))
    first, last = max(math.floor(first), 0), math.ceil(last)
    ramp = ((torch.arange(16) - first) / (last - first)).clamp(0, 1)
    angles = torch.arange(256)[:, None] * (F / 4 * ramp + F * (1 - ramp))
    attention = 0.1 * math.log(4) + 1
    torch.testing.assert_close(sin[0][0, 0, :, :16].float(), angles.sin() * attention, atol=6e-4, rtol=1e-3)
    torch.testing.assert_close(cos[0][0, 0, :, 16:].float(), angles.cos() * attention, atol=6e-4, rtol=1e-3)


@pytest.mark.parametrize(("tokens", "positions"), [(0, 256), (100, 100), (256, 256), (300, 256), (5000, 256)])
def test_tables_are_as_long_as_a_sequence_can_be(tokens: int, positions: int) -> None:
    """The tables reach the longest context, or as far as the cache does."""
    tp = TPContext(small_model(), [1.0], tokens, backend="cpu")
    tp.finalize()
    sin, _ = tp.get_sin_cos()
    assert sin[0].shape == (1, 1, positions, 32)


@pytest.mark.parametrize("style", [RopeStyle.NONE, 0, "NONE"])
def test_no_rope(style: object) -> None:
    """A model without RoPE has no tables, also where the style is a bare number."""
    tables = finalized((1.0, 1.0), arch=_arch(style)).get_sin_cos()
    assert [[x.is_meta for x in each] for each in tables] == [[True, True], [True, True]]


@pytest.mark.parametrize(("given", "meant"), [(None, 2), (1, 1), (2, 2), ("gptj", 1), ("NEOX", 2)])
def test_styles_by_number_and_name(given: object, meant: int) -> None:
    """A bare number or a name stands for the style; no style is NEOX."""
    styles = (given, RopeStyle(meant), RopeStyle(3 - meant))
    sines = [finalized((1.0,), arch=_arch(style)).get_sin_cos()[0][0] for style in styles]
    found, same, other = sines
    assert torch.equal(found, same)
    assert not torch.equal(found, other)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("style", [RopeStyle.NEOX, RopeStyle.GPTJ])
def test_frequencies_in_half_precision(style: RopeStyle, scale: float) -> None:
    """``rope_freq_half`` rounds the frequencies to float16 before positions are divided, as the original does."""
    tp = finalized((1.0,), arch=_arch(style, rope_freq_half=True), scale_pos_emb=scale, max_seq_len=4096)
    angles = torch.arange(4096)[:, None] / scale * F.half()
    angles = torch.cat((angles, angles), -1) if style == RopeStyle.NEOX else angles.repeat_interleave(2, -1)
    for (table,), expected in zip(tp.get_sin_cos(), (angles.sin(), angles.cos()), strict=True):
        torch.testing.assert_close(table[0, 0].float(), expected, atol=2e-3, rtol=1e-3)
    (plain,), _ = finalized((1.0,), arch=_arch(style), scale_pos_emb=scale, max_seq_len=4096).get_sin_cos()
    assert (plain[0, 0].float() - angles.sin()).abs().max() > 0.05


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"alt_rope_method": "mrope"}, "alt_rope_method is 'mrope'"),
        ({"alt_rope_method": "llama3"}, "has no l3_rope_factor"),
        (
            {"alt_rope_method": "su", "scale_long_factor": [1.0], "scale_short_factor": [], "original_max_seq_len": 64},
            "has 1 numbers, expected 16",
        ),
        ({"rotary_embedding_base": "large"}, "rotary_embedding_base is large"),
        ({"arch": SimpleNamespace(lm=SimpleNamespace(rope_style="SPIRAL"))}, "rope_style is 'spiral'"),
        ({"arch": SimpleNamespace(lm=SimpleNamespace(rope_style=3))}, "rope_style is '3'"),
        ({"pos_id_index": 2}, "pos_id_index is 2"),
    ],
)
def test_bad_rope(keys: dict[str, Any], message: str) -> None:
    """A RoPE that cannot be made is refused, each time it is asked for."""
    tp = finalized((1.0,), **keys)
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            tp.get_sin_cos()
