"""Moving tensors between devices by a way that is known to work.

Between two GPUs that is torch's peer copy, if the link report (:mod:`tpplan.exec.links.known`) says that it arrives,
and the host's memory otherwise. The links are asked for, and if need be probed, at the first move between two GPUs.
"""

from __future__ import annotations

import logging
from collections import UserDict, UserList, deque
from collections.abc import Mapping
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tpplan.errors import DeviceError, ExecutionError
from tpplan.exec.links.known import LinkReport, Mechanism, link_report

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gpu_peer_copy", "safe_move_tensor", "test_gpu_peer_copy"]

T = TypeVar("T")
AnyDevice = torch.device | str | int

#: Containers that are copied, whatever their class has besides, and their items replaced.
_BY_KEY, _BY_INDEX = dict | UserDict, list | UserList | deque

_CPU = torch.device("cpu")
_LOG = logging.getLogger(__name__)


class Gpus(Protocol):
    """The GPUs of this process."""

    def count(self) -> int:
        """Return how many there are."""

    def current(self) -> int:
        """Return the index of the current one, where there is any."""

    def links(self) -> LinkReport:
        """Return what is verified between them."""


class TorchGpus:
    """The GPUs that torch sees."""

    def count(self) -> int:
        """Return how many there are."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the index of the current one."""
        return torch.cuda.current_device()

    def links(self) -> LinkReport:
        """Return the report from the cache, or from the probe."""
        return link_report()


class Mover:
    """Moves tensors between some GPUs and the CPU, and remembers between which GPUs a peer copy has failed."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    @cached_property
    def _peers(self) -> set[tuple[int, int]]:
        """The (source, target) between which peer copies are verified and have not failed since."""
        return set(self._gpus.links().pairs(Mechanism.COPY))

    def move(self, tree: T, device: AnyDevice, *, non_blocking: bool) -> T:
        """See :func:`safe_move_tensor`."""
        if not isinstance(tree, torch.Tensor | Mapping | tuple | _BY_INDEX):
            hint = "pass a tensor, or a tuple, list, deque or mapping of tensors"
            raise ExecutionError(f"{type(tree).__name__} is neither a tensor nor a container of tensors", hint)
        moved: T = _each(tree, partial(self._moved, device=self._device(device), non_blocking=non_blocking))
        return moved

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :func:`gpu_peer_copy`."""
        if target.shape != source.shape or target.dtype != source.dtype:
            what = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (source, target)]
            raise ExecutionError(f"cannot copy {what[0]} into {what[1]}", "make shape and dtype of the two equal")
        with torch.no_grad():  # parameters are filled too
            if not _are_two_gpus(source.device, target.device):
                target.copy_(source)
            elif not target.is_contiguous() or target.is_conj() or target.is_neg():
                target.copy_(self._moved(source, target.device, non_blocking=False))
            else:
                whole = source.resolve_conj().resolve_neg().contiguous()
                if self._peer(source.device, target.device, lambda: target.copy_(whole)) is None:
                    target.copy_(source.to(_CPU))

    def are_peers(self, device_a: AnyDevice, device_b: AnyDevice) -> bool:
        """See :func:`test_gpu_peer_copy`."""
        ends = [self._device(device) for device in (device_a, device_b)]
        for end in ends:
            if end.type != "cuda":
                raise DeviceError(f"{str(end)!r} is no GPU", 'name two GPUs, such as "cuda:0" and "cuda:1"')
        a, b = (end.index for end in ends)
        return a == b or {(a, b), (b, a)} <= self._peers

    def _device(self, wanted: AnyDevice) -> torch.device:
        """Return a device with its index."""
        try:
            is_index = isinstance(wanted, int) and not isinstance(wanted, bool)  # no bool: torch refuses it
            device = torch.device(f"cuda:{wanted}" if is_index else wanted)
        except (RuntimeError, TypeError) as error:
            raise DeviceError(f"{wanted!r} names no device", 'name one such as "cpu", "cuda:1" or 1') from error
        if device.type != "cuda":
            return device
        count = self._gpus.count()
        is_any = device == torch.device("cuda")
        index = 0 if is_any and not count else self._gpus.current() if is_any else device.index
        if index >= count:
            raise DeviceError(f"there is no GPU {index}: this process sees {count}", "check CUDA_VISIBLE_DEVICES")
        return torch.device("cuda", index)

    def _moved(self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        if not _are_two_gpus(tensor.device, device):
            return tensor.to(device, non_blocking=non_blocking)  # the same object where it is there already
        if tensor.layout is torch.strided:
            whole = _in_one_piece(tensor)
            copied = self._peer(tensor.device, device, lambda: whole.to(device, non_blocking=non_blocking))
            if copied is not None:
                return copied
        return tensor.to(_CPU).to(device, non_blocking=non_blocking)

    def _peer(self, source: torch.device, target: torch.device, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return what a peer copy returns; None if it must not be tried, or has failed and is not to be tried again."""
        if (source.index, target.index) not in self._peers:
            return None
        try:
            return run()
        except torch.OutOfMemoryError:  # the fault of neither link
            raise
        except RuntimeError as error:
            self._peers.discard((source.index, target.index))
            _LOG.warning("peer copy from %s to %s failed, from now on by the host's memory: %s", source, target, error)
            return None


def _are_two_gpus(source: torch.device, target: torch.device) -> bool:
    return source.type == target.type == "cuda" and source != target


def _in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements fill one range of bytes, in the strides that ``.to()`` would give to it.

    Only of such a tensor torch's peer copy is the copy engine's, which is verified; of another, it is a kernel's that
    stores into the target's memory.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    is_dense = tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    return tensor if is_dense else tensor.clone()


def _each(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of nested containers with every tensor changed and everything else as it is."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return _tuple(type(tree), [_each(item, change) for item in tree])
    if isinstance(tree, _BY_KEY | _BY_INDEX):
        try:
            new = copy(tree)
        except TypeError as error:  # its class makes objects in a way of its own
            hint = "pass a plain dict, list or tuple"
            raise ExecutionError(f"{type(tree).__name__} cannot be copied: {error}", hint) from error
        for key in list(tree) if isinstance(tree, _BY_KEY) else range(len(tree)):
            new[key] = _each(tree[key], change)
        return new
    if isinstance(tree, Mapping):
        return {key: _each(value, change) for key, value in tree.items()}
    return tree


def _tuple(kind: Any, items: list[Any]) -> Any:
    """Return a tuple of a class, whose constructor may take anything."""
    if hasattr(kind, "_make"):
        return kind._make(items)
    try:
        return tuple.__new__(kind, items)
    except TypeError:  # a class written in C, such as those in torch.return_types
        return kind(items)


_MOVER = Mover(TorchGpus())


def safe_move_tensor(tensor: T, device: AnyDevice, non_blocking: bool = False) -> T:  # noqa: FBT001, FBT002 - the original's
    """Return a tensor, or every tensor in nested containers, on a device.

    In this order: a tensor that is there already is returned as it is; from or to the CPU ``.to()`` copies; between two
    GPUs torch's peer copy does, if it is verified in that direction; else the copy goes through the host's memory. A
    peer copy that raises is made good through the host's memory; that is logged as a warning, and this process tries no
    other one from that GPU to that GPU.

    Every copy has the strides that ``.to()`` would give it, by whichever way it went: those of the original where its
    elements fill one range of memory (contiguous, transposed, channels last), else dense ones of the same order.

    Ordering: a copy follows what is in the current streams of both devices and is complete for what is put there later;
    neither those nor the current device change. With ``non_blocking`` a copy from a GPU to the CPU may return before
    the bytes are there: read it after ``torch.cuda.current_stream(source device).synchronize()``; and one from pinned
    memory to a GPU may return before that memory is read: leave it unchanged until the target's current stream is
    synchronised. Between GPUs the host waits only where the copy goes through its memory, and there it always does.

    Args:
        tensor: of any shape and dtype; or a tuple, list, deque or mapping of such or of such containers, of which new
            ones of the same class are made (dicts of mappings that are neither dict nor UserDict). Anything else in
            them, such as None or a data class, is kept.
        device: a torch.device, a text such as ``"cuda:1"`` or ``"cpu"``, or the index of a GPU.
        non_blocking: as in ``Tensor.to``, for every tensor at whatever depth.

    Raises:
        DeviceError: there is no such device.
        ExecutionError: what is to be moved is none of these, or its class cannot be copied.
        torch.OutOfMemoryError: the device has no room.
    """
    return _MOVER.move(tensor, device, non_blocking=non_blocking)


def gpu_peer_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one of the same shape and dtype, usually on another GPU.

    The ways, the recovery and the ordering are those of :func:`safe_move_tensor`. A source that is not contiguous is
    made so on its own device first, a target that is not gets its bytes from a copy on its own device. Autograd does
    not record it.

    Args:
        target: to write; any strides without overlap.
        source: to read; any strides.

    Raises:
        ExecutionError: shape or dtype differ; nothing is written.
        torch.OutOfMemoryError: a device has no room for what the copy needs.
    """
    _MOVER.copy(target, source)


def test_gpu_peer_copy(device_a: AnyDevice, device_b: AnyDevice) -> bool:
    """Tell whether peer copies between two GPUs are verified in both directions, and none has failed since.

    Args:
        device_a: a GPU, as a torch.device, a text such as ``"cuda:0"``, or an index.
        device_b: likewise.

    Raises:
        DeviceError: one of them is not there, or no GPU.
    """
    return _MOVER.are_peers(device_a, device_b)


test_gpu_peer_copy.__test__ = False  # type: ignore[attr-defined] # pytest takes it for a test where it is imported
