"""Rounds: a program divided into what each process copies, adds and sends at a time."""

from __future__ import annotations

from collections import defaultdict
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.backends.cpu import Place, Work, sequence
from tpplan.exec.programs.program import HOST
from tpplan.exec.programs.region import regions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tpplan.exec.programs.program import Program
    from tpplan.exec.programs.region import Memory, Region


class Message(NamedTuple):
    """Data that one process sends to another.

    Attributes:
        source: what the sender reads.
        sender: index of the sending process.
        receiver: index of the receiving process.
        targets: where the receiver writes it, to one or more of its devices or to its host memory.
    """

    source: Place
    sender: int
    receiver: int
    targets: tuple[Place, ...]


class Round(NamedTuple):
    """Independent work, to be done in any order by all processes at the same time.

    Attributes:
        messages: the messages from or to one process, in the same order in both processes of a message.
        work: copies and sums within that process.
    """

    messages: tuple[Message, ...]
    work: tuple[Work, ...]


def rounds(program: Program, owners: Mapping[int, int], process: int) -> tuple[Round, ...]:
    """Return a process's part of a program.

    The owner of the device that holds a target writes it. Every process has a host memory of its own: what programs
    read there is expected to be the same in all processes, and what they write there, every process writes.

    Args:
        program: a program of ``events``, whose only steps are copies and sums.
        owners: index of the process that owns each device.
        process: index of the process.

    Returns:
        The rounds in order; those without work for the process are left out.
    """
    everyone = sorted(set(owners.values()))
    found = []
    for works in _levels(program):
        carried: dict[tuple[Place, int], list[Place]] = {}  # what goes to several devices of a process is sent once
        own = []
        for work in works:
            target = work.target.view.buffer.device
            for writer in everyone if target == HOST else (owners[target],):
                foreign = [s for s in work.sources if owners.get(s.view.buffer.device, writer) != writer]
                if foreign:
                    carried.setdefault((foreign[0], writer), []).append(work.target)
                elif writer == process:
                    own.append(work)
        messages = (
            Message(source, owners[source.view.buffer.device], receiver, tuple(targets))
            for (source, receiver), targets in carried.items()
        )
        mine = tuple(message for message in messages if process in (message.sender, message.receiver))
        if mine or own:
            found.append(Round(mine, tuple(own)))
    return tuple(found)


def _levels(program: Program) -> list[list[Work]]:
    """Return a program's work by level: each reads and writes nothing that another of its level writes.

    It is the same in every process, and as few levels as the dependencies allow. Where outputs are inputs, a sum reads
    what it overwrites, and no other command of its level does.
    """
    works = sequence(program)
    parts = lcm(*(place.view.parts for work in works for place in (work.target, *work.sources)))
    seen: defaultdict[Memory, list[tuple[Region, bool, int]]] = defaultdict(list)
    levels: defaultdict[int, list[Work]] = defaultdict(list)
    for work in works:
        touched = [*_regions(work.target, parts, is_written=True)]
        touched += [each for source in work.sources for each in _regions(source, parts, is_written=False)]
        level = 0
        for memory, region, is_written in touched:
            for other, was_written, at in seen[memory]:
                if at >= level and (is_written or was_written) and region.overlaps(other, alike=True):
                    level = at + 1
        for memory, region, is_written in touched:
            seen[memory].append((region, is_written, level))
        levels[level].append(work)
    return [levels[level] for level in sorted(levels)]


def _regions(place: Place, parts: int, *, is_written: bool) -> Iterator[tuple[Memory, Region, bool]]:
    """Yield the regions of a place with their memory."""
    return (((*region.memory, place.slot), region, is_written) for region in regions(place.view, parts))
