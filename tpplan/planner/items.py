"""What the solver places: items, in bins, in a placement."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from tpplan.planner.costs import Stage

#: Bits after the point of a fixed-point number.
SHIFT = 64
#: The load that nothing exceeds.
UNLIMITED = 1 << 200

#: Units of each item in each bin.
Placement: TypeAlias = tuple[tuple[int, ...], ...]


@frozen
class Item:
    """An item to place.

    Attributes:
        count: number of units, at least 1.
        minimum: fewest units in a bin that holds any.
        cost: bytes per unit.
        kept: fixed cost in bytes of a bin that holds any unit.
        load: load per unit.
        kept_load: fixed load of a bin that holds any unit.
        borne: load of it that every bin has already, in the item's stage.
        stage: the stage of a pass that loads belong to; of balanced plans all belong to one.
        attention: whether units are attention heads, which more bins should hold where that costs next to nothing.
    """

    count: int
    minimum: int
    cost: int
    kept: int
    load: int
    kept_load: int
    attention: bool = False
    borne: int = 0
    stage: Stage = ("", "")

    def change(self, have: int, more: int) -> tuple[int, int]:
        """Return the bytes and the load that ``more`` units (fewer, if negative) add to a bin that has ``have``."""
        if not more:
            return 0, 0
        starts = (not have) - (have + more == 0)
        return self.cost * more + self.kept * starts, self.load * more + self.kept_load * starts

    def upper(self, room: int, limit: int) -> int:
        """Return the most units that fit into ``room`` bytes and a load of ``limit``, 0 if below the minimum."""
        room -= self.kept
        limit -= self.kept_load
        if room < 0 or limit < 0:
            return 0
        units = self.count
        if self.cost:
            units = min(units, room // self.cost)
        if self.load:
            units = min(units, limit // self.load)
        return units if units >= self.minimum else 0


@frozen
class Bin:
    """A bin that holds units of items.

    Attributes:
        room: bytes for items; negative if the bin cannot be used.
        speed: load per unit of ``t``, positive.
        load: load of the bin without any items.
    """

    room: int
    speed: int
    load: int

    def limit(self, t: int | None) -> int:
        """Return the most load of items that keeps the bin within ``t``; None sets no limit."""
        return UNLIMITED if t is None else (t * self.speed >> SHIFT) - self.load
