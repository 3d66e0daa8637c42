"""What compiling a plan allocates: the bytes of its ledger, whatever the plan, in which every operation has room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis.strategies import sampled_from

import tpplan
from tests.cut_plans import cut_plans
from tests.examples import examples
from tests.exec.reference import same
from tpplan import exec as tpx
from tpplan.core.axes import Axis
from tpplan.core.workspace import pinned_bytes
from tpplan.exec import build as build_module
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.build import build
from tpplan.exec.memory.host import HostMemory
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.plan import SplitPlan

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "plans").rglob("*.json"))


def assert_ledger(plan: SplitPlan, transport: str) -> None:
    """Compile a plan and hold the bytes on every device, and on the host, against the plan's."""
    with tpx.compile(plan, backend="cpu", transport=transport) as ctx:
        for entry in plan.memory:
            device = ctx.devices.get(entry.device)
            allocated = device.control.untyped_storage().nbytes() if device else 0
            assert allocated == entry.workspace_bytes, entry.device
        pinned = pinned_bytes(plan.splits, plan.model.dtype, plan.request)
        if transport != "host":  # nobody else has slots in the host's memory
            pinned = evolve(pinned, queues=0)
        found = ctx.get_pinned(0, 1).untyped_storage().nbytes()
        assert found == pinned.total_bytes
        used = tuple(entry.device for entry in plan.memory if entry.used_bytes)
        assert ctx.all_devices == used


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name} on {path.stem}")
def test_examples_take_the_bytes_of_their_ledgers(path: Path) -> None:
    """What is allocated on each device is to the byte what the file says; what is pinned is what the formula says."""
    assert_ledger(tpplan.load(path), "peer")


@settings(max_examples=examples(60))
@given(cut_plans(64), sampled_from(TRANSPORTS))
def test_any_plan_takes_the_bytes_of_its_ledger(plan: SplitPlan, transport: str) -> None:
    """Of any family, however it is cut, layers alike or not, with idle devices or without, on every transport."""
    assert_ledger(plan, transport)


def test_without_waiting_kernels_no_slots_are_pinned() -> None:
    """Everything between devices goes through the rings, by copies, and is right."""
    plan = tpplan.load(next(path for path in EXAMPLES if path.parent.name == "Mixtral-8x7B"))
    places, dtype = (torch.device("cpu"),) * len(plan.devices), getattr(torch, plan.model.dtype)
    with build(plan, places, VirtualDevices, transport="host", max_rows=64, dtype=dtype, waits=False) as ctx:
        pinned = evolve(pinned_bytes(plan.splits, plan.model.dtype, plan.request), queues=0)
        assert ctx.get_pinned(0, 1).untyped_storage().nbytes() == pinned.total_bytes
        between = [way for way in ctx.explain().ways if way.transport != "local"]
        assert all(way.how.endswith(("part", "parts")) and way.buffers == ("host rings",) for way in between)
        x = torch.randn(3, plan.split(Axis.RESIDUAL).size).to(dtype)
        assert all(same(y, x) for y in ctx.allgather(ctx.scatter(x, Axis.RESIDUAL), Axis.RESIDUAL))
        total = len(ctx.all_devices) * x.float()
        assert all(same(y, total.to(dtype)) for y in ctx.all_reduce([x for _ in ctx.all_devices]))


@pytest.mark.parametrize("own", [{0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize("transport", ["peer", "events"])
def test_blocks_are_those_of_this_process(own: set[int], transport: str) -> None:
    """Only its own GPUs tell how many blocks they have room for: those of other processes have no place here."""
    plan = tpplan.load(next(path for path in EXAMPLES if path.parent.name == "Mixtral-8x7B"))
    used = [i for i, memory in enumerate(plan.memory) if memory.used_bytes]
    assert used[:2] == [0, 1]
    places = [torch.device("cpu" if i in own else "meta") for i in range(len(plan.devices))]
    asked: list[torch.device] = []

    def most(some: Sequence[torch.device], *_: object, **__: object) -> int:
        asked.extend(some)
        return 8

    def unlocked(*arguments: Any, lock_pages: bool) -> HostMemory:
        assert lock_pages
        return HostMemory(*arguments, lock_pages=False)

    with (
        patch.multiple(build_module, most_blocks=most, HostMemory=unlocked),
        pytest.raises(InterruptedError),  # before there is a backend, for which GPUs would have to be there
    ):
        build(
            plan,
            [*places, torch.device("cuda")],  # that of a device that nothing is on: there are GPUs
            Mock(side_effect=InterruptedError),
            transport=transport,
            max_rows=64,
            dtype=torch.bfloat16,
            waits=transport != "events",
            share=lambda areas: {i: areas[min(own)] for i in used if i not in own},
        )
    assert asked
    assert {place.type for place in asked} == {"cpu"}


@pytest.mark.parametrize("path", [EXAMPLES[3]], ids=lambda path: path.parent.name)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_plans_at_their_real_size(path: Path, transport: str) -> None:
    """With the real sizes of slots and stages, a decode step and a prefill of a large model move right."""
    plan = tpplan.load(path)
    with tpx.compile(plan, backend="cpu", transport=transport) as ctx:
        hidden = plan.split(Axis.RESIDUAL).size
        for rows in (1, 30):
            x = torch.randn(rows, hidden).bfloat16()
            parts = ctx.scatter(x, Axis.RESIDUAL)
            assert same(ctx.gather(parts, Axis.RESIDUAL).tensor, x)
            assert all(same(y, x) for y in ctx.allgather(parts, Axis.RESIDUAL))
            total = x.float()
            for _ in ctx.all_devices:
                total = total + x.float()
            sums = ctx.all_reduce([x for _ in ctx.all_devices], [x for _ in ctx.all_devices])
            assert all(same(y, total.bfloat16()) for y in sums)
