"""Plans, contexts and tensors for tests on real GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import tpplan
from tpplan import exec as tpx
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = Path(__file__).parents[3] / "examples" / "models" / "Llama-3.1-8B" / "config.json"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def plan_for(devices: int) -> tpplan.SplitPlan:
    """An uneven plan for the first GPUs."""
    sizes = ",".join(f"{size}GiB" for size in (40, 20, 30, 25)[:devices])
    return tpplan.plan(tpplan.read_model(MODEL), tpplan.parse_devices(sizes), cache=tpplan.Cache(tokens=4096))


@pytest.fixture(params=TRANSPORTS)
def ctx(request: pytest.FixtureRequest) -> Iterator[tpx.TPContext]:
    """A context on two GPUs, by every transport."""
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs, found {GPUS}")
    with tpx.compile(plan_for(2), backend="cuda", devices=[0, 1], transport=request.param) as context:
        yield context


def parts_of(ctx: tpx.TPContext, rows: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parts on every device, and their sum."""
    parts = [torch.randn(rows, 4096).bfloat16() for _ in ctx.all_devices]
    total = sum((part.float() for part in parts[1:]), parts[0].float())
    return [part.to(ctx.devices[d].device) for d, part in zip(ctx.all_devices, parts, strict=True)], total.bfloat16()
