"""Settings of a model's config.json that the decoder needs and a plan does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from tpplan.axes import Axis
from tpplan.config import read_config
from tpplan.decoder.cache import check_kind
from tpplan.decoder.stored import check_formats
from tpplan.exec.rope.tables import Rope
from tpplan.formats import Scheme, read_scheme

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.config import Config
    from tpplan.model import ModelSpec
    from tpplan.plan import SplitPlan

#: Activation functions by ``hidden_act`` of a config.json; they work in place.
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": partial(functional.silu, inplace=True),
    "gelu": torch.ops.aten.gelu_,
    "gelu_pytorch_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
}


@frozen
class Experts:
    """Names of the matrices of a layer's experts, relative to the layer; ``{expert}`` is the number of the expert.

    Attributes:
        router: router matrix, which scores the experts.
        gate: gate matrix, whose output gets the activation.
        up: up matrix.
        down: down matrix.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"


@frozen(kw_only=True)
class Family:
    """What the models of an architecture have in common, and defaults for keys that a config.json leaves out.

    Attributes:
        norm_eps: default of ``rms_norm_eps``.
        activation_key: key of the activation's name.
        activation: default name of the activation.
        offset: number added to the stored weights of a norm (Gemma stores them minus 1).
        sandwich: whether the outputs of attention and MLP are normed too.
        scaled_embedding: whether the embedding is multiplied by the square root of the hidden size.
        attention_scalar: default of ``query_pre_attn_scalar``; None if scores are divided by the square root of the
            head size.
        attention_cap: default of ``attn_logit_softcapping``; None if the family has no such cap.
        logit_cap: default of ``final_logit_softcapping``; None if the family has no such cap.
        experts: names of the experts' matrices.
        normalised: whether the weights of a token's experts add up to 1; None if ``norm_topk_prob`` decides.
    """

    norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    offset: float = 0.0
    sandwich: bool = False
    scaled_embedding: bool = False
    attention_scalar: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts: Experts = Experts()
    normalised: bool | None = None


_MIXTRAL: Final = Experts(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma2": Family(
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        offset=1.0,
        sandwich=True,
        scaled_embedding=True,
        attention_scalar=256.0,
        attention_cap=50.0,
        logit_cap=30.0,
    ),
    "phi3": Family(norm_eps=1e-5),
    "mixtral": Family(norm_eps=1e-5, experts=_MIXTRAL, normalised=True),
    "qwen3_moe": Family(),
}


@frozen(kw_only=True)
class Settings:
    """Settings of one model.

    Attributes:
        family: settings common to its architecture.
        norm_eps: epsilon that norms add to the mean square.
        activation: activation function of the gate.
        attention_scalar: scores are divided by the square root of it; None for the head size.
        attention_cap: soft cap: scores ``s`` become ``cap · tanh(s / cap)``; None if there is none.
        logit_cap: soft cap of the logits, likewise.
        normalised: whether the weights of a token's experts add up to 1.
        rope: parameters of RoPE.
        scheme: how the checkpoint stores quantised matrices.
    """

    family: Family
    norm_eps: float
    activation: Callable[[Tensor], Tensor]
    attention_scalar: float | None
    attention_cap: float | None
    logit_cap: float | None
    normalised: bool
    rope: Rope
    scheme: Scheme

    @classmethod
    def read(cls, config: Config) -> Self:
        """Read the settings of a model from its config.json.

        Raises:
            ModelError: the decoder does not know the architecture, the activation or the kind of RoPE, or a number is
                invalid.
        """
        model_type = config.text("model_type")
        family = FAMILIES.get(model_type)
        if family is None:
            problem = f"the decoder does not compute models of type {model_type[:60]!r}"
            raise config.error(problem, f"it computes {', '.join(FAMILIES)}")
        name = config.text(family.activation_key) or family.activation
        if name not in ACTIVATIONS:
            raise config.error(f"{family.activation_key} is {name[:60]!r}", f"known are {', '.join(ACTIVATIONS)}")
        normalised = config.flag("norm_topk_prob") if family.normalised is None else family.normalised
        return cls(
            family=family,
            norm_eps=_number(config, "rms_norm_eps", family.norm_eps) or family.norm_eps,
            activation=ACTIVATIONS[name],
            attention_scalar=_number(config, "query_pre_attn_scalar", family.attention_scalar),
            attention_cap=_number(config, "attn_logit_softcapping", family.attention_cap),
            logit_cap=_number(config, "final_logit_softcapping", family.logit_cap),
            normalised=normalised,
            rope=_rope(config),
            scheme=read_scheme(config),
        )


def settings_of(directory: str | Path, model: ModelSpec) -> Settings:
    """Return the settings of a model, and check that the decoder supports it.

    Args:
        directory: the model's directory, with a config.json.
        model: the model, from :func:`tpplan.read_model`.

    Raises:
        ModelError: the decoder does not know the architecture, the activation or the kind of RoPE, a number is invalid,
            or weights have a format that the decoder does not support, see
            :func:`tpplan.decoder.stored.check_formats`.
    """
    config = read_config(directory)
    settings = Settings.read(config)
    check_formats(model, settings.scheme, str(directory))
    return settings


def check_model(directory: str | Path, model: ModelSpec, plan: SplitPlan) -> None:
    """Check that the decoder supports a model and its plan; this can be done before the weights are loaded.

    Args:
        directory: the model's directory, with a config.json.
        model: the model, from :func:`tpplan.read_model`.
        plan: a plan for the model.

    Raises:
        ModelError: see :func:`settings_of`.
        ExecutionError: the decoder has no cache of the plan's kind.
    """
    settings_of(directory, model)
    for split in plan.splits:
        if split.axis is Axis.KV:
            check_kind(plan.request.cache.kind, split.width)


def _rope(config: Config) -> Rope:
    """Return the parameters of RoPE in the neox style: element i is paired with the one half the rotated part later.

    Raises:
        ModelError: the kind of RoPE is unknown, or it pairs neighbouring elements.
    """
    rope = Rope.from_config(config.data)
    if rope.style != "neox":
        raise config.error("rope_interleave is true", "the decoder does not turn neighbouring elements together")
    return rope


def _number(config: Config, key: str, default: float | None) -> float | None:
    """Return a positive number of a config.json, or None for null; a key without a default is ignored."""
    if default is None or key not in config:
        return default
    value = config.raw(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and isfinite(value)):
        raise config.error(f"{key} is {str(value)[:60]}, expected a number above 0")
    return float(value)
