"""What the tests of the bench share: its schema and operations, rates of links, and turns of one call."""

from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from schemas import generate
from tpplan.exec.programs.program import HOST
from tpplan.exec.tools.bench import clock as bench_clock
from tpplan.reports.bench import Limit

SCHEMA = Draft202012Validator(generate.schema("bench-report"))
OPERATIONS = ("broadcast", "allgather", "all_reduce", "all_reduce with residual", "scatter", "gather")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a turn be a call: nobody looks at the times."""
    monkeypatch.setattr(bench_clock, "_TURN_SECONDS", 0)


RATES = (
    *(Limit(source=a, target=b, bytes_per_second=100) for a in (0, 1, 2) for b in (0, 1, 2) if a != b and a),
    *(Limit(source=0, target=b, bytes_per_second=50 * b) for b in (1, 2)),
    *(Limit(source=a, target=HOST, bytes_per_second=20) for a in (0, 1, 2)),
    *(Limit(source=HOST, target=a, bytes_per_second=10) for a in (0, 1, 2)),
)
