"""A model of transformers on the devices of a plan, which is used like one on a single device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers import CONFIG_MAPPING, AutoConfig

from tpplan.errors import RequestError
from tpplan.models.config import COMPARE
from tpplan.transformers.assembly import assemble
from tpplan.transformers.classes import runnable
from tpplan.transformers.trial import check_small_model
from tpplan.weights import load_weights
from tpplan.weights.source import Source

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext

#: Characters that are told of an error of transformers.
_LONGEST: Final = 200


def shard(directory: str | Path | Source, plan: SplitPlan, ctx: TPContext, *, trial: bool = True) -> Any:
    """Load a checkpoint into transformers' model of it, on the devices of a plan.

    Each device has its slices of the weights, as many bytes as the plan's ledger counts, and runs transformers' own
    modules with them; ``ctx`` puts together what is partial. What the model returns is on the first device of this
    process. ``generate`` works as usual. In several processes, each calls the model at the same time with the same
    inputs, and seeds torch alike before it samples.

    Args:
        directory: directory with config.json and safetensors files, or what was read of it.
        plan: the plan to load by.
        ctx: the compiled plan.
        trial: whether to try a small random model of the same kind first, whole and sharded, in some seconds.

    Returns:
        The model of transformers (``…ForCausalLM``). Its methods are those of a whole one, but parameters are those of
        the first device; ``device_models`` has the model of each device of this process, by index, and
        ``captures_steps`` tells whether decoding steps over a static cache become CUDA graphs.

    Raises:
        PlanError: the plan breaks a rule, or a value of it is not what the model or the plan's own cuts decide.
        ModelError: the directory has another model than the plan is for, or tensors that transformers does not know.
        RequestError: transformers has no class for the model or does not compute it in parts, the trial gave other
            logits, or weights or cache are not plain numbers.
        ExecutionError: a device has too little memory, or the context is closed.
    """
    source = directory if isinstance(directory, Source) else Source.read(Path(directory))
    config = config_of(source, plan)
    if trial:
        check_small_model(config, plan.request.layout, plan.request.kv)
    return assemble(source, plan, ctx, config, load_weights(plan, source, ctx).tensors)


def config_of(source: Source, plan: SplitPlan) -> Any:
    """Return transformers' config of a checkpoint's language model, or of the model around it that has its only class.

    Raises:
        RequestError: transformers has no class for it, or cannot run with this plan or these weights.
    """
    if not source.model.is_plain:
        what = f"the weights of {source.directory} are {source.model.weight_format}"
        raise RequestError(f"{what}, which are not computed by transformers on a plan", "take weights of 16 bits")
    if plan.request.cache.kind != "fp16":
        what = f"the plan caches keys and values as {plan.request.cache.kind}, transformers as numbers of 16 bits"
        raise RequestError(what, "plan with --cache fp16")
    name = source.model.model_type
    try:
        config = AutoConfig.from_pretrained(source.directory, trust_remote_code=False)
    except Exception as error:  # of kinds that differ between its versions
        told = " ".join(str(error).split())[:_LONGEST]
        message = f"transformers does not read the config of models of type {name}: {told}"
        raise RequestError(message, COMPARE if name in CONFIG_MAPPING else "upgrade transformers") from error
    found = runnable(config)
    if found is None:
        message = f"transformers has no class for models of type {name}"
        raise RequestError(message, "docs/run-a-model.md lists what runs")
    return found
