"""CudaEvents: who waits for which point of which stream, when results are complete, and which events are used again."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import runtime

from tests.exec.cuda.fake_driver import Runtime
from tpplan.errors import ExecutionError
from tpplan.exec.cuda import events
from tpplan.exec.cuda.events import CudaEvents, Pending
from tpplan.exec.programs.fence import HOST_STREAM, own
from tpplan.exec.programs.program import Event, Record, Wait

STEP, RESULT, DRAINED = Event("step", own(0)), Event("leave", own(0)), Event("drained", HOST_STREAM)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Return what stands for the driver."""
    fake = Runtime()
    monkeypatch.setattr(events, "runtime", fake)
    monkeypatch.setattr(events, "switch_device", fake.switch_device)
    monkeypatch.setattr(events, "current_device", lambda: fake.device)
    monkeypatch.setattr(events.CudaEvent, "_destroy", staticmethod(fake.destroyed.append))
    return fake


def test_a_wait_is_for_what_was_recorded_last(fake: Runtime) -> None:
    """By whichever device that was; each records an event of its own, every time the same."""
    ready = CudaEvents({0: 4, 1: 7})
    first, second = (ready.recording(Record(own(d), DRAINED), ()) for d in (0, 1))
    again = ready.recording(Record(own(0), DRAINED), ())
    wait = ready.waiting(Wait(own(1), DRAINED), on_host=False)
    wait.bind()(50)
    assert not fake.log
    for step, stream in ((first, 40), (wait, 50), (second, 50), (wait, 50), (again, 40), (wait, 50)):
        step.bind()(stream)
    records = [("record", 0, 40), ("record", 1, 50), ("record", 0, 40)]
    assert fake.log == [step for record in records for step in (record, ("hold", record[1], 50))]
    assert (fake.made, fake.device) == ([4, 7], 0)


def test_the_host_waits_itself(fake: Runtime) -> None:
    """No stream is held for it; what was forgotten is not waited for."""
    ready = CudaEvents({0: 0})
    wait = ready.waiting(Wait(HOST_STREAM, STEP), on_host=True)
    ready.recording(Record(own(0), STEP), ()).bind()(3)
    wait.bind()(0)
    ready.forget()
    wait.bind()(0)
    assert fake.log == [("record", 0, 3), ("wait", 0, -1)]


def _result(ready: CudaEvents) -> Pending:
    """Record a result and return what waits for it."""
    ready.recording(Record(own(0), RESULT), (RESULT,)).bind()(1)
    return ready.results((RESULT,), lambda: None)()


def test_a_result_is_recorded_once(fake: Runtime) -> None:
    """As long as somebody may ask for it, its event is no other result's; afterwards it is used again."""
    ready = CudaEvents({0: 0})
    first, second = _result(ready), _result(ready)
    fake.complete = {0}
    assert first.done()
    assert not second.done()
    del first
    third = _result(ready)
    assert not third.done()
    assert not second.done()
    fake.complete = {0, 1}
    assert third.done()
    assert second.done()
    assert len(fake.made) == 2


def test_what_is_done_is_not_asked_again(fake: Runtime) -> None:
    """Nor waited for; what is not done is asked as often as somebody wants to know."""
    pending = _result(CudaEvents({0: 0}))
    assert not pending.done()
    assert not pending.done()
    with pytest.raises(TimeoutError, match="not complete after 0"):
        pending.wait(0)
    pending.wait()
    asked = len(fake.log)
    assert pending.done()
    pending.wait()
    pending.wait(0)
    assert len(fake.log) == asked


def test_all_results_are_waited_for(fake: Runtime) -> None:
    """A program is done when the last of its results is, whichever that is."""
    ready, events = CudaEvents({0: 0, 1: 1}), [Event("leave", own(d)) for d in (0, 1)]
    for late in (0, 1):
        for d, event in enumerate(events):
            ready.recording(Record(own(d), event), events).bind()(1)
        pending = ready.results(events, lambda: None)()
        fake.complete = {1 - late}
        assert not pending.done()
        pending.wait()
        assert fake.complete == {0, 1}
        assert pending.done()
        del pending


def test_what_was_not_recorded_is_no_result(fake: Runtime) -> None:
    """The others' events go back to their own devices, and what an error has left half made has none."""
    ready, events = CudaEvents({0: 0, 1: 1}), [Event("leave", own(d)) for d in (0, 1)]
    ready.recording(Record(own(1), events[1]), events).bind()(1)
    pending = ready.results(events, lambda: None)()
    pending.wait()
    del pending
    for d in (0, 1):
        ready.recording(Record(own(d), events[d]), events).bind()(1)
    assert fake.made == [1, 0]
    with pytest.raises(TypeError):
        Pending()  # type: ignore[call-arg]
    gc.collect()


def test_a_wait_tells_of_devices_that_waited_in_vain() -> None:
    """Also if nothing is to be waited for, or in time."""

    def check() -> None:
        raise ExecutionError("a device waited for another one that never came")

    nothing = CudaEvents({}).results((), check)()
    assert nothing.done()
    for timeout in (None, 1.0):
        with pytest.raises(ExecutionError, match="never came"):
            nothing.wait(timeout)


def test_a_failed_event_is_an_error(fake: Runtime) -> None:
    """Whatever is done with it, it says what the driver says."""
    ready = CudaEvents({0: 0})
    record = ready.recording(Record(own(0), STEP), ())
    wait = ready.waiting(Wait(own(0), STEP), on_host=False)
    record.bind()(1)
    pending = _result(ready)
    fake.result = runtime.cudaError_t.cudaErrorIllegalAddress
    for call in (lambda: record.bind()(1), lambda: wait.bind()(1), pending.wait, pending.done, lambda: pending.wait(1)):
        with pytest.raises(ExecutionError, match="an event failed: cudaErrorIllegalAddress"):
            call()
    with pytest.raises(ExecutionError, match="an event failed"):
        CudaEvents({0: 0}).recording(Record(own(0), STEP), ())
    gc.collect()
    assert not fake.destroyed  # least of all what was never made


def test_results_outlive_what_they_came_from(fake: Runtime) -> None:
    """Clearing destroys all events but those that somebody may still ask for, and these when nobody can."""
    ready = CudaEvents({0: 0})
    ready.recording(Record(own(0), STEP), ()).bind()(1)
    unused, pending = _result(ready), _result(ready)
    del unused
    ready.clear()
    assert sorted(fake.destroyed) == [0, 1]
    pending.wait()
    assert pending.done()
    del ready, pending
    gc.collect()
    assert sorted(fake.destroyed) == [0, 1, 2]
