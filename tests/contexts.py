"""Small plans and contexts, on plain and on adversarial virtual devices, with room for so little that nothing is small.

Slots and stages are a few hundred bytes where real ones are thousands of times as large, so that tensors of a few rows
take every route: by slots, straight, and in one, two and more parts.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests import strategies
from tpplan.core import workspace
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.plan import Cache, DeviceMemory, PlanModel, Request, Split, SplitPlan
from tpplan.exec import build
from tpplan.exec.backends.adversary import Adversary
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.memory import host
from tpplan.exec.tools.selftest import attempts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hypothesis import strategies as st

    from tpplan.exec.context import TPContext

CPU = torch.device("cpu")
MAX_ROWS = 12
FREE = 2**30


@pytest.fixture(scope="module", autouse=True)
def little_room() -> Iterator[None]:
    """Make slots, stages and flags small in every context of a module that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {
            "FLAG_BYTES": 64,
            "CONTROL_BYTES": 4096,
            "CHUNK_BYTES": 64,
            "HOST_SLOT_BYTES": 256,
            "FRAME_SLOT_BYTES": 96,
            "SPARED_BYTES": 400,
            "SPARE_BYTES": 256,
        }.items():
            for module in (workspace, build, host, attempts):
                if hasattr(module, name):
                    patch.setattr(module, name, size)
        yield


def budgeted(plan: SplitPlan) -> SplitPlan:
    """Return a plan whose ledger has the workspace that its splits take, and devices that have room for it."""
    workspaces = workspace.workspace_bytes(plan.splits, plan.model.dtype, plan.request)
    read = int(plan.request.strategy == "latency")  # a byte of weights, which such a plan must state
    held = [read if size else 0 for size in workspaces]
    memory = tuple(
        DeviceMemory(i, byte, 0, size, 0, FREE, byte)
        for i, (size, byte) in enumerate(zip(workspaces, held, strict=True))
    )
    devices = [
        evolve(device, budget_bytes=size + byte + FREE, overhead_bytes=0)
        for device, size, byte in zip(plan.devices, workspaces, held, strict=True)
    ]
    return evolve(plan, memory=memory, devices=tuple(devices))


def plan_of(*splits: Split, dtype: str = "bfloat16", layers: int = 4, request: Request | None = None) -> SplitPlan:
    """Return a plan with these splits, for as many devices as they have."""
    order = list(Axis)
    splits = tuple(sorted(splits, key=lambda split: (order.index(split.axis), split.layers)))
    request = request or Request("reduce", "balanced", Cache("fp16", 16), 1, MAX_ROWS, "idle")
    count = len(splits[0].bounds) - 1
    devices = tuple(Device(name=f"GPU {i}", budget_bytes=1) for i in range(count))
    model = PlanModel("Tiny", "LlamaForCausalLM", f"sha256:{0:064x}", dtype, layers)
    return budgeted(SplitPlan(model=model, request=request, devices=devices, splits=splits, memory=()))


def heads(bounds: Sequence[int], *, layers: str = "0-3", group: int = 2, replicas: int = 1) -> tuple[Split, Split]:
    """Return a cut of the KV heads, of 8 elements each, and of the query heads that go with it."""
    keys, queries = tuple(bounds), tuple(group * cut for cut in bounds)
    return (
        Split(axis=Axis.KV_HEADS, layers=layers, size=keys[-1], unit=1, width=8, replicas=replicas, bounds=keys),
        Split(axis=Axis.Q_HEADS, layers=layers, size=queries[-1], unit=1, width=8, bounds=queries),
    )


#: Four devices, one of which is idle, and one without heads; every axis cut at other places.
UNEVEN = plan_of(
    *heads((0, 3, 3, 3, 5)),
    Split(axis=Axis.INTERMEDIATE, layers="0-3", size=70, unit=8, bounds=(0, 16, 16, 48, 70)),
    Split(axis=Axis.VOCAB, size=101, unit=2, bounds=(0, 32, 32, 64, 101)),
    Split(axis=Axis.RESIDUAL, size=40, unit=1, bounds=(0, 11, 11, 29, 40)),
)
#: One device has everything.
ALONE = plan_of(
    *heads((0, 2)),
    Split(axis=Axis.INTERMEDIATE, layers="0-3", size=24, unit=8, bounds=(0, 24)),
    Split(axis=Axis.VOCAB, size=33, unit=2, bounds=(0, 33)),
    Split(axis=Axis.RESIDUAL, size=16, unit=1, bounds=(0, 16)),
)
#: Heads of which there are two each, and layers that are cut in two ways.
REPLICATED = plan_of(
    *heads((0, 1, 3, 4), layers="0,2", replicas=2),
    *heads((0, 2, 2, 4), layers="1,3", replicas=2),
    Split(axis=Axis.INTERMEDIATE, layers="0,2", size=48, unit=8, bounds=(0, 16, 32, 48)),
    Split(axis=Axis.INTERMEDIATE, layers="1,3", size=40, unit=8, bounds=(0, 24, 24, 40)),
    Split(axis=Axis.VOCAB, size=64, unit=2, bounds=(0, 32, 64, 64)),
    Split(axis=Axis.RESIDUAL, size=24, unit=1, bounds=(0, 8, 16, 24)),
    request=Request("gather", "latency", Cache("q8", 32), 2, MAX_ROWS, "replicate"),
)
PLANS = {"uneven": UNEVEN, "alone": ALONE, "replicated": REPLICATED}
#: Seeds of contexts, by what they make of the devices.
BACKENDS = {"plain": None, "adversarial": 1}


def widest(plan: SplitPlan) -> int:
    """Return the columns that a plan leaves room for in a row."""
    return max(split.size * split.width for split in plan.splits)


def plans() -> st.SearchStrategy[SplitPlan]:
    """Valid plans of any shape, for a few rows."""

    def few_rows(plan: SplitPlan) -> SplitPlan:
        request = evolve(plan.request, max_rows=MAX_ROWS, batch=2, cache=evolve(plan.request.cache, tokens=16))
        return budgeted(evolve(plan, request=request))

    return strategies.plans().map(few_rows)


def context(plan: SplitPlan, transport: str, seed: int | None = None) -> TPContext:
    """Return a context on plain devices, or on adversarial ones that a seed decides for."""
    return build.build(
        plan,
        (CPU,) * len(plan.devices),
        VirtualDevices if seed is None else lambda memory: Adversary(memory, Random(seed)),
        transport=transport,
        max_rows=plan.request.max_rows,
        dtype=getattr(torch, plan.model.dtype),
    )
