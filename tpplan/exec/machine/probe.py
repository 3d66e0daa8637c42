"""The probe of links, on real GPUs or any other driver: the memory's owner checks what arrives.

A faulty peer copy often raises no error: zeros arrive, or nothing, or the writer reads its own bytes back from a mirror
that the other GPU never sees. So each move writes fresh random bytes over their complement. Then the target GPU reads
its own memory, with the bytes around the moved ones, behind nothing but an event, as in operations: the host waits only
for what it has read. Each link is tested alone at several sizes, then all links of a mechanism at once; stores run
together with copies between the same GPUs.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from tpplan.exec.machine.link_report import Link, Mechanism, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch

    from tpplan.exec.machine.link_report import Route

#: Version of cached verdicts: increase it when this probe may find faults that an older one missed.
PROBE_VERSION = 3

KIB, MIB = 2**10, 2**20

#: Sizes in bytes to test on each link alone; a repeated size has new contents at the same addresses.
ALONE = (16, 4 * KIB, 4 * KIB, 64 * KIB + 16, MIB, 16 * MIB)

#: Additional ranges for copy engines: few or many bytes, odd in number and start.
ODD = (slice(3, 16), slice(5, 64 * KIB))

#: Sizes in bytes to test on all links at once.
TOGETHER = (4 * KIB, 4 * KIB, 8 * MIB)

#: Bytes after the moved ones that must not change.
GUARD = 64 * KIB

#: Number of different contents of any size.
_STARTS = MIB

_COMPLEMENT = bytes(range(255, -1, -1))

B = TypeVar("B")


class PeersExhaustedError(Exception):
    """The driver can map the memory of no further GPU: it maps eight at most, whatever the link between two is like."""


class Driver(Protocol[B]):
    """The operations that the probe needs on GPUs; ``B`` is a buffer in a GPU's memory."""

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs, in index order; empty for a GPU without one."""

    def software(self) -> str:
        """Return driver, libraries and settings that verdicts depend on; empty if unknown."""

    def lacks(self, mechanism: Mechanism) -> str:
        """Return why a mechanism cannot be tested; empty if it can."""

    def peers(self, a: int, b: int) -> bool:
        """Return whether two GPUs can access each other's memory, according to the driver."""

    def prepare(self) -> None:
        """Do slow preparations in the process that tests."""

    def allocate(self, gpu: int, size: int) -> B:
        """Return ``size`` bytes of a GPU's memory, which live as long as the returned object.

        Raises:
            MemoryError: the GPU has too little free memory.
        """

    def write(self, buffer: B, data: memoryview) -> None:
        """Fill the first bytes of a buffer from the host, by its GPU's own path; they are there on return."""

    def read(self, buffer: B, size: int) -> bytes:
        """Return the first bytes of a buffer, by its GPU's own path."""

    def move(self, moves: Mapping[Mechanism, Sequence[tuple[B, B, B]]], part: slice) -> None:
        """Move a part of each source to the same part of its target, all at the same time.

        Each target's GPU reads the whole target behind the move, ordered by nothing but an event, and stores what it
        has read. That is complete on return. It may raise, and may never return.

        Args:
            moves: (source, target, what the target's GPU has read, a buffer of that GPU), by the mechanism that moves.
            part: bytes from ``start`` to ``stop``; for other mechanisms than ``copy`` multiples of 16.

        Raises:
            MemoryError: a GPU has too little free memory; nothing was moved.
            PeersExhaustedError: nothing was moved.
        """


def without_access(driver: Driver[B], route: Route) -> Link | None:
    """Return the verdict on a route that needs access to the other GPU's memory, if the driver gives none.

    The driver then stages copies in host memory, so they may arrive all the same.
    """
    if route[0] == Mechanism.COPY or driver.peers(*route[1:]):
        return None
    return Link(*route, Verdict.BROKEN, "the driver gives no peer access")


def probe(
    driver: Driver[B], routes: Sequence[Route], verified: Collection[Route] = ()
) -> Iterator[tuple[Route, ...] | Link]:
    """Test links, one mechanism after the other.

    Args:
        driver: driver of the GPUs.
        routes: routes to test; the driver lacks none of their mechanisms.
        verified: other routes, known to work. Those of a mechanism that is tested take part when all are used at once.

    Yields:
        Before every step, the routes that it tests, which are at fault if it hangs: none if a GPU is used by itself.
        For each route a verdict, as soon as it is final; also for the verified ones that take part.

    Raises:
        Exception: an error of the driver, which may be unable to go on, so the next test needs a new process. If no
            routes were yielded before, a GPU cannot be used at all, which says nothing of its links.
    """
    copies = {route for route in verified if route[0] == Mechanism.COPY}
    alone, together = ([slice(0, size) for size in sizes] for sizes in (ALONE, TOGETHER))
    contents = _Contents(max(part.stop for part in (*alone, *together, *ODD)) + GUARD)
    for gpu in sorted({gpu for _, *pair in routes for gpu in pair}):
        yield ()
        _use_alone(driver, contents, gpu)
    apart = [link for route in routes if (link := without_access(driver, route))]
    yield from apart
    routes = [route for route in routes if route not in {link.route for link in apart}]
    for mechanism in Mechanism:
        passed = [route for route in verified if route[0] == mechanism]
        tested = [route for route in routes if route[0] == mechanism]
        for route in tested:
            yield (route,)
            parts = [*alone, *ODD] if mechanism == Mechanism.COPY else alone
            if fault := _faults(driver, contents, (route,), parts)[route]:
                yield _link(route, fault)
            else:
                passed.append(route)
        if tested and passed:
            yield tuple(passed)
            besides = copies & {(Mechanism.COPY, a, b) for _, a, b in passed} if mechanism == Mechanism.STORE else ()
            faults = _faults(driver, contents, passed, together, sorted(besides))
            yield from (_link(route, faults[route]) for route in passed)
            if mechanism == Mechanism.COPY:
                copies.update(route for route in passed if not faults[route])


class _Contents:
    """Random bytes and their complements."""

    def __init__(self, largest: int) -> None:
        random = os.urandom(largest + _STARTS)
        self._random = memoryview(bytearray(random))
        self._poison = memoryview(bytearray(random.translate(_COMPLEMENT)))

    def draw(self, size: int) -> tuple[memoryview, memoryview]:
        """Return fresh contents, and the poison that differs from them in every byte."""
        start = secrets.randbelow(_STARTS)
        return self._random[start : start + size], self._poison[start : start + size]


def _use_alone(driver: Driver[B], contents: _Contents, gpu: int) -> None:
    """Check that a GPU can hold and read back its own memory; raise an error if not."""
    buffer, (data, _) = driver.allocate(gpu, KIB), contents.draw(KIB)
    driver.write(buffer, data)
    if driver.read(buffer, KIB) != bytes(data):
        raise RuntimeError(f"GPU {gpu} does not hold what the host wrote to it")


_Fault = tuple[Verdict, str]


def _faults(
    driver: Driver[B],
    contents: _Contents,
    routes: Sequence[Route],
    parts: Sequence[slice],
    besides: Sequence[Route] = (),
) -> dict[Route, _Fault | None]:
    """Return what is wrong with each route when all of them are used at once; None if nothing is.

    All are of one mechanism. ``besides`` are copies between some of the same GPUs, which work by themselves, so what is
    wrong with them is these routes' fault.
    """
    faults: dict[Route, _Fault | None] = dict.fromkeys(routes)
    every = (*routes, *besides)
    at_once = f" with {len(every)} links at once" if len(every) > 1 else ""
    size = max(part.stop for part in parts) + GUARD
    try:
        ends = [(driver.allocate(a, size), driver.allocate(b, size), driver.allocate(b, size)) for _, a, b in every]
    except MemoryError as error:
        return dict.fromkeys(routes, _no_memory(error))
    moves: dict[Mechanism, list[tuple[B, B, B]]] = {}
    for route, move in zip(every, ends, strict=True):
        moves.setdefault(route[0], []).append(move)
    for part in parts:
        drawn = [contents.draw(part.stop + GUARD) for _ in every]
        for (source, target, read), (data, poison) in zip(ends, drawn, strict=True):
            driver.write(source, data)
            for buffer in (target, read):
                driver.write(buffer, poison)
        try:
            driver.move(moves, part)
        except MemoryError as error:
            return dict.fromkeys(routes, _no_memory(error))
        except PeersExhaustedError as error:
            return dict.fromkeys(routes, (Verdict.UNTESTED, f"not possible now: {error}"))
        for (mechanism, a, b), (*_, read), (data, poison) in zip(every, ends, drawn, strict=True):
            if what := _difference(driver.read(read, part.stop + GUARD), data, poison, part):
                route = routes[0][0], a, b
                of = f" of {mechanism}" if mechanism != route[0] else ""
                reason = f"{what} of {part.stop - part.start} bytes{of}{at_once}"
                faults[route] = faults[route] or (Verdict.BROKEN, reason)
    return faults


def _no_memory(error: MemoryError) -> _Fault:
    return Verdict.UNTESTED, f"no memory for the test: {error}"


def _difference(got: bytes, sent: memoryview, poison: memoryview, part: slice) -> str:
    """Tell in what way the owner's bytes are not those that were sent, amid the poison; empty if they are."""
    arrived, outside = got[part], [bytes(poison[: part.start]), bytes(poison[part.stop :])]
    if arrived == sent[part]:
        return "" if [got[: part.start], got[part.stop :]] == outside else "bytes changed outside"
    known = {bytes(poison[part]): "nothing arrived", bytes(len(arrived)): "zeros arrived"}
    return known.get(arrived, "wrong bytes arrived")


def _link(route: Route, fault: _Fault | None) -> Link:
    return Link(*route, *(fault or (Verdict.WORKS, "every byte arrived")))


#: The kernels of :mod:`tpplan.exec.cuda.probe_kernels`: a sum of one is a copy.
COPIER, EXCHANGER = "sum_f32", "slot_move"


class Started(NamedTuple):
    """Moves that were started.

    Attributes:
        streams: for each move, the stream behind which its target is complete.
        finish: checks that no move has failed, once these streams are done; keeps alive what the moves need.
    """

    streams: Sequence[torch.cuda.Stream]
    finish: Callable[[], None]
