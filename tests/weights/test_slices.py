"""Which rows and columns of which tensor go where."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

import tpplan
from tests.family_models import hub_config, spec_of
from tests.published import sizes
from tests.weight_plans import fine_units, plan_of, request_of
from tpplan.core.axes import Axis
from tpplan.planner.ledger import demands
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.model import ModelSpec
    from tpplan.weights import TensorSlice

__all__ = ["fine_units"]  # a fixture

#: Two layers of four KV heads of eight elements, and two query heads to each.
SMALL = {
    **sizes(vocab=30, hidden=64, dense=24, layers=2, q=8, kv=4, context=16),
}
#: Three devices: one without heads, one without a part of the MLP, one without a part of the vocabulary.
CUTS = {
    Axis.KV_HEADS: (0, 3, 3, 4),
    Axis.INTERMEDIATE: (0, 4, 24, 24),
    Axis.EXPERT_INTERMEDIATE: (0, 4, 24, 24),
    Axis.LINEAR_HEADS: (0, 3, 3, 4),
    Axis.VOCAB: (0, 0, 12, 30),
    Axis.RESIDUAL: (0, 8, 32, 64),
}

Found = dict[int, tuple[int | None, tuple[tuple[int, int], ...]]]


def small(model_type: str, **keys: Any) -> ModelSpec:
    """Return a small model of a family."""
    return spec_of(hub_config({"model_type": model_type, **SMALL, **keys}).to_dict())


def slices(model: ModelSpec, layout: str = "reduce", kv: str = "idle", **cuts: tuple[int, ...]) -> list[TensorSlice]:
    """Return the slices of a model for three devices."""
    request = request_of(layout, kv)
    bounds = [cuts.get(d.axis.name, CUTS[d.axis]) for d in demands(model, request, 3).axes]
    return list(iter_slices(plan_of(model, request, bounds), model))


def part(found: list[TensorSlice], name: str) -> Found:
    """Return what each device holds of a tensor: the dimension and its ranges."""
    return {each.device: (each.dim, each.ranges) for each in found if each.name == name}


def test_matrices_of_a_llama() -> None:
    """Columns and then rows are cut by heads and by the MLP; norms are everywhere, the vocabulary by its rows."""
    found = slices(small("llama"))
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert part(found, f"{attention}q_proj.weight") == {0: (0, ((0, 48),)), 2: (0, ((48, 64),))}
    assert part(found, f"{attention}v_proj.weight") == {0: (0, ((0, 24),)), 2: (0, ((24, 32),))}
    assert part(found, f"{attention}o_proj.weight") == {0: (1, ((0, 48),)), 2: (1, ((48, 64),))}
    assert part(found, f"{mlp}up_proj.weight") == {0: (0, ((0, 4),)), 1: (0, ((4, 24),))}
    assert part(found, f"{mlp}down_proj.weight") == {0: (1, ((0, 4),)), 1: (1, ((4, 24),))}
    assert part(found, "model.layers.0.input_layernorm.weight") == {0: (None, ()), 1: (None, ()), 2: (None, ())}
    assert part(found, "lm_head.weight") == {1: (0, ((0, 12),)), 2: (0, ((12, 30),))}
    (down,) = [each for each in found if each.name == f"{mlp}down_proj.weight" and each.device == 1]
    assert (down.whole, down.shape, down.nbytes) == ((64, 24), (64, 20), 64 * 20 * 2)


def test_the_layout_gather_cuts_outputs() -> None:
    """Matrices that lead to the residual stream are cut by its columns, and so are their biases."""
    found = slices(small("llama", attention_bias=True), "gather")
    cut = {0: (0, ((0, 8),)), 1: (0, ((8, 32),)), 2: (0, ((32, 64),))}
    for name in ("self_attn.o_proj.weight", "self_attn.o_proj.bias", "mlp.down_proj.weight"):
        assert part(found, f"model.layers.0.{name}") == cut
    assert part(found, "model.layers.0.self_attn.k_proj.bias") == {0: (0, ((0, 24),)), 2: (0, ((24, 32),))}


def test_fused_tensors_are_cut_in_every_segment() -> None:
    """Queries, keys and values, gate and up each have a range of their own; GPT-2 stores them as columns."""
    found = slices(small("phi3", pad_token_id=0))
    assert part(found, "model.layers.0.self_attn.qkv_proj.weight") == {
        0: (0, ((0, 48), (64, 88), (96, 120))),
        2: (0, ((48, 64), (88, 96), (120, 128))),
    }
    assert part(found, "model.layers.0.mlp.gate_up_proj.weight") == {
        0: (0, ((0, 4), (24, 28))),
        1: (0, ((4, 24), (28, 48))),
    }
    keys = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_inner": 24, "vocab_size": 30, "n_positions": 16}
    found = slices(spec_of({"model_type": "gpt2", **keys}), RESIDUAL=(0, 8, 32, 32))
    assert part(found, "transformer.h.0.attn.c_attn.weight") == {
        0: (1, ((0, 24), (32, 56), (64, 88))),
        2: (1, ((24, 32), (56, 64), (88, 96))),
    }


#: Four key heads of 8 elements with two value heads of 6 to each, and every other layer with attention.
HYBRID = {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_value_heads_are_with_their_key_head(model_type: str) -> None:
    """Three of four key heads, six of eight value heads: in what is fused by heads one range, else one a segment."""
    experts = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "mlp_only_layers": [0, 1]}
    found = slices(small(model_type, **HYBRID, **(experts if model_type == "qwen3_next" else {})))
    linear, keys, values = "model.layers.0.linear_attn.", 32, 48
    segments = ((0, 24), (keys, keys + 24), (2 * keys, 2 * keys + 36))
    rest = ((24, keys), (keys + 24, 2 * keys), (2 * keys + 36, 2 * keys + values))
    for name, first, second in (
        ("conv1d.weight", segments, rest),
        ("dt_bias", ((0, 6),), ((6, 8),)),
        ("A_log", ((0, 6),), ((6, 8),)),
        *(
            (
                # query, key, two values and two gates of each key head; two numbers for each value head
                ("in_proj_qkvz.weight", ((0, 3 * 40),), ((3 * 40, 4 * 40),)),
                ("in_proj_ba.weight", ((0, 12),), ((12, 16),)),
            )
            if model_type == "qwen3_next"
            else (
                ("in_proj_qkv.weight", segments, rest),
                ("in_proj_z.weight", ((0, 36),), ((36, 48),)),
                ("in_proj_b.weight", ((0, 6),), ((6, 8),)),
                ("in_proj_a.weight", ((0, 6),), ((6, 8),)),
            )
        ),
    ):
        assert part(found, linear + name) == {0: (0, first), 2: (0, second)}, name
    assert part(found, f"{linear}out_proj.weight") == {0: (1, ((0, 36),)), 2: (1, ((36, 48),))}
    assert part(found, f"{linear}norm.weight") == {0: (None, ()), 2: (None, ())}
    assert not any(each.name.startswith("model.layers.1.linear_attn") for each in found)
    # Queries with their gates, head by head.
    assert part(found, "model.layers.1.self_attn.q_proj.weight") == {0: (0, ((0, 96),)), 2: (0, ((96, 128),))}


def test_a_replicated_head_is_held_once() -> None:
    """Two KV heads, two replicas each: who has both replicas, or the second of one and the first of the next."""
    model = small("llama", num_key_value_heads=2)
    found = slices(model, kv="replicate", KV_HEADS=(0, 1, 3, 4))
    assert part(found, "model.layers.0.self_attn.k_proj.weight") == {
        0: (0, ((0, 8),)),
        1: (0, ((0, 16),)),
        2: (0, ((8, 16),)),
    }
    assert part(found, "model.layers.0.self_attn.q_proj.weight") == {
        0: (0, ((0, 16),)),
        1: (0, ((16, 48),)),
        2: (0, ((48, 64),)),
    }
    found = slices(model, kv="replicate", KV_HEADS=(0, 2, 2, 4))
    assert part(found, "model.layers.0.self_attn.k_proj.weight") == {0: (0, ((0, 8),)), 2: (0, ((8, 16),))}


def test_what_no_axis_cuts_is_where_it_is_needed() -> None:
    """Norms of heads live with the heads, and the router with the experts, of which every device has columns."""
    experts = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 8}
    found = slices(small("qwen3_moe", **experts))
    assert part(found, "model.layers.0.self_attn.q_norm.weight") == {0: (None, ()), 2: (None, ())}
    assert part(found, "model.layers.0.mlp.gate.weight") == {0: (None, ()), 1: (None, ())}
    assert part(found, "model.layers.0.mlp.experts.2.up_proj.weight") == {0: (0, ((0, 4),)), 1: (0, ((4, 24),))}


def test_order_is_that_of_the_model() -> None:
    """What is outside the layers comes first, then layer by layer, and the devices of each tensor ascend."""
    found = slices(small("llama"))
    names = list(dict.fromkeys(each.name for each in found))
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert not any(".layers." in name for name in names[: len(names) - len(layers)])
    for name in names:
        devices = [each.device for each in found if each.name == name]
        assert devices == sorted(set(devices))


def test_a_plan_for_another_model_is_refused() -> None:
    """At once, not when the first slice is asked for."""
    model = small("llama")
    plan = plan_of(model, request_of(), [CUTS[d.axis] for d in demands(model, request_of(), 3).axes])
    with pytest.raises(tpplan.ModelError, match="this model is sha256:"):
        iter_slices(plan, small("llama", vocab_size=31))


def test_a_plan_that_was_altered_is_refused() -> None:
    """A plan that obeys all rules may still cut an axis of another size."""
    model = small("llama")
    plan = plan_of(model, request_of(), [CUTS[d.axis] for d in demands(model, request_of(), 3).axes])
    splits = [evolve(s, size=28, bounds=(0, 4, 28, 28)) if s.axis is Axis.INTERMEDIATE else s for s in plan.splits]
    with pytest.raises(tpplan.ModelError, match="cuts 28 intermediate of layer 0, the model has 24"):
        iter_slices(evolve(plan, splits=tuple(splits)), model)


def test_slices_need_no_torch(tmp_path: Path) -> None:
    """Who brings a loader of another kind does not pay for torch."""
    code = """
import sys
from tpplan import parse_devices, plan, read_model
from tpplan.weights import iter_slices
model = read_model(sys.argv[1])
print(sum(part.nbytes for part in iter_slices(plan(model, parse_devices("24GiB,24GiB"), max_rows=8), model)) > 0)
print(*sorted({"torch", "numpy", "safetensors"} & set(sys.modules)))
"""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **SMALL}))
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n\n"), done.stderr
