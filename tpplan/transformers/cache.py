"""A cache of transformers, one object, whose layers have keys and values of every device."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DummyLayer

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from tpplan.transformers.lockstep import Lockstep


class HeadlessLayer:
    """A layer of a cache for a device without heads: it counts tokens as others do, with one element for each.

    What is not said here is as in the layer of transformers that it holds.
    """

    def __init__(self, layer: Any) -> None:
        self.__dict__["_layer"] = layer

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what transformers asks for is the layer's class
        return type(self._layer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_layer":
            raise AttributeError(name)
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._layer, name, value)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count tokens; return zeros as keys and values of all of them, which take no memory."""
        found = self._layer.update(keys[:, :1, :, :1], values[:, :1, :, :1], *args, **kwargs)
        return tuple(
            kept.expand(-1, new.shape[1], -1, new.shape[3]) for kept, new in zip(found, (keys, values), strict=True)
        )

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Count tokens that were compressed; return zeros as all of them (DeepSeek-V4)."""
        found: Tensor = self._layer.update_compressor_states(name, compressed[..., :1])
        return found.expand(*found.shape[:-1], compressed.shape[-1])


class PerDeviceLayer:
    """A layer of a cache, of each device its own: in a model's forward pass the device's, otherwise all of them.

    ``generate`` reorders, crops and repeats caches between passes; that is done on every device.
    """

    def __init__(self, layers: Mapping[int, Any], lockstep: Lockstep) -> None:
        self.__dict__.update(_layers=layers, _lockstep=lockstep)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what transformers asks for is the layer's class
        return next(iter(self._layers.values())).__class__  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = [getattr(layer, name) for layer in self._now()]
        return own[0] if len(own) == 1 or not callable(own[0]) else _all(own)

    def __setattr__(self, name: str, value: object) -> None:
        for layer in self._now():
            setattr(layer, name, value)

    def _now(self) -> tuple[Any, ...]:
        device = self._lockstep.device
        return tuple(self._layers.values()) if device is None else (self._layers[device],)


def own_layers(cache: Any) -> list[Any]:
    """Return the layers of all devices of a cache that :func:`split_cache` has divided."""
    parts = [layer for layer in cache.layers if type(layer) is PerDeviceLayer]
    every = [own for layer in parts for own in layer._layers.values()]  # noqa: SLF001 (of this module)
    return [own._layer if type(own) is HeadlessLayer else own for own in every]  # noqa: SLF001


def _all(functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that calls all of these and returns what the first one does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        results = [function(*args, **kwargs) for function in functions]
        return results[0]

    return call


def split_cache(cache: Any, layers: int, lockstep: Lockstep, headless: Mapping[int, AbstractSet[int]]) -> None:
    """Give every device its own layers of a cache of transformers that nothing is in yet; one that has them stays.

    Args:
        cache: a ``transformers.Cache``.
        layers: number of layers of the model.
        lockstep: tells which device runs.
        headless: for each device of this process the layers of which it has no KV heads.

    Raises:
        ExecutionError: something is in it already.
    """
    made = cache.layer_class_to_replicate
    if made is not None:
        cache.layers = [*cache.layers, *(made() for _ in range(layers - len(cache.layers)))]
        cache.layer_class_to_replicate = None
    for number, layer in enumerate(cache.layers):
        if type(layer) is DummyLayer:  # of a layer that caches nothing
            continue
        if type(layer) is PerDeviceLayer and layer._lockstep is lockstep:  # noqa: SLF001 (of this module)
            continue
        if type(layer) is PerDeviceLayer:
            message = "past_key_values is of another sharded model"
            raise ExecutionError(message, "pass an empty cache, or one that this model has filled")
        if getattr(layer, "is_initialized", False):
            message = "past_key_values already has keys and values, which are not those of this plan's devices"
            raise ExecutionError(message, "pass an empty cache, or one that this model has filled")
        own = {device: deepcopy(layer) for device in headless}
        for device, missing in headless.items():
            if number in missing and hasattr(layer, "keys"):  # which layers that only have states lack
                own[device] = HeadlessLayer(own[device])
        cache.layers[number] = PerDeviceLayer(own, lockstep)
