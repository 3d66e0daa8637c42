"""A caller's torch work on adversarial devices: every step of it is done when its device's stream gets there.

On GPUs torch work is issued and done later. Here the same: a tensor that is computed holds garbage until the adversary
runs the stream that computes it, in whatever order that allows. So who uses a result that nothing orders gets garbage,
and who mixes tensors of two devices, which virtual devices cannot tell apart, is refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.watching import Watching
from tpplan.exec.programs.fence import caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.exec.backends.adversary import Adversary
    from tpplan.exec.context import TPContext

#: Operations of a context that return tensors, with the argument that says on which devices.
_RESULTS = {"broadcast": "axis", "allgather": "to", "all_reduce": None}

_SYNCS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Late(Watching):
    """Puts off what torch is told to do on virtual devices.

    A tensor belongs to the device that it was computed on; those that were there before belong to none.

    Attributes:
        count: of what was put off.
    """

    def __init__(self, adversary: Adversary) -> None:
        """Let ``adversary`` decide when things are done."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._adversary = adversary
        self._owners: dict[int, int] = {}
        self._kept: list[object] = []  # so that no address is used twice
        self.count = 0

    def own(self, tensor: Tensor, device: int) -> Tensor:
        """Let a tensor belong to a device."""
        storage = tensor.untyped_storage()
        if tensor.numel():  # others have no address of their own
            self._kept.append(storage)
            self._owners[storage.data_ptr()] = device
        return tensor

    def finish(self) -> None:
        """Let everything be done."""
        with _disable_current_modes():
            self._adversary.synchronize()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do at once what needs no device's memory; put off the rest."""
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = {self._owners.get(tensor.untyped_storage().data_ptr()) for tensor in tensors} - {None}
        assert len(found) < 2, f"{func} of tensors on devices {found}"
        if func in _SYNCS:
            self._adversary.synchronize()
        if not found or func in _SYNCS:
            return func(*args, **kwargs)
        (device,) = found
        assert device is not None
        if func._schema.is_mutable:
            self.own(args[0], device)
            self._put_off(device, lambda: func(*args, **kwargs))
            return args[0]
        if any(result.alias_info for result in func._schema.returns):  # a view
            return func(*args, **kwargs)
        shapes = func(*tree_map_only(Tensor, _meta, args), **tree_map_only(Tensor, _meta, kwargs))
        results = tree_map_only(Tensor, lambda x: self.own(_garbage(x), device), shapes)

        def late() -> None:
            for result, value in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(result, Tensor):
                    result.copy_(value)

        self._put_off(device, late)
        return results

    def _put_off(self, device: int, work: Callable[[], object]) -> None:
        self.count += 1
        self._adversary.call(caller(device), torch.inference_mode()(work))


@contextmanager
def late(context: TPContext, adversary: Adversary) -> Iterator[Late]:
    """Put off a caller's torch work, and know which device the results of a context's operations are on."""
    mode = Late(adversary)
    to_list = Tensor.tolist

    def wrapped(name: str) -> Callable[..., tuple[Tensor, ...]]:
        operation = getattr(context, name)
        argument = _RESULTS[name]

        def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            with _disable_current_modes():
                results: tuple[Tensor, ...] = operation(*args, **kwargs)
            place = {"broadcast": 1, "allgather": 2}.get(name, len(args))
            axis = kwargs.get(argument, args[place] if len(args) > place else None) if argument else None
            devices = context.devices_of(axis, kwargs.get("layer"))
            return tuple(mode.own(x, device) for x, device in zip(results, devices, strict=True))

        return run

    def quietly(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return operation(*args, **kwargs)

        return run

    def listed(tensor: Tensor) -> Any:
        mode.finish()
        return to_list(tensor)

    names = {name: wrapped(name) for name in _RESULTS} | {"add_residual": quietly(context.add_residual)}
    with patch.multiple(context, **names), patch.object(Tensor, "tolist", listed), mode:
        yield mode
    mode.finish()


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _garbage(like: Tensor) -> Tensor:
    """Return a tensor of a shape that holds nothing useful."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
    return made.fill_(torch.nan if made.is_floating_point() else 77)
