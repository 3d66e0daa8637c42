"""What layers keep of a sequence beside keys and values is what transformers keeps, in every family that has such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.family_configs import VISION
from tests.family_models import build, hub_config, spec_of
from tests.published import sizes
from tests.weight_plans import request_of
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache
from tpplan.planner.ledger import cache_bytes_per_token, demands, state_bytes
from tpplan.planner.plan import plan

_COMMON: dict[str, Any] = {
    **sizes(vocab=96, hidden=32, dense=16, layers=4, q=4, kv=2, context=512),
    "pad_token_id": 0,
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 3}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 8}
_CONVOLVED: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}

#: A small model of each family, with layers of several kinds.
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {**_MAMBA2, "num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": {
        **_EXPERTS,
        "hybrid_override_pattern": "M*E-",
        "head_dim": 8,
        "n_routed_experts": 2,
        "moe_shared_expert_intermediate_size": 8,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 3,
        "ssm_state_size": 16,
        "conv_kernel": 4,
    },
    "lfm2": _CONVOLVED,
    "lfm2_moe": {**_CONVOLVED, **_EXPERTS, "num_experts": 2},
    "lfm3": {**_CONVOLVED, "head_dim": 8},
    "kimi_linear": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "num_experts": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "bailing_hybrid": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "num_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [2]},
    "zamba2": {
        "num_key_value_heads": None,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "layers_block_type": ["hybrid", "mamba", "hybrid", "mamba"],
    },
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen4_exp_text": {
        **_EXPERTS,
        "head_dim": 8,
        "num_experts": 2,
        "shared_expert_intermediate_size": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "hc_lowrank": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 12,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    # Beside keys the indexer keeps the gates of all tokens, and whether they count.
    "glm5_next": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 2,
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "q_lora_rank": 8,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "index_topk": 32,
        "vision_config": VISION["glm5_next"],
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 48},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
    },
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_state_is_what_transformers_keeps(model_type: str, dtype: str) -> None:
    """After prompts shorter and longer than the convolution, and after another token; tokens take keys and values."""
    raw = {"model_type": model_type, **_COMMON, **FAMILIES[model_type], "torch_dtype": dtype}
    model = build(hub_config(raw), dtype=getattr(torch, dtype)).eval()
    spec = spec_of(raw)
    item = {"bfloat16": 1, "float32": 2}[dtype]  # times the 16 bits of the cache fp16
    for tokens in (1, 2, 9):
        with torch.no_grad():
            cache = model(torch.randint(96, (3, tokens)), use_cache=True).past_key_values
            for length in (tokens, tokens + 1):
                kinds = [getattr(layer, of, {}) for layer in cache.layers for of in ("conv_states", "recurrent_states")]
                states = [state for kind in kinds for state in kind.values() if state is not None]
                states += [state for state in getattr(cache, "linear_cache", ()) if len(state)]  # MiniMax
                assert sum(state.nbytes for state in states) == 3 * state_bytes(spec)
                keys = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
                kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in keys)
                indexed = [layer.indexer_keys for layer in keys if getattr(layer, "indexer_keys", None) is not None]
                kept += sum(index.nbytes for index in indexed)
                assert kept == 3 * length * item * cache_bytes_per_token(spec, "fp16")
                model(torch.randint(96, (3, 1)), use_cache=True, past_key_values=cache)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_steps_are_predicted_to_read_and_write_what_is_kept(model_type: str) -> None:
    """Twice its bytes for each sequence that steps, beside a full cache, by a device that reads a byte a nanosecond."""
    spec = spec_of({"model_type": model_type, **_COMMON, **FAMILIES[model_type]})
    device = Device(name="x", budget_bytes=2**32, read_bytes_per_second=10**9)
    speed = plan(spec, [device], cache=Cache("fp16", 4 * 100), batch=4, strategy="auto").speed
    assert speed
    for step in speed.decode:
        kept, cached = (step.rows * size for size in (2 * state_bytes(spec), 100 * cache_bytes_per_token(spec, "fp16")))
        (one,) = step.devices
        assert one.cache_ns == kept + cached
        assert step.without_cache_ns == one.weights_ns + one.rest_ns + kept


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_what_is_kept_is_cut_with_the_heads(model_type: str, layout: str) -> None:
    """All that the axis distributes is a part of the whole; what heads share is counted once for each group."""
    spec = spec_of({"model_type": model_type, **_COMMON, **FAMILIES[model_type]})
    request = request_of(layout)
    for demand in demands(spec, request, 2).axes:
        if demand.axis is not Axis.LINEAR_HEADS:
            continue
        whole, state = demand.cost(0, demand.size), state_bytes(spec)
        assert whole.cache == request.batch * state
        halves = [demand.cost(0, demand.unit), demand.cost(demand.unit, demand.size)] if demand.units > 1 else [whole]
        assert state <= sum(half.cache for half in halves) < 2 * state or len(halves) == 1
