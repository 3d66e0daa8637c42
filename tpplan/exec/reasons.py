"""Descriptions of routes in words: how an operation runs, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.sizes import format_bytes
from tpplan.exec.programs.lower import LARGEST_CHUNK, kind_of
from tpplan.exec.programs.operation import Addition, Moves
from tpplan.exec.tuning import copies_field, slots_field

if TYPE_CHECKING:
    from tpplan.exec.backends.engine import Engine
    from tpplan.exec.programs.lower import Mode, Route
    from tpplan.exec.programs.operation import Operation


def how(operation: Operation, route: Route) -> str:
    """Return how an operation runs on a route; see :attr:`tpplan.exec.explain.Way.how`."""
    if route.transport == "local" and operation.name == "gather":
        return "written" if route.small else "copied"
    if route.transport == "local":
        return "on each device"
    ways = {"slots": route.small, "shared frames": route.shared, "frames": route.framed, "passed on": route.passed_on}
    ways["straight"] = route.transport == "peer"
    for way, is_taken in ways.items():
        if is_taken:
            return way
    return f"{route.parts} part{'s' if route.parts > 1 else ''}"


def why(operation: Operation, route: Route, engine: Engine, mode: Mode) -> str:
    """Return the reason for the choice of a route, in words.

    Args:
        operation: operation that takes the route.
        route: route for a given number of rows.
        engine: engine that chose the route.
        mode: mode that it was chosen for.
    """
    if route.transport == "local":
        return _why_local(operation, route, engine)
    limits, kind = engine.limits, kind_of(operation)
    largest = limits.slots(operation, engine.transport) if engine.transport != "events" else 0
    slot = f"a slot of {format_bytes(largest)}"
    if largest < limits.slot_bytes:
        slot = f"{slots_field(engine.transport, kind)}, {format_bytes(largest)}"
    if route.small:
        return f"fits {slot}" if largest == limits.slot_bytes else f"within {slot}"
    large = f"larger than {slot}"
    if route.framed:
        return f"{large}, and shared out" if route.shared else large
    if route.transport == "peer":
        spared = format_bytes(limits.tuning.passed_on_bytes)
        return f"spares its source passed_on_bytes, {spared}, or more" if route.passed_on else large
    if limits.straight and not mode.aside and largest < limits.tuning.copies(kind):
        large = f"from {copies_field(kind)}, {format_bytes(limits.tuning.copies(kind))}, on"
    large = f"{large}: " if engine.transport == "peer" and route.transport == "events" else ""
    if route.transport == "events" and isinstance(operation, Moves):
        return f"{large}copies of any size"
    room = f"a chunk of {format_bytes(min(limits.ring_slot(route.slots), LARGEST_CHUNK))}"
    if route.transport == "events":
        room = f"the exchange buffer of {format_bytes(limits.exchange_bytes)}"
    return f"{large}fits {room}" if route.parts == 1 else f"{large}parts fit {room}"


def _why_local(operation: Operation, route: Route, engine: Engine) -> str:
    if isinstance(operation, Addition):
        return "each adds its own"
    if operation.name != "gather":
        return "no other device"
    largest = format_bytes(engine.limits.tuning.gathers_bytes)
    return f"{'within' if route.small else 'larger than'} gathers_bytes, {largest}"
