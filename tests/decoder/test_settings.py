"""What of a config.json the decoder reads, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from safetensors.torch import save_file

from tests.checkpoints import saved_values
from tests.cli_cases import ROOT
from tests.decoder_cases import model_of
from tests.family_models import INCOMPLETE_DEFAULTS, SAME, hub_config
from tpplan.decoder.model.router import Key, Router
from tpplan.decoder.model.settings import AROUND, FAMILIES, Settings, settings_of
from tpplan.errors import ModelError
from tpplan.models.config import OF_DECODERS, Config, InvalidConfigError, epsilon_of, read_config
from tpplan.models.families import FAMILIES as PLANNED
from tpplan.models.families import spec_from_config
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_weights_of_another_dtype(tmp_path: Path) -> None:
    """A tensor that is stored in another dtype than the others is refused by name."""
    directory = shutil.copytree(model_of("mistral").directory, tmp_path / "tiny")
    tensors = saved_values(directory)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].half()}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.up_proj.weight is stored as F16, the decoder computes"):
        settings_of(directory, read_model(directory))


@pytest.mark.parametrize(
    ("family", "renamed"),
    [
        ("mixtral", {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}),
        ("mixtral", {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}),
        ("qwen3_moe", {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}),
    ],
)
def test_experts_in_another_form(tmp_path: Path, family: str, renamed: dict[str, str]) -> None:
    """Experts that can be planned but not computed with are refused by name, before any weights are loaded."""
    directory = shutil.copytree(model_of(family).directory, tmp_path / "tiny")
    tensors = saved_values(directory)
    for old, new in renamed.items():
        tensors = {
            name.replace(old, new) if ".experts." in name or "moe" in name else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match="the decoder looks for"):
        settings_of(directory, read_model(directory))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in PLANNED and name not in SAME])
def test_slips_of_all_keys_that_the_decoder_looks_up_are_looked_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the config to plan takes as known what is looked up here later."""
    raw = hub_config({"model_type": family, **INCOMPLETE_DEFAULTS.get(family, {})}).to_dict()
    config = Config(json.loads(json.dumps(raw, default=str)), "config.json")
    asked: set[str] = set()
    with monkeypatch.context() as patch:
        for name in ("_find", "__contains__"):
            patch.setattr(Config, name, recording(getattr(Config, name), asked))
        model = spec_from_config(config, "m")
        known = {*asked, *OF_DECODERS, epsilon_of(family)}
        asked.clear()
        Settings.read(Config(config.data, "config.json"), model)
    of_formats = {"compression_config", "expert_dtype", "quantization", "quantization_config"}
    assert asked - known - of_formats <= {"full_attention", "sliding_attention", "qk_rope_head_dim"}  # in RoPE, and MLA
    assert asked & OF_DECODERS


def recording(method: Callable[[Config, str], object], asked: set[str]) -> Callable[[Config, str], object]:
    """Return a method that looks up a key of a config.json, and adds it to others; not of its sections."""

    def look(self: Config, key: str) -> object:
        asked.update([key] * (self.source == "config.json"))
        return method(self, key)

    return look


def test_settings_that_are_refused(tmp_path: Path) -> None:
    """Architectures, activations and numbers that the decoder does not know are named."""
    directory = model_of("llama").directory
    config, model = json.loads((directory / "config.json").read_text()), read_model(directory)
    inner = {"text_config": config | {"model_type": "gemma"}}
    for change, problem in (
        ({"model_type": "gpt2"}, "does not compute models of type 'gpt2'"),
        ({"model_type": "granitemoehybrid"}, "does not compute models of type 'granitemoehybrid'"),
        ({"model_type": "paligemma", **inner}, "does not compute models of type 'paligemma'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        (
            {"model_type": "granite", "residual_multiplier": 0},
            "residual_multiplier is 0, expected a number from 1e-12 to",
        ),
        ({"model_type": "granite", "residual_multiplier": 1e-200}, "residual_multiplier is 1e-200, expected a number"),
        ({"model_type": "granite", "logits_scaling": 1e200}, "logits_scaling is 1e[+]200, expected a number"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"model_type": "gpt_oss", "swiglu_limit": 6.0}, "swiglu_limit is '6.0'"),
        ({"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"model_type": "llava", "text_config": config | {"model_type": "cohere"}}, "models of type 'cohere'"),
        ({"is_causal": False}, "is_causal is false"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"partial_rotary_factor": 0.5}, "RoPE turns 4 of 8 elements of a head"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_interleave": True}, "rope_interleave is true"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=problem):
            Settings.read(read_config(tmp_path), model)


def test_routers_that_are_refused(tmp_path: Path) -> None:
    """Groups that do not divide the experts, too few eligible experts, and weights that would be of no use."""
    directory = model_of("glm4_moe").directory
    config, model = json.loads((directory / "config.json").read_text()), read_model(directory)
    for change, problem in (
        ({"n_group": 3}, r"8 experts in 3 groups \(n_group\) of which 2 are eligible"),
        ({"n_group": 8}, r"8 experts in 8 groups"),
        ({"topk_group": 5}, r"of which 5 are eligible \(topk_group\)"),
        ({"topk_group": 1}, r"a token has 3 experts \(num_experts_per_tok\), only 2 are eligible"),
        ({"n_group": 0}, "n_group is 0"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number from 1e-06 to 1e[+]06"),
        ({"routed_scaling_factor": "1"}, "routed_scaling_factor is '1', expected a number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=problem) as error:
            Settings.read(read_config(tmp_path), model)
        assert isinstance(error.value, InvalidConfigError) is ("only" not in problem)  # transformers computes that one


def test_weights_of_scores_beside_another_scaling(tmp_path: Path) -> None:
    """In transformers they count whatever scales RoPE, in the decoder with YaRN only."""
    directory = model_of("deepseek_v3").directory
    config, model = json.loads((directory / "config.json").read_text()), read_model(directory)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "mscale_all_dim": 0.7}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "rope_scaling": None}))
    with pytest.raises(ModelError, match="mscale_all_dim is given"):
        Settings.read(read_config(tmp_path), model)


def test_what_routers_depend_on(tmp_path: Path) -> None:
    """Keys that a family's models have count, with the defaults of transformers; other keys are ignored."""
    directory = model_of("glm4_moe").directory
    config, model = json.loads((directory / "config.json").read_text()), read_model(directory)
    grouped = Router(sigmoid=True, groups=4, eligible=2, best=2, normalised=True, factor=1.7, wide=True)
    no_groups = {"n_group": None, "topk_group": None, "routed_scaling_factor": None, "norm_topk_prob": None}
    others = {"model_type": "qwen3_moe", "norm_topk_prob": None, "rope_parameters": None, "partial_rotary_factor": 1.0}
    for change, router in (
        ({}, grouped),
        ({"norm_topk_prob": False}, evolve(grouped, normalised=False)),
        (no_groups, Router(sigmoid=True, best=2, normalised=True, wide=True)),
        (others, Router()),
        (others | {"norm_topk_prob": True}, Router(normalised=True)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert Settings.read(read_config(tmp_path), model).router == router


def test_methods_of_grouping() -> None:
    """DeepSeek-V2's ``topk_method`` says whether experts are in groups; without it they are in none."""
    blocks = read_model(model_of("glm4_moe").directory).blocks
    keys: tuple[Key, ...] = ("topk_method", "n_group", "topk_group")
    groups = {"n_group": 4, "topk_group": 2}
    for method, expected in (
        ({"topk_method": "group_limited_greedy"}, Router(groups=4, eligible=2)),
        ({"topk_method": "greedy"}, Router()),
        ({}, Router()),
    ):
        assert Router().read(Config({**groups, **method}, "config.json"), keys, blocks) == expected
    with pytest.raises(ModelError, match="topk_method is 'noaux'") as error:
        Router().read(Config({**groups, "topk_method": "noaux"}, "config.json"), keys, blocks)
    assert error.value.hint == "known are greedy, group_limited_greedy"


def test_the_page_lists_what_is_computed() -> None:
    """Every family, and every kind of model of text and images."""
    page = (ROOT / "docs" / "run-a-model.md").read_text(encoding="utf-8")
    section = page.partition("### What the decoder computes")[2].partition("\n- ")[0]
    listed = set(re.findall(r"\w+", section))
    assert not {name.removesuffix("_text") for name in (*FAMILIES, *AROUND)} - listed
