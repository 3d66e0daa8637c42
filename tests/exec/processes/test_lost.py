"""The first cause of a failure, from what processes report of each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore

from tpplan.exec.group import lost
from tpplan.exec.group.lost import Causes, Report, first_cause, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CLOSED = "Connection closed by peer"
SILENT = "Timed out waiting 4000ms for recv operation to complete"
FOR_4_S = "nothing came from there for 4 s"


def name(processes: Sequence[int]) -> str:
    """Name processes."""
    return " and ".join(f"process {i}" for i in processes)


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        pytest.param({0: ([1], CLOSED)}, f"process 1 is lost: {CLOSED}", id="one of two"),
        pytest.param({0: ([2], CLOSED), 1: ([0], CLOSED)}, f"process 2 is lost: {CLOSED}", id="and who noticed"),
        pytest.param({0: ([1], SILENT), 1: ([2], SILENT)}, f"process 2 is lost: {FOR_4_S}", id="at the end of a chain"),
        pytest.param(
            {0: ([1, 2], SILENT), 3: ([2], CLOSED)}, f"process 2 is lost: {CLOSED}", id="an end before silence"
        ),
        pytest.param({0: ([2, 3], SILENT)}, f"process 2 and process 3 are lost: {FOR_4_S}", id="two"),
        pytest.param(
            {0: ([1], SILENT), 1: ([0], SILENT)},
            f"process 0 and process 1 wait for each other in vain: {FOR_4_S}",
            id="different calls",
        ),
        pytest.param({0: ([1], SILENT), 1: ([], "was interrupted")}, "process 1 was interrupted", id="by itself"),
    ],
)
def test_the_cause_is_who_reports_nothing(reports: Mapping[int, tuple[list[int], str]], cause: str) -> None:
    """Others are awaited because they wait themselves, or have ended because they noticed."""
    known = {i: Report(tuple(awaited), reason) for i, (awaited, reason) in reports.items()}
    assert first_cause(known, name, 5) == cause


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "[/x/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36256. This is typically caused by a remote",
            CLOSED,
        ),
        (
            "[a:1] Read error [fe80::1%eth0]:32144: Connection reset by peer\nmore",
            "Read error: Connection reset by peer",
        ),
        (f"[a:2] {SILENT}", SILENT),
    ],
)
def test_reasons_have_no_ports(said: str, reason: str) -> None:
    """Nor lines of torch's source."""
    assert reason_of(RuntimeError(said)) == reason


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a store in a file, which stands for that of torch.distributed."""
    found: Any = FileStore(str(tmp_path / "store"), 3)
    monkeypatch.setattr(lost, "store_of", lambda key: PrefixStore(key, found))
    return found


@pytest.mark.usefixtures("store")
def test_all_that_are_left_say_the_same() -> None:
    """At once or one after the other; the rank is named where it is another number."""
    causes = [Causes("context", process, [3, 1, 5]) for process in range(3)]
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda i: causes[i].verdict([2] if i else [1], SILENT), range(2))]
    assert found == [f"process 2 (rank 5) is lost: {FOR_4_S}"] * 2
    assert causes[2].verdict([0], CLOSED) == found[0]
    assert Causes("context", 0, [3, 1, 5]).verdict([1], CLOSED) == found[0]
    assert Causes("another", 0, [3, 1, 5]).verdict([1], CLOSED) == f"process 1 is lost: {CLOSED}"


def test_what_others_write_is_only_text(store: Any) -> None:
    """Reports that are none blame their writers, and control characters are escaped."""
    store = PrefixStore("context", store)
    store.set("1", b"\x80\x04.")
    store.set("2", '[[0], "\x1b[2J timed out"]')
    assert Causes("context", 0, [0, 1, 2]).verdict([1], SILENT) == (
        "process 1 has written no report to the store of torch.distributed"
    )


@pytest.mark.parametrize(
    ("awaited", "reason", "cause"),
    [
        ([1, 2], SILENT, f"process 1 and process 2 are lost, or process 0 is cut off from them: {FOR_4_S}"),
        ([1], SILENT, f"process 1 is lost: {FOR_4_S}"),
        ([1, 2], CLOSED, f"process 1 and process 2 are lost: {CLOSED}"),
    ],
)
def test_without_a_store_each_says_what_it_knows(
    awaited: list[int], reason: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may be lost with the process that has it."""

    def fail(_: str) -> None:
        raise RuntimeError("Failed to recv, got 0 bytes")

    monkeypatch.setattr(lost, "store_of", fail)
    assert Causes("context", 0, [0, 1, 2]).verdict(awaited, reason) == cause


@pytest.mark.parametrize(
    ("by_torchrun", "awaited", "reason", "said"),
    [
        ("", [1], SILENT, "process 0 is lost, or process 2 is cut off from it: the store of torch.distributed"),
        ("", [0, 1], SILENT, f"process 0 is lost, or process 2 is cut off from it: {FOR_4_S}"),
        ("", [0, 1], CLOSED, f"process 0 is lost: {CLOSED}"),
        ("True", [1], SILENT, f"process 1 is lost: {FOR_4_S}"),
    ],
)
def test_a_store_that_does_not_answer_is_lost_with_its_process(
    by_torchrun: str, awaited: list[int], reason: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is awaited may itself wait for the one that has the store, unless torchrun has it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", by_torchrun)
    monkeypatch.setattr(lost, "store_of", Mock(side_effect=RuntimeError("Failed to recv")))
    assert Causes("context", 2, [0, 1, 2]).verdict(awaited, reason).startswith(said)
