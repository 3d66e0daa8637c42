"""The report on the links between this machine's GPUs, from the cache or else from a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.exec.links import cache, gpu_cache
from tpplan.exec.links.child import load_driver, probe_in_child
from tpplan.exec.links.report import Link, LinkReport, Mechanism, Verdict, routes

if TYPE_CHECKING:
    from collections.abc import Sequence

TORCH = "tpplan.exec.links.driver:TorchDriver"

#: Reports that could not be stored on disk, by driver, GPUs and their software, so that this process probes once.
_UNKEPT: dict[tuple[str, tuple[str, ...], str], LinkReport] = {}


def link_report(
    *, gpus: Sequence[str] = (), use_cache: bool = True, driver: str = TORCH, deadline_s: float = 30.0
) -> LinkReport:
    """Return the verdict on every mechanism from each GPU that this process sees to each other.

    A link that is broken, untested or missing in the report must not be used. The probe runs in a child process, takes
    some seconds, and needs up to 32 MiB, plus 40 MiB per other GPU, of each GPU's memory, besides the driver's overhead
    for another process. Its verdicts are stored on disk until the next boot, under ``$XDG_CACHE_HOME/tpplan``, by UUIDs
    of the GPUs, driver, torch, kernels and version of the probe, unless the probe is incomplete. If they cannot be
    stored on disk, this process keeps them in memory.

    A step takes milliseconds, or ``deadline_s`` if it hangs. If a step hangs or the child dies, another child goes on,
    up to four in all. A child may take 180 s to start and 10 s to end, so the worst case is a quarter of an hour.

    Args:
        gpus: UUIDs of GPUs, for a report on these if this process does not see all of them. The probe, which is another
            process, sees those that CUDA_VISIBLE_DEVICES hides from this one.
        use_cache: use stored verdicts if there are any; if false, always probe, and store the result.
        driver: the GPUs' driver, as ``module:factory`` of a :class:`tpplan.exec.links.probe.Driver`.
        deadline_s: seconds after which a step of the probe counts as hung, including the first use of a GPU.

    Returns:
        The report, with the driver's indices; without links if there are fewer than two GPUs.
    """
    gpus_driver = load_driver(driver)
    seen = gpus_driver.gpus()
    gpus = gpu_cache.gpus_meant(seen, gpus)
    environ = {} if gpus == seen else {"CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{gpu}" for gpu in gpus)}
    lacks = {mechanism: gpus_driver.lacks(mechanism) for mechanism in Mechanism}
    wanted = [route for route in routes(len(gpus)) if not lacks[route[0]]]
    if not wanted:
        return _report(gpus, lacks, ())
    key = driver, gpus, gpus_driver.software()
    origin = cache.origin(gpus, key[2])
    if use_cache:
        known = _UNKEPT.get(key) or (cache.load(origin, gpus) if origin else None)
        if known and _is_complete(known, lacks):
            return known
    report = _report(gpus, lacks, probe_in_child(driver, gpus, wanted, deadline_s, environ))
    if _is_complete(report, lacks):
        if origin and not cache.save(origin, report):
            _UNKEPT.pop(key, None)
        else:
            _UNKEPT[key] = report
    return report


def _report(gpus: tuple[str, ...], lacks: dict[Mechanism, str], links: tuple[Link, ...]) -> LinkReport:
    """Return a report of these links, and of all others as untested."""
    found = {link.route: link for link in links}
    every = (found.get(r) or Link(*r, Verdict.UNTESTED, lacks[r[0]]) for r in routes(len(gpus)))
    return LinkReport(gpus, tuple(every))


def _is_complete(report: LinkReport, lacks: dict[Mechanism, str]) -> bool:
    """Return whether all links are tested that can be."""
    return all(lacks[link.mechanism] or link.verdict != Verdict.UNTESTED for link in report.links)
