"""Plans of tiny models, cut at random, whose ledgers are the planner's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from tests.planning_cases import tiny_model
from tests.strategies import bounds
from tpplan.core.device import Device
from tpplan.core.plan import KV_MODES, LAYOUTS, Cache, Request
from tpplan.planner.attempt import Attempt
from tpplan.planner.ledger import demands, ledger

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan


@st.composite
def cut_plans(draw: st.DrawFn, *rows: int) -> SplitPlan:
    """A model of a random family, cut at random for one to six devices, some of them idle; passes of some rows."""
    model = tiny_model(random.Random(draw(st.integers(0, 999))))
    batch, max_rows = draw(st.sampled_from((1, 5))), draw(st.sampled_from(rows))
    layout, kv = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(KV_MODES))
    request = Request(layout, "balanced", Cache("q4", 999), batch, max_rows, kv)
    count = draw(st.integers(1, 6))
    wanted = demands(model, request, count)
    cuts = tuple(draw(bounds(d.axis, d.size, d.unit, count)) for d in wanted.axes)
    devices = (Device(name="x", budget_bytes=2**40),) * count
    return Attempt(model, devices, request, wanted, cuts, ledger(cuts, wanted, devices, request)).plan()
