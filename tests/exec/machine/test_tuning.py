"""Thresholds, chosen from times: those under which everything takes the least."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.contexts import little_room  # noqa: F401 (for every test here)
from tests.exec.machine.tuning_cases import ROOM, Machine
from tpplan.exec import Tuning
from tpplan.exec.tuning import (
    COPIES,
    DIRECT,
    EXCHANGES,
    FANS,
    FRAMES,
    KIB,
    KINDS,
    LARGEST,
    MIB,
    SLOTS,
    SUMS,
    default,
    tune,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_thresholds_are_where_the_ways_cross() -> None:
    """The largest measured size at which slots are fastest, and the smallest at which copy engines are, by kind."""
    machine = Machine(fans=(10, 0.008))  # slots until 400 KiB, copies from 7,000 KiB on, and of fans from 2,000 KiB on
    assert tune(machine.time, ROOM, 2, direct=True) == Tuning(
        peer_fans_bytes=256 * KIB, peer_exchanges_bytes=256 * KIB, peer_sums_bytes=256 * KIB,
        host_fans_bytes=64 * KIB, host_exchanges_bytes=64 * KIB, host_sums_bytes=64 * KIB,
        copies_fans_bytes=2 * MIB, copies_exchanges_bytes=8 * MIB, peer_one_shot_bytes=0,
    )  # fmt: skip


def test_one_bad_measurement_does_not_decide() -> None:
    """A size far from where the ways cross that once took longer changes nothing."""
    assert tune(Machine(bad=64 * KIB).time, ROOM, 2, direct=True).peer_fans_bytes == 256 * KIB


@pytest.mark.parametrize(("machine", "largest"), [(Machine(slots=(99, 9)), 0), (Machine(slots=(0.1, 0)), 2 * MIB)])
def test_slots_that_never_or_always_win(machine: Machine, largest: int) -> None:
    """Slots that are never faster are not used, and those that always are, for all that fits one."""
    found = tune(machine.time, ROOM, 2, direct=True)
    assert [found.slots("peer", kind) for kind in KINDS] == [largest] * 3
    assert [found.slots("host", kind) for kind in KINDS] == [min(largest, 64 * KIB)] * 3


def test_copy_engines_that_never_or_always_win() -> None:
    """Copy engines that are never faster never take over; those that are so at the largest size only, do there."""
    found = tune(Machine(copies=(99, 9), fans=(22, 0.0099)).time, ROOM, 2, direct=True)  # from 160,000 KiB on
    assert (found.copies_fans_bytes, found.copies_exchanges_bytes) == (0, 0)
    found = tune(Machine(fans=(10, 0.0099)).time, ROOM, 2, direct=True)  # from 40,000 KiB on
    assert found.copies_fans_bytes == LARGEST == 64 * MIB
    found = tune(Machine(copies=(1, 0.0001)).time, ROOM, 2, direct=True)
    assert (found.copies_exchanges_bytes, found.peer_exchanges_bytes) == (1, 0)
    assert found.peer_sums_bytes == 256 * KIB  # sums have no copy engines


def test_nothing_between_two_sizes_goes_a_way_that_is_never_the_fastest() -> None:
    """Where copy engines follow slots at once, they take all that slots do not."""
    found = tune(Machine(fans=(5, 0.008)).time, ROOM, 2, direct=True)  # slots until 250 KiB
    assert (found.peer_fans_bytes, found.copies_fans_bytes) == (128 * KIB, 128 * KIB)


@pytest.mark.parametrize(
    ("machine", "devices", "copies", "passed"),
    [
        (Machine(), 2, 8 * MIB, default(2).passed_on_bytes),  # nobody to pass on to, nothing measured
        (Machine(passed=(10, 0.004)), 3, 8 * MIB, MIB),  # from 667 KiB on
        (Machine(), 8, 8 * MIB, 6 * 16 * MIB),  # from 12,500 KiB on, which is spared that often
        (Machine(passed=(10, 0.004)), 4, 8 * MIB, 2 * MIB),  # from 667 KiB on, whatever copy engines could do
        (Machine(passed=(1, 0.0001)), 4, 8 * MIB, 2 * 256 * KIB),  # right after slots
        (Machine(passed=(99, 9)), 4, 8 * MIB, 0),
        (Machine(passed=(22, 0.009)), 4, 8 * MIB, 0),  # faster than straight, but never than copy engines
        (Machine(slots=(99, 9), passed=(1, 0.0001)), 4, 8 * MIB, 2),
    ],
)
def test_passing_on_has_a_threshold(machine: Machine, devices: int, copies: int, passed: int) -> None:
    """Devices pass on what is faster than by slots, straight and copy engines, which are chosen without it."""
    found = tune(machine.time, ROOM, devices, direct=True)
    assert (found.copies_fans_bytes, found.passed_on_bytes) == (copies, passed)


#: Of as many H200: µs by KiB of a message, through slots, straight, and by copy engines.
H200: dict[int, dict[str, dict[int, tuple[float, float, float]]]] = {
    2: {
        FANS: {
            8: (2.3, 6.0, 4.5), 64: (2.6, 6.2, 4.6), 256: (3.5, 6.7, 5.0), 512: (5.1, 7.6, 5.7), 1024: (8.2, 9.4, 7.3),
            4096: (0, 18.7, 15.2), 16384: (0, 56, 49.8),
        },
        EXCHANGES: {
            4: (3.2, 6.0, 21.6), 128: (4.3, 6.8, 17.9), 256: (5.0, 7.1, 18.6), 512: (7.1, 8.1, 24),
            1024: (10.2, 9.4, 24), 2048: (0, 12.1, 27.5), 8192: (0, 30.8, 51.8),
        },
        SUMS: {
            8: (3.2, 6.7, 29), 256: (4.9, 7.4, 30), 512: (7.4, 7.9, 31), 1024: (12.3, 9.6, 33), 4096: (0, 19.4, 43),
        },
    },
    4: {
        FANS: {
            8: (2.8, 6.7, 8.3), 64: (3.6, 7.0, 9.2), 256: (7.0, 8.9, 9.8), 512: (11.3, 11.2, 11.9),
            1024: (0, 15.6, 15.3), 4096: (0, 42.1, 40.8), 16384: (0, 149, 143),
        },
        EXCHANGES: {
            4: (4.8, 7.0, 58), 64: (6.7, 7.8, 56.5), 128: (8.2, 8.8, 64), 256: (12.2, 11.4, 114),
            512: (17.1, 14.1, 52.1), 2048: (0, 31.6, 80.3), 8192: (0, 109, 183),
        },
        SUMS: {4: (4.7, 8.7, 0), 64: (6.3, 9.6, 0), 128: (7.4, 9.7, 0), 256: (10.7, 10.1, 0), 512: (18, 10.9, 0)},
    },
}  # fmt: skip


@pytest.mark.parametrize("devices", H200)
def test_defaults_are_those_of_h200(devices: int) -> None:
    """What such GPUs need at some sizes, and as much at others as at the next larger one, gives the defaults."""
    measured = H200[devices]

    def time(_: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        near = min((kib for kib in measured[kind] if kib * KIB >= size), default=max(measured[kind]))
        by_way = dict(zip((SLOTS, DIRECT, COPIES), measured[kind][near], strict=True))
        return [by_way.get(way) or inf for way in ways]

    found = tune(time, {"peer": MIB // (devices // 2)}, devices, direct=True)
    unmeasured = {name: getattr(default(devices), name) for name in ("passed_on_bytes", "peer_one_shot_bytes")}
    assert evolve(found, **unmeasured) == default(devices)


@pytest.mark.parametrize(
    ("one_shot", "slots", "most"),
    [((4, 0.012), 128 * KIB, 512 * KIB), ((4, 0.01), 128 * KIB, LARGEST), ((9, 0.02), 256 * KIB, 0)],
)
def test_sums_in_one_shot_have_a_threshold(one_shot: tuple[float, float], slots: int, most: int) -> None:
    """They follow slots, which end from 250 KiB on, and precede shares of the columns, from 1,000 KiB on."""
    found = tune(Machine(one_shot=one_shot).time, ROOM, 2, direct=True)
    assert (found.peer_sums_bytes, found.peer_one_shot_bytes) == (slots, most)


@pytest.mark.parametrize(("devices", "like"), [(1, 2), (3, 4), (6, 4), (8, 4)])
def test_other_devices_have_defaults_of_more_or_of_four(devices: int, like: int) -> None:
    """Two devices have nobody to pass on to; three and more go like four."""
    assert default(devices) == default(like)


def test_what_is_not_measured_keeps_its_default() -> None:
    """Without peer access nothing is timed by ``peer``; where kernels do not write straight, nothing goes straight."""
    asked = set()

    def time(transport: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        asked.add((transport, kind, ways))
        assert size <= ROOM[transport]
        return Machine(slots=(99, 9)).time(transport, kind, size, ways)

    found = tune(time, {"host": ROOM["host"]}, 2, direct=True)
    assert found == evolve(default(2), host_fans_bytes=0, host_exchanges_bytes=0, host_sums_bytes=0)
    assert asked == {("host", kind, (SLOTS, FRAMES)) for kind in KINDS}
    asked.clear()
    found = tune(time, {"peer": ROOM["peer"]}, 2, direct=False)
    assert found == evolve(default(2), peer_fans_bytes=0, peer_exchanges_bytes=0, peer_sums_bytes=0)
    assert asked == {("peer", kind, (SLOTS, COPIES)) for kind in KINDS}


@given(st.lists(st.tuples(*[st.floats(1, 100)] * 3), min_size=15, max_size=15))
def test_no_other_thresholds_take_less(times: list[tuple[float, float, float]]) -> None:
    """Whatever was measured, no other thresholds have a smaller product of times."""
    sizes = [2**i * KIB for i in range(2, 17)]
    by_size = dict(zip(sizes, times, strict=True))
    room = ROOM["peer"]

    def time(_: str, __: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        return list(by_size[size])[-len(ways) :]

    def product(slots: int, copies: int) -> float:
        result = 1.0
        for size, (small, direct, copied) in by_size.items():
            result *= small if size <= slots else copied if 0 < copies <= size else direct
        return result

    found = tune(time, {"peer": room}, 2, direct=True)
    every = [(slots, copies) for slots in (0, *(s for s in sizes if s <= room)) for copies in (0, *sizes)]
    assert product(found.peer_fans_bytes, found.copies_fans_bytes) <= min(product(*one) for one in every) * (1 + 1e-9)
