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
from tests.family_models import INCOMPLETE_DEFAULTS, hub_config
from tests.later import transformers
from tpplan.core.plan import Cache, Request
from tpplan.exec import compile as compile_plan
from tpplan.transformers import shard
from tpplan.transformers.trial import small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.core.plan import SplitPlan

#: One family of each kind: grouped heads, fused projections, windows and sinks, experts, latent and linear attention,
#: norms over all heads, heads of the hidden size.
KINDS = (
    *("llama", "phi3", "gemma3_text", "gpt_oss", "mixtral", "qwen2_moe", "deepseek_v3", "qwen3_next", "olmo2"),
    *("gpt2", "stablelm"),
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
    """Return transformers' default config of a family."""
    return hub_config({"model_type": model_type, **INCOMPLETE_DEFAULTS.get(model_type, {})})


@cache
def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> Model:
    """Make a family's model, once."""
    torch.manual_seed(sum(map(ord, model_type)))
    whole = transformers.AutoModelForCausalLM.from_config(small(default_config(model_type)), dtype=dtype).eval()
    for parameter in whole.parameters():
        parameter.data.normal_(0 if parameter.dim() > 1 else 0.5, 0.1)
    _KEPT.append(TemporaryDirectory())
    whole.save_pretrained(_KEPT[-1].name)
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
