"""Where the devices of a process are, and where its messages start and arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

from tests.contexts import UNEVEN
from tpplan.errors import ExecutionError
from tpplan.exec.group.transport import GroupTransport, Message
from tpplan.exec.machine.look import places_for
from tpplan.exec.toolchain.torch_shims import backends_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have three GPUs, of which the third one is the current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


@pytest.mark.parametrize(
    ("backend", "devices", "own", "places"),
    [
        ("cpu", None, (0, 3), ("cpu", "meta", "meta", "cpu")),
        ("cpu", ["cpu"], (2,), ("meta", "meta", "cpu", "meta")),
        ("cuda", None, (2,), ("meta", "meta", "cuda:2", "meta")),
        ("auto", None, (0, 3), ("cuda:0", "meta", "meta", "cuda:1")),
        ("cuda", None, (0, 2, 3), ("cuda:0", "meta", "cuda:1", "cuda:2")),
        ("cuda", ["cuda:1", 0], (2, 3), ("meta", "meta", "cuda:1", "cuda:0")),
        ("auto", [0], (0,), ("cuda:0", "meta", "meta", "meta")),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_process_has_places_for_its_own_devices(
    backend: str, devices: Sequence[str | int] | None, own: Sequence[int], places: Sequence[str]
) -> None:
    """Devices of others are on ``meta``; a single GPU is the current one, several are the first ones, unless named."""
    assert places_for(UNEVEN, backend, devices, own) == (tuple(torch.device(place) for place in places), [])


@pytest.mark.parametrize(
    ("backend", "devices", "own", "problems"),
    [
        ("cpu", ["cpu"] * 3, (0, 2), ["devices: this process owns 2, 3 were given"]),
        ("cpu", ["cpu", "cuda:1"], (0, 2), ["devices[1]: cuda:1 is not for the backend cpu"]),
        ("cuda", [1, 1], (0, 2), ["devices: cuda:1, cuda:1 are not all different"]),
        ("cuda", [3], (0,), ["devices[0]: cuda:3 is none of the 3 CUDA devices of this machine, which have numbers"]),
        ("auto", None, (0, 1, 2, 3), ["devices: this process owns 4, this machine has 3 CUDA devices"]),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_what_is_wrong_with_places_is_counted_for_the_process(
    backend: str, devices: Sequence[str | int] | None, own: Sequence[int], problems: Sequence[str]
) -> None:
    """A process needs as many devices as it owns, however many the plan has."""
    places, found = places_for(UNEVEN, backend, devices, own)
    assert places == ()
    assert len(found) == len(problems)
    assert all(each.startswith(problem) for each, problem in zip(found, problems, strict=True))


@pytest.fixture
def carrier(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a carrier of a group with some backends, for a process with some places."""

    def make(backends: str, *places: str) -> GroupTransport:
        monkeypatch.setattr(distributed, "get_backend_config", lambda _: backends)
        monkeypatch.setattr(distributed, "get_process_group_ranks", lambda _: [0, 1])
        meeting: Any = SimpleNamespace(group=object(), process=0)
        return GroupTransport(meeting, [torch.device(place) for place in places])

    return make


@pytest.mark.parametrize(
    ("backends", "places", "found"),
    [
        ("cpu:gloo,cuda:nccl", ("cuda:1", "cuda:0"), ("cuda:1", "nccl")),
        ("cuda:nccl", ("cuda:3",), ("cuda:3", "nccl")),
        ("cpu:gloo,cuda:gloo", ("cuda:1",), ("cpu", "gloo")),
        ("cpu:gloo,cuda:nccl", (), ("cpu", "gloo")),
        ("cpu:gloo", ("cuda:0",), ("cpu", "gloo")),
        ("cpu:mpi,cuda:gloo", ("cuda:0",), ("cpu", "mpi")),
    ],
)
def test_messages_go_from_gpus_if_the_group_carries_them(
    backends: str, places: Sequence[str], found: tuple[str, str], carrier: Any
) -> None:
    """They start and arrive on the process's first GPU; with gloo, and without GPUs, in host memory."""
    made = carrier(backends, *places)
    assert (str(made.place), made.backend) == found


def test_virtual_devices_need_a_group_for_host_memory(carrier: Any) -> None:
    """The error says what the group has, and how to get what it lacks."""
    with pytest.raises(ExecutionError, match=r"group: it has nccl for cuda, but .* need one for cpu\nhint: initialise"):
        carrier("cuda:nccl")


def test_backends_of_a_group_are_known_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of backends may have colons."""
    monkeypatch.setattr(distributed, "get_backend_config", lambda _: "cpu:gloo,cuda:own:nccl")
    group: Any = object()
    assert backends_of(group) == {"cpu": "gloo", "cuda": "own:nccl"}


def test_messages_of_another_context_or_call_have_other_tags(carrier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So two contexts of a plan that processes use in different orders wait in vain, instead of taking wrong data."""
    made, tags = carrier("cpu:gloo"), []

    def send(*arguments: Any) -> Mock:
        tags.append(arguments[-1])
        return Mock()

    monkeypatch.setattr(distributed, "isend", send)
    for name, mark in (("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")):
        made.name = name
        made.carry([Message(torch.zeros(1, dtype=torch.uint8), 1, is_sent=True)], mark)()
    assert len(set(tags)) == 3
    assert tags[0] == tags[3]
    assert all(0 <= tag < 2**31 for tag in tags)
