"""The report on the links between this machine's GPUs, from the cache or else from a probe.

The cache has a file for each pair of GPUs, valid for the same software, boot and probe version. So a plan for other
GPUs adds its pairs, and a pair whose link has failed in use loses its verdicts alone.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from tpplan.exec.machine import gpu_cache
from tpplan.exec.machine.gpu_cache import Origin
from tpplan.exec.machine.link_report import Link, LinkReport, Mechanism, Route, Verdict, routes
from tpplan.exec.machine.probe import PROBE_VERSION, without_access
from tpplan.exec.machine.probe_child import load_driver, probe_in_child

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from attrs import Attribute


_BOOT_ID, _STATISTICS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/stat")
_BOOT_TIME = re.compile(r"^btime [0-9]+$", re.MULTILINE)
_KIND = "links"


def _each_once(_: _Entry, __: Attribute[tuple[Link, ...]], links: tuple[Link, ...]) -> None:
    """Check that a file has at most one verdict for each route between two GPUs."""
    if {link.route for link in links} - {*routes(2)} or len({link.route for link in links}) < len(links):
        raise ValueError("each link of the two GPUs once")


@frozen
class _Entry:
    """The content of a cache file.

    Attributes:
        origin: origin of the verdicts; its two GPUs have the indices 0 and 1.
        links: one link for each route that was tested.
    """

    origin: Origin
    links: tuple[Link, ...] = field(validator=_each_once)


@frozen
class Pair:
    """The cache file of two GPUs.

    Attributes:
        gpus: their indices, in the order of their UUIDs.
        origin: origin of current verdicts on them.
    """

    gpus: tuple[int, int]
    origin: Origin

    def load(self) -> list[Link]:
        """Return the verdicts; none if the file is missing, damaged, or of another origin."""
        entry = gpu_cache.load(_KIND, self.origin, _Entry)
        return [
            evolve(link, source=self.gpus[link.source], target=self.gpus[link.target])
            for link in (entry.links if entry else ())
        ]

    def add(self, links: Sequence[Link]) -> str:
        """Save verdicts beside those that are there; return the reason for a failure, empty on success."""
        here = self.gpus.index
        with gpu_cache.locked(_KIND):
            every = {link.route: link for link in (*self.load(), *links)}
            moved = {
                link.route: link
                for link in (evolve(x, source=here(x.source), target=here(x.target)) for x in every.values())
            }
            kept = tuple(moved[route] for route in routes(2) if route in moved)
            return gpu_cache.save(_KIND, _Entry(self.origin, kept))

    def remove(self) -> None:
        """Remove the file, if there is one; where that is not possible, it stays."""
        with gpu_cache.locked(_KIND):
            gpu_cache.remove(_KIND, self.origin)


def pair_of(gpus: Sequence[str], a: int, b: int, software: str) -> Pair | None:
    """Return the cache file of two GPUs; None (no caching) if GPUs, software or boot cannot be identified.

    Args:
        gpus: UUIDs of all GPUs, by index.
        a: index of one of them.
        b: index of another.
        software: driver, libraries and settings.
    """
    boot = _boot()
    if not boot or any(gpus.count(gpus[gpu]) > 1 for gpu in (a, b)):
        return None
    first, second = sorted((a, b), key=gpus.__getitem__)
    origin = gpu_cache.origin((gpus[first], gpus[second]), software, f"probe {PROBE_VERSION}, boot {boot}")
    return Pair((first, second), origin) if origin else None


def _boot() -> str:
    """Return what is different after each boot; empty if the system does not tell."""
    with contextlib.suppress(OSError):
        if boot := _BOOT_ID.read_text().strip():
            return boot
    with contextlib.suppress(OSError):
        return found.group() if (found := _BOOT_TIME.search(_STATISTICS.read_text())) else ""
    return ""


TORCH = "tpplan.exec.cuda.probe_driver:TorchDriver"

_LOG = logging.getLogger(__name__)

#: Verdicts that could not be stored on disk, by driver, GPUs and their software, so that this process probes once.
_UNKEPT: dict[tuple[str, tuple[str, ...], str], dict[Route, Link]] = {}


def link_report(
    gpus: Collection[int | str] | None = None, *, use_cache: bool = True, driver: str = TORCH, deadline_s: float = 30.0
) -> LinkReport:
    """Return the verdict on every mechanism from each of some GPUs to each other.

    A link that is broken, untested or missing in the report must not be used. Links without a verdict are probed in
    child processes, each for eight GPUs at most. That takes some seconds, and up to 48 MiB, plus 50 MiB per other GPU,
    of each GPU's memory, besides the driver's overhead for another process; its start and end are logged. Verdicts are
    stored on disk until the next boot, under ``$XDG_CACHE_HOME/tpplan``, for each pair of GPUs by their UUIDs, driver,
    torch, kernels and version of the probe. What could not be tested is never stored. If verdicts cannot be stored,
    this process keeps them in memory.

    A step takes milliseconds, or ``deadline_s`` if it hangs. If a step hangs or the child dies, another child goes on,
    until four have hung or sixteen have died. A child may take 180 s to start and 10 s to end.

    Args:
        gpus: the GPUs, by index or UUID; by default all that this process sees. Those that CUDA_VISIBLE_DEVICES hides
            from it have UUIDs only; the probe, which is another process, sees them.
        use_cache: use stored verdicts if there are any; if false, always probe, and store the result.
        driver: the GPUs' driver, as ``module:factory`` of a :class:`tpplan.exec.machine.probe.Driver`.
        deadline_s: seconds after which a step of the probe counts as hung, including the first use of a GPU.

    Returns:
        The report, with the driver's indices; without links if there are fewer than two GPUs.
    """
    here = load_driver(driver)
    seen = here.gpus()
    names = gpu_cache.gpus_meant(seen, [gpu for gpu in gpus or () if isinstance(gpu, str)])
    asked = {names.index(gpu) if isinstance(gpu, str) else gpu for gpu in (range(len(names)) if gpus is None else gpus)}
    every = [route for route in routes(len(names)) if {*route[1:]} <= asked]
    lacks = {mechanism: here.lacks(mechanism) for mechanism in Mechanism}
    links: dict[Route, Link] = {}
    for route in every:
        if lacks[route[0]]:
            links[route] = Link(*route, Verdict.UNTESTED, lacks[route[0]])
        elif names == seen and (link := without_access(here, route)):  # asked anew each time, so never stored
            links[route] = link
    wanted = [route for route in every if route not in links]
    if wanted:
        store = _Store.of(driver, names, here.software())
        links |= store.load(wanted) if use_cache else {}
        if missing := [route for route in wanted if route not in links]:
            verified = [route for route in wanted if route in links and links[route].verdict == Verdict.WORKS]
            _LOG.info(
                "testing the links between GPUs %s, which takes some seconds, or %g s for each that hangs; verdicts "
                "are kept until the next boot",
                _listed({gpu for _, *pair in missing for gpu in pair}),
                deadline_s,
            )
            start = time.monotonic()
            environ = {} if names == seen else {"CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{gpu}" for gpu in names)}
            tested = probe_in_child(driver, names, missing, verified, deadline_s, environ=environ)
            _LOG.info("tested the links in %.1f s: %s", time.monotonic() - start, _summary(tested))
            store.save(tested)
            links |= {link.route: link for link in tested}
    return LinkReport(names, tuple(links[route] for route in every))


def refute(gpus: Collection[int], *, driver: str = TORCH) -> None:
    """Forget the verdicts on the links between some GPUs, of which one has failed in use: the next report probes them.

    It never raises: who calls it has an error of its own to tell.

    Args:
        gpus: the GPUs, by index.
        driver: see :func:`link_report`.
    """
    pairs = {(a, b) for a in gpus for b in gpus if a < b}
    if not pairs:
        return
    try:
        here = load_driver(driver)
        names = here.gpus()
        _Store.of(driver, names, here.software()).remove(pairs)
    except Exception as error:  # noqa: BLE001 (whatever it is; the GPUs may fail any call)
        _LOG.debug("verdicts on the links between GPUs %s are still kept: %s", _listed(gpus), error)
    else:
        _LOG.warning(
            "the links between GPUs %s may be to blame for a time-out: they are tested again at the next start",
            _listed(gpus),
        )


@frozen
class _Store:
    """Where verdicts are kept: in a file for each pair of GPUs, else in this process.

    Attributes:
        names: UUIDs of the GPUs, by index.
        software: driver, libraries and settings.
        unkept: what this process has to remember.
    """

    names: tuple[str, ...]
    software: str
    unkept: dict[Route, Link] = field(repr=False)

    @classmethod
    def of(cls, driver: str, names: tuple[str, ...], software: str) -> _Store:
        """Return the store of a driver's GPUs."""
        return cls(names, software, _UNKEPT.setdefault((driver, names, software), {}))

    def load(self, wanted: Iterable[Route]) -> dict[Route, Link]:
        """Return the kept verdicts on some routes."""
        asked = {*wanted}
        found: dict[Route, Link] = {}
        for pair in {frozenset(route[1:]) for route in asked}:
            file = self._file(pair)
            found |= {link.route: link for link in (file.load() if file else ()) if link.route in asked}
        return found | {route: link for route, link in self.unkept.items() if route in asked}

    def save(self, links: Iterable[Link]) -> None:
        """Keep verdicts; what was not tested has none."""
        by_pair: dict[frozenset[int], list[Link]] = {}
        for link in links:
            if link.verdict != Verdict.UNTESTED:
                by_pair.setdefault(frozenset(link.route[1:]), []).append(link)
        for pair, some in by_pair.items():
            file = self._file(pair)
            is_kept = file is not None and not file.add(some)
            for link in some:
                self.unkept.pop(link.route, None)
            if not is_kept:
                self.unkept.update((link.route, link) for link in some)

    def remove(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Forget the verdicts on some pairs of GPUs."""
        for pair in pairs:
            for route in [route for route in self.unkept if {*route[1:]} == {*pair}]:
                del self.unkept[route]
            if file := self._file(frozenset(pair)):
                file.remove()

    def _file(self, pair: frozenset[int]) -> Pair | None:
        a, b = pair
        return pair_of(self.names, a, b, self.software)


def _listed(gpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(gpus)))


def _summary(links: Collection[Link]) -> str:
    """Return in words how many links of each mechanism work, and what is wrong with the first that does not."""
    parts = []
    for mechanism in Mechanism:
        mine = [link for link in links if link.mechanism == mechanism]
        works = sum(link.verdict == Verdict.WORKS for link in mine)
        if mine:
            parts.append(f"{mechanism} works in {works} of {len(mine)} directions")
    bad = next((link for link in links if link.verdict != Verdict.WORKS), None)
    if bad:
        parts.append(f"{bad.mechanism} {bad.source} to {bad.target} is {bad.verdict}, {bad.reason}")
    return ", ".join(parts)
