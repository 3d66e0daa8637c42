"""The ledger against figures worked out by hand, and published ones."""

from __future__ import annotations

import pytest

from tests.family_models import example
from tests.planner.memory_models import BITS
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache, Request
from tpplan.planner.ledger import cache_bytes_per_token, demands, ledger


@pytest.mark.parametrize(
    ("layout", "residual_0", "residual_1"),
    [
        # o_proj and down_proj by columns of what they read
        ("reduce", 32 * (4096 * 24 * 128 + 4096 * 9984), 32 * (4096 * 8 * 128 + 4096 * 4352)),
        # by rows of what they write
        ("gather", 32 * 3072 * (4096 + 14336), 32 * 1024 * (4096 + 14336)),
    ],
)
def test_llama_8b_by_hand(layout: str, residual_0: int, residual_1: int) -> None:
    """Two devices with 6 and 2 KV heads, every matrix written out."""
    request = Request(layout, "balanced", Cache("fp16", 8192), 1, 1, "idle")
    wanted = demands(example("Llama-3.1-8B"), request, 2)
    cuts = {
        Axis.KV_HEADS: (0, 6, 8),
        Axis.INTERMEDIATE: (0, 9984, 14336),
        Axis.VOCAB: (0, 96000, 128256),
        Axis.RESIDUAL: (0, 3072, 4096),
    }
    devices = (Device(name="x", budget_bytes=2**35),) * 2
    first, second = ledger([cuts[d.axis] for d in wanted.axes], wanted, devices, request)
    norms = 65 * 4096
    heads_0, heads_1 = 32 * 4096 * 128 * (24 + 6 + 6), 32 * 4096 * 128 * (8 + 2 + 2)
    gate_up_0, gate_up_1 = 32 * 2 * 9984 * 4096, 32 * 2 * 4352 * 4096
    vocab_0, vocab_1 = 2 * 96000 * 4096, 2 * 32256 * 4096
    assert first.weights_bytes == 2 * (norms + heads_0 + gate_up_0 + vocab_0 + residual_0)
    assert second.weights_bytes == 2 * (norms + heads_1 + gate_up_1 + vocab_1 + residual_1)
    assert first.cache_bytes == 8192 * 32 * 6 * 2 * 128 * 2
    assert second.cache_bytes == 8192 * 32 * 2 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("name", "expected"), [("Llama-3.1-8B", 131_072), ("Llama-3.1-70B", 327_680), ("DeepSeek-V3", 70_272)]
)
def test_cache_bytes_per_token_are_the_published_ones(name: str, expected: int) -> None:
    """Llama-3.1-8B, Llama-3.1-70B and DeepSeek-V3 in 16 bits, and all kinds in proportion to their bits."""
    chosen = example(name)
    assert {kind: cache_bytes_per_token(chosen, kind) for kind in BITS} == {
        kind: expected * bits / 16 for kind, bits in BITS.items()
    }
