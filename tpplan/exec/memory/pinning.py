"""Pinned host memory that the system refuses, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from tpplan.core.sizes import format_bytes
from tpplan.errors import ExecutionError
from tpplan.hardware.probe import system_memory

#: The system's name and version, which tell WSL2.
_KERNEL = Path("/proc/sys/kernel/osrelease")
#: A container's limit of memory and what it takes, by version of the control groups.
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def refused(what: str, size_bytes: int, error: Exception, smaller: str) -> ExecutionError:
    """Return the error for pinned memory that cannot be had; its hint names the limit that was probably hit.

    Args:
        what: what cannot be allocated, in words.
        size_bytes: its size.
        error: what torch has raised.
        smaller: how to do with less.
    """
    reason = str(error).partition("\n")[0]
    return ExecutionError(f"{what}: {reason}", f"{_advice(size_bytes)}, or {smaller}")


def _advice(size_bytes: int) -> str:
    here = system_memory.read()
    if here and here.available_bytes < size_bytes:
        return f"free host memory: {format_bytes(here.available_bytes)} are available"
    left = _left_in_group()
    if left is not None and left < size_bytes:
        return f"raise the container's limit of memory: {format_bytes(max(0, left))} are left of it"
    if "microsoft" in _text(_KERNEL).lower():
        return "raise memory= in .wslconfig: WSL2 pins a part of that at most"
    limit = _most_locked()
    if limit is not None and limit < size_bytes:
        allows = f"{format_bytes(limit)} are allowed"
        return f"raise the limit of locked memory, with ulimit -l or docker's --ulimit memlock=-1: {allows}"
    return "free host memory, of which the system pins a part at most"


def _left_in_group() -> int | None:
    """Return how many bytes a container may still take; None if it has no limit."""
    for limit, used in _GROUPS:
        texts = _text(limit).strip(), _text(used).strip()
        if all(text.isdecimal() for text in texts):
            return int(texts[0]) - int(texts[1])
    return None


def _most_locked() -> int | None:
    """Return how many bytes a process may lock; None if there is no limit."""
    try:
        import resource  # noqa: PLC0415 (only on Unix)

        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    except (ImportError, AttributeError, OSError):
        return None
    return None if most == resource.RLIM_INFINITY else most


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
