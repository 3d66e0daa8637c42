"""Mamba-2 of a device, whose heads need not divide evenly among the groups that share a B and a C."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from tpplan.errors import RequestError
from tpplan.transformers.build import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpplan.core.model import Block
    from tpplan.transformers.counts import Counts

#: Functions of transformers' modules that read B and C, ``[..., groups, state]``, and which arguments these are.
_SCANS: Final = {"mamba2_chunk_scan": (3, 4), "mamba2_selective_state_update": (4, 5)}


def divide_mamba(model: Any, counts: Sequence[Counts], blocks: Sequence[Block], place: torch.device) -> None:
    """Let the Mamba-2 of layers find the B and C of heads, and multipliers of its own columns.

    Args:
        model: a device's model.
        counts: what the device has of each layer.
        blocks: the layers'.
        place: the device.

    Raises:
        RequestError: transformers computes Mamba-2 otherwise.
    """
    for layer, own, block in zip(layers_of(model), counts, blocks, strict=True):
        found: list[Any] = [*layer.modules()]
        for module in found:
            if block.linear and hasattr(module, "mup_vector"):
                module.mup_vector = _own_columns(module.mup_vector, own, block)
            if own.group_of and hasattr(module, "conv_dim"):
                module.forward = _by_index(module, torch.tensor(own.group_of, device=place))


def _own_columns(vector: Tensor, counts: Counts, block: Block) -> Tensor:
    """Return the multipliers of a device's gate, x, B, C and dt, each of which has one."""
    dims = next(p.dims[0] for p in block.parameters if p.name.endswith("in_proj.weight"))
    parts = torch.split(vector, [segment.length for segment in dims], -1)
    return torch.cat([part[..., : counts.part(dim)] for part, dim in zip(parts, dims, strict=True)], -1)


def _by_index(module: Any, groups: Tensor) -> Any:
    """Return the forward pass of a module that reads the B and C of each head by the number of its group."""
    function = inspect.unwrap(type(module).forward)
    names = {*_SCANS} & {*function.__code__.co_names}
    if names != {*_SCANS}:
        message = f"{type(module).__name__} of transformers does not say where heads read B and C"
        raise RequestError(message, "plan devices with whole groups of heads")

    def indexed(scan: Callable[..., Any], places: tuple[int, int]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [x.index_select(-2, groups) if i in places else x for i, x in enumerate(args)]
            return scan(*given, **kwargs)

        return run

    own = {name: indexed(function.__globals__[name], _SCANS[name]) for name in names}
    made = FunctionType(function.__code__, {**function.__globals__, **own}, closure=function.__closure__)
    made.__kwdefaults__, made.__defaults__ = function.__kwdefaults__, function.__defaults__
    return MethodType(made, module)
