"""What the layouts cut: every label in the tables, and that equal parts of an axis are equal parts of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.family_models import example, hub_config, parameters_of, spec_of
from tpplan.core.axes import Axis

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec


def cut(spec: ModelSpec, suffix: str) -> tuple[int | None, int | None, Axis | None]:
    """Return which dimension each layout cuts (reduce, gather) and the home of a tensor."""
    found = [p for p in parameters_of(spec) if p.name.endswith(suffix)]
    return found[0].cut_dim("reduce"), found[0].cut_dim("gather"), found[0].home


@pytest.mark.parametrize(
    ("model", "suffix", "expected"),
    [
        ("Llama-3.1-8B", "embed_tokens.weight", (0, 0, None)),
        ("Llama-3.1-8B", "lm_head.weight", (0, 0, None)),
        ("Llama-3.1-8B", "q_proj.weight", (0, 0, None)),
        ("Llama-3.1-8B", "o_proj.weight", (1, 0, None)),
        ("Llama-3.1-8B", "down_proj.weight", (1, 0, None)),
        ("Llama-3.1-8B", "input_layernorm.weight", (None, None, None)),
        ("Qwen2.5-7B", "k_proj.bias", (0, 0, None)),
        ("Mixtral-8x7B", "block_sparse_moe.gate.weight", (None, None, Axis.EXPERT_INTERMEDIATE)),
        ("Mixtral-8x7B", "w2.weight", (1, 0, None)),
        ("DeepSeek-V3", "q_a_proj.weight", (None, None, Axis.KV_HEADS)),
        ("DeepSeek-V3", "kv_a_proj_with_mqa.weight", (None, None, Axis.KV_HEADS)),
        ("DeepSeek-V3", "kv_a_layernorm.weight", (None, None, Axis.KV_HEADS)),
        ("DeepSeek-V3", "q_b_proj.weight", (0, 0, None)),
        ("DeepSeek-V3", "kv_b_proj.weight", (0, 0, None)),
        ("DeepSeek-V3", "e_score_correction_bias", (None, None, Axis.EXPERT_INTERMEDIATE)),
    ],
)
def test_what_each_layout_cuts(model: str, suffix: str, expected: tuple[int | None, int | None, Axis | None]) -> None:
    """Columns are cut in both layouts; rows, and what is shared, as the words of the tables say."""
    assert cut(example(model), suffix) == expected


@pytest.mark.parametrize(
    ("model_type", "extra", "suffix", "expected"),
    [
        ("gpt2", {}, "attn.c_proj.weight", (0, 1, None)),
        ("gpt2", {}, "attn.c_attn.weight", (1, 1, None)),
        ("gpt2", {}, "mlp.c_proj.bias", (None, 0, None)),
        ("gpt2", {}, "wpe.weight", (None, None, None)),
        ("qwen3", {}, "q_norm.weight", (None, None, Axis.KV_HEADS)),
        ("olmo2", {}, "q_norm.weight", (0, 0, None)),
        ("cohere", {"use_qk_norm": True}, "k_norm.weight", (0, 0, None)),
        ("qwen2_moe", {}, "shared_expert_gate.weight", (None, None, Axis.SHARED_INTERMEDIATE)),
        ("qwen2_moe", {}, "shared_expert.down_proj.weight", (1, 0, None)),
        ("llama", {"attention_bias": True}, "o_proj.bias", (None, 0, None)),
        ("olmo3", {}, "k_norm.weight", (0, 0, None)),
        ("apertus", {}, "act_fn.alpha_p", (None, None, Axis.INTERMEDIATE)),
        ("apertus", {}, "act_fn.beta", (None, None, Axis.INTERMEDIATE)),
        ("granite_swa", {}, "self_attn.sinks", (0, 0, None)),
        ("bloom", {}, "query_key_value.weight", (0, 0, None)),
        ("gpt_oss", {}, "down_proj_bias", (None, 1, None)),
    ],
)
def test_what_each_layout_cuts_elsewhere(
    model_type: str, extra: dict[str, Any], suffix: str, expected: tuple[int | None, int | None, Axis | None]
) -> None:
    """The same for families that store tensors in their own ways."""
    assert cut(spec_of(hub_config({"model_type": model_type, **extra}).to_dict()), suffix) == expected
