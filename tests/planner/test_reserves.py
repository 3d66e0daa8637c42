"""Memory that is left to something else: how it is written, what it costs, and where it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tests.examples import examples
from tests.planning_cases import case, spec
from tpplan.core.device import Device
from tpplan.core.plan import LAYOUTS, Cache, Reserve
from tpplan.errors import RequestError
from tpplan.planfile.verify import problems
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.options import parse_reserve
from tpplan.planner.plan import plan, replan
from tpplan.reports.check import check
from tpplan.reports.diff import diff

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 2**20
GPU = Device(name="GPU", budget_bytes=2**33)
ASKED: dict[str, Any] = {"cache": Cache("fp16", 4096), "max_rows": 8}


@pytest.mark.parametrize(
    ("text", "reserve"),
    [
        ("2GiB", Reserve(2**31)),
        (" 1.5 GiB ", Reserve(3 * 2**29)),
        ("20MB@0", Reserve(20_000_000, 0)),
        ("7B @ 12", Reserve(7, 12)),
    ],
)
def test_reserves_are_sizes_perhaps_of_one_device(text: str, reserve: Reserve) -> None:
    """As budgets are, with the device's index behind an at sign."""
    assert parse_reserve(text) == reserve


@given(st.builds(Reserve, st.integers(1, 2**50), st.integers(-1, 4095)))
def test_reserves_are_written_as_they_are_read(reserve: Reserve) -> None:
    """To the byte."""
    assert parse_reserve(reserve.text) == reserve


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("2", "--reserve is '2': memory size '2' has no unit", "2GiB"),
        ("@0", "--reserve is '@0': '' is not a memory size", "24GiB"),
        ("2GiB@", "--reserve is '2GiB@', and '' is not the index of a device", "2GiB@0"),
        ("2GiB@-1", "'-1' is not the index", "2GiB@0"),
        ("2GiB@RTX3090", "'RTX3090' is not the index", "2GiB@0"),
        ("0GiB", "is 0 bytes", ""),
    ],
)
def test_what_is_no_reserve(text: str, words: str, hint: str) -> None:
    """The error has the option, and what is wrong in it."""
    with pytest.raises(RequestError) as error:
        parse_reserve(text)
    assert words in error.value.message
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("reserve", "words"),
    [
        ((Reserve(MIB, 2),), "1.00 MiB are reserved on device 2, but there are devices 0 to 1 only"),
        ((Reserve(MIB, 0), Reserve(MIB, 0)), "memory of device 0 is reserved twice"),
        ((Reserve(MIB), Reserve(MIB)), "memory of every device is reserved twice"),
        ((Reserve(2**33, 1),), "device 1 (GPU) has a budget of 8.00 GiB, of which 8.00 GiB are to be reserved"),
        ((Reserve(0),), "a reserve in bytes is 0"),
        (("2GiB",), "a reserve is '2GiB', expected a Reserve"),
        ((Reserve(MIB, True),), "reserved on device True"),
    ],
)
def test_reserves_that_cannot_be(reserve: Sequence[Any], words: str) -> None:
    """For devices that are not there, twice for one, and more than all of its budget."""
    with pytest.raises(RequestError) as error:
        plan(spec(), (GPU, GPU), reserve=reserve, **ASKED)
    assert words in error.value.message
    assert error.value.hint


def test_a_reserve_takes_the_room_that_it_says() -> None:
    """The least budget that is enough grows by the reserve, to the byte, whichever way it is named."""
    model = spec()
    (entry,) = plan(model, (GPU,), **ASKED).memory
    least = evolve(GPU, budget_bytes=entry.used_bytes)
    plan(model, (least,), **ASKED)
    for reserve in (Reserve(77 * MIB), Reserve(77 * MIB, 0)):
        with pytest.raises(InfeasibleError) as error:
            plan(model, (evolve(least, budget_bytes=least.budget_bytes + 77 * MIB - 1),), reserve=(reserve,), **ASKED)
        assert error.value.shortfalls[0].missing_bytes == 1
        assert error.value.shortfalls[0].reserved_bytes == 77 * MIB
        assert "beside 77.00 MiB that are reserved" in error.value.message
        assert "reserve nothing" in error.value.hint
        room = evolve(least, budget_bytes=least.budget_bytes + 77 * MIB)
        made = plan(model, (room,), reserve=(reserve,), **ASKED)
        assert (made.memory[0].reserved_bytes, made.memory[0].free_bytes) == (77 * MIB, 0)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS), st.data())
def test_every_device_keeps_its_own_reserve(seed: int, layout: str, data: st.DataObject) -> None:
    """A device's own, else that of all, whether or not the model is on it; planning again gives the same plan."""
    task = case(seed, layout, "balanced")
    own = data.draw(st.dictionaries(st.integers(0, len(task.devices) - 1), st.integers(1, 2**30)))
    common = data.draw(st.integers(0, 2**30))
    wanted = [own.get(i, common) for i in range(len(task.devices))]
    devices = [evolve(d, budget_bytes=d.budget_bytes + size) for d, size in zip(task.devices, wanted, strict=True)]
    reserve = [Reserve(size, i) for i, size in own.items()] + [Reserve(common)] * bool(common)
    try:
        made = plan(task.model, devices, reserve=reserve, layout=layout, cache=task.request.cache, max_rows=1)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):  # less reserves, there is the same room
            plan(task.model, task.devices, layout=layout, cache=task.request.cache, max_rows=1)
        return
    assert [entry.reserved_bytes for entry in made.memory] == wanted
    for device, entry in zip(devices, made.memory, strict=True):
        assert entry.used_bytes + entry.reserved_bytes + entry.free_bytes == device.budget_bytes
    assert made.format_version == ("1.1" if reserve else "1.0")
    assert not problems(made)
    assert tpplan.loads(tpplan.dumps(made)) == made
    assert replan(task.model, made) == made


def test_exllamav2_cuts_by_what_a_reserve_leaves() -> None:
    """As the original does with a smaller gpu_split."""
    model, smaller = spec(), evolve(GPU, budget_bytes=GPU.budget_bytes // 2)
    kept = plan(model, (GPU, GPU), strategy="exllamav2", reserve=(Reserve(GPU.budget_bytes // 2, 1),), **ASKED)
    assert kept.splits == plan(model, (GPU, smaller), strategy="exllamav2", **ASKED).splits
    assert kept.splits != plan(model, (GPU, GPU), strategy="exllamav2", **ASKED).splits


def test_a_reserve_is_a_change_of_the_request() -> None:
    """Two plans that reserve otherwise differ, and so does a bucket that is shown for no others."""
    model = spec()
    plain, kept = (plan(model, (GPU,), reserve=reserve, **ASKED) for reserve in ((), (Reserve(MIB, 0),)))
    change = diff(plain, kept)
    (field,) = (field for field in change.fields if field.path == "request.reserve")
    assert (field.before, field.after) == ("nothing", "1.00 MiB on device 0")
    assert {bucket.bucket: bucket.delta_bytes for bucket in change.total if bucket.delta_bytes} == {
        "reserved": MIB,
        "free": -MIB,
    }
    assert [bucket.bucket for bucket in diff(plain, plain).total] == [
        "weights", "cache", "workspace", "overhead", "free",
    ]  # fmt: skip
    assert change.summary == "the request and the format differ; 0 of 5 splits change"


def test_a_reserve_of_a_device_that_is_gone_makes_a_plan_stale() -> None:
    """Whoever holds the plan against fewer devices is told which reserve has lost its device."""
    model = spec()
    made = plan(model, (GPU, GPU), reserve=(Reserve(MIB, 1),), **ASKED)
    assert check({"a.json": made}, model, (GPU, GPU)).current
    (found,) = check({"a.json": made}, model, (GPU,)).plans
    assert found.reasons == ("devices", "request")
    assert found.message.endswith("1.00 MiB are reserved on device 1, but there is device 0 only")
