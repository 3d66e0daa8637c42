"""What processes with a GPU each do with a plan, checked by each of them: one of those that torch.distributed has.

Run it as ``python -m tests.exec.processes.on_gpus SCENARIO``, in as many processes as there are GPUs. After ``hidden``,
each sees its own GPU only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

import tpplan
from benchmarks.common.random_checkpoint import shortened, write
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Sampling, prepare
from tpplan.errors import ExecutionError
from tpplan.exec import HOST
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext

MODEL = Path(__file__).parents[3] / "examples" / "models" / "Llama-3.1-8B"
#: Rows of small and of large messages, also of those that mirrors hold in several turns.
ROWS = (1, 2, 3, 7, 16, 64, 300, 511, 1500, 2048)
COLUMNS = 4096
#: Seconds after which a process is killed, and within which the others have to notice and to close.
_DEATH_S, _NOTICED_S = 1, 5
#: The variable of the process that is to be killed.
_KILLED = "TPPLAN_TEST_KILLED"


def plan_for(model: Path = MODEL, *, layout: str = "reduce", tokens: int = 4096) -> SplitPlan:
    """Return a plan for as many uneven GPUs as there are processes."""
    budgets = [2**34 + i * 2**33 for i in range(distributed.get_world_size())]
    devices = [tpplan.Device(name="GPU", budget_bytes=budget) for budget in budgets]
    return tpplan.plan(tpplan.read_model(model), devices, cache=tpplan.Cache(tokens=tokens), layout=layout)


class Caller:
    """A process that calls random operations, the same as all others, and knows what they should give."""

    def __init__(self, ctx: TPContext, seed: int) -> None:
        self.ctx, self.random, self.made = ctx, Random(seed), 1000 * seed
        self.place = next(iter(ctx.devices.values())).device

    def call(self) -> None:
        """Call an operation and compare what it gives."""
        kind = self.random.choice((self.all_reduce, self.allgather, self.broadcast, self.scatter, self.gather))
        kind(self.random.choice(ROWS), self.random.choice((torch.bfloat16, torch.float16, torch.float32)))

    def all_reduce(self, rows: int, dtype: torch.dtype) -> None:
        """Sum a part of each device, perhaps with a residual, perhaps over the parts themselves."""
        parts = {device: self._whole(rows, dtype) for device in self.ctx.all_devices}
        residual, in_place = self._whole(rows, dtype), self.random.random() < 0.5
        total = torch.zeros(rows, COLUMNS)
        for part in parts.values():
            total += part.float()
        own = [parts[device].to(self.place) for device in self.ctx.devices]
        if self.random.random() < 0.5:
            total += residual.float()
            found = self.ctx.all_reduce(own, [residual.to(self.place) for _ in own], out=own if in_place else None)
        else:
            found = self.ctx.all_reduce(own, out=own if in_place else None)
        self._check(found, total.to(dtype))

    def allgather(self, rows: int, dtype: torch.dtype) -> None:
        """Concatenate the parts of an axis."""
        whole = self._whole(rows, dtype)
        self._check(self.ctx.allgather(self._parts(whole), Axis.RESIDUAL), whole)

    def gather(self, rows: int, dtype: torch.dtype) -> None:
        """Concatenate the parts of an axis in host memory, that of every process."""
        whole = self._whole(rows, dtype)
        self._check([self.ctx.gather(self._parts(whole), Axis.RESIDUAL).tensor], whole)

    def broadcast(self, rows: int, dtype: torch.dtype) -> None:
        """Copy a tensor of any device, or of the host, to all."""
        source, whole = self.random.choice((*self.ctx.all_devices, HOST)), self._whole(rows, dtype)
        self._check(self.ctx.broadcast(self._given(whole, source), source=source), whole)

    def scatter(self, rows: int, dtype: torch.dtype) -> None:
        """Cut a tensor of any device, or of the host."""
        source, whole = self.random.choice((*self.ctx.all_devices, HOST)), self._whole(rows, dtype)
        found = self.ctx.scatter(self._given(whole, source), Axis.RESIDUAL, source=source)
        for part, slice_ in zip(found, self.ctx.split(Axis.RESIDUAL), strict=True):
            self._check([part], whole[:, slice_.start : slice_.end])

    def _whole(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor that all processes make alike."""
        self.made += 1
        return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(self.made)).to(dtype)

    def _parts(self, whole: Tensor) -> list[Tensor]:
        return [whole[:, s.start : s.end].to(self.place) for s in self.ctx.split(Axis.RESIDUAL)]

    def _given(self, whole: Tensor, source: int) -> Tensor:
        if source == HOST:
            return whole
        return whole.to(self.place) if source in self.ctx.devices else torch.empty_like(whole, device="meta")

    def _check(self, found: Any, truth: Tensor) -> None:
        for x in found:
            assert torch.equal(x.cpu(), truth), (self.made, list(truth.shape), truth.dtype)


def operations(transport: str, count: int) -> None:
    """Call random operations in two contexts, one after the other, so that the second has memory of the first."""
    for seed in (1, 2):
        with compile_plan(plan_for(), group=distributed.group.WORLD, transport=transport) as ctx:
            assert ctx.transport == transport, ctx.explain().notes
            caller = Caller(ctx, seed)
            for _ in range(count):
                caller.call()


def graphs() -> None:
    """Replay two graphs, and call operations between: small and large sums, of other numbers each time."""
    with compile_plan(plan_for(), group=distributed.group.WORLD) as ctx:
        (device,) = ctx.devices
        count, caller = len(ctx.all_devices), Caller(ctx, 3)
        x, y = (torch.zeros(4, COLUMNS, device=caller.place) for _ in range(2))
        large, out = (torch.zeros(1500, COLUMNS, device=caller.place) for _ in range(2))

        def small() -> None:
            ctx.all_reduce([x], out=[y])
            y.add_(1)
            ctx.all_reduce([y], out=[y])

        small()
        ctx.all_reduce([large], out=[out])
        with ctx.capture() as first:
            small()
        with ctx.capture() as second:
            ctx.all_reduce([large], out=[out])
        for i in range(60):
            x.fill_(i + device)
            large.fill_(i - device)
            for each in ((first, second), (second, first, first))[i % 2]:
                each.replay()
            parts = count * i + sum(ctx.all_devices)
            assert bool((y == count * (parts + 1)).all())
            assert bool((out == count * i - sum(ctx.all_devices)).all())
            if i % 7 == 0:
                caller.call()


def reach() -> None:
    """Call the same operations on memory that comes and goes, in one process more often than in others.

    What torch gives back is closed by the others, and what comes to the same addresses is opened anew; residuals begin
    anywhere, and some memory cannot be opened.
    """
    with compile_plan(plan_for(), group=distributed.group.WORLD, transport="peer") as ctx:
        caller, process, random = Caller(ctx, 5), ctx.process, Random(7)
        for turn in range(60):
            rows, dtype = random.choice((255, 511, 1500)), torch.bfloat16
            whole, residual = caller._whole(rows, dtype), caller._whole(rows, dtype)
            total = len(ctx.all_devices) * whole.float() + residual.float()
            part, room = whole.to(caller.place), torch.empty(rows * COLUMNS + 3, dtype=dtype, device=caller.place)
            shift = 3 * ((turn + process) % 2)  # between vectors in one of the processes
            behind = room[shift : shift + rows * COLUMNS].view(rows, COLUMNS).copy_(residual)
            for _ in range(random.choice((1, 20))):  # also as graphs of one kernel
                (found,) = ctx.all_reduce([part], [behind])
                caller._check([found], total.to(dtype))
            caller._check(ctx.broadcast(caller._given(whole, 0), source=0), whole)
            del part, room, behind, found
            if turn % 3 == process:
                torch.cuda.empty_cache()
        pool = torch.cuda.mem_get_info(caller.place)
        huge = torch.ones(2**19, COLUMNS, dtype=torch.bfloat16, device=caller.place)  # 4 GiB, of which others open all
        ctx.all_reduce([huge[:2048]], out=[huge[:2048]])
        large = torch.ones(1500, COLUMNS, device=caller.place)
        ctx.all_reduce([large], out=[large])
        with ctx.capture() as graph:  # in a pool of its own
            (found,) = ctx.all_reduce([large + 1])
        for value in (1, 2):
            large.fill_(value)
            graph.replay()
            caller._check([found], torch.full((1500, COLUMNS), float(len(ctx.all_devices) * (value + 1))))
        del graph, found, large, huge
        torch.cuda.synchronize(caller.place)
        torch.cuda.empty_cache()
        ctx.tell(None)
        time.sleep(1.5)  # looks come twice a second
        mine: Any = vars(ctx._engine.backend)["_reach"]
        told = ctx.tell([sum(bool(each.handle) for each in mine._own.values()), len(mine._opened)])
        assert all(opened == sum(own for own, _ in told) - own for own, opened in told), told
        assert torch.cuda.mem_get_info(caller.place)[0] > pool[0] - 2**28, "others keep what was given back"


def decoder() -> None:
    """Generate with a model of random weights: all processes the same tokens, and logits near those of float32."""
    process = distributed.get_rank()
    with TemporaryDirectory() as folder:
        where = [Path(folder)]
        distributed.broadcast_object_list(where)
        if process == 0:
            write(where[0], shortened(json.loads((MODEL / "config.json").read_text()), 2))
        distributed.barrier()
        said = []
        for layout in ("reduce", "gather"):
            plan = plan_for(where[0], layout=layout)
            with compile_plan(plan, group=distributed.group.WORLD, scratch=False) as ctx:
                made = Decoder(ctx, where[0], load_weights(plan, where[0], ctx))
                prepare(made)
                logits = ctx.gather(made.prefill(range(5, 50)), Axis.VOCAB).tensor.float().clone()
                steps = made.steps(1)
                tokens = steps.start([[*range(5, 50)]], Sampling())
                tokens += [token for _ in range(20) for token in steps.step()]
                assert made.graph, "nothing was captured"
                said.append(logits)
            every: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(every, (tokens, logits.sum().item()))
            assert all(each == every[0] for each in every), every
        if process == 0:
            plan = tpplan.plan(tpplan.read_model(where[0]), [tpplan.Device(name="one", budget_bytes=2**35)])
            with compile_plan(plan, scratch=False) as ctx:
                alone = Decoder(ctx, where[0], load_weights(plan, where[0], ctx))
                truth = ctx.gather(alone.prefill(range(5, 50)), Axis.VOCAB).tensor.float()
            for logits in said:
                assert torch.cosine_similarity(logits, truth).item() > 0.999
        distributed.barrier()


def late() -> None:
    """Come too late to a sum: nobody gets a wrong one, neither of this call nor of what was queued behind it."""
    ctx = compile_plan(plan_for(), group=distributed.group.WORLD, timeout=timedelta(seconds=3))
    x = torch.ones(4, COLUMNS, dtype=torch.bfloat16, device=next(iter(ctx.devices.values())).device)
    assert bool((ctx.all_reduce([x])[0] == len(ctx.all_devices)).all())
    ctx.tell(None)
    if distributed.get_rank() == 1:
        time.sleep(5)
    errors = []
    for call in (lambda: ctx.all_reduce([x]), lambda: ctx.all_reduce([x]), ctx.synchronize, ctx.close):
        try:
            call()
        except ExecutionError as error:
            errors.append(error.message)
    assert len(errors) == 4 - 2 * (distributed.get_rank() == 0), errors
    assert all("waited for a message that never came" in error for error in errors), errors
    distributed.barrier()
    operations("peer", 20)


def slow() -> None:
    """Come late to a sum, but not too late: unless told otherwise, kernels wait as long as the group does."""
    with compile_plan(plan_for(), group=distributed.group.WORLD) as ctx:
        x = torch.ones(4, COLUMNS, dtype=torch.bfloat16, device=next(iter(ctx.devices.values())).device)
        for _ in range(2):
            if distributed.get_rank() == 1:
                time.sleep(12)
            assert bool((ctx.all_reduce([x])[0] == len(ctx.all_devices)).all())


def interrupted() -> None:
    """Fail in one process: kernels of the others end at once, long before their time-out, with the same cause."""
    ctx = compile_plan(plan_for(), group=distributed.group.WORLD, timeout=40)
    x = torch.ones(4, COLUMNS, dtype=torch.bfloat16, device=next(iter(ctx.devices.values())).device)
    ctx.all_reduce([x])
    ctx.tell(None)
    start = time.monotonic()
    if distributed.get_rank() == 1:
        time.sleep(2)
        backend: Any = ctx._engine.backend
        backend._exchanges.interrupt()
    for call in (lambda: ctx.all_reduce([x]), ctx.synchronize, ctx.close):
        try:
            call()
        except ExecutionError as error:
            assert "was interrupted" in error.message, error.message  # noqa: PT017 (no pytest here)
    assert time.monotonic() - start < 15
    distributed.barrier()


def lost() -> None:
    """Kill a process: the others get an error that names it long before their time-out, and close at once."""
    ctx = compile_plan(plan_for(), group=distributed.group.WORLD, timeout=40)
    x = torch.ones(4, COLUMNS, dtype=torch.bfloat16, device=next(iter(ctx.devices.values())).device)
    ctx.all_reduce([x])
    ctx.synchronize()
    distributed.barrier()
    if distributed.get_rank() == 1:
        time.sleep(_DEATH_S)  # torch.distributed's threads of the others should have read what this one has sent
        os.kill(os.getpid(), signal.SIGKILL)
    start, message = time.monotonic(), ""
    try:
        ctx.all_reduce([x])
        ctx.synchronize()
    except ExecutionError as error:
        message = error.message
    assert message == "process 1 is lost: it no longer runs", message
    assert time.monotonic() - start < _DEATH_S + _NOTICED_S
    for call in (lambda: ctx.all_reduce([x]), ctx.synchronize, ctx.close):
        try:
            call()
        except ExecutionError as error:
            assert error.message == message  # noqa: PT017 (no pytest here)
        else:
            raise AssertionError(call)
    assert time.monotonic() - start < _DEATH_S + _NOTICED_S


SCENARIOS: dict[str, Callable[[], None]] = {
    "peer": lambda: operations("peer", 200),
    "events": lambda: operations("events", 60),
    "graphs": graphs,
    "reach": reach,
    "decoder": decoder,
    "late": late,
    "slow": slow,
    "interrupted": interrupted,
    "lost": lost,
}


def main() -> None:
    """Be one of the processes."""
    process, names = int(os.environ["LOCAL_RANK"]), sys.argv[1:]
    if "lost" in names and process == 1 and _KILLED not in os.environ:  # whoever started this one expects no failure
        words = [sys.executable, "-m", "tests.exec.processes.on_gpus", *names]
        code = subprocess.run(words, env={**os.environ, _KILLED: "1"}, check=False).returncode
        sys.exit(0 if code == -signal.SIGKILL else f"process 1 ended with {code}")
    faulthandler.dump_traceback_later(180, exit=True)
    if names[0] == "hidden":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(process)
        names = names[1:]
    torch.cuda.set_device(process % torch.cuda.device_count())
    distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    for name in names:
        start = time.monotonic()
        SCENARIOS[name]()
        if process == 0:
            sys.stdout.write(f"{name}: right after {time.monotonic() - start:.1f} s\n")
            sys.stdout.flush()
    if "lost" in sys.argv:
        os._exit(0)  # torch.distributed would wait for the lost one
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
