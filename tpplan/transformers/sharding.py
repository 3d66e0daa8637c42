"""A model of transformers on the devices of a plan, which is used like one on a single device."""

from __future__ import annotations

import inspect
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, Cache, DynamicCache

from tpplan.core.axes import Axis
from tpplan.errors import RequestError
from tpplan.transformers.build import blocks_by_layer, build, fill, on_meta
from tpplan.transformers.cache import share
from tpplan.transformers.heads import read_by_index
from tpplan.transformers.layers import Layers, Operations
from tpplan.transformers.load import Names, stored_tensors
from tpplan.transformers.lockstep import Lockstep
from tpplan.weights import load_weights
from tpplan.weights.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.transformers.counts import Counts


def shard(directory: str | Path | Source, plan: SplitPlan, ctx: TPContext) -> Any:
    """Load a checkpoint into transformers' model of it, on the devices of a plan.

    Each device has its slices of the weights, as many bytes as the plan's ledger counts for them, and runs transformers'
    own modules with them; ``ctx`` puts together what is partial. What the model returns is on the first device of this
    process. ``generate`` works as usual. In several processes, each calls the model at the same time with the same
    inputs, and seeds torch alike before it samples.

    Args:
        directory: directory with config.json and safetensors files, or what was read of it.
        plan: the plan to load by.
        ctx: the compiled plan.

    Returns:
        The model of transformers (``…ForCausalLM``). Its methods are those of a whole one, but parameters are those of
        the first device.

    Raises:
        PlanError: the plan breaks a rule, or a value of it is not what the model or the plan's own cuts decide.
        ModelError: the directory has another model than the plan is for, or tensors that transformers does not know.
        RequestError: the plan cuts what transformers does not compute in parts.
        ExecutionError: a device has too little memory, or the context is closed.
    """
    source = directory if isinstance(directory, Source) else Source.read(Path(directory))
    weights = load_weights(plan, source, ctx)
    return assemble(source, plan, ctx, AutoConfig.from_pretrained(source.directory), weights.tensors)


def assemble(
    source: Source, plan: SplitPlan, ctx: TPContext, config: Any, tensors: Mapping[int, Mapping[str, Tensor]]
) -> Any:
    """Return a model with these slices of its weights, see :func:`shard`."""
    stored = stored_tensors(source.model)
    config.dtype = getattr(torch, source.model.dtype)
    names = Names(on_meta(config), stored, {})
    lockstep = Lockstep({index: device.device for index, device in ctx.devices.items()})
    operations = Operations(ctx, lockstep)
    models, counts = {}, {}
    for index, device in ctx.devices.items():
        models[index], counts[index] = build(plan, source.model, config, index)
        fill(models[index], names, tensors[index], counts[index], device.device, tied=source.model.tied_embeddings)
        missing = {layer: each.missing for layer, each in enumerate(counts[index])}
        Layers(models[index], index, operations, missing).change(names.sources)
        read_by_index(models[index], counts[index], device.device)
    return _joined(models, counts, lockstep)


def _joined(models: Mapping[int, Any], counts: Mapping[int, list[Counts]], lockstep: Lockstep) -> Any:
    """Return the first model, whose forward pass is that of all."""
    front = next(iter(models.values()))
    signature = inspect.signature(front.forward)
    devices = {index: model.device for index, model in models.items()}
    forwards: dict[int, Callable[..., Any]] = {index: model.forward for index, model in models.items()}
    headless = {
        index: {layer for layer, each in enumerate(own) if Axis.KV_HEADS in each.missing}
        for index, own in counts.items()
    }
    layers = len(next(iter(counts.values())))

    @wraps(front.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        caches = given.get("use_cache", front.config.use_cache)
        if given.get("past_key_values") is None and caches:
            given["past_key_values"] = DynamicCache(config=front.config)
        for value in given.values():
            if isinstance(value, Cache):
                share(value, layers, lockstep, headless)
        own = {
            index: partial(run, **{key: _on(value, devices[index]) for key, value in given.items()})
            for index, run in forwards.items()
        }
        return next(iter(lockstep.run(own).values()))

    front.forward = forward
    return front


def _on(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(each, device) for each in value)
    return value
