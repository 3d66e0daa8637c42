"""Integer apportionment: dividing units as nearly in proportion to given shares as bounds allow."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def apportion(
    count: int, minimum: int, shares: Sequence[int], uppers: Sequence[int], *, number: int = 0
) -> list[int] | None:
    """Divide ``count`` units in proportion to ``shares``; each place gets none, or ``minimum`` to its upper bound.

    Only the ratios of shares matter. A place with a share of 0 or less gets units only if the other places cannot take
    them all. Places whose proportional share is below the minimum get none, starting with the smallest; or, with a
    ``number``, exactly as many places get units.

    Returns:
        Units per place, or None if no division adds up to ``count``.
    """
    ranked = sorted(
        (p for p, upper in enumerate(uppers) if upper >= minimum),
        key=lambda p: (-shares[p], -uppers[p], p),
    )
    places = _chosen(count, minimum, ranked, shares, uppers, exactly=number)
    if places is None:
        return None
    units = _fill(count, minimum, [max(0, shares[p]) for p in places], [uppers[p] for p in places])
    result = [0] * len(uppers)
    for place, n in zip(places, units, strict=True):
        result[place] = n
    return result


def _chosen(
    count: int, minimum: int, places: list[int], shares: Sequence[int], uppers: Sequence[int], *, exactly: int
) -> list[int] | None:
    """Return the places that get units: those whose share reaches the minimum, and more if these cannot hold all units.

    ``places`` are sorted by descending share. Unless it is 0, ``exactly`` is how many get units.
    """
    most = min(count // minimum, len(places), exactly or len(places))
    if most < exactly:
        return None
    number = exactly
    for place, total in zip(places[:most], accumulate(max(0, shares[p]) for p in places), strict=False):
        if exactly or (number and shares[place] * count < minimum * total):
            break
        number += 1
    held = sum(uppers[p] for p in places[:number])
    while held < count and number < most:
        held += uppers[places[number]]
        number += 1
    if held >= count and number:
        return places[:number]
    largest = sorted(places, key=lambda p: (-uppers[p], p))[:most]
    return largest if largest and sum(uppers[p] for p in largest) >= count else None


def _fill(count: int, lower: int, shares: list[int], uppers: list[int]) -> list[int]:
    """Give every place between ``lower`` and its upper bound, in proportion where possible; the bounds must allow it.

    While proportional shares violate bounds, the places on the side with the larger total violation are fixed to their
    bound. The largest remainder method distributes the units that rounding leaves over.
    """
    units = [0] * len(shares)
    free = list(range(len(shares)))
    rest = count
    while free:
        weights = [shares[p] for p in free]
        if not any(weights):
            weights = [1] * len(free)
        total = sum(weights)
        below = [p for p, w in zip(free, weights, strict=True) if rest * w < lower * total]
        above = [p for p, w in zip(free, weights, strict=True) if rest * w > uppers[p] * total]
        if not below and not above:
            _round(rest, free, weights, uppers, units)
            break
        by_place = dict(zip(free, weights, strict=True))
        missing = sum(lower * total - rest * by_place[p] for p in below)
        excess = sum(rest * by_place[p] - uppers[p] * total for p in above)
        fixed, bounds = (below, [lower] * len(below)) if missing >= excess else (above, [uppers[p] for p in above])
        for p, n in zip(fixed, bounds, strict=True):
            units[p] = n
            rest -= n
        gone = set(fixed)
        free = [p for p in free if p not in gone]
    return units


def _round(count: int, places: list[int], weights: list[int], uppers: list[int], units: list[int]) -> None:
    total = sum(weights)
    remainders = []
    left = count
    for place, weight in zip(places, weights, strict=True):
        units[place], remainder = divmod(count * weight, total)
        left -= units[place]
        remainders.append((-remainder, place))
    for _, place in sorted(remainders):
        if left and units[place] < uppers[place]:
            units[place] += 1
            left -= 1
