"""What processes of torch.distributed do with a plan; as a script, it starts them, and each writes what it found.

All processes of a world act the same scenarios in the same order. They are forks of one that has imported torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from attrs import evolve
from torch import distributed

import tpplan
from tests.planning_cases import spec
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError, TpplanError
from tpplan.exec import HOST, TPContext
from tpplan.exec import compile as compile_plan
from tpplan.exec.build import build
from tpplan.exec.group.transport import GroupTransport
from tpplan.exec.processes import compiler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan

#: How long processes wait for each other: longer than the slowest machine needs to start them, and, where they are to
#: wait in vain, long enough for messages that do arrive.
_PATIENCE, _IMPATIENCE = timedelta(seconds=60), timedelta(seconds=5)
#: After how many seconds a process ends in any case.
_LIFETIME_S = 150

_RS = Axis.RESIDUAL


def tensors(ctx: TPContext, columns: int, seed: int) -> dict[int, torch.Tensor]:
    """Return whole numbers for each device of a process."""
    return {d: (torch.arange(2 * columns).view(2, columns) * (d + seed) % 97).to(ctx.dtype) for d in ctx.devices}


def own_parts(ctx: TPContext) -> list[torch.Tensor]:
    """Return parts of the residual stream for each device of a process."""
    wholes = tensors(ctx, 40, 1)
    return [wholes[s.device][:, s.start : s.end].contiguous() for s in ctx.split(_RS)]


def results(ctx: TPContext) -> dict[str, dict[str, Any]]:
    """Return what each operation gives to each device of a process."""
    wholes, parts = tensors(ctx, 40, 1), own_parts(ctx)
    x = wholes[2] if 2 in wholes else torch.empty(2, 40, dtype=ctx.dtype, device="meta")
    targets = [torch.ones_like(part) for part in parts]
    ctx.add_residual(targets, [*wholes.values()], _RS)
    residual = torch.full((2, 40), 3.0, dtype=ctx.dtype)
    hidden = torch.arange(140).view(2, 70).to(ctx.dtype)
    found = {
        "broadcast": ctx.broadcast(x, source=2),
        "broadcast from the host": ctx.broadcast(hidden, source=HOST),
        "scatter": ctx.scatter(x, _RS, source=2),
        "scatter from the host": ctx.scatter(hidden, Axis.INTERMEDIATE, source=HOST),
        "allgather": ctx.allgather(parts, _RS),
        "all_reduce": ctx.all_reduce([*wholes.values()], [residual] * len(wholes)),
        "all_reduce in place": ctx.all_reduce([*wholes.values()], out=[*wholes.values()]),
        "add_residual": targets,
    }
    told = {name: {str(d): x.tolist() for d, x in zip(ctx.devices, each, strict=True)} for name, each in found.items()}
    return told | {"gather": {str(HOST): ctx.gather(parts, _RS).tensor.tolist()}}


def refusal(call: Callable[[], object]) -> str:
    """Return the error that a call ends in."""
    try:
        call()
    except TpplanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Scenarios:
    """The scenarios of a process.

    Attributes:
        plan: a plan of which devices 0, 2 and 3 are in use.
        process: index of the process.
    """

    def __init__(self, plan: SplitPlan, process: int) -> None:
        self.plan = plan
        self.process = process

    def compile(self, own: list[int] | None = None, **arguments: Any) -> TPContext:
        """Compile the plan."""
        given = {"plan": self.plan, "backend": "cpu", "group": distributed.group.WORLD, **arguments}
        return compile_plan(own=own, **given)

    def refusal(self, own: list[int] | None = None, **arguments: Any) -> str:
        """Return why the plan is not compiled."""
        return refusal(lambda: self.compile(own, **arguments))

    def by_default(self) -> Any:
        """Each process owns a device."""
        with self.compile() as ctx:
            return [*ctx.devices], results(ctx), ctx.explain().notes

    def in_any_order(self) -> Any:
        """Processes say what they own, in any order, and with devices that are not in use."""
        with self.compile(([3, 1], [0], [2])[self.process], group=None, transport="events") as ctx:
            return [*ctx.devices], results(ctx)

    def two_contexts(self) -> Any:
        """Contexts of the same processes take turns."""
        with self.compile() as first, self.compile(([2], [3], [0])[self.process]) as second:
            return results(first), results(second), results(first)

    def subgroups(self) -> Any:
        """Two processes have a context, and the third one has one for itself."""
        pair = distributed.new_group([0, 2], timeout=_PATIENCE)
        alone = distributed.new_group([1], timeout=_PATIENCE)
        if self.process == 1:
            message = self.refusal(group=pair)
            with self.compile(group=alone) as ctx:
                return [*ctx.devices], results(ctx), message
        message = self.refusal(group=pair)  # by default
        with self.compile([3, 0] if self.process else [2], group=pair) as ctx:
            return [*ctx.devices], results(ctx), message

    def another_plan(self) -> Any:
        """One process has another plan for the same model."""
        request = evolve(self.plan.request, batch=self.plan.request.batch + (self.process == 1))
        return self.refusal(plan=evolve(self.plan, request=request))

    def another_model(self) -> Any:
        """All processes have the same plan, and a model that it is not of."""
        try:
            self.compile(model=spec())
        except TpplanError as error:
            return error.message, error.hint
        raise AssertionError

    def other_arguments(self) -> Any:
        """Each process has other arguments."""
        given: list[dict[str, Any]] = [
            {"timeout": timedelta(seconds=30)},
            {"timeout": 30, "max_rows": 5},
            {"timeout": 30.0, "dtype": torch.float16},
        ]
        return self.refusal(**given[self.process])

    def other_timeouts(self) -> Any:
        """Each process would wait for the others as long as it likes."""
        return self.refusal(timeout=(None, 30, timedelta(minutes=1))[self.process])

    def wrong_timeout(self) -> Any:
        """One process has a time-out that is none."""
        return self.refusal(timeout=(5, 5, float("inf"))[self.process])

    def owned_twice(self) -> Any:
        """A device belongs to two processes."""
        return self.refusal(([0], [0, 2], [3, 2])[self.process])

    def owned_by_nobody(self) -> Any:
        """Two devices belong to nobody, and one to all."""
        return self.refusal([0])

    def wrong_own(self) -> Any:
        """Each process owns what it cannot."""
        wrong: list[list[int]] = [[0, 9], [2, 2], [1]]
        return self.refusal(wrong[self.process])

    def without_gpus(self) -> Any:
        """The processes have no CUDA devices."""
        return self.refusal(([0], [2], [3])[self.process], backend="cuda")

    def no_room(self) -> Any:
        """One process has too little memory: for its workspace, and for something after it."""
        built: list[TPContext] = []

        def programmatic(*arguments: Any, **options: Any) -> TPContext:
            if self.process == 1:
                raise ExecutionError("device 2 (GPU 2): too little memory")
            return build(*arguments, **options)

        def late(*arguments: Any, **options: Any) -> TPContext:
            built.append(build(*arguments, **options))
            return programmatic() if self.process == 1 else built[0]

        with patch.object(compiler, "build", programmatic):
            first = self.refusal()
        with patch.object(compiler, "build", late):
            return first, self.refusal(), [repr(ctx) for ctx in built]

    def other_operations(self) -> Any:
        """Two processes call different operations, and then the same."""
        distributed.barrier()  # nobody is late
        pair = distributed.new_group([0, 2], timeout=_IMPATIENCE)
        if self.process == 1:
            return None
        with self.compile([0] if self.process else [2, 3], group=pair) as ctx:
            wholes, parts = [*tensors(ctx, 40, 1).values()], own_parts(ctx)
            calls: list[Callable[[], object]] = [lambda: ctx.all_reduce(wholes), lambda: ctx.allgather(parts, _RS)]
            return refusal(calls[self.process // 2]), refusal(calls[0])

    def killed(self) -> Any:
        """One of two processes is killed in the middle of an operation."""
        ctx = self.compile([3] if self.process else [0, 2])
        before = results(ctx)
        carry, carried = GroupTransport.carry, 0

        def fatal(*arguments: Any) -> Callable[[], None]:
            nonlocal carried
            carried += 1
            if carried > 1 and self.process:
                os.kill(os.getpid(), signal.SIGKILL)
            return carry(*arguments)

        with patch.object(GroupTransport, "carry", fatal):
            messages = [refusal(lambda: results(ctx)) for _ in range(2)]
        return before, messages, self.refusal([0, 2]), refusal(ctx.close)


#: Scenarios by the number of processes.
WORLDS = {
    3: (
        "by_default",
        "in_any_order",
        "two_contexts",
        "subgroups",
        "another_plan",
        "another_model",
        "other_arguments",
        "other_timeouts",
        "wrong_timeout",
        "owned_twice",
        "owned_by_nobody",
        "wrong_own",
        "without_gpus",
        "no_room",
        "other_operations",
    ),
    2: ("killed",),
}


def _act(count: int, process: int, folder: Path) -> None:
    """Act all scenarios of a world as one of its processes, which ends in any case: torch may wait for others."""
    signal.alarm(_LIFETIME_S)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    told: dict[str, Any] = {}
    try:
        store = f"file://{folder}/store-{count}"
        distributed.init_process_group("gloo", init_method=store, rank=process, world_size=count, timeout=_PATIENCE)
        scenarios = Scenarios(tpplan.load(folder / "plan.json"), process)
        for name in WORLDS[count]:
            told[name] = getattr(scenarios, name)()
    except BaseException:  # noqa: BLE001 (whatever it is, it is to be seen)
        told["error"] = traceback.format_exc()
    (folder / f"{count}-{process}.json").write_text(json.dumps(told))
    os._exit(0)


def main(folder: Path) -> None:
    """Start the processes of all worlds, and wait for them."""
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=_act, args=(count, i, folder)) for count in WORLDS for i in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
