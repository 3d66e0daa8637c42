"""What ``inspect`` tells of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import command

MODELS = Path(__file__).parents[2] / "examples/models"

KEYS = [
    "$schema",
    "architecture",
    "model_type",
    "layers",
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
OPTIONAL = {"assumed", "not_planned", "notes"}

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
    planned = json.loads(command("plan", tmp_path, "--gpus", "8GiB", "--cache", "q8", "--json").out)
    assert planned["request"]["cache"]["tokens"] == found["max_context"] == 4096
    assert planned["memory"][0]["cache_bytes"] == whole["q8"]
    assert "Cache per token, until the sliding windows are full\n" in command("inspect", tmp_path).out
