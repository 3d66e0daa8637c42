"""The memory that contexts take: whether it grows, is what was planned, and what the driver says of it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext

MIB = 2**20
#: What may come and go: programs and their tables are remembered up to some number.
_MOST_GROWTH = {"allocated": 4 * MIB, "used": 32 * MIB, "host": 64 * MIB}
#: Looks from which growth can be told.
ENOUGH = 8
#: Share of what was foretold by which an overhead may be more.
_TOLERANCE = 0.05


@define
class Growth:
    """The memory in use, looked at many times.

    Attributes:
        looks: bytes in use at each look, by kind of memory.
    """

    looks: list[dict[str, int]] = Factory(list)

    def look(self, context: TPContext) -> None:
        """Note what is in use now, without what torch keeps for later."""
        gc.collect()
        page = os.sysconf("SC_PAGE_SIZE")
        look = {"host": int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page}
        places = dict.fromkeys(device.device for device in context.devices.values() if device.device.type == "cuda")
        if places:
            torch.cuda.empty_cache()
        for place in places:
            free, total = torch.cuda.mem_get_info(place)
            look |= {f"allocated on {place}": torch.cuda.memory_allocated(place), f"used on {place}": total - free}
        self.looks.append(look)

    @property
    def grown(self) -> dict[str, int]:
        """By how much the most of the last half is above the most of the quarter before it; empty if looks are few."""
        count = len(self.looks)
        if count < ENOUGH:
            return {}
        before, after = self.looks[count // 4 : count // 2], self.looks[count // 2 :]
        return {name: max(x[name] for x in after) - max(x[name] for x in before) for name in self.looks[0]}

    @property
    def problems(self) -> list[str]:
        """What grew too much, in words."""
        return [
            f"memory {name} grew by {grown / MIB:.1f} MiB"
            for name, grown in self.grown.items()
            if grown > _MOST_GROWTH[name.partition(" ")[0]]
        ]


def compile_measured(plan: SplitPlan, make: Callable[[], TPContext]) -> tuple[TPContext, list[tuple[int, int, int]]]:
    """Return a context of a plan, and for each of its devices the workspace that was planned, and the bytes it took.

    Args:
        plan: a plan for virtual devices, or for CUDA devices in the order of their numbers.
        make: compiles the plan.
    """
    gc.collect()
    cached = torch.cuda.is_available() and not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")  # or nobody counts
    before = [_requested(i) if cached else 0 for i in range(torch.cuda.device_count())]
    context = make()
    found = []
    for index, device in context.devices.items():
        taken = device.arena.size_bytes
        if cached and device.device.type == "cuda":
            taken = _requested(device.device.index) - before[device.device.index]
        found.append((index, plan.memory[index].workspace_bytes, taken))
    return context, found


class Driver:
    """What the driver says that this process takes of each GPU; asked first before anything uses one."""

    def __init__(self) -> None:
        """Note what is taken by others."""
        import pynvml  # noqa: PLC0415 (an extra)

        self._nvml = pynvml
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self._handles = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        self._before = {uuid: self._used(uuid) for uuid in self._handles}

    def used_bytes(self, device: int) -> int:
        """Return the bytes that are in use on a CUDA device and were not at first."""
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return self._used(uuid) - self._before[uuid]

    def _used(self, uuid: str) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[uuid]).used)


def multiply(device: int) -> None:
    """Do a first matrix product on a CUDA device, for which libraries are loaded."""
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=torch.device("cuda", device))
    torch.mm(x, x)
    torch.cuda.synchronize(device)


def is_enough(planned: int, measured: int) -> bool:
    """Tell whether an overhead is no more than was planned, or little."""
    return measured - planned <= _TOLERANCE * planned


def _requested(device: int) -> int:
    """Return the bytes that tensors on a CUDA device asked for."""
    count: int = torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0)
    return count
