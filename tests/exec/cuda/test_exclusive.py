"""Contexts know whether they have their GPUs to themselves, before another one begins."""

from __future__ import annotations

import gc

import pytest
import torch

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import exclusive

A, B, C = (torch.device("cuda", i) for i in range(3))


class Told:
    """Notes what it is told, and what others were told before."""

    def __init__(self, log: list[tuple[str, bool]], name: str) -> None:
        """Write to a log."""
        self._log, self._name = log, name

    def tell_exclusive(self, *, exclusive: bool) -> None:
        """Note it."""
        self._log.append((self._name, exclusive))


def taken(log: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return what was noted since."""
    found = list(log)
    log.clear()
    return found


def test_whoever_shares_a_gpu_is_told() -> None:
    """As soon as another comes, and again when it has left; nobody else is told anything."""
    log: list[tuple[str, bool]] = []
    first, second, third = (Told(log, name) for name in ("first", "second", "third"))
    exclusive.enter(first, [A, B])
    assert taken(log) == [("first", True)]
    exclusive.enter(second, [C])
    assert taken(log) == [("second", True)]
    exclusive.enter(third, [B, C])
    assert sorted(taken(log)) == [("first", False), ("second", False)]
    exclusive.leave(second)
    assert taken(log) == []
    exclusive.leave(first)
    assert taken(log) == [("third", True)]
    for each in (first, third, third):
        exclusive.leave(each)
    assert taken(log) == []


def test_a_gpu_that_stands_for_two_devices_is_shared() -> None:
    """Also by one context alone."""
    log: list[tuple[str, bool]] = []
    crowded = Told(log, "crowded")
    exclusive.enter(crowded, [A, A])
    assert log == []
    exclusive.leave(crowded)


class Lost(Told):
    """Notes what it is told, and fails where it is told that it is not alone."""

    def tell_exclusive(self, *, exclusive: bool) -> None:
        """Fail, if so."""
        super().tell_exclusive(exclusive=exclusive)
        if not exclusive:
            raise ExecutionError("a device failed")


def test_who_could_not_come_has_no_seat() -> None:
    """If somebody cannot be told, the others are told again that they are alone, and so is who comes next."""
    log: list[tuple[str, bool]] = []
    first, lost, late, next_one = Told(log, "first"), Lost(log, "lost"), Told(log, "late"), Told(log, "next")
    exclusive.enter(first, [A])
    exclusive.enter(lost, [B])
    log.clear()
    with pytest.raises(ExecutionError, match="failed"):
        exclusive.enter(late, [A, B, C])
    assert taken(log) == [("first", False), ("lost", False), ("first", True)]
    exclusive.enter(next_one, [C])
    assert taken(log) == [("next", True)]
    for each in (late, lost, first, next_one):
        exclusive.leave(each)
    assert taken(log) == []


def test_who_was_dropped_counts_no_more() -> None:
    """Whoever comes next is alone, though nobody left."""
    log: list[tuple[str, bool]] = []
    dropped, other = Told(log, "dropped"), Told(log, "other")
    exclusive.enter(dropped, [A])
    del dropped
    gc.collect()
    log.clear()
    exclusive.enter(other, [A])
    assert taken(log) == [("other", True)]
    exclusive.leave(other)
