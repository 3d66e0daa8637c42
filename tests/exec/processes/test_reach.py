"""What other processes reach: asked for, answered, and closed when it is gone; the driver is played."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from secrets import token_hex
from threading import Event
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import define, field

from tests.exec.processes.threads import Opened
from tpplan.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

reaching = pytest.importorskip("tpplan.exec.processes.reach", reason="needs cuda-bindings")

GPU = torch.device("cuda:0")
PATIENT_S = 10


@define
class Driver:
    """What the driver knows: allocations of 100 bytes at multiples of 1,000, by number."""

    identities: dict[int, int] = field(factory=dict)
    opened: list[Opened] = field(factory=list)
    entered: list[torch.device] = field(factory=list)
    refuses: bool = False

    def allocation_of(self, address: int, _: torch.device) -> tuple[int, int, bytes]:
        """Return the range and the handle; those from 9,000 on have none."""
        start = address // 1000 * 1000
        return start, start + 100, b"" if start >= 9000 else start.to_bytes(64, "little")

    def identity_of(self, address: int) -> int:
        """Return the number of an allocation; 0 if it was given back."""
        return self.identities.get(address // 1000, 0)

    def open(self, _: torch.device, handle: tuple[bytes, int, int]) -> Opened:
        """Open an allocation."""
        if self.refuses:
            raise RuntimeError
        self.opened.append(Opened(torch.zeros(handle[2], dtype=torch.uint8)))
        return self.opened[-1]


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Play the driver for all processes."""
    found = Driver({i: 10 + i for i in range(10)})
    monkeypatch.setattr(reaching.ipc, "allocation_of", found.allocation_of)
    monkeypatch.setattr(reaching.ipc, "identity_of", found.identity_of)
    monkeypatch.setattr(reaching.ipc.Opened, "on", staticmethod(found.open))
    monkeypatch.setattr(reaching.ipc, "enter", found.entered.append)
    monkeypatch.setattr(reaching, "_LOOK_S", 0.02)
    return found


@pytest.fixture
def three(driver: Driver) -> Iterator[list[reaching.Reach]]:  # type: ignore[name-defined]
    """Return three processes, whose devices have their numbers."""
    assert not driver.opened
    name = token_hex(8)
    made = [reaching.Reach(name, GPU, i, {j: j for j in range(3) if j != i}) for i in range(3)]
    yield made
    for each in made:
        each.close()
    assert not any(opened.is_open for opened in driver.opened)


def test_all_others_open_what_is_first_used(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """Once; each is told the address that it sees, from any address inside."""
    first, *_ = three
    found = first.find(3007, PATIENT_S)
    assert found.is_reached
    assert len(driver.opened) == 2
    assert driver.entered == [GPU] * 3  # by the threads that answer
    starts = {opened.tensor.data_ptr() for opened in driver.opened}
    assert {first.address(3007, device) - 7 for device in (1, 2)} == starts
    assert first.find(3050, PATIENT_S) is found
    assert len(driver.opened) == 2
    with pytest.raises(InternalError, match="nobody else has opened"):
        first.address(4000, 1)


def test_what_was_given_back_is_closed_and_opened_anew(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """Another allocation at the same address is another one, which nobody takes for the first."""
    first, *_ = three
    old = first.find(3000, PATIENT_S)
    driver.identities[3] = 99
    assert not first.is_current(old)
    new = first.find(3000, PATIENT_S)
    assert new is not old
    assert first.is_current(new)
    assert new.is_reached
    assert [opened.is_open for opened in driver.opened] == [False, False, True, True]


def test_what_is_used_no_more_is_closed_soon(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """Without any further call."""
    three[1].find(2000, PATIENT_S)
    del driver.identities[2]
    _wait_until(lambda: not any(opened.is_open for opened in driver.opened))


def test_who_closes_memory_for_long_keeps_nobody_waiting(
    three: list[reaching.Reach],  # type: ignore[name-defined]
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if it has room for no message; and it closes later what it could not be told of."""
    first, second, third = three
    go_on, close = Event(), Opened.close

    def close_late(opened: Opened) -> None:
        go_on.wait(PATIENT_S)
        close(opened)

    assert all(first.find(address, PATIENT_S).is_reached for address in (3000, 4000))
    monkeypatch.setattr(Opened, "close", close_late)
    del driver.identities[3]
    _wait_until(lambda: not second._opened.keys() & {(0, 1)})
    try:
        with suppress(BlockingIOError):  # there is room for no more
            while True:
                third._socket.sendto(b"a message", first._path(1))
        del driver.identities[4]
        _wait_until(lambda: not first._own)
        began = time.monotonic()
        assert not first.find(5000, 0.05).is_reached
        assert time.monotonic() - began < reaching.PATIENT_S
    finally:
        go_on.set()
    _wait_until(lambda: not any(opened.is_open for opened in driver.opened[:4]))
    assert first.find(5000, PATIENT_S).is_reached


def test_memory_that_has_come_to_the_place_of_several_is_another(
    three: list[reaching.Reach],  # type: ignore[name-defined]
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if nobody has looked meanwhile, so that others still have all of them open."""
    first, _, _ = three
    monkeypatch.setattr(reaching, "_LOOK_S", 60)
    places = {3000: (3100, 1)}
    monkeypatch.setattr(reaching.ipc, "identity_of", lambda start: places.get(start, (0, 0))[1])
    monkeypatch.setattr(
        reaching.ipc,
        "allocation_of",
        lambda address, _: next((i, j, bytes(64)) for i, (j, _) in places.items() if i <= address < j),
    )
    for start, stop, address in ((3000, 3100, 3060), (3050, 3150, 3120), (3000, 3150, 3060)):
        places.clear()
        places[start] = stop, len(driver.opened) + 1
        assert first.find(address, PATIENT_S).is_reached
    assert first.address(3060, 1) - 60 in {opened.tensor.data_ptr() for opened in driver.opened[4:]}


def test_what_the_driver_does_not_know_is_not_kept(three: list[reaching.Reach]) -> None:  # type: ignore[name-defined]
    """As nothing would tell when it is given back."""
    assert not any(three[0].find(address, PATIENT_S).is_reached for address in (20000, 21000))
    assert not three[0]._own


def test_what_cannot_be_opened_is_refused_at_once(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """By the owner, if the driver has no handle of it, or by another process."""
    assert (three[0].find(9000, PATIENT_S).is_late, three[0].find(9000, PATIENT_S).is_reached) == (False, False)
    driver.refuses = True
    found = three[0].find(4000, PATIENT_S)
    assert (found.is_late, found.is_reached) == (False, False)


def test_a_process_that_is_not_there_is_not_waited_for(driver: Driver) -> None:
    """It has ended, or is in another network namespace: only what it has opened before is reached."""
    first = reaching.Reach(token_hex(8), GPU, 0, {1: 1})
    try:
        found = first.find(1000, PATIENT_S)
        assert (found.is_late, found.is_reached) == (False, False)
        first.know(2000, 2100, {1: 77_000})
        assert first.find(2007, PATIENT_S).is_reached
        assert first.address(2007, 1) == 77_007
    finally:
        first.close()
    assert not driver.opened


def test_calls_wait_once_for_each_question(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not answered one call costs the next ones no time."""
    first = reaching.Reach(token_hex(8), GPU, 0, {1: 1})
    monkeypatch.setattr(reaching, "_LOOK_S", 60)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
        silent.bind(first._path(1))
        try:
            began = time.monotonic()
            for seconds in (0.2, PATIENT_S, PATIENT_S):
                assert first.find(1000, seconds).is_late
            assert 0.2 <= time.monotonic() - began < PATIENT_S
        finally:
            first.close()
    assert not driver.opened


def test_a_process_is_asked_again_while_it_is_waited_for(
    three: list[reaching.Reach],  # type: ignore[name-defined]
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a question may be lost, as where it had no room for messages."""
    first, second, _ = three
    take, lost = second._take, list[tuple[object, ...]]()

    def taken(*message: object) -> None:
        if lost:
            take(*message)
        else:
            lost.append(message)

    monkeypatch.setattr(second, "_take", taken)
    assert first.find(1000, PATIENT_S).is_reached
    assert len(lost) == 1
    assert len(driver.opened) == 2


def test_messages_of_others_change_nothing(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """Neither of another size nor of a process that is not among these."""
    first, second, _ = three
    path = first._path(0)
    second._socket.sendto(b"a message", path)
    second._socket.sendto(reaching._MESSAGE.pack(1, 7, 1, 100, bytes(64)), path)
    second._socket.sendto(reaching._MESSAGE.pack(2, 1, 555, 100, bytes(64)), path)
    assert first.find(3000, PATIENT_S).is_reached
    assert len(driver.opened) == 2
