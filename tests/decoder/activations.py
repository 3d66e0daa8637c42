"""What a decoder's activations take on each device: the bytes of all tensors that live, watched as they come and go."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.watching import Watching
from tpplan.core.workspace import align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tpplan.decoder import Decoder
    from tpplan.exec.context import TPContext

#: Operations of a context that return tensors, with the place and the name of the argument that says on which devices.
_RESULTS = {"broadcast": (1, "axis"), "allgather": (2, "to"), "all_reduce": (None, None)}
#: What GPUs do in one kernel, without the tensors in between that it takes elsewhere.
_AS_ONE = {"rms_norm", "scaled_dot_product_attention"}


class Activations(Watching):
    """Counts the bytes of tensors that are computed, by device.

    What is computed of a device's tensors is on the device, and so is what an operation of the context makes there. A
    tensor that is made of none, such as numbers in a row, counts where it is first used. What was there before counts
    nowhere.

    Attributes:
        live: bytes that tensors have now.
        peak: the most that they had.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Know a context's memory, and the weights and caches on its devices."""
        super().__init__()  # type: ignore[no-untyped-call]
        context = decoder.context
        self._owners = {
            _key(tensor): device
            for device in context.all_devices
            for tensor in (context.devices[device].control, *decoder.weights[device].tensors.values())
        }
        self._owners |= {
            _key(tensor): device
            for layer in decoder.stack.heads
            for device, heads in layer.items()
            for tensor in heads.cache._parts
        }
        self._owners |= {
            _key(tensor): device
            for layer in decoder.stack.linear
            for device, linear in layer.items()
            for tensor in (linear.state.inputs, linear.state.recurrent, linear._scales_21)
        }
        self._new: set[int] = set()
        self.live = dict.fromkeys(context.all_devices, 0)
        self.peak = dict(self.live)

    def own(self, tensor: Tensor, device: int) -> None:
        """Let a tensor that was computed be on a device, and count it there as long as it lives."""
        key, storage = _key(tensor), tensor.untyped_storage()
        self._new.discard(key)
        if key in self._owners:
            return
        size = align(storage.nbytes())
        self._owners[key] = device
        self.live[device] += size
        self.peak[device] = max(self.peak[device], self.live[device])
        finalize(storage, self._gone, key, device, size).atexit = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what torch is told to, and count what comes of it."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name not in _AS_ONE and _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:  # of memory that counts already, or is not on any device yet
            return func(*args, **kwargs)
        given = {_key(tensor): tensor for tensor in _tensors((*args, *kwargs.values()))}
        devices = {self._owners[key] for key in given.keys() & self._owners.keys()}
        assert len(devices) < 2, f"{func} of tensors on devices {devices}"
        result = func(*args, **kwargs)
        made = {key: tensor for tensor in _tensors((result,)) if (key := _key(tensor)) not in given}
        for device in devices:
            for tensor in (*made.values(), *(given[key] for key in given.keys() & self._new)):
                self.own(tensor, device)
        if not devices:
            for key, tensor in made.items():
                self._new.add(key)
                finalize(tensor.untyped_storage(), self._new.discard, key).atexit = False
        return result

    def _gone(self, key: int, device: int, size: int) -> None:
        self.live[device] -= size
        del self._owners[key]


@contextmanager
def activations(decoder: Decoder) -> Iterator[Activations]:
    """Count what a decoder computes."""
    context = decoder.context
    mode = Activations(decoder)

    def wrapped(name: str) -> Callable[..., tuple[Tensor, ...]]:
        operation, (place, argument) = getattr(context, name), _RESULTS[name]

        def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            with _disable_current_modes():  # what virtual devices compute with is not there on GPUs
                results: tuple[Tensor, ...] = operation(*args, **kwargs)
            axis = None
            if place is not None and argument is not None:
                axis = kwargs.get(argument, args[place] if len(args) > place else None)
            for x, device in zip(results, context.devices_of(axis, kwargs.get("layer")), strict=True):
                mode.own(x, device)
            return results

        return run

    def add_residual(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            context.add_residual(*args, **kwargs)

    operations = {name: wrapped(name) for name in _RESULTS}
    with mode, patch.object(decoder.stack, "context", _Counted(context, {**operations, "add_residual": add_residual})):
        yield mode


class _Counted:
    """A context, some of whose operations are counted."""

    def __init__(self, context: TPContext, operations: dict[str, Callable[..., Any]]) -> None:
        """Put operations in the place of a context's."""
        self._context = context
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        """Return one of the operations, or whatever else the context has."""
        return self._operations.get(name) or getattr(self._context, name)


@cache
def _is_made_of_others(func: Any) -> bool:
    """Return whether torch does an operation by others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _key(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from that of others which live."""
    key: int = tensor.untyped_storage()._cdata
    return key
