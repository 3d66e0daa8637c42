"""What the tests of plan files share: a plan, its text, and what a text is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpplan.errors import PlanError
from tpplan.planfile import codec

FIXTURE = Path(__file__).parent / "data/formats/plan-1.0.json"
TEXT = FIXTURE.read_text(encoding="utf-8")
PLAN = codec.loads(TEXT)


def refused(text: str | bytes) -> list[str]:
    """Return the problems for which a text is refused."""
    with pytest.raises(PlanError) as caught:
        codec.loads(text)
    assert caught.value.problems
    assert caught.value.hint
    return [str(problem) for problem in caught.value.problems]


def changed(**changes: Any) -> str:
    """Return the fixture as JSON with some keys of its top level replaced."""
    return json.dumps(json.loads(TEXT) | changes)
