"""Heads that draft for another model: names and shapes as engines load them, and plans of both ways."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import tpplan
from tests.checkpoints import Tensors, tensor_bytes, write_checkpoint
from tests.cli_cases import LLAMA_8B
from tests.command import command
from tests.published import sizes
from tpplan.errors import ModelError
from tpplan.models.families.drafts import DRAFTS, KINDS, is_head, states_of
from tpplan.planner.draft import reserve_for_draft, split_draft
from tpplan.planner.options import Options
from tpplan.planner.plan import plan_request

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.plan import SplitPlan

Shapes = dict[str, tuple[int, ...]]
H, WIDE, VOCAB = 64, 96, 320
_LAYERS: dict[str, Any] = {
    "model_type": "llama",
    **sizes(vocab=VOCAB, hidden=H, dense=WIDE, layers=1, q=4, kv=2, head_dim=16, context=128),
}
_ATTENTION: Shapes = {
    **{f"self_attn.{of}_proj.weight": (64, H) for of in "qo"},
    **{f"self_attn.{of}_proj.weight": (32, H) for of in "kv"},
}
_JOINING: Shapes = {**_ATTENTION, **{f"self_attn.{of}_proj.weight": (64 if of == "q" else 32, 2 * H) for of in "qkv"}}
_HEAD_NORMS: Shapes = {f"self_attn.{of}_norm.weight": (16,) for of in "qk"}
_MLP: Shapes = {"mlp.gate_proj.weight": (WIDE, H), "mlp.up_proj.weight": (WIDE, H), "mlp.down_proj.weight": (H, WIDE)}
_AFTER: Shapes = {"post_attention_layernorm.weight": (H,)}
_NORMS: Shapes = {"input_layernorm.weight": (H,), **_AFTER}
_COPIES: Shapes = {"embed_tokens.weight": (VOCAB, H)}


def at(start: str, *shapes: Shapes) -> Shapes:
    """Return shapes under names that start so."""
    return {f"{start}{name}": shape for each in shapes for name, shape in each.items()}


_EAGLE: Shapes = {"fc.weight": (H, 2 * H), "fc.bias": (H,), **at("layers.0.", _ATTENTION, _AFTER, _MLP)}
_BIASES: Shapes = {f"layers.0.self_attn.{of}_proj.bias": (64 if of == "q" else 32,) for of in "qkv"}
_EAGLE3: Shapes = {"norm.weight": (H,), "lm_head.weight": (80, H)}
_DFLASH: Shapes = {"fc.weight": (H, 4 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
_DFLASH |= {
    name: shape for i in range(2) for name, shape in at(f"layers.{i}.", _NORMS, _ATTENTION, _HEAD_NORMS, _MLP).items()
}
_DFLASH_CONFIG: dict[str, Any] = _LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25]},
}
_MEDUSA: Shapes = {
    **{f"blocks.{head}.layers.{i}.weight": (H, H) for head in range(3) for i in range(2)},
    **{f"lm_heads.{head}.weight": (VOCAB, H) for head in range(3)},
}
_MLP_CONFIG: dict[str, Any] = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": H,
    "inner_dim": 48,
    "n_predict": 3,
    "vocab_size": VOCAB,
}

#: By a name, the config.json of a head, its tensors in files, and the width of the hidden states that it reads.
HEADS: dict[str, tuple[dict[str, Any], Shapes, int]] = {
    # As SafeAILab saves it, whose code gives the matrix that joins a bias if no config says otherwise.
    "EAGLE-LLaMA3-Instruct-8B": (_LAYERS | {"architectures": ["LlamaForCausalLM"]}, _EAGLE, H),
    "EAGLE-Qwen2-7B": (
        _LAYERS | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {**_EAGLE, **_BIASES},
        H,
    ),
    "EAGLE of two layers": (
        _LAYERS | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 2, "bias": False},
        {**{name: s for name, s in _EAGLE.items() if name != "fc.bias"}, **at("layers.1.", _ATTENTION, _NORMS, _MLP)},
        H,
    ),
    "EAGLE for vLLM's first engine": (
        {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": _LAYERS, "eagle_fc_bias": True},
        _EAGLE,
        H,
    ),
    "EAGLE of speculators": (
        {
            "architectures": ["EagleSpeculator"],
            "fusion_bias": False,
            "layernorms": True,
            "transformer_layer_config": _LAYERS,
        },
        {
            "fusion_fc.weight": (H, 2 * H),
            "embedding_layernorm.weight": (H,),
            "pre_lm_head_layernorm.weight": (H,),
            **at("transformer.", _ATTENTION, _AFTER, _MLP),
        },
        H,
    ),
    # Four hidden states, each normed, of a model of another width; layers of Qwen 3.
    "EAGLE-3 of speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": 80,
            "target_hidden_size": 96,
            "eagle_aux_hidden_state_layer_ids": [1, 8, 15, 22],
            "fc_norm": True,
            "transformer_layer_config": _LAYERS | {"model_type": "qwen3", "num_hidden_layers": 2},
        },
        {
            **_EAGLE3,
            "fc.weight": (H, 4 * 96),
            **{f"fc_norm.{i}.weight": (96,) for i in range(4)},
            **at("layers.0.", _NORMS, _JOINING, _HEAD_NORMS, _MLP, {"hidden_norm.weight": (H,)}),
            **at("layers.1.", _NORMS, _ATTENTION, _HEAD_NORMS, _MLP),
            **_COPIES,  # which is none of the model's, as that has another width
        },
        96,
    ),
    "EAGLE-3 of gpt-oss": (
        _LAYERS
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 80, "norm_before_fc": True}
        | {"attention_bias": True},
        {
            **_EAGLE3,
            "fc.weight": (H, 3 * H),
            "input_norm.weight": (3 * H,),
            **at("midlayer.", _NORMS, _JOINING, _MLP, {"hidden_norm.weight": (H,), "self_attn.o_proj.bias": (H,)}),
            **{name.replace("layers.0.", "midlayer."): shape for name, shape in _BIASES.items()},
        },
        H,
    ),
    "P-EAGLE": (
        {
            "architectures": ["PEagleSpeculator"],
            "draft_vocab_size": 80,
            "mask_token_id": 7,
            "transformer_layer_config": _LAYERS,
        },
        {
            **_EAGLE3,
            "embed_tokens.weight": (VOCAB, H),
            "fc.weight": (H, 3 * H),
            **at("layers.0.", _NORMS, _JOINING, _MLP, {"hidden_norm.weight": (H,)}),
        },
        H,
    ),
    "DFlash": (_DFLASH_CONFIG, _DFLASH, H),
    "DFlash of speculators": (
        {
            "architectures": ["DFlashSpeculator"],
            "draft_vocab_size": 80,
            "aux_hidden_state_layer_ids": [1, 9, 17, 25],
            "transformer_layer_config": _LAYERS | {"model_type": "qwen3", "num_hidden_layers": 2},
        },
        {**_DFLASH, "lm_head.weight": (80, H)},
        H,
    ),
    "DFlash of another width": (
        _DFLASH_CONFIG | {"target_hidden_size": 96, "draft_vocab_size": 80},
        {**_DFLASH, "fc.weight": (H, 4 * 96), "lm_head.weight": (80, H), **_COPIES},
        96,
    ),
    "DFlash with sinks": (
        _DFLASH_CONFIG
        | {"dflash_config": {"target_layer_ids": [1, 9, 17, 25], "attention_sink_bias": True}, "attention_bias": True},
        {
            **at("model.", _DFLASH),
            **{f"model.layers.{i}.self_attn.attention_sink_bias": (4,) for i in range(2)},
            **{f"model.layers.{i}.self_attn.o_proj.bias": (H,) for i in range(2)},
            **{name.replace("0", str(i)): s for i in range(2) for name, s in at("model.", _BIASES).items()},
        },
        H,
    ),
    "Medusa": (
        {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2}
        | {"hidden_size": H, "vocab_size": VOCAB},
        _MEDUSA,
        H,
    ),
    # With biases, as its authors save it.
    "Medusa's first": (
        {"medusa_num_heads": 3, "medusa_num_layers": 1, "hidden_size": H, "vocab_size": VOCAB, "medusa_fc_bias": True},
        {
            **{f"{head}.0.linear.weight": (H, H) for head in range(3)},
            **{f"{head}.0.linear.bias": (H,) for head in range(3)},
            **{f"{head}.1.weight": (VOCAB, H) for head in range(3)},
        },
        H,
    ),
    "Medusa with one output matrix": (
        {"architectures": ["MedusaModel"], "medusa_num_heads": 3, "medusa_num_layers": 2, "original_lm_head": True}
        | {"hidden_size": H, "vocab_size": VOCAB, "truncated_vocab_size": 80},
        {**{f"medusa_heads.{name}": s for name, s in _MEDUSA.items() if "lm" not in name}, "lm_head.weight": (80, H)},
        H,
    ),
    "MLP speculator": (
        _MLP_CONFIG,
        {
            **{f"speculator.{of}.{i}.weight": (VOCAB, 48) for of in ("emb", "head") for i in range(3)},
            **{f"speculator.proj.{i}.weight": (48, 48 if i else H) for i in range(3)},
            **{f"speculator.ln.{i}.{kind}": (48,) for i in range(3) for kind in ("weight", "bias")},
        },
        H,
    ),
    "MLP speculator, tied": (
        _MLP_CONFIG | {"tie_weights": True, "scale_input": True, "inner_dim": 0},
        {
            **{f"speculator.{of}.0.weight": (VOCAB, H) for of in ("emb", "head")},
            **{f"speculator.proj.{i}.weight": (H, H) for i in range(2)},
            **{f"speculator.ln.0.{kind}": (H,) for kind in ("weight", "bias")},
        },
        H,
    ),
}


def stored(shapes: Shapes) -> Tensors:
    """Return tensors of these shapes."""
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def alone(name: str, tmp_path: Path) -> Path:
    """Return a head's config.json alone, in a directory of its name."""
    path = tmp_path / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"torch_dtype": "bfloat16"} | HEADS[name][0]))
    return path


@pytest.mark.parametrize("name", HEADS)
def test_names_and_shapes_are_those_that_engines_load(name: str, tmp_path: Path) -> None:
    """Files have the same bytes as a config alone; copies of what the model has do not count."""
    config, shapes, states = HEADS[name]
    copies = _COPIES if name.startswith(("EAGLE", "DFlash")) else {}
    beside: Tensors = {"d2t": ("I64", (80,))} if "draft_vocab_size" in config else {}
    path = write_checkpoint(tmp_path / "stored", config, stored(shapes | copies) | beside)
    spec, described = tpplan.read_model(path), tpplan.read_model(alone(name, tmp_path))
    assert (spec.weight_bytes, described.weight_bytes) == (tensor_bytes(stored(shapes)),) * 2
    assert (states_of(spec), states_of(described)) == (states, states)
    assert is_head(spec.architecture)
    dropped = next(iter(shapes))
    write_checkpoint(path, config, stored({each: s for each, s in shapes.items() if each != dropped} | copies))
    if not dropped.startswith("fc"):
        with pytest.raises(ModelError):
            tpplan.read_model(path)


def left(plan: SplitPlan) -> list[int]:
    """Return what a plan leaves to others on each device."""
    both = zip(plan.devices, plan.memory, strict=True)
    return [device.budget_bytes - entry.used_bytes - entry.free_bytes for device, entry in both]


@pytest.mark.parametrize("name", HEADS)
def test_plans_of_both_ways(name: str, tmp_path: Path) -> None:
    """Every device leaves room for all of a head, or what a plan of the head takes there."""
    model, head = tpplan.read_model(LLAMA_8B), tpplan.read_model(alone(name, tmp_path))
    devices = tpplan.parse_devices("24GiB,12GiB")
    asked = Options(context=4096).request(model)
    cached = sum(len(block.layers) * 2 * 2 * 16 * 2 * 4096 for block in head.blocks if block.attention)
    request, plan = split_draft(asked, head, model, devices)
    assert sum(entry.weights_bytes for entry in plan.memory) >= head.weight_bytes
    assert sum(entry.cache_bytes for entry in plan.memory) == cached
    assert left(plan_request(model, devices, request)) == [e.used_bytes - e.overhead_bytes for e in plan.memory]
    whole, again = left(plan_request(model, devices, reserve_for_draft(asked, head, model, devices)))
    assert whole == again
    assert head.weight_bytes + cached < whole < head.weight_bytes + cached + 64 * 2**20


def test_every_kind_is_tested(tmp_path: Path) -> None:
    """Each has a name for people, and for engines that have one."""
    kinds = {tpplan.read_model(alone(name, tmp_path)).model_type for name in HEADS}
    assert kinds == DRAFTS.keys() == KINDS.keys()


def test_sizes_as_published(tmp_path: Path) -> None:
    """EAGLE's head of Llama 3 8B with its embedding has 1.55 GB, and DFlash's of Qwen3-8B 1.05 thousand millions."""
    large = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
    large |= {"vocab_size": 128_256, "head_dim": 128}
    path = alone("EAGLE-LLaMA3-Instruct-8B", tmp_path)
    path.write_text(json.dumps(HEADS["EAGLE-LLaMA3-Instruct-8B"][0] | large | {"torch_dtype": "float16"}))
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336 + 4096
    assert tpplan.read_model(path).parameter_count == 2 * 4096 * 4096 + 4096 + layer
    assert 1.54e9 < tpplan.read_model(path).weight_bytes + 2 * 128_256 * 4096 < 1.56e9
    path = alone("DFlash", tmp_path)
    ids = {"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}
    path.write_text(json.dumps(_DFLASH_CONFIG | large | {"intermediate_size": 12_288, "num_hidden_layers": 5} | ids))
    assert 1.045e9 < tpplan.read_model(path).parameter_count < 1.055e9


def test_an_eagle_head_is_known_by_its_name_or_its_files(tmp_path: Path) -> None:
    """Its config.json is one of a Llama of one layer: vLLM knows it by its name; here files tell it as well."""
    config = HEADS["EAGLE-LLaMA3-Instruct-8B"][0]
    named = tpplan.read_model(alone("EAGLE-LLaMA3-Instruct-8B", tmp_path))
    assert (named.model_type, named.notes) == ("eagle", ("taken for an EAGLE head by its name",))
    told = tpplan.read_model(write_checkpoint(tmp_path / "head", config, stored(_EAGLE)))
    assert (told.model_type, told.notes) == ("eagle", ())
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    assert tpplan.read_model(path).model_type == "llama"
    path.write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert tpplan.read_model(path).model_type == "llama"


def test_files_tell_what_a_config_does_not(tmp_path: Path) -> None:
    """Biases, norms and an output matrix count if they are there; and Medusa's sizes are those of its matrices."""
    for name, more in (
        ("EAGLE-LLaMA3-Instruct-8B", _BIASES),
        ("EAGLE-LLaMA3-Instruct-8B", {**_BIASES, "layers.0.self_attn.o_proj.bias": (H,)}),
        ("P-EAGLE", {f"layers.0.mlp.{of}_proj.bias": (H if of == "down" else WIDE,) for of in ("gate", "up", "down")}),
        ("DFlash", {name.replace("0", str(i)): shape for i in range(2) for name, shape in _BIASES.items()}),
        ("DFlash", {"lm_head.weight": (VOCAB, H), "mask_embedding": (H,)}),
        ("Medusa", {f"blocks.{head}.layers.{i}.bias": (H,) for head in range(3) for i in range(2)}),
    ):
        config, shapes, _ = HEADS[name]
        path = write_checkpoint(tmp_path / "more", config, stored(shapes | more))
        assert tpplan.read_model(path).weight_bytes == tensor_bytes(stored(shapes | more))
    first = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    path = write_checkpoint(tmp_path / "first", first, stored(HEADS["Medusa's first"][1]))
    assert tpplan.read_model(path).vocab_size == VOCAB


@pytest.mark.parametrize("shape", [(VOCAB,), (2, VOCAB, H)])
def test_medusa_files_without_matrices(shape: tuple[int, ...], tmp_path: Path) -> None:
    """They tell no sizes; an error says what there is not."""
    path = write_checkpoint(tmp_path / "odd", {"medusa_num_heads": 3}, stored({"0.0.linear.weight": shape}))
    with pytest.raises(ModelError, match="hidden_size and vocab_size missing"):
        tpplan.read_model(path)


def test_a_bias_that_is_null(tmp_path: Path) -> None:
    """It is none, as any flag that is null."""
    name = "EAGLE-LLaMA3-Instruct-8B"
    path = alone(name, tmp_path)
    biased = tpplan.read_model(path).parameter_count
    path.write_text(json.dumps(HEADS[name][0] | {"fusion_bias": None}))
    assert tpplan.read_model(path).parameter_count == biased - H


def test_layers_with_windows(tmp_path: Path) -> None:
    """DFlash's layers may have them, all of them by its own section."""
    path = alone("DFlash", tmp_path)
    for told, windows in (
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}, {32, 0}),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 16}}, {16}),
        ({"use_sliding_window": True, "sliding_window": 32}, {0}),
    ):
        path.write_text(json.dumps(_DFLASH_CONFIG | told))
        found = {block.attention.window for block in tpplan.read_model(path).blocks if block.attention}
        assert found == windows


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("Medusa's first", {"vocab_size": None, "hidden_size": None}, "hidden_size and vocab_size missing"),
        ("Medusa", {"num_hidden_layers": 9}, "outside 0 to 8"),
        ("Medusa", {"num_heads": 17}, "outside 1 to 16"),
        ("MLP speculator", {"tie_weights": True, "n_predict": 1}, "tie_weights is true, but n_predict is 1"),
        ("EAGLE-3 of gpt-oss", {"draft_vocab_size": 321}, "draft_vocab_size is 321, more than the 320 of vocab_size"),
        ("DFlash", {"draft_vocab_size": 321}, "draft_vocab_size is 321, more than the 320 of vocab_size"),
        ("DFlash", {"architectures": ["Qwen3DSparkModel"]}, "architecture 'Qwen3DSparkModel' of model type qwen3"),
    ],
)
def test_what_is_refused(name: str, change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """An error has names and numbers, and a hint."""
    path = alone(name, tmp_path)
    path.write_text(json.dumps({key: v for key, v in (HEADS[name][0] | change).items() if v is not None}))
    with pytest.raises(ModelError, match=problem) as caught:
        tpplan.read_model(path)
    assert caught.value.hint


def test_the_command(tmp_path: Path) -> None:
    """A head without any cache is planned for as others are, whole and split."""
    path, output = alone("Medusa", tmp_path), tmp_path / "plan.json"
    asked = ("plan", LLAMA_8B, "--gpus", "24GiB,12GiB", "--context", "4096", "--draft", path, "-o", output)
    assert command(*asked).code == 0
    assert command(*asked, "--draft-output", tmp_path / "draft.json").code == 0
    plan = tpplan.load(tmp_path / "draft.json")
    assert plan.model.architecture == "MedusaModel"
    assert command("validate", tmp_path / "draft.json").code == 0
    assert command("show", tmp_path / "draft.json").code == 0
    assert command("inspect", path).code == 0
