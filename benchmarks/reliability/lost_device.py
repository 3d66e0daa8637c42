"""A device that never arrives: how long the others wait, and what is left."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, evolve, frozen

from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.build import build
from tpplan.exec.cuda.backend import CudaDevices

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext
    from tpplan.exec.cuda.launch import Bound
    from tpplan.exec.handles import Pending
    from tpplan.exec.memory.binding import Memory

#: How long kernels wait, and how long an error may take, in seconds.
_TIMEOUT, _MOST = 10.0, 15
#: Bytes that a closed context may keep: no workspace is as small.
_LITTLE = 2**20


class _Losing(CudaDevices):
    """Devices of which one does not take part any more, once it is ``lost``."""

    lost: int | None = None

    def issue(self, bound: Bound) -> Pending:
        """Issue a program but for the steps of the lost device."""
        if self.lost is None:
            return super().issue(bound)
        kept = tuple(step for step in bound.steps if step[1] != self.lost)
        return super().issue(evolve(bound, steps=kept, quick=kept))


@frozen
class Loss:
    """What came of it.

    Attributes:
        seconds: until there was an error.
        message: message of the error; empty if there was none.
        refused: whether the context refused everything from then on.
        freed: whether closing it gave the workspace back.
    """

    seconds: float
    message: str
    refused: bool
    freed: bool

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, in words."""
        found = {
            "a lost device goes unnoticed": not self.message,
            f"a lost device is noticed after {self.seconds:.0f} s": self.seconds > _MOST,
            "a context goes on without a device": not self.refused,
            "a context that lost a device keeps its memory": not self.freed,
        }
        return [problem for problem, is_so in found.items() if is_so]


def lose(plan: SplitPlan, transport: str, rows: int = 1) -> Loss:
    """Lose the last device in the middle of an all-reduce.

    Args:
        plan: a plan for CUDA devices, in the order of their numbers.
        transport: whose kernels wait for each other: ``peer`` or ``host``.
        rows: number of rows of the residual stream that are added up.
    """
    places = [torch.device("cuda", i) for i in range(len(plan.devices))]
    used = {i: places[i] for i, memory in enumerate(plan.memory) if memory.used_bytes}
    made: list[_Losing] = []

    def start(memory: Memory) -> _Losing:
        made.append(_Losing(memory, used, transport=transport, timeout=_TIMEOUT))
        return made[-1]

    dtype = getattr(torch, plan.model.dtype)
    before = [torch.cuda.memory_allocated(place) for place in places]
    context = build(plan, places, start, transport=transport, max_rows=plan.request.max_rows, dtype=dtype)
    columns = plan.split(Axis.RESIDUAL).size
    parts = [torch.ones(rows, columns, dtype=dtype, device=device.device) for device in context.devices.values()]
    context.all_reduce(parts)
    context.synchronize()
    made[0].lost = context.all_devices[-1]
    begun = time.perf_counter()
    message, refused = "", False
    try:
        context.all_reduce(parts)
        context.synchronize()
    except ExecutionError as error:
        message = error.message
    seconds = time.perf_counter() - begun
    try:
        context.all_reduce(parts)
    except ExecutionError:
        refused = True
    with suppress(ExecutionError):  # which tells of the lost device again
        context.close()
    del parts
    left = [torch.cuda.memory_allocated(place) for place in places]
    freed = all(after - first < _LITTLE for first, after in zip(before, left, strict=True))
    return Loss(seconds, message, refused, freed)


MIB = 2**20
#: What may come and go: programs and their tables are remembered up to some number.
_MOST_GROWTH = {"allocated": 4 * MIB, "used": 32 * MIB, "host": 64 * MIB}
#: Looks from which growth can be told.
_ENOUGH = 8
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
        if count < _ENOUGH:
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
