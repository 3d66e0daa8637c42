"""Small models of transformers, saved, plans that cut them, and models that are sharded by these."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from tests.decoder_cases import plan_of
from tests.family_configs import VISION
from tests.family_models import INCOMPLETE_DEFAULTS, build, hub_config, save_model
from tpplan.core.plan import Cache, Request
from tpplan.exec import compile as compile_plan
from tpplan.transformers import shard
from tpplan.transformers.small import small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.core.plan import SplitPlan

_SLIDING_FIVE = [*["sliding_attention"] * 4, "full_attention"]

#: Models that a family's default config is not like.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4 that shares keys": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 10,
        "layer_types": _SLIDING_FIVE * 2,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 2,
    },
    "gemma4 of experts": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
    "granitemoehybrid without experts": {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention"] * 16,
        "mamba_n_groups": 2,
        "num_experts_per_tok": 0,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
    },
    "nemotron_h with a latent": {"model_type": "nemotron_h", "moe_latent_size": 1024},
    "falcon with ALiBi": {"model_type": "falcon", "alibi": True, "new_decoder_architecture": False},
    "falcon_h1 with a norm": {"model_type": "falcon_h1", "mamba_n_groups": 2, "mamba_rms_norm": True},
}

#: Models whose language model transformers has only within one that reads images, of the smallest kind.
WITH_IMAGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("glm46v", "glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")},
    "step3p7": {
        "text_config": {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 15,
            "num_sliding_attention_heads": 96,
            "sliding_window": 512,
            "moe_layers_enum": "1,2",
        }
    },
}

#: One family of each kind: grouped heads, fused projections, windows and sinks, experts, latent and linear attention,
#: norms over all heads, heads of the hidden size, layers that differ in heads, Mamba-2 that shares B and C.
KINDS = (
    *("llama", "phi3", "gemma3_text", "gpt_oss", "mixtral", "qwen2_moe", "deepseek_v3", "qwen3_next", "olmo2"),
    *(
        "bloom",
        "deepseek_v4",
        "gpt2",
        "mpt",
        "stablelm",
        "gemma3n_text",
        "mimo_v2_flash",
        "granitemoehybrid",
        "olmo_hybrid",
        "kimi_linear",
        *VARIANTS,
    ),
    *("qwen2_5_vl", "qwen3_vl_moe", "step3p7"),
)

_KEPT: list[TemporaryDirectory[str]] = []


@frozen
class Model:
    """A small model.

    Attributes:
        directory: where it is saved.
        whole: on one device, by transformers.
    """

    directory: Path
    whole: Any


def default_config(model_type: str) -> Any:
    """Return transformers' default config of a family, or that of a variant."""
    if model_type in VARIANTS:
        return hub_config(VARIANTS[model_type])
    if model_type in WITH_IMAGES:
        return hub_config({"model_type": model_type, "vision_config": VISION[model_type], **WITH_IMAGES[model_type]})
    return hub_config({"model_type": model_type, **INCOMPLETE_DEFAULTS.get(model_type, {})})


@cache
def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> Model:
    """Make a family's model, once."""
    torch.manual_seed(sum(map(ord, model_type)))
    whole = build(small(default_config(model_type)), dtype=dtype).eval()
    for parameter in whole.parameters():
        parameter.data.normal_(0 if parameter.dim() > 1 else 0.5, 0.1)
    _KEPT.append(TemporaryDirectory())
    save_model(whole, Path(_KEPT[-1].name), "1GB")
    return Model(Path(_KEPT[-1].name), whole)


def cut(model: Model, devices: int, seed: int, *, layout: str = "reduce", kv: str = "idle", rows: int = 8) -> SplitPlan:
    """Return a plan that cuts all axes at random; some devices may have no part of one."""
    return plan_of(model.directory, devices, Request(layout, "balanced", Cache("fp16", 128), 2, rows, kv), {}, seed)


@contextmanager
def sharded(model: Model, plan: SplitPlan) -> Iterator[Any]:
    """Shard a model over virtual devices, without a trial."""
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        yield shard(model.directory, plan, context, trial=False)


def prompt(length: int = 11, count: int = 1) -> torch.Tensor:
    """Return random tokens."""
    return torch.randint(1, 200, (count, length), generator=torch.Generator().manual_seed(3))
