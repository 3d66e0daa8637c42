"""The models of all devices of a process, put together as one."""

from __future__ import annotations

import inspect
import logging
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig

from tpplan.core.axes import Axis
from tpplan.errors import RequestError
from tpplan.models.families.wrappers import WRAPPERS
from tpplan.transformers.build import build, fill
from tpplan.transformers.cache import split_cache
from tpplan.transformers.classes import check_arguments, on_meta, refuse_images, starts, text_of
from tpplan.transformers.graphs import NotCapturedError, captures, step
from tpplan.transformers.heads import read_by_index, slice_alibi
from tpplan.transformers.layers import Layers
from tpplan.transformers.load import Names, Stored
from tpplan.transformers.lockstep import Lockstep
from tpplan.transformers.mamba import divide_mamba
from tpplan.transformers.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.transformers.counts import Counts
    from tpplan.weights.source import Source

_LOG = logging.getLogger(__name__)


def assemble(
    source: Source, plan: SplitPlan, ctx: TPContext, config: Any, tensors: Mapping[int, Mapping[str, Tensor]]
) -> Any:
    """Return a model of transformers with these slices of its weights.

    Args:
        source: the checkpoint.
        plan: the plan that cuts it.
        ctx: the compiled plan.
        config: transformers' config of a class that has the language model.
        tensors: slices of each device of this process, by name.

    Raises:
        ModelError: transformers has no place for a tensor.
        RequestError: the plan cuts what transformers does not compute in parts.
    """
    config.dtype = getattr(torch, source.model.dtype)
    names = names_of(source.model, on_meta(config))
    lockstep = Lockstep({index: device.device for index, device in ctx.devices.items()})
    operations = Operations(ctx, lockstep)
    models, counts = {}, {}
    for index, device in ctx.devices.items():
        models[index], counts[index] = build(plan, source.model, config, index)
        fill(models[index], names, tensors[index], counts[index], device.device, tied=source.model.tied_embeddings)
        missing = {layer: each.missing for layer, each in enumerate(counts[index])}
        Layers(models[index], index, operations, missing, source.model.by_layer).change(names.sources)
        read_by_index(models[index], counts[index], device.device)
        slice_alibi(models[index], plan, index)
        divide_mamba(models[index], counts[index], [*source.model.by_layer.values()], device.device)
    return _joined(models, counts, operations, source)


def names_of(model: ModelSpec, whole: Any) -> Names:
    """Return where a model of transformers has the tensors of its checkpoints.

    Args:
        model: the model as planned.
        whole: a model of transformers, not cut.

    Raises:
        ModelError: transformers has no place for a tensor.
    """
    stored = {name: Stored(parameter, layer) for name, parameter, layer in model.tensors()}
    root = WRAPPERS[model.model_type].root if model.model_type in WRAPPERS else ""
    return Names(whole, stored, starts(whole, root))


def _joined(
    models: Mapping[int, Any], counts: Mapping[int, list[Counts]], operations: Operations, source: Source
) -> Any:
    """Return the first model, whose forward pass is that of all, with the settings of a checkpoint for generating."""
    context, lockstep = operations.context, operations.lockstep
    front = next(iter(models.values()))
    signature = inspect.signature(front.forward)
    devices = {index: model.device for index, model in models.items()}
    forwards: dict[int, Callable[..., Any]] = {index: model.forward for index, model in models.items()}
    headless = {
        index: {layer for layer, each in enumerate(own) if Axis.KV_HEADS in each.missing}
        for index, own in counts.items()
    }
    layers = len(next(iter(counts.values())))
    text = text_of(front.config)
    front.captures_steps = captures(source.model, text)
    if text is not front.config:
        refuse_images(front)

    def run(given: Mapping[str, Any]) -> Any:
        own = {
            index: partial(each, **{key: _on(value, devices[index]) for key, value in given.items()})
            for index, each in forwards.items()
        }
        return next(iter(lockstep.run(own).values()))

    @wraps(front.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        check_arguments(given)
        given = _on(given, next(iter(devices.values())))
        caches = given.get("use_cache")
        caches = text.use_cache if caches is None else caches
        if given.get("past_key_values") is None and caches:
            given["past_key_values"] = DynamicCache(config=front.config)
        cache = given.get("past_key_values")
        if cache is not None:
            split_cache(cache, layers, lockstep, headless)
        _check_tokens(given.get("input_ids"), context.plan.split(Axis.VOCAB).size)
        output = None
        try:
            output = step(context, cache, given, run) if front.captures_steps else None
        except NotCapturedError as error:
            _LOG.warning("decoding steps run without a CUDA graph, which could not be captured: %s", error)
            front.captures_steps = False
        return run(given) if output is None else output

    front.forward, front.device_models = forward, models
    if (source.directory / "generation_config.json").is_file():
        front.generation_config = GenerationConfig.from_pretrained(source.directory)
    if front.generation_config is not None:
        front.generation_config.disable_compile = True  # a graph of all devices takes its place
    return front


def _check_tokens(tokens: Tensor | None, count: int) -> None:
    """Check tokens in host memory; those on GPUs would have to be waited for.

    Raises:
        RequestError: the model has no such token.
    """
    if tokens is None or tokens.device.type != "cpu" or not tokens.numel():
        return
    if not 0 <= (least := int(tokens.min())) <= (most := int(tokens.max())) < count:
        message = f"token {most if least >= 0 else least} is outside the vocabulary of {count}"
        raise RequestError(message, "encode the text with the model's own tokenizer")


def _on(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _on(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(each, device) for each in value)
    return value
