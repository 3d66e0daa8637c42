"""Relays: where one device would send too much, those that send less pass on a part of it.

A relay reads its columns once, where they are, and writes them to all who want them. It is one of these itself, so that
all devices together send as much as without relays.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from tpplan.exec.programs.operation import share_out

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Moves
    from tpplan.exec.programs.program import View

#: Operations that are remembered, for routes are looked for again and again.
_KEPT = 256


def sends(operation: Moves) -> dict[View, dict[int, View]]:
    """Return where each view goes, by device."""
    found: dict[View, dict[int, View]] = {}
    for source, target in operation.moves:
        found.setdefault(source, {})[target.buffer.device] = target
    return found


def shares(operation: Moves) -> dict[View, tuple[tuple[int, int, int], ...]]:
    """Return who writes which columns of each view to the other devices: (device, start, stop), its own device first.

    All devices are to send the same. The less any other one sends itself, the more it gets of what one has too much.
    """
    sent, count = Counter[int](), len(operation.devices)
    for source, target in operation.moves:
        if source.buffer.device != target.buffer.device:
            sent[source.buffer.device] += count * (source.stop - source.start)
    average, found = sent.total() // count, {}  # all of them times the count, to be whole
    for source, targets in sends(operation).items():
        sender, width = source.buffer.device, source.stop - source.start
        room = {device: max(0, average - sent[device]) for device in targets if device != sender}
        repeated = count * (len(room) - 1) * width  # what relays could spare it at most
        given = min(sent[sender] - average, repeated)
        weights = {sender: 1}
        if given > 0 and any(room.values()):
            weights = {sender: (repeated - given) * sum(room.values())}
            weights |= {device: given * columns for device, columns in room.items()}
        cut = share_out(width, weights)
        found[source] = cut if len(cut) > 1 else ((sender, 0, width),)  # a single relay would only take its place
    return found


@lru_cache(_KEPT)
def spared(operation: Moves) -> int:
    """Return by how many columns less the busiest device sends, thanks to its relays."""
    targets = sends(operation)
    return max(
        sum(stop - start for device, start, stop in cut if device != source.buffer.device)
        * (len({*targets[source]} - {source.buffer.device}) - 1)
        for source, cut in shares(operation).items()
    )
