"""A device that never arrives: how long the others wait, and what is left."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.build import build
from tpplan.exec.cuda.backend import CudaDevices

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
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
