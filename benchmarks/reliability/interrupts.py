"""Interrupts of contexts on virtual devices: at every opcode of what uses them, and as Ctrl-C at random moments.

After each, the context has to work or to be closed, a close has to end, and all memory to be freed without the garbage
collector; a file has to be the old or the new one. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, evolve

import tpplan
from benchmarks.reliability.interruption import EVERYWHERE, AtOpcode, Blocks, noted_blocks
from benchmarks.reliability.operations import plan_for
from tpplan import exec as tpx
from tpplan.core.axes import Axis
from tpplan.core.plan import SplitPlan
from tpplan.errors import ExecutionError, TpplanError
from tpplan.exec.context import TPContext
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from types import FrameType

#: What is interrupted, and what checks afterwards what is left, and returns that in a word.
Target = tuple[Callable[[], object], Callable[[], str]]

#: Seconds after which a step counts as hung, and within which a random interrupt comes.
_HUNG_SECONDS, _WINDOW_SECONDS = 60, 0.01
#: Opcodes from one interrupt to the next where all of them would take too long: 1 means every one.
_STEPS = {"compile, first operations and close": 997}


class WrongError(Exception):
    """What is left behind an interrupt is wrong."""


@define
class Bench:
    """What is interrupted.

    Attributes:
        plan: a plan for virtual devices.
        blocks: the memory of all contexts.
        folder: where plans are saved, and nothing else is.
        x: a tensor as wide as the residual stream.
        turns: how many contexts were compiled, to take turns with transports.
        shared: the context of operations, used until it is closed.
    """

    plan: SplitPlan
    blocks: Blocks
    folder: Path
    x: torch.Tensor = Factory(lambda: torch.randn(2, 4096, dtype=torch.bfloat16))
    turns: int = 0
    shared: TPContext | None = None

    def targets(self) -> dict[str, Callable[[], Target]]:
        """Return a function for each kind of target that makes a new one."""
        return {
            "operations": self._operations,
            "compile and close": lambda: (self._compile_and_close, self._memory),
            "close": self._close,
            "save": self._save,
            "compile, first operations and close": lambda: (self._compile_and_use, self._memory),
        }

    def _operations(self) -> Target:
        ctx = self.shared = self.shared or self.warm()

        def check() -> str:
            self.use(ctx)
            return "works"

        return partial(self.use, ctx), check

    def end(self) -> None:
        """Close the context of operations, and check that nothing is left of it."""
        if self.shared:
            self.shared.close()
            self.shared = None
            self._memory()

    def _close(self) -> Target:
        ctx = self.warm()
        return ctx.close, partial(self.state, ctx)

    def _save(self) -> Target:
        plans = [evolve(self.plan, model=evolve(self.plan.model, name=name)) for name in ("old", "new")]
        path = self.folder / "plan.json"
        plans[0].save(path)

        def check() -> str:
            _expect(list(self.folder.iterdir()) == [path], f"there are {sorted(self.folder.iterdir())}")
            _expect(tpplan.load(path) in plans, "the file is neither plan")
            return "whole"

        def save() -> None:
            for plan in reversed(plans):
                plan.save(path)

        return save, check

    def _compile_and_close(self) -> None:
        with tpx.compile(self.plan, backend="cpu"):
            pass

    def _compile_and_use(self) -> None:
        self.turns += 1
        with tpx.compile(self.plan, backend="cpu", transport=TRANSPORTS[self.turns % len(TRANSPORTS)]) as ctx:
            self.use(ctx)

    def warm(self) -> TPContext:
        """Return a context whose operations have run."""
        ctx = tpx.compile(self.plan, backend="cpu")
        self.use(ctx)
        return ctx

    def use(self, ctx: TPContext) -> None:
        """Run an operation of each kind, and check the results."""
        x, parts = self.x, ctx.scatter(self.x, Axis.RESIDUAL)
        sums = ctx.all_reduce([x] * len(parts))
        copies = *ctx.broadcast(x), *ctx.allgather(parts, Axis.RESIDUAL), ctx.gather(parts, Axis.RESIDUAL).tensor
        _expect(all(torch.equal(each, x) for each in copies), "a copy is wrong")
        _expect(all(torch.equal(each, x * len(parts)) for each in sums), "a sum is wrong")

    def state(self, ctx: TPContext) -> str:
        """Return whether a context works or is closed, and close it."""
        state = "works"
        try:
            self.use(ctx)
        except ExecutionError as error:
            state = "closed"
            _expect(error.message == "the context is closed", error.message)
        ctx.close()
        self._memory()
        return state

    def _memory(self) -> str:
        _expect(self.blocks.all_freed(), "memory is left")
        return "freed"


def _expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001
    if not condition:
        raise WrongError(otherwise)


def at_opcodes(new: Callable[[], Target], step: int) -> tuple[int, Counter[str]]:
    """Interrupt a target at the opcodes of tpplan's functions; return how many it has, and what the interrupts left."""
    left: Counter[str] = Counter()
    at = 0
    while True:
        faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
        run, check = new()
        with suppress(KeyboardInterrupt), AtOpcode(at, EVERYWHERE) as tracer:
            run()
        try:
            outcome = check()
        except (WrongError, TpplanError) as error:
            outcome = f"WRONG in {tracer.place}: {error}"
        if tracer.place or outcome.startswith("WRONG"):
            left[outcome] += 1
        if not tracer.place:
            return tracer.count, left
        at += step


def at_random(new: Callable[[], Target], count: int, random: Random) -> Counter[str]:
    """Let Ctrl-C come so often while a target runs again and again, and return what the interrupts left."""
    left: Counter[str] = Counter()
    for _ in range(count):
        faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
        run, check = new()
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, _WINDOW_SECONDS))
            end = time.monotonic() + 1
            while time.monotonic() < end:
                run()
            left["swallowed"] += 1  # as where Python cannot raise: in a finalizer
        except KeyboardInterrupt:
            pass
        try:
            left[check()] += 1
        except (WrongError, TpplanError) as error:
            left[f"WRONG: {error}"] += 1
    return left


def closed_by_handler(bench: Bench, count: int, random: Random) -> Counter[str]:
    """Let a signal handler close the context so often while operations run, and return how that ended."""
    left: Counter[str] = Counter()
    for _ in range(count):
        faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
        ctx, outcomes = bench.warm(), list[str]()

        def close(_: int, __: FrameType | None, ctx: TPContext = ctx, outcomes: list[str] = outcomes) -> None:
            try:
                ctx.close()
            except ExecutionError:
                outcomes.append("refused, as an operation was running")
            else:
                outcomes.append("closed")

        before = signal.signal(signal.SIGALRM, close)
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, _WINDOW_SECONDS))
            with suppress(ExecutionError):
                while not outcomes:
                    bench.use(ctx)
            bench.state(ctx)
            left[outcomes[0]] += 1
        except (WrongError, TpplanError) as error:
            left[f"WRONG: {error}"] += 1
        finally:
            signal.signal(signal.SIGALRM, before)
    return left


def main(arguments: Sequence[str]) -> None:
    """Interrupt everything, and say how it went."""
    parser = argparse.ArgumentParser(prog="soak interrupts", description=__doc__)
    parser.add_argument("--interrupts", type=int, default=4000, help="random ones")
    parser.add_argument("--step", type=int, default=1, help="opcodes from one interrupt to the next; 0: none of them")
    parser.add_argument("--only", default="", help="opcodes of a single target, such as save")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    wanted = parser.parse_args(arguments)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C calls
    gc.disable()
    threads = threading.active_count()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, noted_blocks() as blocks:
        bench = Bench(plan_for(3, 64), blocks, Path(folder))
        targets = bench.targets()
        for run, check in (new() for new in targets.values()):  # the first time, much is imported
            run()
            check()
            bench.end()
        if wanted.step:
            print("| at opcodes of | opcodes | interrupts | left |\n|---|---|---|---|", flush=True)
        for name, new in targets.items() if wanted.step else ():
            if wanted.only in ("", name):
                count, left = at_opcodes(new, wanted.step * _STEPS.get(name, 1))
                problems += _row(f"{name} | {count:,}", left)
                bench.end()
        print("\n| random Ctrl-C in | interrupts | left |\n|---|---|---|", flush=True)
        random, each = Random(wanted.seed), wanted.interrupts // len(targets)  # noqa: S311 (to be the same again)
        for name, new in targets.items():
            if name != "close":  # too short to be hit; a close is in two of the others
                problems += _row(name, at_random(new, each, random))
                bench.end()
        problems += _row("operations, by a handler that closes", closed_by_handler(bench, each, random))
    faulthandler.cancel_dump_traceback_later()
    if threading.active_count() > threads:
        problems.append("threads are left")
    print("\n" + ("\n".join(problems) or "nothing was wrong"))
    sys.exit(1 if problems else 0)


def _row(name: str, left: Counter[str]) -> list[str]:
    """Print a row of a table, and return what was wrong."""
    wrong = [f"{name}: {each} ({times}x)" for each, times in left.items() if each.startswith("WRONG")]
    fine = ", ".join(f"{times:,} {each}" for each, times in left.most_common() if not each.startswith("WRONG"))
    count = left.total() - left["swallowed"]
    bad = count - sum(times for each, times in left.items() if not each.startswith(("WRONG", "swallowed")))
    print(f"| {name} | {count:,} | {fine}{f', {bad:,} WRONG' if bad else ''} |", flush=True)
    return wrong
