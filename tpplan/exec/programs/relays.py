"""Relays: devices that send little forward a part of what a busier device would send to several.

A relay reads its columns once from the source and writes them to all targets. It is a target itself, so the total
traffic is the same as without relays.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from tpplan.exec.programs.operation import share_out

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Moves
    from tpplan.exec.programs.program import View

#: Cached operations: routes are computed again and again.
_KEPT = 256


def sends(operation: Moves) -> dict[View, dict[int, View]]:
    """Return for each source view its target views, by device."""
    found: dict[View, dict[int, View]] = {}
    for source, target in operation.moves:
        found.setdefault(source, {})[target.buffer.device] = target
    return found


def shares(operation: Moves) -> dict[View, tuple[tuple[int, int, int], ...]]:
    """Return which device sends which columns of each view: (device, start, stop), the view's own device first.

    This balances what devices send: the less a device sends itself, the more it relays for those above average.
    """
    sent, count = Counter[int](), len(operation.devices)
    for source, target in operation.moves:
        if source.buffer.device != target.buffer.device:
            sent[source.buffer.device] += count * (source.stop - source.start)
    average, found = sent.total() // count, {}  # all numbers are times count, to stay integers
    for source, targets in sends(operation).items():
        sender, width = source.buffer.device, source.stop - source.start
        room = {device: max(0, average - sent[device]) for device in targets if device != sender}
        repeated = count * (len(room) - 1) * width  # the most that relays could save it
        given = min(sent[sender] - average, repeated)
        weights = {sender: 1}
        if given > 0 and any(room.values()):
            weights = {sender: (repeated - given) * sum(room.values())}
            weights |= {device: given * columns for device, columns in room.items()}
        cut = share_out(width, weights)
        found[source] = cut if len(cut) > 1 else ((sender, 0, width),)  # a single relay would only replace the sender
    return found


@lru_cache(_KEPT)
def spared(operation: Moves) -> int:
    """Return how many columns relays save the sender, for the view where they save most."""
    targets = sends(operation)
    return max(
        sum(stop - start for device, start, stop in cut if device != source.buffer.device)
        * (len({*targets[source]} - {source.buffer.device}) - 1)
        for source, cut in shares(operation).items()
    )
