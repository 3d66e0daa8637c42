"""Safe moves of tensors between devices.

Between two GPUs, torch's peer copy is used if the link report (:mod:`tpplan.exec.machine.links`) verifies it and the
environment allows it (:func:`tpplan.exec.machine.environment.no_peer_copies`); otherwise the copy goes through the
host's memory. The first move between two GPUs loads the report on them, or probes them.
"""

from __future__ import annotations

import logging
from collections import UserDict, UserList, deque
from collections.abc import Mapping
from copy import copy
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tpplan.errors import DeviceError, ExecutionError
from tpplan.exec.machine.environment import no_peer_copies
from tpplan.exec.machine.link_report import LinkReport, Mechanism, Verdict
from tpplan.exec.machine.links import link_report

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["gpu_peer_copy", "safe_move_tensor", "test_gpu_peer_copy", "tested_peer_copies"]

T = TypeVar("T")
AnyDevice = torch.device | str | int

#: Containers that are copied with all their attributes, and whose items are then replaced.
_BY_KEY, _BY_INDEX = dict | UserDict, list | UserList | deque

_CPU = torch.device("cpu")
#: As ExLlamaV2's ``tested_peer_copy`` has them.
_VALUES = {Verdict.UNTESTED: 0, Verdict.WORKS: 1, Verdict.BROKEN: -1}
_LOG = logging.getLogger(__name__)


class Gpus(Protocol):
    """The GPUs of this process."""

    def count(self) -> int:
        """Return the number of GPUs."""

    def current(self) -> int:
        """Return the index of the current GPU; there must be one."""

    def links(self, gpus: Collection[int]) -> LinkReport:
        """Return the report on the links between some of them."""

    def wait(self, index: int) -> None:
        """Return when all work on the current stream of a GPU is complete."""


class TorchGpus:
    """The GPUs that torch sees."""

    def count(self) -> int:
        """Return the number of GPUs."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the index of the current GPU."""
        return torch.cuda.current_device()

    def links(self, gpus: Collection[int]) -> LinkReport:
        """Return the report from the cache, or from the probe."""
        return link_report(gpus)

    def wait(self, index: int) -> None:
        """Return when all work on the current stream of a GPU is complete, or at once while a graph captures it."""
        with torch.cuda.device(index):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()


class Mover:
    """Moves tensors between GPUs and the CPU, and remembers the pairs of GPUs on which a peer copy failed."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        #: The verdict on peer copies of each (source, target) that was asked for; a copy that fails changes it.
        self._verdicts: dict[tuple[int, int], Verdict] = {}

    def _verdict(self, source: int, target: int) -> Verdict:
        """Return the verdict on peer copies from one GPU to another; only these two are probed."""
        if (source, target) not in self._verdicts:
            links = self._gpus.links((source, target)).links
            self._verdicts |= {(x.source, x.target): x.verdict for x in links if x.mechanism == Mechanism.COPY}
        return self._verdicts.get((source, target), Verdict.UNTESTED)

    def tested(self) -> list[list[int]] | None:
        """See :func:`tested_peer_copies`."""
        if not self._verdicts:
            return None
        count = self._gpus.count()
        matrix = [[int(a == b) for b in range(count)] for a in range(count)]
        for a, b in combinations(range(count), 2):
            matrix[a][b] = min(_VALUES[self._verdicts.get(pair, Verdict.UNTESTED)] for pair in ((a, b), (b, a)))
        return matrix

    def move(self, tree: T, device: AnyDevice, *, non_blocking: bool) -> T:
        """See :func:`safe_move_tensor`."""
        if not isinstance(tree, torch.Tensor | Mapping | tuple | _BY_INDEX):
            hint = "pass a tensor, or a tuple, list, deque or mapping of tensors"
            raise ExecutionError(f"{type(tree).__name__} is neither a tensor nor a container of tensors", hint)
        busy: set[int] = set()
        move = partial(self._moved, device=self._device(device), non_blocking=non_blocking, busy=busy)
        moved: T = _each(tree, move)
        for index in busy:
            self._gpus.wait(index)
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
                target.copy_(self._moved(source, target.device, non_blocking=True, busy=set()))
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
        return a == b or (self._may_peer(a, b) and self._may_peer(b, a))

    def _device(self, wanted: AnyDevice) -> torch.device:
        """Return a checked device; a GPU has its index."""
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

    def _moved(self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool, busy: set[int]) -> torch.Tensor:
        """Move a tensor; add to ``busy`` the GPU on whose stream a copy runs that the host has to wait for."""
        source = tensor.device
        if not _are_two_gpus(source, device):
            if non_blocking and {source.type, device.type} == {"cpu", "cuda"}:
                busy.add(device.index if device.type == "cuda" else source.index)
            return tensor.to(device, non_blocking=non_blocking)  # returns the same object if it is already there
        if tensor.layout is torch.strided:
            whole = _in_one_piece(tensor)
            copied = self._peer(source, device, lambda: whole.to(device, non_blocking=non_blocking))
            if copied is not None:
                if not non_blocking:
                    busy.add(device.index)
                return copied
        return tensor.to(_CPU).to(device)

    def _may_peer(self, source: int, target: int) -> bool:
        """Return whether peer copies from one GPU to another are verified and allowed."""
        return not no_peer_copies() and self._verdict(source, target) == Verdict.WORKS

    def _peer(self, source: torch.device, target: torch.device, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Run a peer copy; return None if the pair is not verified, or if the copy fails, which disables the pair."""
        if not self._may_peer(source.index, target.index):
            return None
        try:
            return run()
        except torch.OutOfMemoryError:  # not a fault of the link
            raise
        except RuntimeError as error:
            self._verdicts[source.index, target.index] = Verdict.BROKEN
            _LOG.warning("peer copy from %s to %s failed, from now on by the host's memory: %s", source, target, error)
            return None


def _are_two_gpus(source: torch.device, target: torch.device) -> bool:
    return source.type == target.type == "cuda" and source != target


def _in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of the same values, with the strides that ``.to()`` would give it.

    Only for dense tensors does torch's peer copy use the copy engine, which is what the probe verifies. For others, a
    kernel stores into the target's memory.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    is_dense = tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    return tensor if is_dense else tensor.clone()


def _each(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of nested containers with ``change`` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return _tuple(type(tree), [_each(item, change) for item in tree])
    if isinstance(tree, _BY_KEY | _BY_INDEX):
        try:
            new = copy(tree)
        except TypeError as error:  # the class has its own constructor protocol
            hint = "pass a plain dict, list or tuple"
            raise ExecutionError(f"{type(tree).__name__} cannot be copied: {error}", hint) from error
        for key in list(tree) if isinstance(tree, _BY_KEY) else range(len(tree)):
            new[key] = _each(tree[key], change)
        return new
    if isinstance(tree, Mapping):
        return {key: _each(value, change) for key, value in tree.items()}
    return tree


def _tuple(kind: Any, items: list[Any]) -> Any:
    """Return a tuple of class ``kind``, whose constructor may have any signature."""
    if hasattr(kind, "_make"):
        return kind._make(items)
    try:
        return tuple.__new__(kind, items)
    except TypeError:  # a class written in C, such as those in torch.return_types
        return kind(items)


_MOVER = Mover(TorchGpus())


def safe_move_tensor(tensor: T, device: AnyDevice, non_blocking: bool = False) -> T:  # noqa: FBT001, FBT002 - the original's
    """Move a tensor, or all tensors in nested containers, to a device.

    A tensor that is already on the device is returned unchanged. Copies from or to the CPU use ``.to()``. Copies
    between two GPUs use torch's peer copy if it is verified in that direction, else the host's memory. If a peer copy
    raises, the copy is repeated through the host's memory and a warning is logged; this process then tries no further
    peer copy from that GPU to that GPU.

    Every copy has the strides that ``.to()`` would give it: those of the original if it is dense (contiguous,
    transposed, channels last), else dense strides in the same order.

    Ordering: a copy runs after the work already queued on the current streams of both devices, and later work on these
    streams runs after the copy. The current streams and device do not change. All copies are complete when the call
    returns, those from and to the CPU with ``non_blocking`` too: they are then queued one after the other, and the host
    waits once for each GPU. Only peer copies with ``non_blocking`` may still run. While the current stream captures a
    CUDA graph, the host does not wait.

    Args:
        tensor: a tensor of any shape and dtype, or a tuple, list, deque or mapping of tensors or of such containers.
            The result has new containers of the same class (dict for mappings that are neither dict nor UserDict).
            Other items, such as None or a data class, are kept.
        device: a torch.device, a string such as ``"cuda:1"`` or ``"cpu"``, or the index of a GPU.
        non_blocking: whether the host goes on while a peer copy runs.

    Raises:
        DeviceError: there is no such device.
        ExecutionError: ``tensor`` is neither a tensor nor a container, or a container's class cannot be copied.
        torch.OutOfMemoryError: the device has no room.
    """
    return _MOVER.move(tensor, device, non_blocking=non_blocking)


def gpu_peer_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another of the same shape and dtype, usually on another GPU.

    Routes, recovery and ordering are as in :func:`safe_move_tensor`, but the host does not wait for a peer copy. A
    non-contiguous source is first made contiguous on its own device. A non-contiguous target is filled from a temporary
    copy on its own device. Autograd does not record the copy.

    Args:
        target: tensor to write, with any strides that do not overlap.
        source: tensor to read, with any strides.

    Raises:
        ExecutionError: the shapes or dtypes differ; nothing is written.
        torch.OutOfMemoryError: a device has no room for temporary copies.
    """
    _MOVER.copy(target, source)


def test_gpu_peer_copy(device_a: AnyDevice, device_b: AnyDevice) -> bool:
    """Tell whether peer copies between two GPUs are verified in both directions and have not failed since.

    If the environment rules them out, the answer is False without a probe.

    Args:
        device_a: a GPU, as a torch.device, a string such as ``"cuda:0"``, or an index.
        device_b: another, in the same forms.

    Raises:
        DeviceError: a device does not exist or is not a GPU.
    """
    return _MOVER.are_peers(device_a, device_b)


test_gpu_peer_copy.__test__ = False  # type: ignore[attr-defined] # pytest would collect it as a test


def tested_peer_copies() -> list[list[int]] | None:
    """Return what is known of peer copies between this process's GPUs, without a probe.

    Returns:
        A new matrix, whose element ``[a][b]`` with ``a < b`` is about both directions: 1 if they are verified and have
        not failed since, -1 if one is broken, 0 if one is untested. The diagonal is 1, and below it all is 0. None
        until :func:`test_gpu_peer_copy` or a move between two GPUs has asked for the links.
    """
    return _MOVER.tested()
