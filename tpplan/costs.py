"""What an axis of a model costs, in exact integers: the whole of it, a part of it, and what comes with any part."""

from __future__ import annotations

from attrs import evolve, frozen

from tpplan.axes import Axis, unit_count


@frozen
class Cost:
    """Bytes by bucket, and the bytes of them that one decoded token reads."""

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    reads: int = 0

    @property
    def bytes(self) -> int:
        """Weights, cache and workspace together."""
        return self.weights + self.cache + self.workspace

    def __add__(self, other: Cost) -> Cost:
        """Add bucket by bucket."""
        return Cost(
            self.weights + other.weights,
            self.cache + other.cache,
            self.workspace + other.workspace,
            self.reads + other.reads,
        )

    def part(self, numerator: int, denominator: int, *, up: bool = False) -> Cost:
        """Return a part; what does not divide rounds down, or ``up``. Reads, an estimate, always round up."""
        more = denominator - 1 if up else 0
        return Cost(
            (self.weights * numerator + more) // denominator,
            (self.cache * numerator + more) // denominator,
            (self.workspace * numerator + more) // denominator,
            -(-self.reads * numerator // denominator),
        )


@frozen
class Demand:
    """One axis to cut, with everything that follows the cut.

    Attributes:
        axis: the axis; query heads follow ``kv_heads`` and have no demand of their own.
        layers: that share the cut, as ranges; empty outside the layers.
        size: elements; replicated KV heads count each time.
        unit: elements that move together.
        width: elements of a tensor per element of the axis.
        replicas: how often each KV head is repeated: elements ``r·i`` to ``r·i + r - 1`` are KV head ``i``.
        group: query heads per (replicated) KV head; 0 for other axes.
        split: the cost of the whole axis; a device pays for its elements.
        kept: what a device pays as soon as it holds any of it.
        head: where KV heads are replicated, the cost of one, which a device pays once however many replicas it holds.
    """

    axis: Axis
    layers: str
    size: int
    unit: int
    width: int
    replicas: int
    group: int
    split: Cost
    kept: Cost
    head: Cost

    @property
    def units(self) -> int:
        """How many units; a ragged last one counts as one."""
        return unit_count(self.size, self.unit)

    def unit_cost(self) -> Cost:
        """Return what planning charges for one whole unit, which may lie anywhere: see :meth:`fixed_cost`."""
        return self._elements(self.unit) + self.head.part(self.unit, self.replicas, up=True)

    def fixed_cost(self) -> Cost:
        """Return what planning charges for holding any: with :meth:`unit_cost` never less than :meth:`cost`.

        Elements of replicated heads touch at most one head for the first, one more for the second, and then one for
        each ``replicas``: ``n`` elements at most ``n / r + 2 - 2 / r``.
        """
        return self.kept + self.head.part(2 * self.replicas - 2, self.replicas, up=True)

    def cost(self, start: int, end: int) -> Cost:
        """Return the exact cost of a slice; nothing for an empty one."""
        if start == end:
            return Cost()
        heads = unit_count(end, self.replicas) - start // self.replicas
        return self.kept + self._elements(end - start) + self.head.part(heads, 1)

    def _elements(self, elements: int) -> Cost:
        rows = self.split.workspace * unit_count(elements, self.unit)
        return evolve(evolve(self.split, workspace=0).part(elements, self.size), workspace=rows)


@frozen
class Demands:
    """Everything a model and a request ask of the devices.

    Attributes:
        axes: what is cut.
        common: what every device in use pays.
    """

    axes: tuple[Demand, ...]
    common: Cost
