"""Explaining which path a context takes for each operation, at each row count, and why, in words."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.axes import Axis, slices_of
from tpplan.core.sizes import format_bytes
from tpplan.errors import ExecutionError
from tpplan.exec.checks import name_of
from tpplan.exec.programs import operation
from tpplan.exec.programs.lower import CALLED, LARGEST_CHUNK, Limits, Mode, kind_of, lower
from tpplan.exec.programs.operation import Addition, Moves
from tpplan.exec.programs.program import EXCHANGE, HOST, SLOT, STAGE, flat, reads, writes
from tpplan.exec.tuning import copies_field, slots_field
from tpplan.render.text import shorten, table, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from tpplan.core.plan import Split, SplitPlan
    from tpplan.exec.backends.engine import Engine
    from tpplan.exec.programs.lower import Route
    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Buffer, Program
    from tpplan.exec.tuning import Tuning
    from tpplan.render.text import Span


def how(operation: Operation, route: Route) -> str:
    """Return how an operation runs on a route; see :attr:`tpplan.exec.explain.Way.how`."""
    if route.transport == "local" and operation.name == "gather":
        return "written" if route.small else "copied"
    if route.transport == "local":
        return "on each device"
    ways = {"slots": route.small, "shared frames": route.shared, "frames": route.framed, "passed on": route.relayed}
    ways["one shot"], ways["straight"] = route.one_shot, route.transport == "peer"
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
        return _why_peer(route, limits.tuning, large)
    if limits.direct and not mode.aside and largest < limits.tuning.copies(kind):
        large = f"from {copies_field(kind)}, {format_bytes(limits.tuning.copies(kind))}, on"
    large = f"{large}: " if engine.transport == "peer" and route.transport == "events" else ""
    if route.transport == "events" and isinstance(operation, Moves):
        return f"{large}copies of any size"
    room = f"a chunk of {format_bytes(min(limits.ring_slot(route.slots), LARGEST_CHUNK))}"
    if route.transport == "events":
        room = f"the exchange buffer of {format_bytes(limits.exchange_bytes)}"
    return f"{large}fits {room}" if route.parts == 1 else f"{large}parts fit {room}"


def _why_peer(route: Route, tuning: Tuning, large: str) -> str:
    if route.relayed:
        return f"spares its source passed_on_bytes, {format_bytes(tuning.passed_on_bytes)}, or more"
    one_shot = f"peer_one_shot_bytes, {format_bytes(tuning.peer_one_shot_bytes)}"
    return f"{large}, within {one_shot}" if route.one_shot else large


def _why_local(operation: Operation, route: Route, engine: Engine) -> str:
    if isinstance(operation, Addition):
        return "each adds its own"
    if operation.name != "gather":
        return "no other device"
    largest = format_bytes(engine.limits.tuning.gathers_bytes)
    return f"{'within' if route.small else 'larger than'} gathers_bytes, {largest}"


#: In place of an axis: all devices in use.
ALL = "all devices"

#: Suffixes of an operation's name for the ways that it takes only in a graph, and only aside.
IN_GRAPH, ASIDE = " in a graph", " aside"
_MODES = {IN_GRAPH: Mode(captured=True), ASIDE: Mode(aside=True)}

#: Widths of the two columns of the table that are wrapped, so that it is 120 wide at most.
_AXES, _WHY = 22, 46

#: Names of the context's memory areas, by role and whether they are on the host.
_BUFFERS = {
    (EXCHANGE, False): "exchange buffer",
    (STAGE, True): "host rings",
    (SLOT, False): "peer slots",
    (SLOT, True): "host slots",
}


@frozen(kw_only=True)
class Way:
    """The path of an operation on some axes, for a range of row counts.

    Attributes:
        operation: name of the operation, with ``from the host`` if its tensor is in host memory, and ``in a graph`` or
            ``aside`` if it takes this path only when captured, or only concurrently with other work.
        axes: names of the axes, with layers where these are cut differently, or ``all devices``.
        first: fewest rows.
        last: most rows.
        transport: ``peer``, ``host``, ``events``, ``local`` where devices exchange nothing, or ``refused``.
        how: ``slots``, ``frames``, ``shared frames``, ``straight``, ``passed on`` between receivers of the same data,
            or for copies the number of parts; if ``local``, ``on each device``, or ``written`` or ``copied`` to the
            host.
        why: reason for this path, in words.
        row_bytes: bytes that one row moves from one memory to another, summed over all devices.
        buffers: areas of the context's memory that are used.
    """

    operation: str
    axes: tuple[str, ...]
    first: int
    last: int
    transport: str
    how: str
    why: str
    row_bytes: int
    buffers: tuple[str, ...]


@frozen(kw_only=True)
class Explanation:
    """Which path a context takes for each operation; ``str()`` gives a table at most 120 wide, without the buffers.

    Broadcasts and all-reduces have the width of the residual stream, other operations that of their axis, all in the
    dtype of the activations. Other widths and dtypes take the same paths, at other row counts.

    Attributes:
        model: name of the plan's model.
        transport: transport of the context.
        dtype: dtype of the activations.
        max_rows: maximum rows of an operand.
        ways: one entry per path, ordered by operation, then axis, then rows.
        limits: buffer sizes and thresholds.
        notes: why no faster transport was chosen, and where the thresholds come from.
    """

    model: str
    transport: str
    dtype: str
    max_rows: int
    ways: tuple[Way, ...]
    limits: Limits
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.model}, transport {self.transport}, 1 to {self.max_rows} rows of {self.dtype}"
        return "\n".join((head, *(f"note: {note}" for note in self.notes), "", *_table(self.ways)))


def _table(ways: Sequence[Way]) -> Iterator[str]:
    """Yield the lines of a table of ways, with the name of each operation above its rows."""
    on: dict[str, set[str]] = {}
    for way in ways:
        on.setdefault(called(way.operation), set()).update(way.axes)
    rows: list[tuple[str, ...]] = [("  on", "rows", "way", "per row", "why")]
    names: dict[int, str] = {}
    joined = _joined(ways)
    for name in dict.fromkeys(way.operation for way in joined):
        names[len(rows)] = name
        every = len(on[called(name)])
        for way in (one for one in joined if one.operation == name):
            several = f"{way.first}-{way.last}" if way.last > way.first else str(way.first)
            moved = format_bytes(way.row_bytes) if way.row_bytes else "none"
            axes = "every axis" if 1 < len(way.axes) == every else ", ".join(way.axes)
            cells = (several, f"{way.transport} {way.how}".strip(), moved)
            indent = "  "
            for axis, reason in zip_longest(wrapped(axes, _AXES), wrapped(way.why, _WHY), fillvalue=""):
                rows.append((indent + shorten(axis, _AXES), *cells, reason))
                indent, cells = "    ", ("", "", "")
    spans: list[list[Span]] = [[(cell, "") for cell in row] for row in rows]
    for i, line in enumerate(table(spans, "<><><")):
        if i in names:
            yield names[i]
        yield "".join(text for text, _ in line)


def _joined(ways: Sequence[Way]) -> list[Way]:
    """Join successive ways that differ only in rows and number of parts: ``1 to 8 parts``."""
    found: list[Way] = []
    for way in ways:
        before = found[-1] if found else way
        fewest, parts, _ = before.how.partition(" part")
        same = evolve(before, first=way.first, last=way.last, how=way.how, why=way.why) == way
        if same and parts and way.first == before.last + 1:
            found[-1] = evolve(way, first=before.first, how=f"{fewest.partition(' ')[0]} to {way.how}")
        else:
            found.append(way)
    return found


def cuts(plan: SplitPlan) -> dict[str, Split | None]:
    """Return the splits of a plan by display name, with None for all devices."""
    several = [split.axis for split in plan.splits]
    names = (f"{s.axis} in layers {s.layers}" if several.count(s.axis) > 1 else str(s.axis) for s in plan.splits)
    return {ALL: None, **dict(zip(names, plan.splits, strict=True))}


def called(operation: str) -> str:
    """Return an operation's name without the suffix for a graph or for going aside."""
    return operation.removesuffix(IN_GRAPH).removesuffix(ASIDE)


def in_graphs(ways: Sequence[Way], name: str) -> Iterator[Way]:
    """Yield the ways of an operation when captured: those that differ in a graph, and for other rows the usual ones."""
    usual, others = ([one for one in ways if one.operation == each] for each in (name, name + IN_GRAPH))
    yield from others
    for way in usual:
        for axis in way.axes:
            taken = sorted((one.first, one.last) for one in others if axis in one.axes)
            first = way.first
            for start, end in (*taken, (way.last + 1, way.last + 1)):
                last = min(start - 1, way.last)
                if first <= last:
                    yield evolve(way, axes=(axis,), first=first, last=last)
                first = max(first, end + 1)


def explain(
    plan: SplitPlan, devices: tuple[int, ...], engine: Engine, max_rows: int, dtype: torch.dtype
) -> Explanation:
    """Return which path an engine takes for each operation of a plan.

    Args:
        plan: the compiled plan.
        devices: the devices in use.
        engine: the context's engine.
        max_rows: maximum rows of an operand.
        dtype: dtype of the activations.
    """
    grouped: dict[Way, list[str]] = {}
    for name, axis, wanted in _operations(plan, devices):
        usual = [*_ways(name, wanted, engine, max_rows, dtype.itemsize, mode=CALLED)]
        others = (
            way
            for suffix, mode in _MODES.items()
            for way in _ways(name + suffix, wanted, engine, max_rows, dtype.itemsize, mode=mode)
            if not any(_is_part(way, one) for one in usual)
        )
        for way in (*usual, *others):
            grouped.setdefault(way, []).append(axis)
    return Explanation(
        model=plan.model.name,
        transport=engine.transport,
        dtype=name_of(dtype),
        max_rows=max_rows,
        ways=tuple(evolve(way, axes=tuple(axes)) for way, axes in grouped.items()),
        limits=engine.limits,
        notes=engine.notes,
    )


def _operations(plan: SplitPlan, devices: tuple[int, ...]) -> Iterator[tuple[str, str, Operation]]:
    """Yield every operation on every axis, as its name, the name of the axis, and the operation."""
    stream = plan.split(Axis.RESIDUAL).size
    slices = {
        axis: tuple((x.device, x.start * split.width, x.end * split.width) for x in slices_of(split.bounds))
        for axis, split in cuts(plan).items()
        if split
    }
    held = {ALL: devices, **{axis: tuple(device for device, _, _ in cut) for axis, cut in slices.items()}}
    first = devices[0]
    for source, name in ((first, "broadcast"), (HOST, "broadcast from the host")):
        yield from ((name, axis, operation.broadcast(source, targets, stream)) for axis, targets in held.items())
    for source, name in ((first, "scatter"), (HOST, "scatter from the host")):
        yield from ((name, axis, operation.scatter(source, cut)) for axis, cut in slices.items())
    yield from (("gather", axis, operation.allgather("gather", cut, (HOST,))) for axis, cut in slices.items())
    yield from (("allgather", axis, operation.allgather("allgather", cut, devices)) for axis, cut in slices.items())
    yield from (
        ("all_reduce", axis, operation.all_reduce(stream, senders, devices, residual=True))
        for axis, senders in held.items()
    )
    yield from (("add_residual", axis, operation.add(cut)) for axis, cut in slices.items())


def _ways(
    name: str, operation: Operation, engine: Engine, max_rows: int, item_bytes: int, *, mode: Mode
) -> Iterator[Way]:
    """Yield the ways of an operation, from one row to ``max_rows``; the caller fills in the axes."""
    bare = partial(Way, operation=name, axes=())

    def route_of(rows: int) -> Route:
        found = engine.route(operation, rows, item_bytes, mode)
        return evolve(found, parts=1) if found.framed else found  # frames are one way, whatever their number of parts

    first = 1
    try:
        while first <= max_rows:
            route = route_of(rows=first)
            last = _last(route, route_of, first, max_rows)
            program = lower(operation, evolve(route, parts=1))  # all parts together move the same bytes
            yield bare(
                first=first,
                last=last,
                transport=route.transport,
                how=how(operation, route),
                why=why(operation, route, engine, mode),
                row_bytes=item_bytes * _crossing(program),
                buffers=_buffers(program),
            )
            first = last + 1
    except ExecutionError as error:
        yield bare(first=first, last=max_rows, transport="refused", how="", why=error.message, row_bytes=0, buffers=())


def _is_part(way: Way, other: Way) -> bool:
    """Return whether a way equals another one, but for its name, on a subrange of its rows."""
    within = other.first <= way.first and way.last <= other.last
    return within and evolve(other, operation=way.operation, first=way.first, last=way.last) == way


def _last(route: Route, route_of: Callable[..., Route], first: int, most: int) -> int:
    """Return the most rows with the same route as ``first``, by bisection: more rows never return to an earlier one."""
    low, high = first, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if route_of(rows=middle) == route else (low, middle - 1)
    return low


def _crossing(program: Program) -> int:
    """Return how many columns of each row commands read or write outside their device's memory."""
    return sum(
        view.stop - view.start
        for step in flat(program)
        for view in (*reads(step), *writes(step))
        if _place(view.buffer) != step.stream.device
    )


def _buffers(program: Program) -> tuple[str, ...]:
    """Return the names of the memory areas that a program uses."""
    used = {
        (view.buffer.role, _place(view.buffer) == HOST)
        for step in flat(program)
        for view in (*reads(step), *writes(step))
    }
    return tuple(name for key, name in _BUFFERS.items() if key in used)


def _place(buffer: Buffer) -> int:
    """Return the device whose memory holds a buffer, or HOST."""
    if buffer.role == STAGE:
        return HOST
    return buffer.queue.place if buffer.queue else buffer.device
