"""Which streams programs are issued to: those that are current, and none that somebody else captures."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("cuda.core", reason="needs cuda.core: pip install '.[cu13]'")

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import backend, streams
from tpplan.exec.cuda.backend import CudaDevices
from tpplan.exec.cuda.launch import Bound, LaunchGraphs, ReadyProgram
from tpplan.exec.programs.program import Program


def test_a_call_follows_the_streams_that_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where another one is than before, and only of the devices that take part; a graph asks for all of them."""
    monkeypatch.setattr(backend, "current_device", lambda: 0)
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges = Mock()
    devices._loaded, devices._turn_to = set(), Mock()
    devices._graphs = LaunchGraphs({})
    devices._ordinals, devices._current = dict.fromkeys(range(3), 0), {0: 50, 1: 51, 2: 52}
    devices._handle = lambda device: 50 + 10 * device  # as devices that share a GPU override it
    devices.issue(
        Bound(ReadyProgram(Program("p", ()), (), (0, 1), frozenset(), Mock(), on_host=False, copies=False), ())
    )
    assert [call.args for call in devices._turn_to.call_args_list] == [(1, 60)]
    devices.turn_to_current()
    assert [call.args for call in devices._turn_to.call_args_list[1:]] == [(1, 60), (2, 70)]


def _turning(monkeypatch: pytest.MonkeyPatch, captured: list[int], before: dict[int, int]) -> Any:
    """Return three devices, of which somebody captures the streams of some, and 9 is the one that is current."""
    at = [9]
    for module in (backend, streams):
        monkeypatch.setattr(module, "switch_device", lambda device: (at[0], at.__setitem__(0, device))[0])
        monkeypatch.setattr(module, "current_device", lambda: at[0])
    monkeypatch.setattr(streams, "is_capturing", lambda: at[0] in captured)
    monkeypatch.setattr(streams, "stream_handle", lambda ordinal: 10 * ordinal)
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges = Mock()
    devices._loaded = set()
    devices._ordinals, devices._current = {0: 4, 1: 9, 2: 6}, dict(before)
    devices._streams = {(d, handle): Mock() for d in range(3) for handle in (1, 40, 90, 60)}
    return devices


@pytest.mark.parametrize("before", [{}, {0: 1, 1: 1, 2: 1}])
@pytest.mark.parametrize("foreign", [4, 9])
def test_what_somebody_else_captures_is_refused(
    foreign: int, before: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device would wait, when it is replayed, for others that did their part long ago; nothing is issued.

    Whether its device is current or not, and whether something else was issued before.
    """
    captured = [foreign]
    devices = _turning(monkeypatch, captured, before)
    step = Mock()
    ready = ReadyProgram(Program("p", ()), ((step, 0, 0),), (0, 1, 2), frozenset(), Mock(), on_host=False, copies=False)
    bound = Bound(ready, tuple((step, device, 0) for device in range(3)), quick=((step, 0, 0), (step, 1, 0)))
    for _ in range(2):
        with pytest.raises(ExecutionError, match=f"cuda:{foreign} is being captured, but not by") as error:
            devices.is_capturing() or devices.issue(bound)
        assert "ctx.capture()" in error.value.hint
    step.assert_not_called()
    devices._exchanges.interrupt.assert_not_called()
    devices._streams[{4: 0, 9: 1}[foreign], 10 * foreign].wait_stream.assert_not_called()
    captured.clear()
    devices.issue(bound)
    assert [call.args for call in step.call_args_list] == [(40,), (90,)]
    assert devices._current == {0: 40, 1: 90, 2: 60}


def test_in_a_capture_of_the_context_all_streams_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it captures are its own."""
    devices = _turning(monkeypatch, [4, 6, 9], {})
    devices.captures = True
    assert devices.is_capturing()
    devices.turn_to_current()
    assert devices._current == {0: 40, 1: 90, 2: 60}


@pytest.mark.parametrize("forked", [False, True])
def test_a_single_device_is_captured_by_whoever(monkeypatch: pytest.MonkeyPatch, *, forked: bool) -> None:
    """As a server does with a whole step on one GPU: what is captured waits for nothing that is not, and calls go on.

    So it is whichever device is current, and it waits for the stream before that one if that is captured with it.
    """
    captured = [4]
    devices = _turning(monkeypatch, captured, {0: 1})
    devices._ordinals = {0: 4}
    monkeypatch.setattr(streams, "_is_captured", lambda stream: forked and stream is devices._streams[0, 1])
    assert devices.is_capturing()
    devices.turn_to_current()
    assert devices._current == {0: 40}
    assert devices._streams[0, 40].wait_stream.called == forked
    captured.clear()
    assert not devices.is_capturing()
    monkeypatch.setattr(streams, "stream_handle", lambda _: 1)
    devices.turn_to_current()
    devices._streams[0, 1].wait_stream.assert_called_once_with(devices._streams[0, 40])


def test_a_close_waits_for_all_streams() -> None:
    """Those that were current at the latest call or replay, which follow those before, and those of copies."""
    devices: Any = object.__new__(CudaDevices)
    waiting, names = Mock(), ("first", "second", "older", "load")
    first, second, older, load = (getattr(waiting, name) for name in names)
    devices._ordinals, devices._exchanges = dict.fromkeys(range(2), 0), waiting.exchanges
    devices._streams = {(0, 60): first, (1, 61): second, (1, 50): older}
    devices._current, devices._loads, devices._loaded = {0: 60}, {0: load, 1: Mock()}, {0}
    devices._handle = lambda device: 60 + device
    devices._turn_to = devices._current.__setitem__
    devices.turn_to_current()
    devices.synchronize()
    waited = [name for name, *_ in waiting.method_calls]
    assert waited == ["first.synchronize", "second.synchronize", "load.synchronize", "exchanges.check"]
