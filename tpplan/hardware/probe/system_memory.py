"""The system's memory, which some GPUs share."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

from tpplan.hardware.catalogue import system_share

_MEMINFO = Path("/proc/meminfo")


@frozen
class SystemMemory:
    """What the kernel tells of the memory of this machine.

    Attributes:
        total_bytes: in all.
        available_bytes: that programs can have without swapping.
    """

    total_bytes: int
    available_bytes: int

    @property
    def usable_bytes(self) -> int:
        """What a GPU may take now: all that is available, less the system's share."""
        return max(0, self.available_bytes - system_share(self.total_bytes))


def read() -> SystemMemory | None:
    """Return the memory of this machine; None where the kernel has no ``/proc/meminfo``."""
    try:
        return parse(_MEMINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def parse(meminfo: str) -> SystemMemory | None:
    """Return what the text of ``/proc/meminfo`` tells; None if it has not both numbers."""
    kibibytes = {key: int(number) for key, number in re.findall(r"^(\w+): +([0-9]{1,15}) kB$", meminfo, re.MULTILINE)}
    total, available = kibibytes.get("MemTotal", 0), kibibytes.get("MemAvailable", 0)
    return SystemMemory(total * 2**10, available * 2**10) if total and available else None
