"""One attempt at a plan: the cuts that a strategy finds, and what they take of every device's memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.axes import Axis, bounds_of, format_layers, minimum_units, parse_layers
from tpplan.core.device import Device
from tpplan.core.model import GGUF, PREDICTION, ModelSpec
from tpplan.core.plan import DeviceMemory, PlanModel, Request, Split, SplitPlan, least_version
from tpplan.planfile.codec import fingerprint
from tpplan.planner.apportion import apportion
from tpplan.planner.costs import Demands
from tpplan.planner.exllamav2 import exllamav2_counts
from tpplan.planner.items import Bin, Item, Placement
from tpplan.planner.ledger import demands, ledger, stated
from tpplan.planner.place import Effort, nearest, solve
from tpplan.planner.replicated import are_replicated, place_replicated
from tpplan.planner.speed import bandwidth_of
from tpplan.planner.stages import solve_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.planner.costs import Demand
    from tpplan.planner.replicated import Counts

#: Times the budget, any model fits on any device.
_PLENTY = 2**60
#: Cuts in proportion are easier to understand than others that lack a fiftieth less.
_HARDLY_MORE = 50


@frozen
class Attempt:
    """Cuts of every axis, which may exceed the budgets.

    Attributes:
        model: the model that is cut.
        devices: the devices that it is cut over.
        request: the request to the planner.
        wanted: the axes and their costs.
        bounds: the cut points of each of these axes.
        memory: the ledger of each device; free bytes are negative where the budget is exceeded.
    """

    model: ModelSpec
    devices: tuple[Device, ...]
    request: Request
    wanted: Demands
    bounds: tuple[tuple[int, ...], ...]
    memory: tuple[DeviceMemory, ...]

    @property
    def lacking(self) -> int:
        """Bytes in excess of the budgets, summed over all devices."""
        return sum(max(0, -entry.free_bytes) for entry in self.memory)

    def plan(self) -> SplitPlan:
        """Return the plan with these cuts."""
        made = SplitPlan(
            model=described(self.model, self.request),
            request=self.request,
            devices=self.devices,
            splits=splits_of(self.wanted.axes, self.bounds),
            memory=stated(self.memory, self.request),
        )
        return evolve(made, format_version=least_version(made))


def attempt(
    model: ModelSpec,
    devices: tuple[Device, ...],
    request: Request,
    *,
    effort: Effort = Effort.BEST,
    wanted: Demands | None = None,
) -> Attempt | None:
    """Cut every axis by the request's strategy; where nothing fits, the attempt lacks as little as possible.

    ``exllamav2`` ignores budgets; it gives None where the original divides by zero. With less than the
    best effort, None if no cuts that fit were found. ``wanted`` are the model's costs, if they are known.
    """
    wanted = wanted or demands(model, request, len(devices))
    if request.strategy == "exllamav2":
        # The original knows no sliding windows: it counts all tokens in all layers.
        whole = demands(model, evolve(request, full_window=True), len(devices))
        left = [evolve(d, budget_bytes=d.budget_bytes - request.left(i)) for i, d in enumerate(devices)]
        counts = exllamav2_counts(model, whole, left)
        return None if counts is None else finish(model, devices, request, wanted, counts)
    speeds = map(bandwidth_of, devices) if request.strategy == "latency" else (0,) * len(devices)
    hosts = enumerate(zip(devices, speeds, strict=True))
    bins = [bin_of(device, wanted, request, i, speed) for i, (device, speed) in hosts]
    solver = solve_stages if request.strategy == "latency" else partial(solve, shares=True)

    def placed(some: Demands, hosts: Sequence[Bin], effort: Effort) -> Counts | None:
        return place(some, hosts, request.strategy, lambda items, hosts: solver(items, hosts, effort))

    if request.strategy == "latency" and effort is not Effort.ANY and are_replicated(wanted):
        counts = place_replicated(wanted, bins, placed, effort)
    else:
        counts = placed(wanted, bins, effort)
    found = finish(model, devices, request, wanted, counts) if counts else None
    if found and not found.lacking:
        return found
    # The solver overestimates: it charges a ragged unit as a whole one, and replicated heads at their highest cost.
    # Where that exceeds a budget by a little, the exact ledger may still accept a cut.
    return nearest_attempt(model, devices, request, wanted) if effort is Effort.BEST else None


def nearest_attempt(
    model: ModelSpec, devices: tuple[Device, ...], request: Request, wanted: Demands | None = None
) -> Attempt:
    """Return the cuts that lack the fewest bytes, or, if they lack hardly more, cuts in proportion to the budgets."""
    wanted = wanted or demands(model, request, len(devices))
    bins = [bin_of(device, wanted, request, i) for i, device in enumerate(devices)]
    plenty = [evolve(host, room=host.speed * _PLENTY) for host in bins]
    placed = (
        place(wanted, plenty, "balanced", lambda items, hosts: solve(items, hosts, Effort.ANY)),
        place(wanted, bins, "balanced", nearest),
    )
    attempts = [finish(model, devices, request, wanted, counts) for counts in placed if counts]
    least = min(each.lacking for each in attempts)
    return next(each for each in attempts if each.lacking <= least + least // _HARDLY_MORE)


def finish(
    model: ModelSpec,
    devices: tuple[Device, ...],
    request: Request,
    wanted: Demands,
    counts: Sequence[Sequence[int]],
) -> Attempt:
    """Convert the units of every axis on each device into bounds and a ledger."""
    bounds = tuple(bounds_of(row, d.unit, d.size) for row, d in zip(counts, wanted.axes, strict=True))
    memory = ledger(bounds, wanted, devices, request)
    return Attempt(model, devices, request, wanted, bounds, memory)


def place(
    wanted: Demands, bins: Sequence[Bin], strategy: str, solver: Callable[[list[Item], Sequence[Bin]], Placement | None]
) -> tuple[tuple[int, ...], ...] | None:
    """Return how many units of every axis each device gets, or None if the solver finds no placement.

    Axes that cost nothing (the residual stream in the layout ``reduce``) are placed last, in proportion to speed, over
    the devices that are already in use.
    """
    items = {i: _item(demand, strategy) for i, demand in enumerate(wanted.axes)}
    first = [i for i, demand in enumerate(wanted.axes) if demand.replicas > 1 and demand.units >= len(bins)]
    for i in first:
        # Heads are replicated so that every device has some: each gets one before the others are placed.
        bins = [_with_one(items[i], host) for host in bins]
        one = items[i].kept_load + items[i].load
        items[i] = evolve(items[i], count=items[i].count - len(bins), kept=0, kept_load=0, borne=one)
    costly = [i for i, item in items.items() if item.count and (item.cost or item.kept)]
    placed = solver([items[i] for i in costly], bins)
    if placed is None:
        return None
    rows = dict(zip(costly, placed, strict=True))
    shares = [host.speed if first or any(row[b] for row in placed) else 0 for b, host in enumerate(bins)]
    for i in items.keys() - rows.keys():
        count, minimum = items[i].count, items[i].minimum
        # Any used bin could hold all units; adding its room breaks ties by room instead of by the devices' order.
        uppers = [count + host.room if share else 0 for host, share in zip(bins, shares, strict=True)]
        rows[i] = tuple(apportion(count, minimum, shares, uppers) or ()) if count else (0,) * len(bins)
    return tuple(tuple(units + (i in first) for units in rows[i]) for i in sorted(rows))


def _with_one(item: Item, host: Bin) -> Bin:
    """Return a bin with one unit of an item added."""
    return evolve(host, room=host.room - item.kept - item.cost, load=host.load + item.kept_load + item.load)


def _item(demand: Demand, strategy: str) -> Item:
    unit, kept = demand.unit_cost(), demand.fixed_cost()
    minimum = minimum_units(demand.axis, demand.size, demand.unit)
    attention = demand.axis in {Axis.KV_HEADS, Axis.LINEAR_HEADS}
    if strategy == "latency":
        return Item(demand.units, minimum, unit.bytes, kept.bytes, unit.time, kept.time, attention, stage=demand.stage)
    # What value heads share is small, and no reason to compute all of them on one device.
    load = kept if demand.replicas > 1 else demand.kept
    return Item(demand.units, minimum, unit.bytes, kept.bytes, unit.bytes, load.bytes, attention)


def bin_of(device: Device, wanted: Demands, request: Request, index: int, bandwidth: int = 0) -> Bin:
    """Return a device as a bin, with its room, and its bandwidth as speed, or its budget if that is 0."""
    left = request.left(index)
    room = device.budget_bytes - device.overhead_bytes - wanted.common.bytes - left
    if bandwidth:
        return Bin(room, bandwidth, wanted.common.time)
    overhead = 0 if request.drafts_for else device.overhead_bytes  # the model's, wherever this one goes
    return Bin(room, device.budget_bytes, wanted.common.bytes + overhead + left)


def described(model: ModelSpec, request: Request) -> PlanModel:
    """Return what a plan says of its model; prediction layers that it leaves room for are planned."""
    name, architecture, layers = model.name, model.architecture, model.layer_count
    stored = model.weight_format if model.weight_format.startswith(GGUF) else ""
    beside = tuple(part for part in model.not_planned if not (request.mtp and part.what == PREDICTION))
    told = beside, model.assumed, stored
    return PlanModel(name, architecture, fingerprint(model), model.dtype, layers, *told)


def splits_of(axes: Sequence[Demand], bounds: Sequence[tuple[int, ...]]) -> tuple[Split, ...]:
    """Return the splits of a plan, given the cut points of each axis; query heads are cut where their KV heads are.

    Layers whose query heads are cut alike share a split of them, though their KV heads may be others.
    """
    found, queries = [], dict[Split, list[int]]()
    for d, cuts in zip(axes, bounds, strict=True):
        split = Split(
            axis=d.axis, layers=d.layers, size=d.size, unit=d.unit, width=d.width, replicas=d.replicas, bounds=cuts
        )
        found.append(split)
        if d.axis is Axis.KV_HEADS:
            heads = tuple(cut * d.group for cut in cuts)
            size, unit = d.size * d.group, d.unit * d.group
            alike = evolve(split, axis=Axis.Q_HEADS, layers="", size=size, unit=unit, replicas=1, bounds=heads)
            queries.setdefault(alike, []).extend(parse_layers(d.layers))
    found += [evolve(split, layers=format_layers(layers)) for split, layers in queries.items()]
    return tuple(sorted(found, key=lambda split: list(Axis).index(split.axis)))
