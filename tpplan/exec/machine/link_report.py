"""The report on which mechanisms of moving data between GPUs are verified to work."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

from attrs import frozen


class Mechanism(StrEnum):
    """A mechanism of moving data from the memory of GPU a to that of GPU b, without the host; tested in this order."""

    COPY = "copy"  # a's or b's copy engine
    STORE = "store"  # a kernel on a writes b's memory
    FLAG = "flag"  # kernels on both at once: a stores data and a flag, b polls the flag, takes the data, and answers
    LOAD = "load"  # a kernel on b reads a's memory; only large moves and sums need it: tested last


class Verdict(StrEnum):
    """The result of a probe; ``untested`` says nothing of the hardware."""

    WORKS = "works"
    BROKEN = "broken"
    UNTESTED = "untested"


#: A mechanism in one direction: (mechanism, source, target).
Route = tuple[Mechanism, int, int]


@frozen
class Link:
    """The verdict on one mechanism in one direction.

    Attributes:
        mechanism: the mechanism that moves the data.
        source: index of the GPU that the data is on.
        target: index of the GPU that the data is moved to.
        verdict: the verdict; only a link that works may be used.
        reason: the reason for the verdict, to be displayed.
    """

    mechanism: Mechanism
    source: int
    target: int
    verdict: Verdict
    reason: str

    @property
    def route(self) -> Route:
        """The mechanism, source and target of the verdict."""
        return self.mechanism, self.source, self.target


@frozen
class LinkReport:
    """The verdicts on all links of some GPUs; :func:`tpplan.files.codec.dumps` makes JSON of it.

    Attributes:
        gpus: UUIDs of the GPUs, by index.
        links: one link per route between the GPUs that were asked for, in the order of :func:`routes`.
    """

    gpus: tuple[str, ...]
    links: tuple[Link, ...]

    def pairs(self, mechanism: Mechanism) -> frozenset[tuple[int, int]]:
        """Return the pairs (source, target) for which a mechanism is verified; it must not be used for others."""
        return frozenset((source, target) for verified, source, target in self._working if verified == mechanism)

    def works(self, source: int, target: int, mechanism: Mechanism) -> bool:
        """Return whether a mechanism is verified from one GPU to another."""
        return (mechanism, source, target) in self._working

    @cached_property
    def _working(self) -> frozenset[Route]:
        return frozenset(link.route for link in self.links if link.verdict == Verdict.WORKS)


def routes(gpus: int) -> tuple[Route, ...]:
    """Return all routes between this many GPUs, by mechanism, then source, then target."""
    return tuple((m, a, b) for m in Mechanism for a in range(gpus) for b in range(gpus) if a != b)
