"""Costs of a model's axes in bytes, as exact integers: of a whole axis, of a slice, and of holding any slice at all."""

from __future__ import annotations

from math import gcd
from typing import Self, TypeAlias

from attrs import evolve, frozen

from tpplan.core.axes import Axis, unit_count

#: What devices compute between two sums, after which they go on together: the axis that stands for it, and its layers.
Stage: TypeAlias = tuple[str, str]

#: The parts of a byte that times are counted in.
THOUSANDTHS = 1000

_STANDS_FOR = {
    Axis.LINEAR_HEADS: Axis.KV_HEADS,
    Axis.EXPERT_INTERMEDIATE: Axis.INTERMEDIATE,
    Axis.SHARED_INTERMEDIATE: Axis.INTERMEDIATE,
}


@frozen
class Cost:
    """Bytes by bucket, and what a decode step reads of them.

    Attributes:
        weights: bytes of weights.
        cache: bytes of the cache, states included.
        workspace: bytes of the workspace.
        reads: how many of these bytes one token reads.
        time: what a step of the plan's batch takes, in the time in which a device reads a thousandth of a byte.
        states: bytes of the cache that a sequence of any length keeps, which its every step reads and writes.
    """

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    reads: int = 0
    time: int = 0
    states: int = 0

    @classmethod
    def of_cache(cls, size: int) -> Self:
        """Return the cost of a cache, all of which a step reads."""
        return cls(cache=size, reads=size, time=THOUSANDTHS * size)

    @classmethod
    def of_states(cls, size: int) -> Self:
        """Return the cost of states, all of which a step reads and writes."""
        return cls(cache=size, reads=size, time=2 * THOUSANDTHS * size, states=size)

    @property
    def bytes(self) -> int:
        """Sum of weights, cache and workspace."""
        return self.weights + self.cache + self.workspace

    def __add__(self, other: Cost) -> Cost:
        """Add two costs, bucket by bucket."""
        return Cost(
            self.weights + other.weights,
            self.cache + other.cache,
            self.workspace + other.workspace,
            self.reads + other.reads,
            self.time + other.time,
            self.states + other.states,
        )

    def part(self, numerator: int, denominator: int, *, up: bool = False) -> Cost:
        """Return a fraction of the cost, rounded down, or up with ``up``; what is read, an estimate, always is."""
        more = denominator - 1 if up else 0
        return Cost(
            (self.weights * numerator + more) // denominator,
            (self.cache * numerator + more) // denominator,
            (self.workspace * numerator + more) // denominator,
            -(-self.reads * numerator // denominator),
            -(-self.time * numerator // denominator),
            (self.states * numerator + more) // denominator,
        )


@frozen
class Demand:
    """An axis to cut, with the costs of everything that its cut distributes.

    Attributes:
        axis: the axis; query heads follow ``kv_heads`` and have no demand of their own.
        layers: ranges of the layers that share the cut; empty for axes outside the layers.
        size: elements of the axis; every replica of a KV head counts.
        unit: elements that a cut may not separate.
        width: tensor elements per element of the axis.
        share: number of elements that share a head: ``s·i`` to ``s·i + s - 1`` are replicas of KV head ``i``, or value
            heads of the key head ``i`` of linear attention.
        group: query heads per (replicated) KV head; 0 for other axes.
        split: cost of the whole axis, of which a device pays the fraction that it holds.
        kept: fixed cost of a device that holds any element.
        head: cost of a head that elements share; a device pays it once per head, however many of its elements it holds.
    """

    axis: Axis
    layers: str
    size: int
    unit: int
    width: int
    share: int
    group: int
    split: Cost
    kept: Cost
    head: Cost

    @property
    def replicas(self) -> int:
        """Number of copies of each KV head."""
        return self.share if self.axis is Axis.KV_HEADS else 1

    @property
    def units(self) -> int:
        """Number of units; a ragged last unit counts as one."""
        return unit_count(self.size, self.unit)

    @property
    def stage(self) -> Stage:
        """The stage of a pass that the axis belongs to: attention, or the MLP and the experts, of its layers."""
        return _STANDS_FOR.get(self.axis, self.axis), self.layers

    def unit_cost(self) -> Cost:
        """Return the planner's cost of a whole unit, wherever it lies on the axis; see :meth:`fixed_cost`."""
        return self._elements(self.unit) + self.head.part(self.unit, self.share, up=True)

    def fixed_cost(self) -> Cost:
        """Return the planner's cost of holding any unit; with :meth:`unit_cost` it never falls below :meth:`cost`.

        Where ``s`` elements share a head and cuts are at multiples of ``g``, a slice of ``n`` elements covers at most
        ``n / s + 2 - 2 g / s`` heads: one for the first ``g``, another for the second, and then one more for every
        ``s`` elements. If there is only one head, it covers that.
        """
        ends = 2 if self.size > self.share else 1
        return self.kept + self.head.part(ends * (self.share - gcd(self.unit, self.share)), self.share, up=True)

    def cost(self, start: int, end: int) -> Cost:
        """Return the exact cost of a slice; an empty slice costs nothing."""
        if start == end:
            return Cost()
        heads = unit_count(end, self.share) - start // self.share
        return self.kept + self._elements(end - start) + self.head.part(heads, 1)

    def _elements(self, elements: int) -> Cost:
        part = self.split.part(elements, self.size)
        return evolve(part, workspace=self.split.workspace * unit_count(elements, self.unit))


@frozen
class Demands:
    """The costs of a model for a request.

    Attributes:
        axes: the axes to cut, with their costs.
        common: cost of every device in use, whatever it holds.
    """

    axes: tuple[Demand, ...]
    common: Cost

    def with_weights(self, numerator: int, denominator: int) -> Demands:
        """Return the costs with all weights smaller or larger in proportion, rounded up."""

        def scaled(cost: Cost) -> Cost:
            cached = Cost.of_cache(cost.cache - cost.states) + Cost.of_states(cost.states)
            of_weights = cost.weights, cost.reads - cached.reads, cost.time - cached.time
            weights, reads, time = (max(0, -(-each * numerator // denominator)) for each in of_weights)
            return evolve(cost, weights=weights, reads=reads + cached.reads, time=time + cached.time)

        axes = (evolve(d, split=scaled(d.split), kept=scaled(d.kept), head=scaled(d.head)) for d in self.axes)
        return Demands(tuple(axes), scaled(self.common))
