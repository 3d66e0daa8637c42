"""Mamba-2: its heads are cut, devices share B and C of a group, and what they compute adds up to the layer."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, silu, softplus

import tpplan
from tests.examples import examples
from tests.family_models import assert_same_tensors, hub_config, meta_model, saved_tensors, spec_of
from tests.later import transformers
from tests.published import shape
from tests.weight_plans import plan_of, request_of
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request
from tpplan.planner.ledger import demands, ledger
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec
    from tpplan.weights import TensorSlice

#: Two layers of Mamba-2 and one of attention: 8 heads of 32 channels, a state of 16 for each.
SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    **shape(vocab=96, hidden=32, dense=16, layers=3, q=4, kv=2, context=512),
    "shared_intermediate_size": 24,
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 8,
    "pad_token_id": 0,
}
_LAYER = "model.layers.0.mamba."


def small(**keys: Any) -> ModelSpec:
    """Return a small model in bfloat16."""
    return spec_of({**SMALL, **keys})


def slices(model: ModelSpec, heads: tuple[int, ...]) -> list[TensorSlice]:
    """Return all slices of a model whose Mamba heads are cut so, and all else is on the last device."""
    request = request_of()
    wanted = demands(model, request, len(heads) - 1).axes
    bounds = [heads if d.axis is Axis.LINEAR_HEADS else (*(0,) * (len(heads) - 1), d.size) for d in wanted]
    return list(iter_slices(plan_of(model, request, bounds), model))


def part(found: list[TensorSlice], name: str) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return the ranges that each device holds of a tensor of the first layer."""
    return {each.device: each.ranges for each in found if each.name == _LAYER + name}


def cut(tensor: torch.Tensor, held: TensorSlice) -> torch.Tensor:
    """Return a device's part of a tensor."""
    if held.dim is None:
        return tensor
    return torch.cat([tensor.narrow(held.dim, start, end - start) for start, end in held.ranges], held.dim)


def mixed(
    x_TD: torch.Tensor, weights: dict[str, torch.Tensor], groups_H: torch.Tensor, head_dim: int, state: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute heads of Mamba-2, token by token, up to the norm: what is normed, and the sums of its squares by head.

    ``groups_H`` says which of the groups that the weights have each head is of.
    """
    heads, groups = len(groups_H), int(groups_H.max()) + 1
    inner, keys = heads * head_dim, groups * state
    projected = x_TD @ weights["in_proj.weight"].T
    gate, convolved, dt = projected[:, :inner], projected[:, inner:-heads], projected[:, -heads:]
    kernel = weights["conv1d.weight"]
    padded = torch.nn.functional.pad(convolved.T, (kernel.shape[-1] - 1, 0))
    convolved = silu(conv1d(padded, kernel, weights["conv1d.bias"], groups=len(kernel))).T
    x, b, c = convolved[:, :inner], convolved[:, inner:-keys], convolved[:, -keys:]
    x_THP, dt_TH = x.reshape(-1, heads, head_dim), softplus(dt + weights["dt_bias"])
    b_THN, c_THN = (each.reshape(-1, groups, state)[:, groups_H] for each in (b, c))
    state_HPN, outputs = x.new_zeros(heads, head_dim, state), []
    for t in range(len(x)):
        decay_H = torch.exp(-torch.exp(weights["A_log"]) * dt_TH[t])
        added = (dt_TH[t, :, None] * x_THP[t])[..., None] * b_THN[t, :, None]
        state_HPN = decay_H[:, None, None] * state_HPN + added
        outputs.append((state_HPN * c_THN[t, :, None]).sum(-1) + weights["D"][:, None] * x_THP[t])
    y_THP = torch.stack(outputs) * silu(gate).view(-1, heads, head_dim)
    return y_THP, y_THP.square().sum(-1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@settings(max_examples=examples(20))
@given(data=st.data())
def test_the_parts_of_a_layer_add_up_to_the_layer(groups: int, data: st.DataObject) -> None:
    """In float64, whatever the cut of the heads: devices sum the squares of a group, and their outputs."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = small(mamba_n_groups=groups)
    config = hub_config({**SMALL, "mamba_n_groups": groups})
    layer = transformers.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer(config, 0)
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
        x_TD = torch.randn(5, 32, dtype=torch.float64)
        expected = layer(x_TD[None])[0]
    whole = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    cuts = sorted(data.draw(st.lists(st.integers(0, 8), min_size=2, max_size=2)))
    heads, each = (0, *cuts, 8), 8 // groups
    found = slices(model, heads)
    normed, squares = {}, x_TD.new_zeros(5, groups)
    for device, (start, end) in enumerate(pairwise(heads)):
        held = [s for s in found if s.device == device and s.name.startswith(_LAYER)]
        assert bool(held) == (end > start)
        if not held:
            continue
        own = {s.name.removeprefix(_LAYER): cut(whole[s.name.removeprefix(_LAYER)], s) for s in held}
        assert own.keys() == whole.keys()
        groups_H = torch.arange(start, end) // each
        y_THP, sums_TH = mixed(x_TD, own, groups_H - groups_H[0], 32, 16)
        squares.index_add_(1, groups_H, sums_TH)
        normed[device] = y_THP, groups_H, own
    scale_TG = torch.rsqrt(squares / (each * 32) + config.rms_norm_eps)
    parts = [
        (y_THP * scale_TG[:, groups_H, None]).flatten(1) * own["norm.weight"] @ own["out_proj.weight"].T
        for y_THP, groups_H, own in normed.values()
    ]
    total = torch.stack(parts).sum(0)
    groups_H = torch.arange(8) // each
    y_THP, sums_TH = mixed(x_TD, whole, groups_H, 32, 16)
    scale_TH = torch.rsqrt(sums_TH.view(-1, groups, each).mean(-1) / 32 + config.rms_norm_eps)[:, groups_H]
    alone = (y_THP * scale_TH[..., None]).flatten(1) * whole["norm.weight"] @ whole["out_proj.weight"].T
    torch.testing.assert_close(total, alone, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)  # transformers has parts of it in 32 bits


def test_one_group_is_shared_by_all_devices() -> None:
    """Gate, x and dt are cut by heads; B and C of the only group are on each device that has any of its heads."""
    found = slices(small(), (0, 6, 6, 8))
    inner, state = 256, 16
    x, b, c = inner, 2 * inner, 2 * inner + state
    shared = ((b, b + state), (c, c + state))
    dt = c + state
    assert part(found, "in_proj.weight") == {
        0: ((0, 192), (x, x + 192), *shared, (dt, dt + 6)),
        2: ((192, 256), (x + 192, x + 256), *shared, (dt + 6, dt + 8)),
    }
    convolved = ((inner, inner + state), (inner + state, inner + 2 * state))
    assert part(found, "conv1d.weight") == {0: ((0, 192), *convolved), 2: ((192, 256), *convolved)}
    assert part(found, "A_log") == {0: ((0, 6),), 2: ((6, 8),)}
    assert part(found, "norm.weight") == {0: ((0, 192),), 2: ((192, 256),)}
    assert part(found, "out_proj.weight") == {0: ((0, 192),), 2: ((192, 256),)}


def test_only_the_groups_of_its_heads_are_on_a_device() -> None:
    """Four groups of two heads: who has heads of the first three has their B and C, and the second their last."""
    found = slices(small(mamba_n_groups=4), (0, 6, 8))
    b, c = 512, 512 + 4 * 16
    assert part(found, "in_proj.weight")[0][2:4] == ((b, b + 48), (c, c + 48))
    assert part(found, "in_proj.weight")[1][2:4] == ((b + 48, b + 64), (c + 48, c + 64))
    found = slices(small(mamba_n_groups=2), (0, 6, 8))
    b, c = 512, 512 + 2 * 16
    assert part(found, "in_proj.weight")[0][2:4] == ((b, b + 32), (c, c + 32))
    assert part(found, "in_proj.weight")[1][2:4] == ((b + 16, b + 32), (c + 16, c + 32))


def test_the_ledger_of_an_uneven_plan_by_hand() -> None:
    """Six of eight heads on one device, for five sequences: states of its heads, and the group's inputs on both."""
    model = small()
    request = Request("reduce", "balanced", Cache("fp16", 500), 5, 8, "idle")
    wanted = demands(model, request, 2)
    bounds = tuple((0, 6, 8) if d.axis is Axis.LINEAR_HEADS else (0, d.size, d.size) for d in wanted.axes)
    devices = tuple(tpplan.Device(name="x", budget_bytes=2**30) for _ in range(2))
    first, second = ledger(bounds, wanted, devices, request)
    head, group = 32 * 16 * 4 + 4 * 32 * 2, 4 * 2 * 16 * 2  # a matrix in 32 bits, four inputs of each channel in 16
    tokens = 500 * 2 * 2 * 8 * 2
    assert (first.cache_bytes, second.cache_bytes) == (2 * 5 * (6 * head + group) + tokens, 2 * 5 * (2 * head + group))
    # Two heads: rows of gate, x and dt, and columns back; kernels and biases of x, B and C; norm; A_log, dt_bias and D.
    own = (2 * 64 + 2 + 2 * 16) * 32 + (64 + 2 * 16) * (4 + 1) + 64 * 32 + 64 + 3 * 2
    norms = 3 * 2 * 32 + 32
    assert second.weights_bytes == 2 * (2 * own + norms)


def test_a_unit_of_heads_has_room_for_a_key() -> None:
    """Heads are as many as have the columns of a state, or 32, as far as they are of one group; then wider."""
    for keys, unit, width in (
        ({}, 1, 32),
        ({"mamba_d_state": 64}, 2, 32),
        ({"mamba_d_state": 65}, 4, 32),
        ({"mamba_d_state": 65, "mamba_n_groups": 4}, 2, 33),
        ({"mamba_d_state": 65, "mamba_n_groups": 8}, 1, 65),
        ({"mamba_expand": 2}, 4, 8),
    ):
        (heads,) = (d for d in demands(small(**keys), request_of(), 2).axes if d.axis is Axis.LINEAR_HEADS)
        assert (heads.unit, heads.width, heads.size, heads.replicas) == (unit, width, 8, 1), keys


@pytest.mark.parametrize("strategy", ["latency", "auto"])
def test_uneven_devices_share_the_heads_of_one_group(strategy: str) -> None:
    """Granite 4.0 H Tiny on a GPU of 6 GB and one of 24: both have Mamba heads, though there is one group."""
    model = spec_of(GRANITE_4_H_TINY)
    plan = tpplan.plan(model, tpplan.parse_devices("rtx2060 6gb,rtx3090"), max_rows=256, strategy=strategy)
    heads = plan.bounds(Axis.LINEAR_HEADS, layer=0)
    assert 0 < heads[1] < 48
    held = list(iter_slices(plan, model))
    for device, entry in enumerate(plan.memory):
        assert sum(part.nbytes for part in held if part.device == device) == entry.weights_bytes


#: As its config.json on the hub has it.
GRANITE_4_H_TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    **shape(vocab=100352, hidden=1536, dense=512, layers=40, q=12, kv=4, top=6, context=131072),
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


#: Of Nemotron-H-8B-Base-8K, LFM2-1.2B, Falcon-H1-34B and Kimi-Linear-48B-A3B, what their config.json files say.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "nemotron_h": (
        8_100_852_736,
        {
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            **shape(vocab=131072, hidden=4096, dense=21504, layers=52, q=32, kv=8, head_dim=128, context=8192),
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
    ),
    "lfm2": (
        1_170_340_608,
        {
            "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            **shape(vocab=65536, hidden=2048, layers=16, q=32, kv=8, context=128000),
            "tie_embedding": True,
        },
    ),
    "falcon_h1": (
        33_642_221_312,
        {
            **shape(vocab=261120, hidden=5120, dense=21504, layers=72, q=20, kv=4, head_dim=128, context=262144),
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_n_groups": 2,
            "mamba_d_state": 256,
        },
    ),
    "kimi_linear": (
        49_122_681_728,
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
            "model_max_length": 1048576,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [layer for layer in range(1, 27) if layer % 4],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "granitemoehybrid": (6_939_037_248, GRANITE_4_H_TINY),
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_parameters_of_published_models(model_type: str) -> None:
    """As many as transformers' model of the same config.json has, in the form of keys that the hub has."""
    parameters, raw = PUBLISHED[model_type]
    raw = {"model_type": model_type, **raw}
    spec = spec_of(raw)
    assert_same_tensors(spec, saved_tensors(meta_model(hub_config(raw))))
    assert spec.parameter_count == parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_n_groups": 3}, "8 heads (mamba_n_heads) are not a multiple of 3 groups (mamba_n_groups)"),
        (
            {"mamba_d_head": 9},
            "8 heads of 9 (mamba_n_heads, mamba_d_head) are not the 256 of mamba_expand × hidden_size",
        ),
        ({"mamba_n_heads": 7}, "7 heads of 36 (mamba_n_heads, mamba_d_head) are not the 256 of mamba_expand"),
        ({"mamba_d_state": 0}, "mamba_d_state is 0"),
        ({"layer_types": ["mamba", "conv", "mamba"]}, "layer_types has 'conv', known are full_attention and linear_at"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], words: str) -> None:
    """An error names the keys and what is wrong with them."""
    with pytest.raises(tpplan.ModelError) as caught:
        small(**change)
    assert words in caught.value.message
    assert caught.value.hint
