"""Garbage of the adversary: what makes a race show in the bytes."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tpplan.exec.backends.adversary import Garbage
from tpplan.exec.memory.binding import BITS


@pytest.mark.parametrize("dtype", BITS.values())
def test_every_element_is_wrong(dtype: torch.dtype) -> None:
    """Of few and of many, however they lie; another time they are wrong otherwise."""
    garbage = Garbage(Random(0))
    for rows, columns in ((1, 1), (3, 7), (200, 300), (3, 7)):
        right = torch.randint(100, (columns, rows), dtype=dtype).T
        before = right.clone()
        assert (garbage.unlike(right) != right).all()
        assert torch.equal(right, before)
        garbage.spoil(right)
        assert (right != before).all()
    assert not torch.equal(garbage.unlike(before), garbage.unlike(before))
