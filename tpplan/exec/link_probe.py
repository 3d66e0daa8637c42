"""The test of links, on real GPUs or on any other driver: what arrives is checked by the owner of the memory.

A peer copy that goes wrong often says nothing: zeros arrive, or nothing, or the writer reads its own bytes back from a
mirror that the other GPU never sees. So every move is of fresh random bytes into memory that was filled with their
complement, and it is the target GPU that then reads its own memory back to the host, by its own path. Each link is
tested alone at several sizes, then all links of a mechanism at once.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Protocol, TypeVar

from tpplan.exec.link_report import Link, Mechanism, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.exec.link_report import Route

#: Of what is cached: raise it whenever an older probe may have passed what this one finds.
PROBE_VERSION = 1

KIB, MIB = 2**10, 2**20

#: Bytes of the moves of a link alone; a size that comes twice has new contents at the same addresses.
ALONE = (16, 4 * KIB, 4 * KIB, 64 * KIB + 16, MIB, 16 * MIB)

#: Bytes of the moves of all links at once.
TOGETHER = (4 * KIB, 4 * KIB, 8 * MIB)

#: How many contents there are of any size.
_STARTS = MIB

_COMPLEMENT = bytes(range(255, -1, -1))

B = TypeVar("B")


class Driver(Protocol[B]):
    """Some GPUs and what the probe does with them; ``B`` is a piece of a GPU's memory."""

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs, in the order of their indices; empty for one that has none."""

    def software(self) -> str:
        """Return driver, libraries and settings that verdicts depend on; empty if they cannot be told."""

    def lacks(self, mechanism: Mechanism) -> str:
        """Return why a mechanism cannot be tested; empty if it can."""

    def allocate(self, gpu: int, size: int) -> B:
        """Return ``size`` bytes of a GPU's memory, which live as long as the returned object.

        Raises:
            MemoryError: there is no room.
        """

    def write(self, buffer: B, data: memoryview) -> None:
        """Fill the first bytes of a buffer from the host, by its GPU's own path; they are there on return."""

    def read(self, buffer: B, size: int) -> bytes:
        """Return the first bytes of a buffer, by its GPU's own path."""

    def move(self, mechanism: Mechanism, moves: Sequence[tuple[B, B]], size: int) -> None:
        """Move the first bytes of each source to its target, all at the same time; they are there on return.

        It may raise, and may never return.
        """


def probe(driver: Driver[B], routes: Sequence[Route]) -> Iterator[tuple[Route, ...] | Link]:
    """Test links, one mechanism after the other.

    Args:
        driver: that has them.
        routes: to test; the driver lacks none of their mechanisms.

    Yields:
        The routes that are tested next, before every step, so that whoever waits knows whose fault a hang is: none,
        before a GPU is used by itself; and a verdict for each route, as soon as it is final.

    Raises:
        Exception: what the driver raises. It may be unable to go on, so the next test needs a new process. If that is
            before the first routes, a GPU cannot be used at all, which tells nothing of its links.
    """
    contents = _Contents(max(ALONE + TOGETHER))
    for gpu in sorted({gpu for _, *pair in routes for gpu in pair}):
        yield ()
        _use_alone(driver, contents, gpu)
    for mechanism in Mechanism:
        passed: list[Route] = []
        for route in (route for route in routes if route[0] == mechanism):
            yield (route,)
            if fault := _faults(driver, contents, (route,), ALONE)[route]:
                yield _link(route, fault)
            else:
                passed.append(route)
        if passed:
            yield tuple(passed)
            faults = _faults(driver, contents, passed, TOGETHER)
            yield from (_link(route, faults[route]) for route in passed)


class _Contents:
    """Random bytes and, for each, its complement."""

    def __init__(self, largest: int) -> None:
        random = os.urandom(largest + _STARTS)
        self._random = memoryview(bytearray(random))
        self._poison = memoryview(bytearray(random.translate(_COMPLEMENT)))

    def draw(self, size: int) -> tuple[memoryview, memoryview]:
        """Return fresh contents, and the poison that differs from them in every byte."""
        start = secrets.randbelow(_STARTS)
        return self._random[start : start + size], self._poison[start : start + size]


def _use_alone(driver: Driver[B], contents: _Contents, gpu: int) -> None:
    """Fail if the owner of a memory cannot be a witness."""
    buffer, (data, _) = driver.allocate(gpu, KIB), contents.draw(KIB)
    driver.write(buffer, data)
    if driver.read(buffer, KIB) != bytes(data):
        raise RuntimeError(f"GPU {gpu} does not hold what the host wrote to it")


_Fault = tuple[Verdict, str]


def _faults(
    driver: Driver[B], contents: _Contents, routes: Sequence[Route], sizes: Sequence[int]
) -> dict[Route, _Fault | None]:
    """Return what is wrong with each route when all of them are used at once; None if nothing is."""
    faults: dict[Route, _Fault | None] = dict.fromkeys(routes)
    at_once = f" with {len(routes)} links at once" if len(routes) > 1 else ""
    try:
        moves = [(driver.allocate(a, max(sizes)), driver.allocate(b, max(sizes))) for _, a, b in routes]
    except MemoryError as error:
        return dict.fromkeys(routes, (Verdict.UNTESTED, f"no memory for the test: {error}"))
    for size in sizes:
        drawn = [contents.draw(size) for _ in routes]
        for (source, target), (data, poison) in zip(moves, drawn, strict=True):
            driver.write(source, data)
            driver.write(target, poison)
        driver.move(routes[0][0], moves, size)
        for route, (_, target), (data, poison) in zip(routes, moves, drawn, strict=True):
            if what := _difference(driver.read(target, size), data, poison):
                faults[route] = faults[route] or (Verdict.BROKEN, f"{what} of {size} bytes{at_once}")
    return faults


def _difference(got: bytes, sent: memoryview, poison: memoryview) -> str:
    """Tell in what way the owner's bytes are not those that were sent; empty if they are."""
    known = (("", bytes(sent)), ("nothing arrived", bytes(poison)), ("zeros arrived", bytes(len(sent))))
    return next((what for what, data in known if got == data), "wrong bytes arrived")


def _link(route: Route, fault: _Fault | None) -> Link:
    return Link(*route, *(fault or (Verdict.WORKS, "every byte arrived")))
