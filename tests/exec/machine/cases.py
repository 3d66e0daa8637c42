"""What the tests of links share: reports of imitated GPUs, in a cache of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tpplan.exec.machine import links
from tpplan.exec.machine.link_report import LinkReport, Mechanism, Verdict
from tpplan.exec.machine.links import link_report

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.exec.machine.link_report import Route


COPY, STORE, FLAG, LOAD = Mechanism
WORKS, BROKEN, UNTESTED = Verdict

#: Long enough for an honest step on a busy machine.
DEADLINE_S = 3.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of each test to itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(links, "_UNKEPT", {})


def report_of(name: str, *gpus: int | str, use_cache: bool = True) -> LinkReport:
    """Return the report of some or all GPUs that a function of :mod:`tests.exec.machine.fake_gpus` makes."""
    driver = f"tests.exec.machine.fake_gpus:{name}"
    return link_report(gpus or None, driver=driver, deadline_s=DEADLINE_S, use_cache=use_cache)


def not_working(report: LinkReport) -> dict[Route, Verdict]:
    """Return the verdicts on what must not be used."""
    return {link.route: link.verdict for link in report.links if link.verdict != WORKS}
