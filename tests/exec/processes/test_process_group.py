"""Joining the processes of a launcher, or an error that says what or who is missing."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

import pytest
import torch
from torch import distributed

from tpplan.errors import ExecutionError, RequestError, TpplanError
from tpplan.exec import process_group

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Describe a single process that finds itself on the loopback interface."""
    for name in (*_NAMES, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in zip(_NAMES, ("0", "1", "127.0.0.1", str(port)), strict=False):
        monkeypatch.setenv(name, value)
    yield monkeypatch
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": ""}, "environment: WORLD_SIZE is not set"),
        (dict.fromkeys(_NAMES[1:4], ""), "environment: WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "1"}, "environment: RANK is '1', expected a whole number from 0 to 0"),
        ({"RANK": "-1"}, "environment: RANK is '-1', expected"),
        ({"WORLD_SIZE": "two"}, "environment: WORLD_SIZE is 'two', expected a whole number from 1 to"),
        ({"WORLD_SIZE": "9" * 5000}, "environment: WORLD_SIZE is '9999"),
        ({"MASTER_PORT": "65536"}, "environment: MASTER_PORT is '65536', expected a whole number from 1 to 65535"),
        ({"MASTER_ADDR": "no such host"}, "MASTER_ADDR=no such host is no host that this machine knows"),
        (
            {"WORLD_SIZE": "3"},
            r"the processes did not meet at 127.0.0.1:\d+: processes 1 and 2 of 3 did not come within",
        ),
        ({"WORLD_SIZE": "2", "RANK": "1"}, r"process 0 did not come within 0.5 s: nobody listens on 127.0.0.1:\d+"),
    ],
)
def test_what_is_missing_is_named(environment: pytest.MonkeyPatch, changes: dict[str, str], message: str) -> None:
    """Variables and processes that are missing or impossible end in an error, in time."""
    for name, value in changes.items():
        environment.setenv(name, value)
    with pytest.raises(TpplanError, match=message) as caught, process_group(timeout_s=0.5):
        pass
    assert caught.value.hint


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
@pytest.mark.usefixtures("environment")
def test_an_impossible_time_out(seconds: float) -> None:
    """A time-out is a positive number of seconds."""
    with pytest.raises(RequestError, match="timeout_s is"), process_group(timeout_s=seconds):
        pass


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_of_another_program(environment: pytest.MonkeyPatch, rank: str) -> None:
    """A program that has the port and answers nothing is no store, and nobody waits for it beyond the time-out."""
    environment.setenv("RANK", rank)
    environment.setenv("WORLD_SIZE", "2")
    message = "Address already in use" if rank == "0" else "it is no store of torch.distributed"
    with (
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))),
        pytest.raises(ExecutionError, match=message),
        process_group(timeout_s=0.5),
    ):
        pass


def test_nothing_listens_outside_of_loopback(environment: pytest.MonkeyPatch) -> None:
    """With 127.0.0.1, the store's port is free on other addresses; gloo's interface is loopback, until the end."""
    with process_group() as group:
        port = int(os.environ["MASTER_PORT"])
        assert re.fullmatch("lo[0-9]*", os.environ["GLOO_SOCKET_IFNAME"])
        with socket.create_server(("127.0.0.2", port)):
            pass
        x = torch.ones(1)
        distributed.all_reduce(x, group=group)
        assert x == 1
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    del group  # which has the store, and its port
    environment.setenv("GLOO_SOCKET_IFNAME", "lo")
    with process_group():
        pass
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
