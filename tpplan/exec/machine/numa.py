"""Placing pinned memory on the NUMA nodes of the GPUs that read and write it, by the thread's memory policy."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

_SYSTEM = Path("/sys")
#: Numbers of the system calls set_mempolicy and get_mempolicy, for which the C library has no functions.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
#: Policies. No allocation fails for those that are set: other nodes are used where these have no room.
_DEFAULT, _PREFERRED, _INTERLEAVED = 0, 1, 3
#: Maximum number of nodes, and how the system wants it said.
_NODES, _SIZE = 1024, ctypes.c_ulong(1025)


@contextmanager
def near(places: Sequence[torch.device]) -> Iterator[None]:
    """Prefer the NUMA nodes of GPUs for memory that this thread allocates in the block.

    If the GPUs are on several nodes, pages are dealt out to these in turn. Nothing happens if the machine has one node,
    or does not tell those of all GPUs, if this thread has a policy already, as from numactl, or if it may not have one.

    Args:
        places: torch devices; those that are no GPUs do not matter.
    """
    has_several = len([*(_SYSTEM / "devices/system/node").glob("node[0-9]*")]) > 1  # none but on Linux
    nodes = {_node_of(place) for place in places if place.type == "cuda"} if has_several else set()
    if not nodes or -1 in nodes or not _has_default():
        yield
        return
    try:
        _set(_INTERLEAVED if len(nodes) > 1 else _PREFERRED, sum(1 << node for node in nodes))
        yield
    finally:
        _set(_DEFAULT, 0)


def _node_of(place: torch.device) -> int:
    """Return the node of a GPU; -1 if it is unknown."""
    try:
        node = int((_SYSTEM / "bus/pci/devices" / _address_of(place.index) / "numa_node").read_text())
    except (ImportError, OSError, ValueError):
        return -1
    return node if 0 <= node < _NODES else -1


def _address_of(ordinal: int) -> str:
    """Return the PCI address of a GPU as the system writes it, such as ``0000:3b:00.0``; empty if it is unknown."""
    from tpplan.exec.toolchain.bindings import runtime  # noqa: PLC0415 (not on every machine)

    _, address = runtime.cudaDeviceGetPCIBusId(32, ordinal)
    return address.partition(b"\0")[0].decode().lower() if isinstance(address, bytes) else ""


def _has_default() -> bool:
    """Return whether this thread has the system's default policy."""
    mode = ctypes.c_int(-1)
    return not _call(1, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) and mode.value == _DEFAULT


def _set(mode: int, nodes: int) -> None:
    """Set the policy of this thread, if the system allows it, for nodes with a bit each."""
    mask = ctypes.create_string_buffer(nodes.to_bytes(_NODES // 8, sys.byteorder), _NODES // 8)
    _call(0, ctypes.c_int(mode), mask if nodes else None, _SIZE if nodes else ctypes.c_ulong(0))


def _call(which: int, *arguments: object) -> int:
    """Make one of the system calls; return 0 if it succeeded."""
    numbers = _CALLS.get(platform.machine())
    return -1 if numbers is None else int(ctypes.CDLL(None).syscall(ctypes.c_long(numbers[which]), *arguments))
