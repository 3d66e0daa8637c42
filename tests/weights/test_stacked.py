"""Checkpoints that have all experts of a layer in one tensor, as qwen3_5_moe has on the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tests.checkpoints import Tensors, fill_random, saved_values, write_checkpoint
from tests.examples import examples
from tests.family_models import named, renamed, spec_of
from tests.published import sizes
from tests.weight_plans import assert_loaded, even_plan, fine_units, loaded, plans_of
from tpplan.models import families
from tpplan.models.config import Config
from tpplan.models.families import spec_from_config
from tpplan.planfile.codec import fingerprint
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fine_units"]  # a fixture

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        **sizes(vocab=32, hidden=16, expert=8, layers=2, q=4, kv=2, head_dim=4, top=2, context=64),
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 3,
        "num_experts": 3,
        "shared_expert_intermediate_size": 8,
    },
}
#: What the hub's checkpoints have besides: the layer that predicts a second token, and what reads images.
BESIDES: Tensors = {
    "mtp.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (8, 16)),
    "model.visual.x.bias": ("F32", (3,)),
}
EXPERTS = "model.layers.1.mlp.experts."


def tensors_of(*, stacked: bool) -> Tensors:
    """Return the language model's tensors in one of its forms."""
    spec = spec_from_config(Config(CONFIG, "config.json"), "m", stacked=stacked)
    return {_on_the_hub(name): (parameter.dtype, parameter.shape) for name, parameter, _ in named(spec)}


def _on_the_hub(name: str) -> str:
    """Return what the hub calls a tensor."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random bytes in stacked experts."""
    made = write_checkpoint(tmp_path_factory.mktemp("stacked") / "m", CONFIG, tensors_of(stacked=True) | BESIDES)
    fill_random(made)
    return made


def test_the_form_is_the_checkpoint_s(directory: Path, tmp_path: Path) -> None:
    """Experts are one tensor or each its own: the same model, of the same bytes; a config alone means the latter."""
    apart = tpplan.read_model(write_checkpoint(tmp_path / "m", CONFIG, tensors_of(stacked=False) | BESIDES))
    stacked = tpplan.read_model(directory)
    shapes = {name: parameter.shape for name, parameter, _ in named(stacked) if name.startswith(EXPERTS)}
    assert shapes == {f"{EXPERTS}gate_up_proj": (3, 2 * 8, 16), f"{EXPERTS}down_proj": (3, 16, 8)}
    assert fingerprint(apart) == fingerprint(spec_of(CONFIG, "m"))
    assert (stacked.parameter_count, stacked.weight_bytes) == (apart.parameter_count, apart.weight_bytes)
    layouts = [even_plan(model, 2, layout) for layout in ("reduce", "gather") for model in (stacked, apart)]
    assert [plan.memory for plan in layouts[::2]] == [plan.memory for plan in layouts[1::2]]


def test_layers_for_prediction_do_not_say_how_experts_are_stored(directory: Path, tmp_path: Path) -> None:
    """They may be stacked where the model's own are tensors of their own."""
    besides: Tensors = {"mtp.layers.0.mlp.experts.gate_up_proj": ("BF16", (3, 16, 16))}
    apart = write_checkpoint(tmp_path / "m", CONFIG, tensors_of(stacked=False) | besides)
    assert fingerprint(tpplan.read_model(apart)) == fingerprint(spec_of(CONFIG, "m"))


def test_a_checkpoint_in_both_forms_is_refused(tmp_path: Path) -> None:
    """One layer's experts in one tensor, the other's each its own: the error names what lacks and what is too much."""
    mixed = tensors_of(stacked=True) | {
        name: tensor for name, tensor in tensors_of(stacked=False).items() if "layers.1.mlp.experts." not in name
    }
    with pytest.raises(tpplan.ModelError, match=r"does not ask for: .*layers\.0\.mlp\.experts\.0"):
        tpplan.read_model(write_checkpoint(tmp_path / "m", CONFIG, mixed))


def test_gate_and_up_are_cut_alike(directory: Path) -> None:
    """Of every expert, a device has its columns of both, and the rows of what follows."""
    model = tpplan.read_model(directory)
    found = {(part.name, part.device): part for part in iter_slices(even_plan(model, 2), model)}
    part = found[f"{EXPERTS}gate_up_proj", 1]
    assert (part.dim, part.ranges, part.shape) == (1, ((4, 8), (12, 16)), (3, 8, 16))
    assert (found[f"{EXPERTS}down_proj", 0].dim, found[f"{EXPERTS}down_proj", 0].ranges) == (2, ((0, 4),))


@settings(max_examples=examples(15))
@given(data=st.data())
def test_parts_together_are_the_checkpoint(directory: Path, data: st.DataObject) -> None:
    """By any plan, all devices have their slices, and nothing of what no plan needs."""
    model = tpplan.read_model(directory)
    plan = data.draw(plans_of(model))
    known = families.tolerated("qwen3_5_moe").renamed
    saved = {renamed(name, known): tensor for name, tensor in saved_values(directory).items() if name not in BESIDES}
    assert_loaded(plan, model, loaded(plan, directory), saved)


def test_a_plan_for_the_other_form_is_refused(directory: Path) -> None:
    """A plan made from config.json alone is for experts that are tensors of their own."""
    plan = even_plan(tpplan.read_model(directory / "config.json"), 2)
    with pytest.raises(tpplan.ModelError, match="is not the model that the plan for m was made for") as caught:
        loaded(plan, directory)
    assert "plan again from this checkpoint" in caught.value.hint


def test_a_dtype_that_differs_is_named(directory: Path, tmp_path: Path) -> None:
    """Where nothing else does."""
    tensors = tensors_of(stacked=True)
    name = "model.language_model.layers.0.linear_attn.A_log"
    other = write_checkpoint(tmp_path / "m", CONFIG, tensors | {name: ("F32", tensors[name][1])})
    with pytest.raises(tpplan.ModelError, match=r"A_log in model\.safetensors is F32 and not BF16"):
        loaded(even_plan(tpplan.read_model(directory), 2), other)
