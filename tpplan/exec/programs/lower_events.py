"""Lowering to copies between devices, ordered by events; works wherever such copies do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tpplan.exec.programs.fence import caller, fence, meet, order, own
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, Buffer, Copy, Event, Exchange, Program, Sum, View

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Addition, Moves, Reduction
    from tpplan.exec.programs.program import Command


def moves(operation: Moves) -> Program:
    """Lower moves: every target device pulls its columns."""
    ends = [(source.buffer.device, target.buffer.device) for source, target in operation.moves]
    touched = [(device, target) for source, target in ends for device in (source, target)]
    hub = own(min(target for _, target in ends))
    commands: list[Command] = [
        *meet("enter", ((caller(device), own(target)) for device, target in touched), hub),
        *(Copy(own(target.buffer.device), source, target) for source, target in operation.moves),
        *meet("leave", ((own(target), caller(device)) for device, target in touched), hub),
    ]
    return Program(f"{operation.name} by events", tuple(commands))


def local(operation: Moves, *, by_kernels: bool = False) -> Program:
    """Lower local moves: each device copies its own columns, within its memory or to the host, waiting for no other.

    Args:
        operation: the operation to lower.
        by_kernels: whether kernels copy, instead of copy engines; only to the host.
    """
    commands: list[Command] = []
    leave: list[Command] = []  # issued last, so that it delays no copy
    results = []
    for source, target in operation.moves:
        stream = own(source.buffer.device)
        copy = Copy(stream, source, target)
        commands += order("enter", caller(stream.device), stream)
        commands.append(Exchange(stream, (copy,)) if by_kernels else copy)
        leave += order("leave", stream, caller(stream.device))
        if target.buffer.device == HOST:
            results.append(Event("leave", stream))
    where = "by kernels of each device" if by_kernels else "on each device"
    return Program(f"{operation.name} {where}", (*commands, *leave), tuple(results))


def addition(operation: Addition) -> Program:
    """Lower an addition: every device adds its own columns."""
    commands: list[Command] = []
    for share in operation.shares:
        device = share.taker
        target = View(Buffer(OUTPUT, device), 0, share.stop - share.start)
        commands += order("enter", caller(device), own(device))
        commands.append(Sum(own(device), (target, share.of(INPUT, device)), target))
        commands += order("leave", own(device), caller(device))
    return Program(f"{operation.name} on each device", tuple(commands))


def reduction(operation: Reduction, parts: int) -> Program:
    """Lower a reduction: each taker pulls its share from all givers, sums it, and pulls the other takers' sums."""
    callers = [caller(device) for device in operation.devices]
    workers = [own(taker) for taker in operation.takers]
    shares = operation.shares()
    summed = [own(share.taker) for share in shares]
    hub = summed[0]
    commands: list[Command] = [*fence("enter", callers, hub, summed)]
    for part in range(parts):
        for share in operation.shares(part, parts):
            stream = own(share.taker)
            givers = operation.others(share.taker)
            commands += (Copy(stream, share.of(INPUT, g), operation.slab(share, g)) for g in givers)
            commands.append(operation.total(stream, share, partial(operation.slab, share)))
    commands += fence("sum", summed, hub, [w for w in workers if {*summed} - {w}])
    for taker in operation.takers:
        for share in shares:
            if share.taker != taker:
                commands.append(Copy(own(taker), share.of(OUTPUT, share.taker), share.of(OUTPUT, taker)))
    commands += fence("leave", workers, hub, callers)
    return Program(f"{operation.name} by events", tuple(commands))
