"""Two kinds of RoPE in tables of one: each takes the half of a row that would repeat the other."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tpplan.errors import ExecutionError
from tpplan.exec.rope.scaling import Default, Linear, Yarn
from tpplan.exec.rope.tables import Rope


def test_each_has_its_half() -> None:
    """With the frequencies and the attention factor that it has in tables of its own, to the bit."""
    first, second = Rope(1e6, 64, Yarn(8.0, 512)), Rope(1e4, 64, Default())
    assert first.scaling.attention != 1
    for one, other in ((first, second), (second, first)):
        both = evolve(one, beside=other).tables(70_001)
        for table, left, right in zip(both, one.tables(70_001), other.tables(70_001), strict=True):
            assert torch.equal(table, torch.cat((left[:, :32], right[:, 32:]), dim=1))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Rope(1e6, 64, Default()), Rope(1e4, 32, Default())),
        (Rope(1e6, 64, Default()), Rope(1e4, 64, Default(), "gptj")),
        (Rope(1e6, 64, Default(), "gptj"), Rope(1e4, 64, Default(), "gptj")),
        (Rope(1e6, 64, Linear(2.0)), Rope(1e4, 64, Default(), beside=Rope(1e5, 64, Default()))),
    ],
)
def test_others_share_no_tables(first: Rope, second: Rope) -> None:
    """Those of other dimensions, of neighbouring pairs, and a third one."""
    with pytest.raises(ExecutionError, match=r"RoPE of \d+ rotary dimensions"):
        evolve(first, beside=second)
