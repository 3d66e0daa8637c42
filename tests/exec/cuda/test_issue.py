"""The issue of programs on CUDA devices: something fails between two of them, or a thread waits for its turn."""

from __future__ import annotations

import threading
from array import array
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda.core: pip install '.[cu13]'")

from tests.exec.caller import bits, expected, memory, noise, widths
from tests.exec.cuda.fake_driver import Runtime
from tests.exec.program_cases import CASES
from tpplan.errors import ExecutionError
from tpplan.exec.cuda import backend, copies, encode_slots, events, launch, streams
from tpplan.exec.cuda.backend import CudaDevices
from tpplan.exec.cuda.events import CudaEvents
from tpplan.exec.cuda.exchanges import Exchanges
from tpplan.exec.cuda.exclusive import ISSUING
from tpplan.exec.cuda.launch import Bound, LaunchGraphs, Ready, ReadyProgram
from tpplan.exec.programs.fence import HOST_STREAM, own
from tpplan.exec.programs.operation import Moves
from tpplan.exec.programs.program import HOST, INPUT, Buffer, Copy, Exchange, Program

#: Programs of which devices and the host only copy.
COPIED = {
    name: case
    for name, case in CASES.items()
    if isinstance(case.operation, Moves) and not any(isinstance(each, Exchange) for each in case.program.commands)
}


def test_a_launch_that_fails_after_another_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 has its part of the program and device 1 has not: they count differently from then on."""
    monkeypatch.setattr(streams, "is_capturing", lambda: False)
    monkeypatch.setattr(backend, "current_device", lambda: 0)
    exchanges = (Exchange(own(0), ()), Exchange(own(1), ()))
    program = Program("p", exchanges)
    launches: Any = (Mock(), Mock())
    launches[1].bind().side_effect = ExecutionError("a kernel of device 1 was not launched")
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges = Mock()
    devices._current = {0: 1, 1: 1}
    devices._ordinals, devices._graphs = {0: 0, 1: 1}, LaunchGraphs({})
    monkeypatch.setattr(streams, "stream_handle", lambda _: 1)
    devices._loaded = set()
    ready = ReadyProgram(
        program,
        tuple(zip(launches, (0, 1), (0, 0), strict=True)),
        (0, 1),
        loads=frozenset(),
        pending=Mock(),
        on_host=False,
        copies=False,
    )
    devices._ready = {(id(program), torch.float32): ready}
    with pytest.raises(ExecutionError, match="not launched"):
        devices.run(program, {Buffer(INPUT, 0): torch.zeros(1, 4)})
    launches[0].bind().assert_called_once()
    devices._exchanges.interrupt.assert_called_once()


@pytest.mark.parametrize("transport", ["peer", "events"])
def test_devices_that_cannot_copy_to_each_other_take_part_in_nothing(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is found before kernels are loaded and other contexts are told; by the host nothing of it is asked."""
    made = Mock()
    monkeypatch.setattr(backend, "Exchanges", made)
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.Tensor, "copy_", Mock(side_effect=RuntimeError("peer access")))
    places = {i: torch.device("cpu", i) for i in range(2)}
    with pytest.raises(ExecutionError, match="cpu:0 gets no access to cpu:0: peer access") as refused:
        CudaDevices(memory(), places, transport=transport, timeout=1.0)
    assert refused.value.hint == 'compile with transport="host"'
    made.assert_not_called()
    CudaDevices(memory(), places, transport="host", timeout=1.0)
    made.assert_called_once()


@pytest.mark.parametrize(
    ("transport", "timeout", "others", "refuted"),
    [
        ("peer", 10.0, {}, {3, 5}),
        ("peer", 0.5, {}, set()),  # what a device has to do first may take as long
        ("peer", 10.0, {2: 132}, set()),  # a process that is late or gone is the ordinary cause
        ("host", 10.0, {}, set()),  # no link between GPUs takes part
        ("events", 10.0, {}, set()),
    ],
)
def test_what_a_timeout_says_of_links(
    transport: str, timeout: float, others: dict[int, int], refuted: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process that issues for all devices, the links are to blame if kernels that use them wait in vain."""
    made, refute = Mock(), Mock()
    monkeypatch.setattr(backend, "Exchanges", made)
    monkeypatch.setattr(backend, "refute", refute)
    monkeypatch.setattr(backend, "_enable_access", Mock())
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    places = {i: torch.device("cuda", ordinal) for i, ordinal in enumerate((3, 5))}
    CudaDevices(memory(), places, transport=transport, timeout=timeout, others=others)
    made.call_args.kwargs["on_timeout"]()
    refute.assert_called_once()
    assert {*refute.call_args.args[0]} == refuted


@pytest.mark.parametrize(("code", "calls"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 0)])
def test_a_timeout_is_told_once(code: int, calls: int) -> None:
    """However often the failed context is asked, and not of a context that was merely interrupted."""
    exchanges: Any = object.__new__(Exchanges)
    told = Mock()
    exchanges._seen, exchanges._on_timeout = memoryview(array("i", [code])), [told]
    exchanges._cause = lambda _: ""
    for _ in range(2):
        if code:
            with pytest.raises(ExecutionError):
                exchanges.check()
        else:
            exchanges.check()
    assert told.call_count == calls


def test_a_cause_is_told_instead_and_outlives_an_interrupt() -> None:
    """A process that is lost says more than what follows from it in this one."""
    exchanges: Any = object.__new__(Exchanges)
    exchanges._seen, exchanges._on_timeout = memoryview(array("i", [0])), []
    exchanges._cause = lambda code: "process 1 is lost" if code == 16 else ""
    exchanges.check()
    exchanges._seen[0] = 16
    exchanges.interrupt()
    with pytest.raises(ExecutionError, match="process 1 is lost"):
        exchanges.check()


def test_what_is_interrupted_behind_the_launches_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts what it waits for there: a landing that it did not count would be taken for the next one."""
    monkeypatch.setattr(backend, "current_device", lambda: 0)
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges, devices._loaded, devices._current = Mock(), set(), {}
    devices._graphs = LaunchGraphs({})
    pending = Mock(side_effect=KeyboardInterrupt)
    ready = ReadyProgram(Program("p", ()), (), (), frozenset(), pending, on_host=True, copies=False)
    with pytest.raises(KeyboardInterrupt):
        devices.issue(Bound(ready, ()))
    devices._exchanges.interrupt.assert_called_once()


class _Kernel(Ready):
    """A kernel that notes its launches, and what is launched in its place."""

    def __init__(self, launched: list[str]) -> None:
        self.launched, self.programmatic = launched, False

    def __call__(self, _: int) -> None:
        self.launched.append("kernel")

    def bind(self, *_: object) -> Any:
        """Return it, whatever the operands."""
        return self

    def graph(self, _: int) -> None:
        """Stand for its graph."""
        self.launched.append("graph")


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_called_often_is_launched_by_graphs(monkeypatch: pytest.MonkeyPatch, *, captured: bool) -> None:
    """What is bound while the context is captured never is: the launch of a graph cannot be captured.

    Also where the current stream is none of those that are.
    """
    monkeypatch.setattr(streams, "_is_capturing_on", lambda _: False)
    monkeypatch.setattr(backend, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "graph_of", lambda kernel, ordinal: kernel.graph if ordinal == 3 else None)
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges = Mock()
    devices._loaded, devices._events = set(), CudaEvents({})
    devices._ordinals, devices._graphs, devices._streams, devices._channels = {0: 3}, LaunchGraphs({0: 3}), {}, {}
    monkeypatch.setattr(streams, "stream_handle", lambda _: 50)
    devices._current, devices.captures = {0: 50}, captured
    assert devices.is_capturing() is captured
    program, x, launched = Program("p", ()), torch.ones(2, 3), list[str]()
    ready = ReadyProgram(program, ((_Kernel(launched), 0, 0),), (0,), frozenset(), Mock(), on_host=False, copies=False)
    devices._ready = {(id(program), x.dtype): ready}
    issue = devices.bind(program, {Buffer(INPUT, 0): x})
    for _ in range(40):
        issue()
    assert launched[-1] == ("kernel" if captured else "graph")
    assert set(launched[:10]) == {"kernel"}
    assert len(launched) == 40
    devices.close()
    assert issue.args[0].quick == (() if not captured else issue.args[0].steps)
    with pytest.raises(ExecutionError, match="closed"):
        issue()


@pytest.mark.parametrize("captured", [False, True])
def test_slots_are_not_cleared_while_something_is_captured(monkeypatch: pytest.MonkeyPatch, *, captured: bool) -> None:
    """What was never run is refused before its slots are touched, whichever stream is current in the capture."""
    monkeypatch.setattr(streams, "is_capturing", lambda: False)
    case = CASES[next(name for name, each in CASES.items() if each.way.small and each.way.transport == "peer")]
    cleared = list[Any]()
    exchanges: Any = object.__new__(Exchanges)
    exchanges._counters, exchanges._most, exchanges._memory = {}, {"slot": 1}, Mock()
    exchanges._clear = cleared.extend
    monkeypatch.setattr(encode_slots, "prepare", lambda *_: ())
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges, devices._ready, devices._load_handles = exchanges, {}, {}
    devices._ordinals = {0: 0, 1: 1}
    devices._events, devices.captures = Mock(), captured
    monkeypatch.setattr(backend, "without_callers", lambda _: ())
    if captured:
        with pytest.raises(ExecutionError, match="run everything once before capturing it"):
            devices._prepare(case.program, torch.bfloat16)
    else:
        devices._prepare(case.program, torch.bfloat16)
    assert bool(cleared) is not captured


def test_default_streams_have_their_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as something is issued to them; afterwards the caller's is, also if something fails."""
    at, seen = [9], []
    monkeypatch.setattr(backend, "switch_device", lambda device: (at[0], at.__setitem__(0, device))[0])
    monkeypatch.setattr(backend, "current_device", lambda: at[0])
    devices: Any = object.__new__(CudaDevices)
    devices._ordinals, devices._load_handles = {0: 4, 1: 5, 2: 6}, {0: 70}
    devices._current, devices._loaded = {0: 0, 1: 0, 2: 30}, set()

    def step(device: int, fixed: int = 0) -> Any:
        return lambda handle: seen.append((handle, at[0])), device, fixed

    steps = step(0), step(0), step(1), step(0, 70), step(HOST, -1), step(2), step(0)
    devices._go_through(steps, frozenset({0}))
    devices._go_through(steps[5:6], frozenset())
    assert [handle for handle, _ in seen] == [0, 0, 0, 70, -1, 30, 0, 30]
    assert [seen[i][1] for i in (0, 1, 2, 6, 7)] == [4, 4, 5, 4, 9]
    assert at == [9]
    assert devices._loaded == {0}
    failing = Mock(side_effect=ExecutionError("the driver refuses"))
    with pytest.raises(ExecutionError, match="refuses"):
        devices._go_through(((failing, 1, 0),), frozenset())
    assert at == [9]


@pytest.mark.parametrize("name", COPIED)
def test_programs_of_copies_give_what_they_should(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where devices copy at once, in the order of issue, every byte is right; results are waited for by events.

    Nothing in which the host takes part is captured.
    """
    fake, case, places = Runtime(), COPIED[name], range(6)
    monkeypatch.setattr(copies, "runtime", fake)
    monkeypatch.setattr(events, "runtime", fake)
    monkeypatch.setattr(events, "switch_device", fake.switch_device)
    monkeypatch.setattr(events, "current_device", lambda: fake.device)
    monkeypatch.setattr(backend, "current_device", lambda: 0)
    monkeypatch.setattr(streams, "is_capturing", lambda: False)
    devices: Any = object.__new__(CudaDevices)
    devices._memory, devices._exchanges, devices._ready = memory(), Mock(prepare=lambda *_, **__: ()), {}
    devices._loaded, devices._graphs = set(), LaunchGraphs({})
    devices._ordinals, devices._events = {d: d for d in places}, CudaEvents({d: d for d in places})
    monkeypatch.setattr(streams, "stream_handle", lambda ordinal: 80 + ordinal)
    devices._current, devices._load_handles = {d: 80 + d for d in places}, {d: 90 + d for d in places}
    program, random = case.program, Random(1)
    for _ in range(3):
        tensors = {b: noise(case.rows, size, torch.bfloat16, random) for b, size in widths(case.operation).items()}
        right = expected(case.operation, tensors)
        pending = devices.run(program, tensors)
        for buffer, truth in right.items():
            assert torch.equal(bits(tensors[buffer]), bits(truth))
        assert pending.done() is not bool(program.results)
        pending.wait()
        assert pending.done()
    reads_host = any(each.stream == HOST_STREAM for each in program.commands if isinstance(each, Copy))
    assert (devices.bind(program, tensors) is None) is reads_host  # or it would keep the tensor that the host reads
    if reads_host or program.results:
        devices.captures = True
        with pytest.raises(ExecutionError, match="cannot be captured"):
            devices.run(program, tensors)
    used = {stream for *_, stream in fake.copied}
    assert used <= {*devices._current.values(), *devices._load_handles.values()}


def test_who_waited_for_his_turn_is_refused_after_a_close() -> None:
    """A replay in another thread does not go to memory that was given back meanwhile, and keeps nobody out."""
    devices, refused = CudaDevices.__new__(CudaDevices), list[str]()
    devices._exchanges = Mock()

    def enter() -> None:
        try:
            with ISSUING:
                devices.check()
        except ExecutionError as error:
            refused.append(error.message)

    with ISSUING:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        devices._is_closed = True
    thread.join()
    assert refused == ["the context is closed"]
    assert ISSUING.acquire(blocking=False)
    ISSUING.release()
