"""Measure the executor on virtual devices: what an operation costs beside the same movement written by hand.

One row of 8192 in bfloat16, as in decoding, on eight uneven devices. There is next to no data, so that the times are
those of the code around it. Copies take one thread, for more would measure the machine's other work. At last the same
calls on two devices where nothing is run: what the host does before a device has anything to do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

import tpplan
from benchmarks.common.rows import GPUS, MODEL, TOKENS, Row, measure, rounds_wanted
from tpplan.core.axes import Axis
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.cpu import Pending, VirtualDevices
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext

COLUMNS = 8192
CALLS = 5


def row(name: str, work: Callable[[], object], calls: int = CALLS, aim: float = 0) -> Row:
    """Return the line for ``work``, whose memory is not measured."""

    def run() -> int:
        work()
        return 0

    return Row(name, run, aim, calls)


def operations(ctx: TPContext) -> dict[str, Callable[[], object]]:
    """Return a call of each operation."""
    x = torch.randn(1, COLUMNS).bfloat16()
    everywhere, parts = ctx.broadcast(x), ctx.scatter(x, Axis.RESIDUAL)
    return {
        "broadcast": lambda: ctx.broadcast(x),
        "scatter": lambda: ctx.scatter(x, Axis.RESIDUAL),
        "gather": lambda: ctx.gather(parts, Axis.RESIDUAL).tensor,
        "allgather": lambda: ctx.allgather(parts, Axis.RESIDUAL),
        "all_reduce": lambda: ctx.all_reduce(everywhere),
        "all_reduce with residual": lambda: ctx.all_reduce(everywhere, everywhere),
        "add_residual": lambda: ctx.add_residual(parts, everywhere, Axis.RESIDUAL),
    }


def nothing(*_: object) -> Pending:
    """Take the place of a backend's run."""
    return Pending()


def calls_alone() -> dict[str, Callable[[], object]]:
    """Return calls on two devices, with outputs given, of matrices, and of the same with a batch."""
    plan = tpplan.plan(
        tpplan.read_model(MODEL), tpplan.parse_devices("2x80GiB"), cache=tpplan.Cache("q8", tokens=TOKENS)
    )
    found: dict[str, Callable[[], object]] = {}
    for lead in ((1,), (1, 1)):
        ctx = compile_plan(plan, backend="cpu")
        x = torch.randn(*lead, COLUMNS).bfloat16()
        outs, sums, parts = ctx.broadcast(x), ctx.broadcast(x), ctx.scatter(x, Axis.RESIDUAL)
        found |= {
            f"broadcast, {len(lead) + 1}-D": partial(ctx.broadcast, x, out=outs),
            f"allgather, {len(lead) + 1}-D": partial(ctx.allgather, parts, Axis.RESIDUAL, out=outs),
            f"all_reduce, {len(lead) + 1}-D": partial(ctx.all_reduce, outs, out=sums),
            f"all_reduce in place, {len(lead) + 1}-D": partial(ctx.all_reduce, outs, out=outs),
        }
    return found


def by_hand(plan: SplitPlan, devices: int) -> dict[str, Callable[[], object]]:
    """Return the same as somebody would write it in torch: a new tensor for each device, nothing checked."""
    x = torch.randn(1, COLUMNS).bfloat16()
    cuts = [(s.start, s.end) for s in plan.slices(Axis.RESIDUAL)]
    everywhere, parts = [x.clone() for _ in range(devices)], [x[:, a:b].clone() for a, b in cuts]

    def add_up(*more: torch.Tensor) -> list[torch.Tensor]:
        total = everywhere[0].float()
        for part in (*everywhere[1:], *more):
            total += part
        return [total.bfloat16() for _ in range(devices)]

    def add() -> None:
        for part, whole, (a, b) in zip(parts, everywhere, cuts, strict=True):
            part.add_(whole[:, a:b])

    return {
        "broadcast": lambda: [x.clone() for _ in range(devices)],
        "scatter": lambda: [x[:, a:b].clone() for a, b in cuts],
        "gather": lambda: torch.cat(parts, -1),
        "allgather": lambda: [torch.cat(parts, -1) for _ in range(devices)],
        "all_reduce": add_up,
        "all_reduce with residual": lambda: add_up(x),
        "add_residual": add,
    }


def main() -> None:
    """Measure compiling, and every operation by hand and by each transport."""
    rounds = rounds_wanted(__doc__)
    torch.set_num_threads(1)
    print("on virtual devices, parts of the host's memory: no GPU is measured")
    model = tpplan.read_model(MODEL)
    plan = tpplan.plan(model, tpplan.parse_devices(GPUS), cache=tpplan.Cache("q8", tokens=TOKENS), layout="reduce")
    opened = row("compile() and close(), 70B", lambda: compile_plan(plan, backend="cpu").close(), 1, 0.050)
    measure([opened], rounds)
    contexts = {name: compile_plan(plan, backend="cpu", transport=name) for name in TRANSPORTS}
    floor = by_hand(plan, len(contexts["peer"].all_devices))
    calls = {"by hand": floor, **{name: operations(ctx) for name, ctx in contexts.items()}}
    measure([row(f"{name}, {way}", calls[way][name]) for name in floor for way in calls], rounds, "µs")
    for ctx in contexts.values():
        ctx.close()
    alone = [row(f"{name}, nothing run", call, 100) for name, call in calls_alone().items()]
    with patch.object(VirtualDevices, "run", nothing):
        measure(alone, rounds, "µs")


if __name__ == "__main__":
    main()
