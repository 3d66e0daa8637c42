"""The way of messages between GPUs of several processes: kernels where all of them can, and the reason where not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, call

import pytest
import torch

from tests.exec.processes.threads import ThreadMeeting
from tpplan.errors import ExecutionError
from tpplan.exec.cuda import tuning_cache
from tpplan.exec.group.members import Claim, Gpu
from tpplan.exec.machine.transports import Choice
from tpplan.exec.processes import process_transport
from tpplan.exec.processes.process_transport import ProcessTransport, transport_between
from tpplan.exec.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Two processes with a GPU each, on one host, and a plan whose device 1 is idle.
CLAIMS = (Claim(own=(0,), gpus=(Gpu(0, "here", "b", 132),)), Claim(own=(2,), gpus=(Gpu(2, "here", "a", 108),)))
MEASURED = Tuning(peer_sums_bytes=2**18, copies_fans_bytes=2**20)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend two GPUs, a and b, between which everything works, and thresholds that were measured."""
    monkeypatch.setattr(process_transport, "choose", lambda *_: (Choice("peer"), []))
    monkeypatch.setattr(
        process_transport, "_tried", lambda meeting, _: [process_transport._Verdict() for _ in range(meeting.count)]
    )
    monkeypatch.setattr(tuning_cache, "stored", lambda *_: (MEASURED, "measured"))
    return monkeypatch


def found(
    claims: Sequence[Claim] = CLAIMS, transport: str = "auto", tuning: Tuning | None = None
) -> list[ProcessTransport]:
    """Return the way that each process finds."""
    barrier, told = Barrier(len(claims), timeout=20), dict[int, bytes]()

    def find(process: int) -> ProcessTransport:
        meeting: Any = ThreadMeeting(process, len(claims), barrier, told)
        meeting.gpu = torch.device("cuda", 0)  # the only one that it sees
        return transport_between(meeting, claims, transport, tuning)

    with ThreadPoolExecutor(len(claims)) as pool:
        return [*pool.map(find, range(len(claims)))]


@pytest.mark.usefixtures("machine")
def test_kernels_where_all_can() -> None:
    """Each process knows how large the GPUs of the others are, without seeing them; all have the same thresholds."""
    first, second = found()
    assert first.others == {2: 108}
    assert second.others == {0: 132}
    assert first.tuning == second.tuning
    assert first.tuning
    assert (first.tuning.peer_sums_bytes, first.tuning.copies_fans_bytes) == (2**18, 0)  # as in one process
    assert first.direct
    assert not first.problem
    (given, _) = found(tuning=MEASURED)
    assert given.tuning
    assert (given.tuning.peer_sums_bytes, given.tuning.copies_fans_bytes) == (2**18, 0)
    assert found(transport="events") == [ProcessTransport(), ProcessTransport()]


def _fail(*_: object) -> Any:
    raise ValueError("no such thing\nin any world")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            lambda m: m.setattr(
                process_transport, "choose", lambda *_: (Choice("events", notes=("peer is not verified",)), [])
            ),
            "not",
        ),
        (
            lambda m: m.setattr(process_transport, "choose", lambda *_: (Choice("peer"), ["kernels: none"])),
            "is out: kernels: none",
        ),
        (lambda m: m.setattr(process_transport, "choose", _fail), "is out: ValueError: no such thing"),
        (
            lambda m: m.setattr(
                process_transport,
                "_tried",
                lambda *_: [process_transport._Verdict(), process_transport._Verdict("is out: no memory")],
            ),
            "is out: no memory (process 1)",
        ),
    ],
)
def test_else_torch_distributed_and_why(
    broken: Callable[[pytest.MonkeyPatch], None], reason: str, machine: pytest.MonkeyPatch
) -> None:
    """All processes find the same, whoever it was that could not; kernels that were asked for are a problem."""
    broken(machine)
    for way in found():
        assert not way.others
        assert not way.problem
        assert way.notes[0].startswith("peer ")
        assert reason in way.notes[0]
        assert "\n" not in way.notes[0]
    assert all(reason in way.problem for way in found(transport="peer"))


def test_links_and_thresholds_are_those_of_the_gpus_of_all(machine: pytest.MonkeyPatch) -> None:
    """Every process asks about its own GPU, and about the links between all, which it knows by UUID."""
    chosen, stored = Mock(return_value=(Choice("peer"), [])), Mock(return_value=(MEASURED, "measured"))
    machine.setattr(process_transport, "choose", chosen)
    machine.setattr(tuning_cache, "stored", stored)
    found()
    assert chosen.call_args_list == [call([torch.device("cuda:0")], "auto", ["b", "a"])] * 2
    assert stored.call_args_list == [call(2, "peer", ["b", "a"])] * 2


@pytest.mark.usefixtures("machine")
def test_not_between_hosts_and_not_for_several_gpus() -> None:
    """What shares no memory, or has several GPUs in a process, is left to torch.distributed."""
    there = Claim(own=(2,), gpus=(Gpu(2, "there", "a", 108),))
    assert "on one host" in found((CLAIMS[0], there))[0].notes[0]
    several = Claim(own=(2, 3), gpus=(Gpu(2, "here", "a", 108), Gpu(3, "here", "c", 108)))
    assert "with one GPU each" in found((CLAIMS[0], several))[1].notes[0]


def test_loads_that_are_not_verified(machine: pytest.MonkeyPatch) -> None:
    """Kernels then use slots only, in all processes, even if just one may not read from its peers."""
    choices = iter([Choice("peer", direct=False), Choice("peer"), Choice("peer")])
    machine.setattr(process_transport, "choose", lambda *_: (next(choices), []))
    for way in found():
        assert way.others
        assert not way.direct
        assert "loads from peers are unverified" in way.notes[0]


def test_thresholds_that_cannot_be_read(machine: pytest.MonkeyPatch) -> None:
    """Built-in ones take their place."""

    def fail(*_: object) -> Any:
        raise ExecutionError("damaged")

    machine.setattr(tuning_cache, "stored", fail)
    assert all(way.tuning for way in found())
