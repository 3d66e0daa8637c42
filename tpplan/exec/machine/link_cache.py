"""The cache of verdicts on links: a file for each pair of GPUs, valid for the same software, boot and probe version.

So a plan for other GPUs adds its pairs, and a pair whose link has failed in use loses its verdicts alone.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from tpplan.exec.machine import gpu_cache
from tpplan.exec.machine.gpu_cache import Origin
from tpplan.exec.machine.link_report import Link, routes
from tpplan.exec.machine.probe import PROBE_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

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
