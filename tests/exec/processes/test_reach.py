"""What other processes reach: asked for, answered, and closed when it is gone; the driver is played."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import define, field

from tpplan.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

reaching = pytest.importorskip("tpplan.exec.processes.reach", reason="needs cuda-bindings")

GPU = torch.device("cuda:0")
PATIENT_S = 10


@define
class Opened:
    """Memory of another process."""

    tensor: torch.Tensor
    is_open: bool = True

    def close(self) -> None:
        """Close it, once."""
        assert self.is_open
        self.is_open = False


@define
class Driver:
    """What the driver knows: allocations of 100 bytes at multiples of 1,000, by number."""

    identities: dict[int, int] = field(factory=dict)
    opened: list[Opened] = field(factory=list)
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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Play the driver for all processes."""
    found = Driver({i: 10 + i for i in range(10)})
    monkeypatch.setattr(reaching.ipc, "allocation_of", found.allocation_of)
    monkeypatch.setattr(reaching.ipc, "identity_of", found.identity_of)
    monkeypatch.setattr(reaching.ipc.Opened, "on", staticmethod(found.open))
    monkeypatch.setattr(reaching.ipc, "allow_while_capturing", lambda: None)
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
    deadline = time.monotonic() + PATIENT_S
    while any(opened.is_open for opened in driver.opened):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_opened_is_refused_at_once(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """By the owner, if the driver has no handle of it, or by another process."""
    assert (three[0].find(9000, PATIENT_S).is_late, three[0].find(9000, PATIENT_S).is_reached) == (False, False)
    driver.refuses = True
    found = three[0].find(4000, PATIENT_S)
    assert (found.is_late, found.is_reached) == (False, False)


def test_a_process_that_comes_late_is_asked_again(driver: Driver) -> None:
    """Until then, the memory is reached by nobody, for whom there are mirrors."""
    name = token_hex(8)
    first = reaching.Reach(name, GPU, 0, {1: 1})
    try:
        found = first.find(1000, 0.01)
        assert (found.is_late, found.is_reached) == (True, False)
        second = reaching.Reach(name, GPU, 1, {0: 0})
        try:
            time.sleep(0.03)
            assert first.find(1000, PATIENT_S).is_reached
        finally:
            second.close()
    finally:
        first.close()
    assert [opened.is_open for opened in driver.opened] == [False]


def test_messages_of_others_change_nothing(three: list[reaching.Reach], driver: Driver) -> None:  # type: ignore[name-defined]
    """Neither of another size nor of a process that is not among these."""
    first, second, _ = three
    path = first._path(0)
    second._socket.sendto(b"a message", path)
    second._socket.sendto(reaching._MESSAGE.pack(1, 7, 1, 100, bytes(64)), path)
    second._socket.sendto(reaching._MESSAGE.pack(2, 1, 555, 100, bytes(64)), path)
    assert first.find(3000, PATIENT_S).is_reached
    assert len(driver.opened) == 2
