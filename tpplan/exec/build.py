"""Allocating what a plan's operations need, on devices that are already checked."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from attrs import evolve

from tpplan.core.model import ModelSpec
from tpplan.core.workspace import (
    ALIGNMENT,
    FLAG_BYTES,
    FRAME_SLOT_BYTES,
    HOST_SLOT_BYTES,
    PAIR,
    areas,
    pinned_bytes,
    slot_bytes,
)
from tpplan.exec.backends.engine import Engine
from tpplan.exec.calls.operands import ADDABLE
from tpplan.exec.checks import name_of
from tpplan.exec.context import TPContext, run_all
from tpplan.exec.cuda.blocks import DIRECT_BLOCKS, SLOT_BLOCKS, most_blocks
from tpplan.exec.machine.look import uncounted
from tpplan.exec.machine.numa import near
from tpplan.exec.memory.binding import Memory
from tpplan.exec.memory.device import DeviceContext
from tpplan.exec.memory.host import HostMemory
from tpplan.exec.programs.lower import SPARED_BYTES, Limits
from tpplan.exec.programs.program import HOST, SLOTS
from tpplan.exec.protocol.direct import HELD, THREADS, VECTOR_BYTES
from tpplan.exec.protocol.slots import capacity
from tpplan.exec.tuning import Tuning, default
from tpplan.models.reader import read_model
from tpplan.planner.recount import differences as recounted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.backends.engine import Backend
    from tpplan.exec.group.meeting import Meeting
    from tpplan.exec.programs.program import Queue


class _Closable(Protocol):
    def close(self) -> None: ...


_Resource = TypeVar("_Resource", bound=_Closable)


#: The control area and the exchange buffer of devices.
Areas = dict[int, tuple[torch.Tensor, torch.Tensor]]


def build(
    plan: SplitPlan,
    places: Sequence[torch.device],
    start: Callable[[Memory], Backend],
    *,
    transport: str,
    max_rows: int,
    dtype: torch.dtype,
    direct: bool = True,
    waits: bool = True,
    tuning: Tuning | None = None,
    notes: Sequence[str] = (),
    scratch: bool = True,
    others: Mapping[int, int] = MappingProxyType({}),
    share: Callable[[Areas], Areas] = lambda _: {},
    meeting: Meeting | None = None,
) -> TPContext:
    """Allocate a context on devices that are already checked.

    Args:
        plan: a verified plan.
        places: a torch device for each device of the plan; ``meta`` for those of other processes.
        start: creates the backend over the context's memory.
        transport: ``peer``, ``host`` or ``events``.
        max_rows: maximum rows of an operand.
        dtype: dtype of the activations.
        direct: whether the backend can write directly into the tensors of other devices.
        waits: whether kernels on different devices may wait for each other.
        tuning: thresholds; the built-in ones if not given.
        notes: notes for the user on how the transport and thresholds were chosen.
        scratch: whether to allocate the plan's scratch.
        others: multiprocessors of each device of another process to whose memory kernels write.
        share: called with the control area and the exchange buffer of each device of this process, returns those of
            the others.
        meeting: the processes that the devices belong to, if there are several.

    Raises:
        ExecutionError: there is not enough memory.
    """
    sizes = areas(plan.splits, plan.model.dtype, plan.request)
    if not scratch:
        sizes = tuple(evolve(size, scratch_bytes=0) for size in sizes)
    used = [i for i, area in enumerate(sizes) if area.total_bytes]
    made: list[_Closable] = []
    try:
        own = [i for i in used if places[i].type != "meta"]
        devices = [_noted(made, DeviceContext(i, plan.devices[i].name, places[i], sizes[i])) for i in own]
        pinned = pinned_bytes(plan.splits, plan.model.dtype, plan.request)
        if transport != "host" or not waits:  # no kernel exchanges anything through the host's memory
            pinned = evolve(pinned, queues=0)
        on_gpus = any(place.type == "cuda" for place in places)
        blocks_of = partial(most_blocks, [places[i] for i in own], others=others.values())
        with near([device.device for device in devices]):
            host = _noted(made, HostMemory(pinned, used, lock_pages=on_gpus))
        peer_slot = slot_bytes(len(used))
        largest_message = (HOST_SLOT_BYTES if transport == "host" else peer_slot) if waits else 0
        if on_gpus and largest_message:
            largest_message = capacity(2 * largest_message, blocks_of(SLOT_BLOCKS))
        held = len(devices[0].exchange) // PAIR // ALIGNMENT * ALIGNMENT
        if on_gpus:
            held = min(held, blocks_of(DIRECT_BLOCKS) * THREADS * HELD * VECTOR_BYTES)
        shared = {device.index: (device.control, device.exchange) for device in devices}
        shared |= share(shared)
        exchanges = {index: exchange for index, (_, exchange) in shared.items()}

        def slots(queue: Queue) -> torch.Tensor:
            if queue.place == HOST:
                return host.slots(queue)
            senders = [index for index in used if index != queue.place]
            area = shared[queue.place][0][FLAG_BYTES:]
            size = 2 * SLOTS * peer_slot  # flags travel inside the data
            first = senders.index(queue.sender) * size
            return area[first : first + size].view(SLOTS, -1)

        flags = {**{index: control[:FLAG_BYTES] for index, (control, _) in shared.items()}, HOST: host.flags}
        limits = Limits(
            slot_bytes=largest_message,
            stage_bytes=pinned.chunk_bytes,
            exchange_bytes=len(devices[0].exchange),
            direct=direct,
            frame_bytes=FRAME_SLOT_BYTES if transport == "host" and waits else 0,
            streams=on_gpus,
            spared_bytes=SPARED_BYTES,
            tuning=tuning or default(len(used)),
            held_bytes=held,
            mirror_bytes=len(devices[0].exchange) if others else 0,
        )
        backend = _noted(made, start(Memory(exchanges, host.rings, slots, flags)))
        engine = Engine(backend, transport, limits, notes)
        everywhere = {i: places[i] for i in used}
        return TPContext(plan, everywhere, devices, host, engine, max_rows=max_rows, dtype=dtype, meeting=meeting)
    except BaseException:  # of an interrupt too, whose traceback may keep the memory for long
        run_all([each.close for each in reversed(made)])
        raise


def _noted(made: list[_Closable], resource: _Resource) -> _Resource:
    """Note a resource, to close it if an exception follows, and return it."""
    made.append(resource)
    return resource


def mismatches(plan: SplitPlan, model: ModelSpec | str | Path | None, max_rows: int, dtype: torch.dtype) -> list[str]:
    """Return a message for each argument that does not fit the plan, and for what the plan counts wrongly.

    Without a model, only the workspace can be counted again.
    """
    if model is None:
        problems = uncounted(plan)
    else:
        problems = recounted(plan, model if isinstance(model, ModelSpec) else read_model(model))
    if type(max_rows) is not int or not 1 <= max_rows <= plan.request.max_rows:
        most = plan.request.max_rows
        problems.append(f"max_rows: the plan has room for 1 to {most}, {max_rows!r:.40} were asked for")
    planned: torch.dtype = getattr(torch, plan.model.dtype)
    fitting = [each for each in ADDABLE if each.itemsize <= planned.itemsize]
    if dtype not in fitting:
        names = " or ".join(map(name_of, fitting))
        problems.append(f"dtype: the plan has room for {names}, {name_of(dtype)} was asked for")
    return problems


def advice(backend: str) -> str:
    """Return what to do where a plan cannot run here, be it for the machine, the model or an argument."""
    virtual = ', or run on virtual devices with backend="cpu"' if backend != "cpu" else ""
    return f"tpplan check compares a plan with its model; plan again for this machine and model{virtual}"
