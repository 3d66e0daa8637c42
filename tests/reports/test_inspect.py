"""What ``inspect`` tells of a model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli_cases import ROOT
from tests.command import command
from tests.later import transformers
from tpplan.files.codec import unstructure
from tpplan.models.config import Config
from tpplan.models.families import spec_from_config
from tpplan.render.inspection import inspection
from tpplan.reports.inspect import inspect

if TYPE_CHECKING:
    from pathlib import Path

MODELS = ROOT / "examples/models"

KEYS = [
    "$schema",
    "architecture",
    "model_type",
    "layers",
    "layer_kinds",
    "hidden_size",
    "intermediate_size",
    "q_heads",
    "kv_heads",
    "head_dim",
    "linear_key_heads",
    "linear_value_heads",
    "vocab_size",
    "tied_embeddings",
    "experts",
    "parameters",
    "weight_bytes",
    "weight_format",
    "assumed",
    "not_planned",
    "cache_bytes_per_token",
    "state_bytes_per_sequence",
    "max_context",
    "context_basis",
    "max_context_cache_bytes",
    "fingerprint",
    "notes",
]
#: Those that are left out where there is nothing to say.
OPTIONAL = {"assumed", "not_planned", "notes", "layer_kinds"}

#: Published numbers: parameters and cache bytes per token at 16 bits from the models' own papers and cards.
TRUTHS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "layers": 32,
        "intermediate_size": 14336,
        "q_heads": 32,
        "kv_heads": 8,
        "experts": 0,
        "parameters": 8_030_261_248,
        "weight_bytes": 16_060_522_496,
        "cache": 131_072,
    },
    "Llama-3.1-70B": {"layers": 80, "kv_heads": 8, "head_dim": 128, "parameters": 70_553_706_496, "cache": 327_680},
    "Mixtral-8x7B": {"experts": 8, "intermediate_size": 14336, "parameters": 46_702_792_704, "cache": 131_072},
    "DeepSeek-V3": {
        "experts": 256,
        "intermediate_size": 18432,
        "kv_heads": 128,
        "linear_key_heads": 0,
        "cache": 70_272,
        "not_planned": [{"what": "prediction layers"}],
        "state_bytes_per_sequence": 0,
    },
    "Qwen3-Next-80B-A3B": {
        "experts": 512,
        "kv_heads": 2,
        "linear_key_heads": 16,
        "linear_value_heads": 32,
        "parameters": 79_674_391_296,
        "cache": 24_576,
        "state_bytes_per_sequence": 36 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2),
    },
}


def _inspect(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("inspect", MODELS / model, "--json").out)
    return found


@pytest.mark.parametrize("model", TRUTHS)
def test_numbers(model: str) -> None:
    """The document has the keys that it promises, in their order, and the numbers that are published."""
    found = _inspect(model)
    assert list(found) == [key for key in KEYS if key in found or key not in OPTIONAL]
    assert {**found, "cache": found["cache_bytes_per_token"]["fp16"]}.items() >= TRUTHS[model].items()


def test_cache_kinds() -> None:
    """8.5, 6.5 and 4.5 bits per element are exact parts of the 16-bit cache."""
    costs = _inspect("Llama-3.1-70B")["cache_bytes_per_token"]
    assert costs == {"fp16": 327_680, "fp8": 163_840, "q8": 174_080, "q6": 133_120, "q4": 92_160}


def test_screen() -> None:
    """People see the same numbers with their units."""
    out = command("inspect", MODELS / "Llama-3.1-8B").out
    assert out.startswith("LlamaForCausalLM  llama\n")
    for words in (
        "8.03 billion",
        "14.96 GiB in BF16",
        "32 query heads",
        "8 KV heads of 128",
        "16.00 GiB for 131072 tokens",
    ):
        assert words in out
    assert "Cache per token\n" in out
    assert "linear" not in out


def test_screen_of_linear_attention() -> None:
    """The state is told beside what a token takes, and is in what the longest context takes."""
    out = command("inspect", MODELS / "Qwen3-Next-80B-A3B").out
    assert "linear attention            16 key heads  32 value heads\n" in out
    assert "Cache per token, beside 74.25 MiB of state per sequence\n" in out
    assert "24,576 bytes  6.07 GiB for 262144 tokens" in out


def test_windows_keep_less_of_a_long_sequence(tmp_path: Path) -> None:
    """What the longest context takes is what a plan for it counts: of layers with windows, these."""
    shapes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "sliding_window": 512}
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | shapes | heads))
    found = json.loads(command("inspect", tmp_path, "--json").out)
    each, whole = found["cache_bytes_per_token"], found["max_context_cache_bytes"]
    assert {kind: 512 * size for kind, size in each.items()} == whole
    planned = json.loads(command("plan", tmp_path, "--gpus", "8GiB", "--cache", "q8", "-o", "-").out)
    assert planned["request"]["cache"]["tokens"] == found["max_context"] == 4096
    assert planned["memory"][0]["cache_bytes"] == whole["q8"]
    assert "Cache per token, until the sliding windows are full\n" in command("inspect", tmp_path).out


def inspected(config: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a model of which there is a config alone."""
    return unstructure(inspect(spec_from_config(Config(config, "config.json"), "model")))


def test_kinds_of_layers() -> None:
    """Where layers differ in heads or widths, no number stands for all of them, and each kind is told."""
    text = transformers.Gemma4TextConfig(
        num_hidden_layers=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    )
    found = inspected(text.to_dict())
    sliding, full = {"q_heads": 8, "kv_heads": 4, "head_dim": 256, "window": 512}, {"q_heads": 8, "head_dim": 512}
    assert found["layer_kinds"] == [
        {"layers": "0-1,3-5", **sliding, "intermediate_size": text.intermediate_size},
        {"layers": "2", **full, "kv_heads": 2, "intermediate_size": text.intermediate_size},
        {"layers": "6-7", **full, "kv_heads": 2, "intermediate_size": 2 * text.intermediate_size},
    ]
    assert text.layer_types[-1] == "full_attention"  # which it always is
    screen = "\n".join("".join(text for text, _ in each) for each in inspection(found))
    assert "of 3 kinds" in screen
    assert "KV heads of" not in screen
    assert "intermediate size" not in screen
    assert re.search(r"0-1,3-5 +8 +4 +256 +512 +9216\n", screen)


def test_kinds_without_attention() -> None:
    """Layers without attention are no layers of other heads, so that these are told of all that have some."""
    config = transformers.Lfm2Config(num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"])
    found = inspected(config.to_dict() | {"architectures": ["Lfm2ForCausalLM"]})
    assert [(kind["layers"], kind.get("q_heads")) for kind in found["layer_kinds"]] == [("0-1,3", None), ("2", 32)]
    screen = "\n".join("".join(text for text, _ in each) for each in inspection(found))
    assert "8 KV heads of 80" in screen
    assert "intermediate size" in screen
