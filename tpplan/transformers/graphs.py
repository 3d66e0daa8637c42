"""CUDA graphs of decoding steps: a step over a static cache is captured on all devices, and replayed from then on.

The host launches hundreds of kernels for each layer of each device, which takes longer than the kernels do. A graph is
one launch. What decides on the host which kernels run, such as dynamic caches, windows and experts, is not captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import StaticLayer

from tpplan.transformers.cache import own_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torch import Tensor

    from tpplan.core.model import ModelSpec
    from tpplan.exec.context import TPContext
    from tpplan.exec.cuda.graph import Graph

#: Arguments that ask for more than logits.
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits", "labels")

_NAME = "_tpplan_steps"  # of what a cache keeps: graphs have its addresses, and end with it


class NotCapturedError(Exception):
    """A step could not be captured; nothing of it has run."""


class Step:
    """A captured step: its inputs and output keep their places."""

    def __init__(
        self,
        context: TPContext,
        inputs: Mapping[str, Any],
        run: Callable[[Mapping[str, Any]], Any],
        places: tuple[int, ...],
    ) -> None:
        """Capture what ``run`` does with inputs, over a cache at these places.

        Raises:
            NotCapturedError: torch, or another process, could not.
        """
        self.places = places
        own = {name: _mapped(value, torch.clone) for name, value in inputs.items()}
        failure = ""
        try:
            with context.capture() as graph:
                output = run(own)
        except Exception as error:  # noqa: BLE001 (it is run as usual then, and fails again if it must)
            failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if told := [each for each in context.tell(failure) if each]:
            raise NotCapturedError(told[0])
        self._graph: Graph = graph
        # The cache keeps this object, which keeps none of it: both end at once, without the garbage collector.
        self._kind, self._logits = type(output), output.logits
        self._inputs = {name: value for name, value in own.items() if _tensors(value)}

    def replay(self, inputs: Mapping[str, Any]) -> Any:
        """Return the output for other values of the inputs."""
        for name, value in self._inputs.items():
            for into, tensor in zip(_tensors(value), _tensors(inputs[name]), strict=True):
                into.copy_(tensor)
        self._graph.replay()
        return self._kind(logits=self._logits.clone(), past_key_values=inputs["past_key_values"])


def captures(model: ModelSpec, config: Any) -> bool:
    """Tell whether steps over a static cache can be captured: the host decides nothing in them.

    Args:
        model: the model as planned.
        config: that of transformers.
    """
    if any(not each.attention or each.attention.window or each.linear or each.experts for each in model.blocks):
        return False
    is_dynamic = "dynamic" in str(getattr(config, "rope_parameters", ""))
    return not is_dynamic and not any(getattr(config, name, False) for name in _OUTPUTS)


def step(
    context: TPContext, cache: Any, inputs: Mapping[str, Any], run: Callable[[Mapping[str, Any]], Any]
) -> Any | None:
    """Return the output of a decoding step from a graph; None where it has none (yet) and is to be run as usual.

    The first step of a kind is run as usual, so that all its kernels are loaded; the second is captured.

    Args:
        context: the compiled plan.
        cache: the step's cache, which keeps the graphs.
        inputs: arguments of the model, tensors of which are on the first device.
        run: runs the model.

    Raises:
        NotCapturedError: the step cannot be captured.
    """
    if not _is_fixed(context, cache, inputs):
        return None
    steps: dict[Hashable, Step | None] = cache.__dict__.setdefault(_NAME, {})
    kind = tuple((name, _kind(value)) for name, value in sorted(inputs.items()) if value is not cache)
    if kind not in steps:
        steps[kind] = None
        return None
    found, places = steps[kind], _places(cache)
    if found is not None and found.places != places:  # beam search, for one, puts new tensors in a cache
        found = steps[kind] = None
    if found is None:
        found = steps[kind] = Step(context, inputs, run, places)
    return found.replay(inputs)


def _places(cache: Any) -> tuple[int, ...]:
    """Return the addresses that a step over a cache reads and writes."""
    every = own_layers(cache)
    return tuple(t.data_ptr() for each in every for t in (each.keys, each.values, each.cumulative_length))


def _is_fixed(context: TPContext, cache: Any, inputs: Mapping[str, Any]) -> bool:
    """Tell whether the host decides nothing in a step."""
    tokens = inputs.get("input_ids")
    if cache is None or tokens is None or tokens.dim() != 2 or tokens.shape[1] != 1:  # noqa: PLR2004 (texts × tokens)
        return False
    if torch.is_grad_enabled() or not context.can_capture or getattr(cache, "offloading", False):
        return False
    if inputs.get("return_dict") is False or any(_is_asked(inputs.get(name)) for name in _OUTPUTS):
        return False
    return all(type(layer) is StaticLayer and layer.is_initialized for layer in own_layers(cache))


def _is_asked(value: Any) -> bool:
    return value is not None and value is not False


def _kind(value: Any) -> Hashable:
    """Return what a graph takes for granted of an argument."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, _kind(each)) for name, each in sorted(value.items()))
    return repr(value)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return {name: _mapped(each, change) for name, each in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value.values() for tensor in _tensors(each)] if isinstance(value, dict) else []
