"""A model of transformers with what one device has of every layer."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpplan.transformers.classes import on_meta, text_of
from tpplan.transformers.counts import BY_ATTRIBUTE, Counts, count_channels, count_heads, settings
from tpplan.transformers.load import dtypes, put

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import SplitPlan
    from tpplan.transformers.load import Names, Stored


def build(plan: SplitPlan, model: ModelSpec, config: Any, device: int) -> tuple[Any, list[Counts]]:
    """Return a model without values whose modules count a device's heads and columns, and the counts of each layer.

    Layers that are cut otherwise than the first one come from models of their own.

    Args:
        plan: the plan.
        model: the model as planned.
        config: that of the whole model, of transformers.
        device: index of the device.
    """
    blocks = [*model.by_layer.values()]
    counts = [Counts.of(plan, block, layer, device) for layer, block in enumerate(blocks)]
    wanted = [settings(each, block, text_of(config)) for each, block in zip(counts, blocks, strict=True)]
    common: dict[str, int] = {}
    for each in wanted:
        for name, value in each.items():
            common.setdefault(name, value)
    made = on_meta(_having(config, common))
    others: dict[tuple[tuple[str, int], ...], Any] = {}
    for layer, each in enumerate(wanted):
        other = common | each
        if other == common:
            continue
        signature = tuple(sorted(other.items()))
        if signature not in others:
            others[signature] = on_meta(_having(config, other))
        layers_of(made)[layer] = layers_of(others[signature])[layer]
    for module, own, block in zip(layers_of(made), counts, blocks, strict=True):
        count_channels(module, own, block)
        if text_of(config).model_type in BY_ATTRIBUTE:
            count_heads(module, own, block)
    return made, counts


def _having(config: Any, values: Mapping[str, int]) -> Any:
    """Return a config with other values of the keys that it has."""
    made = deepcopy(config)
    text = text_of(made)
    for key, value in values.items():
        if key == "head_dim" or hasattr(text, key):
            setattr(text, key, value)
    return made


def layers_of(model: Any) -> nn.ModuleList:
    """Return the list of a model's layers."""
    count = text_of(model.config).num_hidden_layers
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)


def fill(
    made: Any,
    names: Names,
    tensors: Mapping[str, Tensor],
    counts: Sequence[Counts],
    place: torch.device,
    *,
    tied: bool,
) -> None:
    """Give a model its values: weights, zeros for what its device has no part of, and tables.

    Args:
        made: a model of :func:`build`.
        names: where transformers has the tensors.
        tensors: the device's slices by name.
        counts: what the device has of each layer.
        place: the device.
        tied: whether the output matrix is the embedding.
    """
    as_loaded = dtypes(made, made.config.dtype)
    filled, stacks = set(), names.stacks(tensors)
    for name, tensor in names.converted(made, tensors):
        # Slices lie in one block of memory, which stacked experts no longer need: what stays of it is copied out.
        put(made, name, tensor.to(as_loaded[name], copy=stacks))
        filled.add(name)
    for name, tensor in made.state_dict().items():
        if name in names.sources and name not in filled:
            shape = tensor.shape if names.converts(name) else _least(names.sources[name], counts, tensor.shape)
            put(made, name, torch.zeros((), dtype=tensor.dtype, device=place).expand(shape))
    if tied:
        made.get_output_embeddings().weight = made.get_input_embeddings().weight
    for module in made.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=place)  # noqa: SLF001
    initialise_buffers(made)
    for module in made.modules():
        if hasattr(module, "nf"):  # what a Conv1D calls its outputs
            module.nf = module.weight.shape[1]
    made.requires_grad_(requires_grad=False).eval()


def _least(stored: Stored, counts: Sequence[Counts], built: Sequence[int]) -> Sequence[int]:
    """Return the shape of a tensor of which a device has no part, by the least that modules count."""
    parameter, layer = stored.parameter, stored.layer
    if layer is None or len(parameter.shape) != len(built):
        return built
    own = counts[layer]
    return [sum(own.part(segment) for segment in dim) for dim in parameter.dims]


def initialise_buffers(made: Any) -> None:
    """Let transformers compute what no checkpoint has, such as frequencies of RoPE."""
    for tensor in made.parameters():
        tensor._is_hf_initialized = True  # noqa: SLF001 (by which transformers knows what is loaded)
    loaded: Sequence[str] = [*made.state_dict()]
    for name in loaded:
        made.get_parameter_or_buffer(name)._is_hf_initialized = True  # noqa: SLF001
    made.initialize_weights()
