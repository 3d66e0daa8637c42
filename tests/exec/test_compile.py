"""Compiling: what a plan is held against, in which words it is refused, and what a context then has."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
import torch
from attrs import evolve

import tpplan
from tests import contexts
from tests.edited_plans import EDITS, recut
from tests.exec.reference import same
from tests.planning_cases import spec
from tests.published import EXAMPLES
from tpplan import exec as tpx
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache, SplitPlan
from tpplan.core.sizes import format_bytes
from tpplan.core.workspace import areas, workspace_bytes
from tpplan.errors import ExecutionError, PlanError, RequestError
from tpplan.exec import compiler
from tpplan.exec.checks import seconds
from tpplan.exec.machine.look import FoundDevice, differences, look_at
from tpplan.exec.machine.transports import Choice
from tpplan.exec.rope.scaling import Default
from tpplan.exec.rope.tables import Rope
from tpplan.planfile.codec import fingerprint
from tpplan.reports.check import check

MIB = 2**20
#: What is no time-out.
TIMEOUTS: tuple[Any, ...] = (0, -1, 0.0, 1e-4, 86_401, 10**400, -(10**9999), 1e400, -1e400, float("nan"), True, "10")
TIMEOUTS += (1j, timedelta(0), timedelta(days=-1), timedelta.max, [10], Decimal(10))


@pytest.fixture(scope="module")
def plan() -> SplitPlan:
    """Plan the tiny llama for two devices."""
    devices = [Device(name=name, budget_bytes=size * MIB, overhead_bytes=MIB) for name, size in (("A", 50), ("B", 45))]
    return tpplan.plan(spec(), devices, cache=Cache("fp16", 2048), max_rows=64)


def refusal(plan: SplitPlan, **arguments: Any) -> list[str]:
    """Return every difference that compiling a plan reports."""
    with pytest.raises(ExecutionError) as error:
        tpx.compile(plan, **arguments)
    first, *differences = error.value.message.split("\n  ")
    assert first == f"the plan for {plan.model.name} cannot run here:"
    assert ('backend="cpu"' in error.value.hint) is (arguments.get("backend") != "cpu")
    return differences


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")
@pytest.mark.parametrize("arguments", [{}, {"backend": "auto"}, {"backend": "cuda"}])
def test_without_gpus_virtual_devices_are_offered(plan: SplitPlan, arguments: dict[str, str]) -> None:
    """A machine without the plan's devices says how many it has; the hint names the way that needs none."""
    assert refusal(plan, **arguments) == ["devices: the plan has 2, this machine has 0 CUDA devices"]


def test_everything_that_differs_is_listed_at_once(plan: SplitPlan) -> None:
    """Devices, model, rows and dtype are each an entry, with what the plan has and what was asked for."""
    other = spec(intermediate_size=1920)
    found = refusal(
        plan, backend="cpu", devices=["cpu", "cuda:1", "cpu"], model=other, max_rows=65, dtype=torch.float32
    )
    assert found == [
        "devices[1]: cuda:1 is not for the backend cpu",
        "devices: the plan has 2, 3 were given",
        f"model.fingerprint is {plan.model.fingerprint}, expected {fingerprint(other)}",
        "max_rows: the plan has room for 1 to 64, 65 were asked for",
        "dtype: the plan has room for float16 or bfloat16, float32 was asked for",
    ]


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({"devices": ["cpu", "gpu one"]}, "devices[1]: 'gpu one' is no torch device"),
        ({"devices": [0.5, "cpu"]}, "devices[0]: '0.5' is no torch device"),
        ({"devices": ["cpu", True]}, "devices[1]: 'True' is no torch device"),
        ({"devices": [10**9, "cpu"]}, "devices[0]: 'cuda:1000000000' is no torch device"),
        ({"devices": ["cpu", -1]}, "devices[1]: 'cuda:-1' is no torch device"),
        ({"devices": [0, 1]}, "devices[0]: cuda:0 is not for the backend cpu"),
        ({"devices": []}, "devices: the plan has 2, 0 were given"),
        ({"max_rows": 0}, "max_rows: the plan has room for 1 to 64, 0 were asked for"),
        ({"max_rows": 1.5}, "max_rows: the plan has room for 1 to 64, 1.5 were asked for"),
        ({"max_rows": "8"}, "max_rows: the plan has room for 1 to 64, '8' were asked for"),
        ({"max_rows": True}, "max_rows: the plan has room for 1 to 64, True were asked for"),
        ({"dtype": torch.float64}, "dtype: the plan has room for float16 or bfloat16, float64 was asked for"),
        ({"dtype": torch.int16}, "dtype: the plan has room for float16 or bfloat16, int16 was asked for"),
        (
            {"dtype": torch.float8_e4m3fn},
            "dtype: the plan has room for float16 or bfloat16, float8_e4m3fn was asked for",
        ),
    ],
)
def test_each_argument_is_held_against_the_plan(plan: SplitPlan, arguments: dict[str, Any], difference: str) -> None:
    """What the plan has no room for, or nobody understands, is named with what was expected."""
    assert difference in refusal(plan, backend="cpu", **arguments)


def test_cuda_devices_are_different_ones(plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same GPU twice is not two, the CPU is none, and neither is what has no number or too high a one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "devices: cuda:0, cuda:0 are not all different" in refusal(plan, backend="cuda", devices=[0, "cuda:0"])
    assert "devices[0]: cpu is not for the backend auto" in refusal(plan, devices=["cpu", 1])
    for device in ("cuda", "cuda:2"):
        difference = f"devices[1]: {device} is none of the 2 CUDA devices of this machine, which have numbers from 0"
        assert difference in refusal(plan, devices=[0, device])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "tpu"}, "unknown backend 'tpu', expected auto, cpu, cuda"),
        ({"backend": None}, "unknown backend 'None'"),
        ({"devices": 5}, "devices is 5, expected a list with one for each of the plan's"),
        ({"devices": "cuda"}, "devices is 'cuda', expected a list with one for each of the plan's"),
        ({"model": 123}, "model is 123, expected a model or its directory"),
        ({"dtype": "half"}, "dtype is 'half', expected a torch.dtype"),
        ({"dtype": 0}, "dtype is 0, expected a torch.dtype"),
        ({"scratch": 0}, "scratch is 0, expected True or False"),
        *(({"timeout": each}, r"timeout is .*, expected 0\.001 to 86400 seconds") for each in TIMEOUTS),
        ({"weights_loaded": 1}, "weights_loaded is 1, expected True or False"),
        ({"backend": "cpu", "transport": "nvlink"}, "unknown transport 'nvlink', expected auto, peer, host, events"),
    ],
)
def test_arguments_without_meaning_are_told_what_has_one(
    plan: SplitPlan, arguments: dict[str, Any], message: str
) -> None:
    """An unknown name, or another type than expected, is a RequestError before anything is held against the plan."""
    with pytest.raises(RequestError, match=message) as error:
        tpx.compile(plan, **arguments)
    assert error.value.hint


@pytest.mark.parametrize(
    ("given", "expected"),
    [(1, 1.0), (0.001, 0.001), (86_400, 86_400.0), (timedelta(minutes=5), 300.0), (timedelta(milliseconds=1), 0.001)],
)
def test_a_timeout_is_in_seconds(given: Any, expected: float, plan: SplitPlan) -> None:
    """It is a number or a timedelta, as of a process group; virtual devices take it, though they never wait."""
    assert seconds("timeout", given) == expected
    tpx.compile(plan, backend="cpu", timeout=given).close()


def test_a_plan_is_a_plan() -> None:
    """A path in place of a plan is told how to become one."""
    wrong: Any = "plan.json"
    with pytest.raises(RequestError, match="compile takes a plan, this is str") as error:
        tpx.compile(wrong, backend="cpu")
    assert "tpplan.load" in error.value.hint


def test_a_plan_that_breaks_rules_is_not_run(plan: SplitPlan) -> None:
    """The rules are the first thing to hold, and every broken one is listed."""
    first = evolve(plan.splits[0], bounds=(0, 3, 7))
    broken = evolve(plan, splits=(first, *plan.splits[1:]), memory=plan.memory[:1])
    with pytest.raises(PlanError, match="TP") as error:
        tpx.compile(broken, backend="cpu", max_rows=999)
    assert len(error.value.problems) >= 2


@pytest.mark.parametrize(("rows", "dtype"), [(4096, "bfloat16"), (64, "float32")])
def test_a_workspace_that_takes_more_than_is_counted(rows: int, dtype: str, plan: SplitPlan) -> None:
    """As where the request was edited, and memory was not: that needs no model, and both numbers are told."""
    edited = evolve(plan, request=evolve(plan.request, max_rows=rows), model=evolve(plan.model, dtype=dtype))
    needed = workspace_bytes(plan.splits, dtype, edited.request)
    assert refusal(edited, backend="cpu", max_rows=1) == [
        f"memory[{i}]: the workspace takes {format_bytes(size)}, the plan counts {format_bytes(memory.workspace_bytes)}"
        for i, (memory, size) in enumerate(zip(plan.memory, needed, strict=True))
    ]


def test_the_model_may_be_given(plan: SplitPlan) -> None:
    """The model that the plan was made for passes, as an object; a directory's is read and told apart."""
    tpx.compile(plan, backend="cpu", model=spec()).close()
    model = EXAMPLES / "Llama-3.1-8B"
    right = tpplan.read_model(model)
    assert refusal(plan, backend="cpu", model=model) == [
        f"model.fingerprint is {plan.model.fingerprint}, expected {fingerprint(right)}",
        f"model.layers is {plan.model.layers}, expected {right.layer_count}",
    ]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_is_not_run(edit: str, plan: SplitPlan) -> None:
    """Every value that the model or the request decides is compared, with the plan's value and the right one."""
    edited, starts = EDITS[edit](plan)
    found = refusal(edited, backend="cpu", model=spec())
    assert all(any(each.startswith(start) for each in found) for start in starts)
    assert all(re.fullmatch(r"[a-z]+(\[\d\])?\.\w+ is \S+, expected \S+", each) for each in found)


def test_other_cuts_than_the_planners_run(plan: SplitPlan) -> None:
    """Cut by hand, with a ledger that is right for the cuts, a plan runs though planning again gives another one."""
    by_hand = recut(plan, spec(), {Axis.INTERMEDIATE: (0, 512, 2048)})
    assert not check({"plan": by_hand}, spec()).current
    tpx.compile(by_hand, backend="cpu", model=spec()).close()


def test_differences_of_the_machine(plan: SplitPlan) -> None:
    """Free bytes are held against what is still to be allocated; a capability is the least that will do."""
    named = evolve(plan, devices=(evolve(plan.devices[0], capability="8.9"), plan.devices[1]))
    needed = [m.used_bytes - m.overhead_bytes for m in plan.memory]
    enough = [FoundDevice("RTX 4090", needed[0], "8.9"), FoundDevice("RTX 3060", needed[1], "8.6")]
    assert differences(named, enough) == []
    newer = [FoundDevice("RTX PRO 6000", needed[0], "12.0"), FoundDevice("RTX 3060", needed[1], "8.6")]
    assert differences(named, newer) == []
    assert differences(named, [None, None]) == []
    short = [FoundDevice("RTX 4090", needed[0] - 1, "8.9"), FoundDevice("RTX 3060", 0, "8.6")]
    assert [text.partition(",")[0] for text in differences(named, short)] == [
        f"devices[{i}] ({device.name})" for i, device in enumerate(plan.devices)
    ]
    assert "needs" in differences(named, short)[1]
    assert differences(named, short)[1].endswith("0 B are free")
    other = [FoundDevice("A100", needed[0], "8.0"), FoundDevice("A100", 0, "8.0")]
    assert differences(named, other)[0].endswith("here A100: planned for capability 8.9, has 8.0")
    assert len(differences(named, other)) == 2


@pytest.mark.parametrize("scratch", [True, False])
def test_weights_that_are_loaded_need_not_be_free(plan: SplitPlan, *, scratch: bool) -> None:
    """Then only the workspace has to be, without the scratch if that is not allocated."""
    rooms = areas(plan.splits, plan.model.dtype, plan.request)
    needed = [room.total_bytes - (0 if scratch else room.scratch_bytes) for room in rooms]
    enough = [FoundDevice("GPU", size, "9.0", held_bytes=2**30) for size in needed]
    assert differences(plan, enough, scratch=scratch, weights_loaded=True) == []
    short = [evolve(here, free_bytes=here.free_bytes - 1) for here in enough]
    for i, text in enumerate(differences(plan, short, scratch=scratch, weights_loaded=True)):
        assert text.startswith(f"devices[{i}] ({plan.devices[i].name}), here GPU: the workspace needs ")
        assert text.endswith(" are free, this process holds 1.00 GiB")
    assert len(differences(plan, short, scratch=scratch, weights_loaded=True)) == 2
    assert len(differences(plan, enough, scratch=scratch)) == 2


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine look as if it had two GPUs with 5 MiB free, and torch had 7 MiB there, 4 of them in tensors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * MIB, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * MIB)
    monkeypatch.setattr(compiler, "choose", lambda *_: (Choice("events"), []))


@pytest.mark.usefixtures("cards")
def test_what_torch_keeps_for_tensors_to_come_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as taken; an allocator without such figures has none of it."""
    assert look_at(torch.device("cuda", 1)) == FoundDevice("GPU", 8 * MIB, "9.0", held_bytes=4 * MIB)

    def unknown(_: object) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_allocated", unknown)
    assert look_at(torch.device("cuda", 1)) == FoundDevice("GPU", 5 * MIB, "9.0")


@pytest.mark.usefixtures("cards")
def test_who_has_loaded_weights_is_told_how_to_say_so(plan: SplitPlan) -> None:
    """Where memory is missing and this process holds some, the hint names the argument, once."""
    with pytest.raises(ExecutionError, match=r"this process holds 4\.00 MiB") as error:
        tpx.compile(plan, backend="cuda")
    assert error.value.hint.startswith("if this process holds the plan's weights, pass weights_loaded=True; ")
    with pytest.raises(ExecutionError, match="the workspace needs") as error:
        tpx.compile(plan, backend="cuda", weights_loaded=True, scratch=False)
    assert "weights_loaded" not in error.value.hint


def test_reserved_memory_need_not_be_free(plan: SplitPlan) -> None:
    """It is for something else, which may be there already; nothing of it is allocated."""
    devices = tuple(evolve(d, budget_bytes=d.budget_bytes + 2**30) for d in plan.devices)
    kept = tpplan.plan(
        spec(), devices, cache=plan.request.cache, max_rows=plan.request.max_rows, reserve=(tpplan.Reserve(2**30),)
    )
    needed = [FoundDevice("GPU", m.used_bytes - m.overhead_bytes, "9.0") for m in kept.memory]
    assert differences(kept, needed) == []
    with tpx.compile(kept, backend="cpu") as ctx:
        assert ctx.max_rows == plan.request.max_rows


def test_the_arguments_are_obeyed(plan: SplitPlan) -> None:
    """Fewer rows and another 16-bit dtype than planned are what the context then has."""
    with tpx.compile(plan, backend="cpu", devices=["cpu", "cpu"], max_rows=8, dtype=torch.float16) as ctx:
        assert ctx.max_rows == 8
        assert {x.dtype for x in ctx.scratch(2, Axis.INTERMEDIATE)} == {torch.float16}
        with pytest.raises(ExecutionError, match="9 rows, but the context was compiled for 8"):
            ctx.broadcast(torch.ones(9, 512))
    with tpx.compile(plan, backend="cpu") as ctx:
        assert (ctx.max_rows, ctx.dtype) == (64, torch.bfloat16)


def test_scratch_is_left_to_others(plan: SplitPlan) -> None:
    """Without it a device has the other areas, and operations go on; who asks for a slice is told why there is none."""
    with tpx.compile(plan, backend="cpu", scratch=False) as ctx:
        for index, area in enumerate(areas(plan.splits, plan.model.dtype, plan.request)):
            assert ctx.devices[index].arena.size_bytes == area.total_bytes - area.scratch_bytes
        x = torch.randn(64, 512, dtype=torch.bfloat16)
        assert same(ctx.all_reduce([x] * len(ctx.all_devices))[1], (len(ctx.all_devices) * x.float()).bfloat16())
        with pytest.raises(ExecutionError, match="64 bytes asked for, 0 free of 0 of scratch") as error:
            ctx.devices[0].scratch(1, 64, torch.uint8)
    assert error.value.hint == "leave out scratch=False when the plan is compiled"


def test_virtual_devices_may_have_a_number(plan: SplitPlan) -> None:
    """Torch calls the CPU's memory cpu:0 too, but says of tensors only that they are on cpu."""
    with tpx.compile(plan, backend="cpu", devices=["cpu:0", torch.device("cpu")]) as ctx:
        x = torch.randn(2, 512)
        assert all(same(y, x) for y in ctx.broadcast(x, out=ctx.broadcast(x)))


def test_rope_tables_are_the_plans(plan: SplitPlan) -> None:
    """As long as a sequence's part of the cache, on every device with heads, made once, in the context's dtype."""
    rope = Rope(10000.0, 64, Default())
    with tpx.compile(plan, backend="cpu") as ctx:
        tables = ctx.rope_tables(rope)
        assert len(tables) == len(ctx.devices_of(Axis.KV_HEADS))
        truth = [table.bfloat16() for table in rope.tables(2048)]
        for pair in tables:
            assert all(same(table, right) for table, right in zip(pair, truth, strict=True))
        again = ctx.rope_tables(rope)
        assert [t.data_ptr() for pair in again for t in pair] == [t.data_ptr() for pair in tables for t in pair]
        with pytest.raises(ExecutionError, match=r"the RoPE tables of 1 positions take .* but the plan left 0 B"):
            ctx.rope_tables(rope, positions=1)
        for device in ctx.devices.values():  # nothing else wrote there
            device.scratch(1, device.arena.free_bytes, torch.uint8).fill_(255)
            device.exchange.fill_(255)
            device.control.fill_(255)
        assert all(same(table, right) for table, right in zip(tables[-1], truth, strict=True))


def test_rope_tables_of_two_kinds_share_the_room(plan: SplitPlan) -> None:
    """Shorter tables leave room for others; what does not fit is told with numbers, and takes nothing."""
    local, distant = Rope(10000.0, 64, Default()), Rope(1e6, 64, Default())
    with tpx.compile(plan, backend="cpu") as ctx:
        ctx.rope_tables(local, 1024)
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"1025 positions take .* but the plan left 256.00 KiB for them"):
                ctx.rope_tables(distant, 1025)
        second = ctx.rope_tables(distant, 1024)
        assert same(second[0][1], distant.tables(1024)[1].bfloat16())
        for positions in (0, -5):
            with pytest.raises(ExecutionError, match=f"positions is {positions}, expected a whole number from 1"):
                ctx.rope_tables(local, positions)


def test_rope_tables_fit_everywhere_or_nowhere() -> None:
    """If one device has too little room, none has given any of its own away."""
    uneven = contexts.plan_of(
        *contexts.heads((0, 2, 2, 4), layers="0-1"),
        *contexts.heads((0, 4, 4, 4), layers="2-3"),
        *[split for split in contexts.REPLICATED.splits if split.axis in {Axis.VOCAB, Axis.RESIDUAL}],
    )
    first, second, third = (Rope(theta, 8, Default()) for theta in (1e4, 1e5, 1e6))
    with contexts.context(uneven, "events") as ctx:
        assert len(ctx.rope_tables(first)) == 2
        with pytest.raises(ExecutionError, match="device 2"):
            ctx.rope_tables(second)
        with pytest.raises(ExecutionError, match="device 2"):
            ctx.rope_tables(third)
        device = ctx.devices[0]
        device.rope_tables(third, 16, torch.bfloat16)  # still has room for tables of its second cut
        with pytest.raises(ExecutionError, match="left 0 B"):
            device.rope_tables(second, 16, torch.bfloat16)
