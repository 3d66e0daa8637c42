"""Attention of a device that reads what is whole, or not as its number of heads says: replicated KV heads, ALiBi."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tpplan.core.axes import Axis
from tpplan.errors import RequestError
from tpplan.transformers.build import layers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.transformers.counts import Counts

#: How attention functions are called that first give each query head its KV head.
_PREFIX: Final = "tpplan_"

#: What transformers calls the slopes that it passes to attention, and the projections of modules that add them.
_SLOPES: Final = {"alibi", "position_bias"}
_FUSED: Final = ("query_key_value", "Wqkv")


def read_by_index(model: Any, counts: Sequence[Counts], place: torch.device) -> None:
    """Let the attention of layers read KV heads as the counts say, where that does not follow from their numbers.

    Args:
        model: a device's model.
        counts: what the device has of each layer.
        place: the device.

    Raises:
        RequestError: the model's attention cannot be told.
    """
    for layer, each in zip(layers_of(model), counts, strict=True):
        if not each.kv_head_of:
            continue
        found: list[Any] = [module for module in layer.modules() if hasattr(module, "num_key_value_groups")]
        if len(found) != 1:
            message = f"{type(layer).__name__} of transformers does not say how query heads share KV heads"
            raise RequestError(message, "plan without --kv replicate")
        found[0].num_key_value_groups = 1
        found[0].tpplan_heads = torch.tensor(each.kv_head_of, device=place)
        kind = found[0].config._attn_implementation  # noqa: SLF001 (as modules read it)
        if not kind.startswith(_PREFIX):
            found[0].config._attn_implementation_internal = _registered(kind)  # noqa: SLF001


def slice_alibi(model: Any, plan: SplitPlan, device: int) -> None:
    """Let the attention of layers add the ALiBi slopes of a device's own heads, of which transformers passes all.

    Args:
        model: the device's model.
        plan: the plan.
        device: index of the device.
    """
    for number, layer in enumerate(layers_of(model)):
        for module in layer.modules():
            if not any(hasattr(module, fused) for fused in _FUSED):
                continue
            for name in _SLOPES & inspect.signature(module.forward).parameters.keys():
                split = plan.split(Axis.Q_HEADS, number)
                first = min(split.bounds[device], split.size - 1)
                own = slice(first, max(split.bounds[device + 1], first + 1))
                module.register_forward_pre_hook(_own_slopes(name, own, split.size), with_kwargs=True)


def _own_slopes(name: str, own: slice, heads: int) -> Any:
    def change(_module: Any, args: Any, kwargs: Any) -> Any:
        slopes: Tensor | None = kwargs.get(name)
        if slopes is not None:
            whole = slopes.dim() > 3  # noqa: PLR2004 ([texts, heads, …]; else the two are one dimension)
            part = slopes.view(-1, heads, 1, slopes.shape[-1])[:, own]
            kwargs = kwargs | {name: part if whole else part.flatten(0, 1)}
        mask: Tensor | None = kwargs.get("attention_mask")
        if mask is not None and mask.dim() > 3 and mask.shape[1] == heads:  # noqa: PLR2004 (slopes are in it)
            kwargs = kwargs | {"attention_mask": mask[:, own]}
        return args, kwargs

    return change


def _registered(kind: str) -> str:
    """Return the name of an attention function that reads heads by index and is otherwise of a kind."""
    name = _PREFIX + kind
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _by_index(kind))
        if kind in ALL_MASK_ATTENTION_FUNCTIONS:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    return name


def _by_index(kind: str) -> Any:
    def attention(module: Any, query: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
        heads = getattr(module, "tpplan_heads", None)
        if heads is not None:
            keys, values = keys.index_select(1, heads), values.index_select(1, heads)
        return run(module, query, keys, values, *args, **kwargs)

    return attention
