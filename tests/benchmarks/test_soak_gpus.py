"""The soak on real GPUs, and a device that is lost there."""

from __future__ import annotations

import pytest

from benchmarks.reliability.lost_device import lose
from benchmarks.reliability.operations import FRAMED_ROWS, plan_for, soak
from tpplan.exec import compile as compile_plan
from tpplan.exec.cuda.probe_driver import TorchDriver
from tpplan.exec.machine.links import link_report, pair_of
from tpplan.exec.options import TRANSPORTS


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_wrong_on_gpus(transport: str) -> None:
    """Calls, and replays of graphs in any order, give what they have to, while devices are late at random."""
    with compile_plan(plan_for(2), backend="cuda", devices=[0, 1], transport=transport) as ctx:
        outcome = soak(ctx, operations=15_000, seconds=600, seed=6, largest=2**22, delays=True, graphs=True)
    assert outcome.faults == []
    assert outcome.replayed > outcome.called > 0


@pytest.mark.multi_gpu
def test_a_lost_device_ends_in_an_error() -> None:
    """The others give up, of a small sum and of a large one; memory is given back, and a new context works.

    One after the other, as they forget what is known of the same links.
    """
    plan, driver = plan_for(2), TorchDriver()
    for transport, rows in (("peer", 1), ("peer", 2048), ("host", 1), ("host", FRAMED_ROWS)):
        link_report([0, 1])
        loss = lose(plan, transport, rows)
        kept = pair_of(driver.gpus(), 0, 1, driver.software())
        assert kept
        assert bool(kept.load()) == (transport == "host")  # links of ``peer`` may be to blame, and are probed again
        assert "never came" in loss.message
        assert loss.refused
        assert loss.freed
        with compile_plan(plan, backend="cuda", devices=[0, 1], transport=transport) as ctx:
            assert soak(ctx, operations=200, seconds=600, seed=7, largest=2**20).faults == []
