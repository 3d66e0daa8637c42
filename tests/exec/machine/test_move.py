"""Moving tensors: the right bytes, in the right strides, by a way that is verified, whatever the links do."""

from __future__ import annotations

import inspect
import logging
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.exec.machine.move_cases import (
    CPU,
    DIRECT,
    EACH_MACHINE,
    GPU,
    STAGED,
    VIEWS,
    Machine,
    X,
    bytes_of,
    fails,
    full,
    same_tensors,
)
from tpplan.errors import DeviceError
from tpplan.exec.machine import move
from tpplan.exec.machine.move import Mover, gpu_peer_copy, safe_move_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@EACH_MACHINE
def test_moves_between_gpus_take_a_way_that_works(make: Callable[[], Machine], ways: list[tuple[str, str]]) -> None:
    """A peer copy is used where its direction is verified, the host's memory where it is not or where it fails."""
    machine = make()
    moved = Mover(machine).move(machine.put(X, GPU[0]), 1, non_blocking=False)
    assert (moved.device, same_tensors(moved, X)) == (GPU[1], True)
    assert machine.ways() == ways


@EACH_MACHINE
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strides_are_those_that_to_gives(
    view: Callable[[torch.Tensor], torch.Tensor], make: Callable[[], Machine], ways: list[tuple[str, str]]
) -> None:
    """By whichever way, a copy has its values and the strides of torch's own copy: dense permuted ones are kept."""
    machine = make()
    data = view(X)
    moved = Mover(machine).move(machine.put(data, GPU[0]), GPU[1], non_blocking=False)
    assert moved.stride() == data.to("meta").stride()
    assert torch.equal(bytes_of(moved), bytes_of(data))
    assert machine.ways() == ways


@pytest.mark.parametrize(("source", "target"), [(CPU, GPU[2]), (GPU[2], CPU)])
def test_the_cpu_is_reached_without_asking_the_links(source: torch.device, target: torch.device) -> None:
    """Moves from and to the CPU are one copy, which is complete when the call returns, and need no probe."""
    machine = Machine(frozenset())
    moved = Mover(machine).move(machine.put(X, source), target, non_blocking=True)
    assert (moved.device, same_tensors(moved, X)) == (target, True)
    assert machine.log == [(str(source), str(target), True), ("cuda:2", "wait", False)]
    assert machine.asked == []


@pytest.mark.parametrize("device", [1, "cuda:1", "cuda", torch.device("cuda", 1), torch.device("cuda")])
def test_a_tensor_that_is_there_stays_the_same_object(device: torch.device | str | int) -> None:
    """Nothing is copied to where it is, however the device is named; ``cuda`` is the current one."""
    machine = Machine()
    x = machine.put(X, GPU[1])
    assert Mover(machine).move(x, device, non_blocking=False) is x
    assert (machine.log, machine.asked) == ([], [])


def test_the_host_waits_for_both_halves_of_a_staged_copy() -> None:
    """Through the host's memory neither half runs on: the second reads what the first writes, and memory of its own."""
    machine = Machine(frozenset())
    Mover(machine).move(machine.put(X, GPU[0]), 1, non_blocking=True)
    assert machine.log == [("cuda:0", "cpu", False), ("cpu", "cuda:1", False)]


@pytest.mark.parametrize(("non_blocking", "waits"), [(False, [("cuda:1", "wait", False)]), (True, [])])
def test_only_peer_copies_run_on(non_blocking: bool, waits: list[tuple[str, str, bool]]) -> None:
    """The host waits for peer copies unless it is told not to, and once for all of a call."""
    machine = Machine()
    Mover(machine).move([machine.put(X, gpu) for gpu in (GPU[0], GPU[2])], 1, non_blocking=non_blocking)
    assert machine.log[2:] == waits


@given(
    st.lists(st.sampled_from([CPU, *GPU]), max_size=6),
    st.sampled_from([CPU, *GPU]),
    st.frozensets(st.sampled_from(list(permutations(range(3), 2)))),
    st.booleans(),
)
def test_what_is_returned_is_complete(
    places: list[torch.device], target: torch.device, verified: frozenset[tuple[int, int]], non_blocking: bool
) -> None:
    """Sources may be overwritten when the call has returned, whatever the flag; the host waits once for each GPU."""
    machine = Machine(verified)
    sources = [X + i for i in range(len(places))]
    placed = tuple(machine.put(source, place) for source, place in zip(sources, places, strict=True))
    moved = Mover(machine).move(placed, target, non_blocking=non_blocking)
    for source, place in zip(sources, places, strict=True):
        if place != target:
            source.fill_(-1)
    assert all(same_tensors(each, X + i) for i, each in enumerate(moved))
    waits = [gpu for gpu, other, _ in machine.log if other == "wait"]
    assert len(waits) == len(set(waits))


@pytest.mark.parametrize(("value", "allowed"), [("1", False), ("yes", False), ("0", True), ("", True), (None, True)])
def test_the_environment_rules_peer_copies_out(
    value: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With EXLLAMA_NO_P2P_COPY, moves go through the host's memory, and nobody asks what the links can do."""
    monkeypatch.delenv("EXLLAMA_NO_P2P_COPY", raising=False)
    if value is not None:
        monkeypatch.setenv("EXLLAMA_NO_P2P_COPY", value)
    machine = Machine()
    mover = Mover(machine)
    assert same_tensors(mover.move(machine.put(X, GPU[0]), 1, non_blocking=False), X)
    mover.copy(machine.put(torch.zeros_like(X), GPU[1]), machine.put(X, GPU[0]))
    assert machine.ways()[:2] == (DIRECT * 2 if allowed else STAGED)
    assert mover.are_peers(0, 1) == allowed
    assert machine.asked == ([(0, 1)] if allowed else [])


def test_what_is_known_of_peer_copies() -> None:
    """None, then 1 for pairs that copy in both directions and -1 for others; a failure counts, too."""
    machine = Machine(frozenset(permutations(range(3), 2)) - {(2, 1)})
    mover = Mover(machine)
    assert mover.tested() is None
    mover.move(machine.put(X, CPU), 1, non_blocking=False)
    assert mover.tested() is None
    assert mover.are_peers(0, 1)
    assert mover.tested() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert mover.are_peers(2, 0)
    assert not mover.are_peers(1, 2)
    assert mover.tested() == [[1, 1, 1], [0, 1, -1], [0, 0, 1]]
    machine.peer = fails
    mover.move(machine.put(X, GPU[2]), 0, non_blocking=False)
    assert mover.tested() == [[1, 1, -1], [0, 1, -1], [0, 0, 1]]
    assert len(machine.asked) == 3


def test_what_the_probe_could_not_test_is_0() -> None:
    """A pair that no probe could test is not called broken, and is not used."""
    machine = Machine(frozenset({(1, 0)}), untested=frozenset({(0, 1), (1, 2), (2, 1)}))
    mover = Mover(machine)
    assert not any(mover.are_peers(a, b) for a in range(3) for b in range(a))
    assert mover.tested() == [[1, 0, -1], [0, 1, 0], [0, 0, 1]]


def test_a_failure_is_reported_once_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """After a peer copy has raised, moves in that direction use the host's memory; other directions still try."""
    machine = Machine(peer=fails)
    mover = Mover(machine)
    for _ in range(3):
        assert same_tensors(mover.move(machine.put(X, GPU[0]), 1, non_blocking=False), X)
    assert machine.ways() == DIRECT + STAGED * 3
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "tpplan.exec.machine.move")
    assert record.getMessage() == (
        "peer copy from cuda:0 to cuda:1 failed, from now on by the host's memory: "
        "CUDA error: peer access is not supported"
    )
    mover.move(machine.put(X, GPU[1]), 0, non_blocking=False)
    assert machine.ways() == [("cuda:1", "cuda:0"), ("cuda:1", "cpu"), ("cpu", "cuda:0")]
    assert len(caplog.records) == 2
    assert not mover.are_peers(0, 1)
    assert mover.are_peers(0, 2)


def test_no_room_is_no_fault_of_the_link(caplog: pytest.LogCaptureFixture) -> None:
    """A device without room is an error, and the link is used again afterwards."""
    machine = Machine(peer=full)
    mover = Mover(machine)
    with pytest.raises(torch.OutOfMemoryError):
        mover.move(machine.put(X, GPU[0]), 1, non_blocking=False)
    assert machine.ways() == DIRECT
    machine.peer = torch.Tensor.clone
    assert same_tensors(mover.move(machine.put(X, GPU[0]), 1, non_blocking=False), X)
    assert machine.ways() == DIRECT
    assert not caplog.records


def test_the_round_trip_needs_both_directions() -> None:
    """``test_gpu_peer_copy`` is about both directions, any order, and true of a GPU and itself."""
    mover = Mover(Machine(frozenset({(0, 1), (1, 0), (0, 2)})))
    assert mover.are_peers(0, 1)
    assert mover.are_peers("cuda:1", torch.device("cuda", 0))
    assert not mover.are_peers(0, 2)
    assert not mover.are_peers(2, "cuda:0")
    assert mover.are_peers(2, 2)


def test_the_links_are_asked_once() -> None:
    """However many tensors move, there is one report for each two GPUs, and of no others."""
    machine = Machine()
    mover = Mover(machine)
    mover.move([machine.put(X, GPU[0])] * 5, 1, non_blocking=False)
    mover.move(machine.put(X, GPU[1]), 0, non_blocking=False)
    assert mover.are_peers(0, 1)
    assert machine.asked == [(0, 1)]
    mover.copy(machine.put(X.clone(), GPU[2]), machine.put(X, GPU[0]))
    assert mover.are_peers(2, 0)
    assert machine.asked == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu7", "'gpu7' names no device"),
        (-1, "-1 names no device"),
        (None, "None names no device"),
        (1.5, "1.5 names no device"),
        (True, "True names no device"),
        ([0], r"\[0\] names no device"),
        (3, "there is no GPU 3: this process sees 3"),
        ("cuda:9", "there is no GPU 9: this process sees 3"),
    ],
)
def test_unknown_devices_are_refused(device: Any, message: str) -> None:
    """A device that is not there is an error with its name, before anything is copied."""
    machine = Machine()
    with pytest.raises(DeviceError, match=message):
        Mover(machine).move(machine.put(X, GPU[0]), device, non_blocking=False)
    assert machine.log == []


def test_without_gpus_tensors_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions work on a machine without GPUs, and say what is missing where they need one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    moved = safe_move_tensor({"x": X, "y": (None, X)}, "cpu")
    assert moved["x"] is X
    target = torch.zeros_like(X)
    gpu_peer_copy(target, X)
    assert torch.equal(target, X)
    for device in (0, "cuda"):
        with pytest.raises(DeviceError, match="there is no GPU 0: this process sees 0"):
            safe_move_tensor(X, device)
    with pytest.raises(DeviceError, match="'cpu' is no GPU"):
        move.test_gpu_peer_copy("cpu", "cpu")


def test_names_and_arguments_are_the_originals() -> None:
    """Calls that worked with the original work here, and pytest does not take ``test_gpu_peer_copy`` for a test."""
    signatures = {name: list(inspect.signature(getattr(move, name)).parameters) for name in move.__all__}
    assert signatures == {
        "safe_move_tensor": ["tensor", "device", "non_blocking"],
        "test_gpu_peer_copy": ["device_a", "device_b"],
        "gpu_peer_copy": ["target", "source"],
        "tested_peer_copies": [],
    }
    assert safe_move_tensor(X, "meta", True).is_meta
    assert not getattr(move.test_gpu_peer_copy, "__test__", True)


@st.composite
def _histories(
    draw: st.DrawFn,
) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], Sequence[tuple[int, int]]]:
    pairs = st.sampled_from(list(permutations(range(3), 2)))
    verified, failing = (draw(st.frozensets(pairs)) for _ in range(2))
    return verified, failing, draw(st.lists(pairs, max_size=12))


@given(_histories())
def test_any_history_of_moves_is_right(
    history: tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], Sequence[tuple[int, int]]],
) -> None:
    """Whichever links are verified or fail, all moves are right; unverified links are never used, failed ones once."""
    verified, failing, moves = history

    def peer(data: torch.Tensor) -> torch.Tensor:
        pair = tuple(int(place[-1]) for place in machine.log[-1][:2])
        assert pair in verified
        return fails(data) if pair in failing else data.clone()

    machine = Machine(verified, peer)
    mover = Mover(machine)
    for source, target in moves:
        assert same_tensors(mover.move(machine.put(X, GPU[source]), target, non_blocking=False), X)
    tried = [pair for pair in machine.ways() if "cpu" not in pair]
    for source, target in set(moves):
        times = moves.count((source, target)) if (source, target) not in failing else 1
        assert tried.count((f"cuda:{source}", f"cuda:{target}")) == (times if (source, target) in verified else 0)


@pytest.mark.gpu
def test_copies_of_a_real_gpu_are_complete() -> None:
    """Behind work of a tenth of a second, copies from and to pinned memory are complete when the call returns."""
    first, second = (torch.arange(2**20, dtype=torch.float32).pin_memory() for _ in range(2))
    torch.cuda._sleep(2 * 10**8)  # type: ignore[no-untyped-call]
    uploads = safe_move_tensor((first, second), "cuda", non_blocking=True)
    first.fill_(-1)
    second.fill_(-1)
    torch.cuda._sleep(2 * 10**8)  # type: ignore[no-untyped-call]
    downloads = safe_move_tensor(uploads, "cpu", non_blocking=True)
    assert all(torch.equal(each, torch.arange(2**20, dtype=torch.float32)) for each in downloads)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_real_gpus_move_and_leave_device_and_streams(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Between real GPUs values and strides arrive, also after work on streams of the caller's, which stay current."""
    streams = [torch.cuda.Stream(gpu) for gpu in GPU[:2]]  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        for source, target in permutations(GPU[:2], 2):
            torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call] # on the current device
            data = view(X.to(source) + 1)
            moved = safe_move_tensor((data,), target)[0]
            assert (moved.device, moved.stride()) == (target, data.to("meta").stride())
            assert torch.equal(bytes_of(moved.cpu()), bytes_of(data.cpu()))
            filled = torch.zeros_like(moved)
            gpu_peer_copy(filled, data)
            assert torch.equal(bytes_of(filled.cpu()), bytes_of(data.cpu()))
        assert [torch.cuda.current_stream(gpu) for gpu in GPU[:2]] == streams
        assert torch.cuda.current_device() == 1
