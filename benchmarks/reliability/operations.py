"""Random operations without end: of any kind, size and dtype, called and in graphs, each result checked where it is.

On GPUs graphs are replayed in any order, streams change, some devices are late now and then if asked for, and in the
end a device that never arrives has to end in an error, after which a new context works. Memory must not grow, and the
plan must have foretold it. Exits with 1 if anything was wrong. Ctrl-C and SIGTERM end it after the current round, whose
results are still checked; a second one ends it at once.

With ``--processes`` each device has a process of its own. All of them do the same operations at the same time, and each
checks what its own device gets.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from random import Random
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, define

import tpplan
from benchmarks.common.rows import ROOT
from benchmarks.reliability.memory import ENOUGH, MIB, Driver, Growth, compile_measured, is_enough, multiply
from benchmarks.reliability.stress import Stress
from tpplan import exec as tpx
from tpplan.core.sizes import counted
from tpplan.errors import ExecutionError, TpplanError
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.tools.bench.between import children
from tpplan.hardware.catalogue import overhead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from subprocess import Popen

    from torch.distributed import ProcessGroup

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext
    from tpplan.exec.cuda.graph import Graph

MODEL = ROOT / "examples" / "models" / "Llama-3.1-8B" / "config.json"
SIZES = (40, 20, 30, 25, 36, 22, 28, 33)
#: Calls of a round; graphs of a round, operations of each, and replays of all of them.
CALLS, GRAPHS, IN_A_GRAPH, REPLAYS = 400, 4, 100, 200
#: Operations in a row on the same streams, and between replays.
_IN_A_ROW, _BETWEEN = 20, 2
#: Rows of a sum that goes through host memory in frames, on up to eight GPUs.
FRAMED_ROWS = 32
#: Faults that are told, and seconds that processes have for all that is not operations.
_TOLD, _MORE_S = 10, 300


@define
class Outcome:
    """What became of the operations of a context.

    Attributes:
        called: number of operations that were called.
        replayed: number of operations that ran in replays of graphs.
        replays: number of replays.
        seconds: how long everything took.
        faults: what went wrong, in words.
        growth: how much memory was in use over time.
    """

    called: int = 0
    replayed: int = 0
    replays: int = 0
    seconds: float = 0
    faults: list[str] = Factory(list)
    growth: Growth = Factory(Growth)

    @property
    def operations(self) -> int:
        """All operations, called or replayed."""
        return self.called + self.replayed


def soak(
    context: TPContext,
    *,
    operations: int,
    seconds: float,
    seed: int,
    largest: int,
    delays: bool = False,
    graphs: bool = False,
    is_ended: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run random operations of a context until there were enough, or for so long, or one ends with an error.

    Of several processes, all run the same number of rounds.

    Args:
        context: a context on any devices.
        operations: number of operations after which no round begins.
        seconds: time after which no round begins.
        seed: seed of everything random.
        largest: bytes of the largest tensor.
        delays: whether devices are late now and then.
        graphs: whether most operations run in graphs.
        is_ended: returns whether no round is to begin any more.
    """
    outcome, random = Outcome(), Random(seed)  # noqa: S311 (to be the same again)
    stress = Stress(context, seed, largest=largest, delays=delays)
    start = time.perf_counter()
    try:
        while outcome.operations < operations and all(
            context.tell(time.perf_counter() - start < seconds and not is_ended())
        ):
            _call(stress, outcome, min(CALLS, operations - outcome.operations))
            if graphs:
                _replay(stress, outcome, random)
            outcome.faults += stress.faults()
            if graphs:
                _drop_graphs(context)
            outcome.growth.look(context)
    except TpplanError as error:
        outcome.faults.append(f"{error.message}, at or before {stress.last}")
    outcome.seconds = time.perf_counter() - start
    return outcome


def _call(stress: Stress, outcome: Outcome, count: int) -> None:
    """Call random operations, now and then on other streams."""
    for first in range(0, count, _IN_A_ROW):
        with stress.other_streams():
            for _ in range(min(_IN_A_ROW, count - first)):
                stress.issue(stress.task())
                outcome.called += 1


def _replay(stress: Stress, outcome: Outcome, random: Random) -> None:
    """Capture some graphs, and replay them in any order, with calls in between."""
    graphs = [_captured(stress, outcome) for _ in range(GRAPHS)]
    for _ in range(REPLAYS):
        with stress.other_streams():
            graph, turns = random.choice(graphs)
            for _ in range(random.choice((1, 1, 1, 2, 3))):
                graph.replay()
                stress.turns += turns
                outcome.replays += 1
                outcome.replayed += IN_A_GRAPH
        _call(stress, outcome, random.randrange(_BETWEEN + 1))


def _captured(stress: Stress, outcome: Outcome) -> tuple[Graph, int]:
    """Return a graph of random operations, and how often it turns the contents."""
    tasks = [stress.task(host=False) for _ in range(IN_A_GRAPH)]
    for task in tasks:
        stress.issue(task)
        outcome.called += 1
    before = stress.turns
    with stress.context.capture() as graph:
        for task in tasks:
            stress.issue(task)
    turns, stress.turns = stress.turns - before, before
    return graph, turns


def _drop_graphs(context: TPContext) -> None:
    """Give back what graphs have left that are gone, as happens when another one is captured."""
    source = context.all_devices[0]
    x = torch.zeros(1, 8, device=context.devices[source].device if source in context.devices else "meta")
    context.broadcast(x, source=source)
    with context.capture():
        context.broadcast(x, source=source)


def plan_for(devices: int, max_rows: int = 2048) -> SplitPlan:
    """Return an uneven plan for as many devices."""
    gpus = tpplan.parse_devices(",".join(f"{size}GiB" for size in SIZES[:devices]))
    return tpplan.plan(tpplan.read_model(MODEL), gpus, cache=tpplan.Cache(tokens=4096), max_rows=max_rows)


def main(arguments: Sequence[str]) -> None:
    """Soak every transport, and say how it went."""
    wanted = _parse(arguments)
    if wanted.processes and "RANK" not in os.environ:
        sys.exit(_start(wanted, arguments) or None)
    ended = Event()
    with _at_first_signal(ended.set):
        if not wanted.processes:
            sys.exit(bool(_soak_all(wanted, ended.is_set)))
        is_cuda, rank = wanted.backend == "cuda", int(os.environ["RANK"])
        if is_cuda:
            torch.cuda.set_device(rank)
        with tpx.process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo") as group:
            problems = _soak_all(wanted, ended.is_set, group)
    sys.exit(bool(problems))


def _start(wanted: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Start a process for each device, and return why they failed, empty if they did not."""
    words = [sys.executable, "-m", "benchmarks.soak", "operations", *arguments]
    processes: list[Popen[str]] = []

    def end() -> None:
        for process in processes[:1]:  # which tells the others between rounds
            process.send_signal(signal.SIGTERM)

    told, most = partial(print, flush=True), wanted.seconds + _MORE_S
    with _at_first_signal(end):
        return children.run(words, _count(wanted), most, told, ROOT, started=processes.extend)


@contextmanager
def _at_first_signal(act: Callable[[], object]) -> Iterator[None]:
    """Do something at the first SIGTERM or Ctrl-C; the next one ends the process."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        children.end_when_asked()
        act()

    before = {each: signal.signal(each, first) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _count(wanted: argparse.Namespace) -> int:
    """Return the number of devices."""
    return int(wanted.devices) or (torch.cuda.device_count() if wanted.backend == "cuda" else 3)


def _transports(wanted: argparse.Namespace) -> tuple[str, ...]:
    """Return the transports to soak: between processes those that there are."""
    if wanted.transport:
        return (wanted.transport,)
    return _between_processes(wanted.backend) if wanted.processes else TRANSPORTS


def _between_processes(backend: str) -> tuple[str, ...]:
    """Return the transports that there are between processes."""
    return ("peer", "events") if backend == "cuda" else ("events",)


def _soak_all(wanted: argparse.Namespace, is_ended: Callable[[], bool], group: ProcessGroup | None = None) -> list[str]:
    """Soak every transport, print how it went, and return what is wrong in any process, in words."""
    cuda, count, transports = wanted.backend == "cuda", _count(wanted), _transports(wanted)
    operations = -(-(wanted.operations or (1_000_000 if cuda else 3_000)) // len(transports))
    plan = plan_for(count, 2048 if cuda else 64)
    is_measured = cuda and not wanted.calls_only and not group
    driver = _driver() if is_measured else None  # before anything uses a GPU
    overheads = [_overhead(driver, i) for i in range(count)] if driver else []
    name = torch.cuda.get_device_name(0) if cuda else "virtual device"
    delays = wanted.delays and cuda
    between = f", in {group.size()} processes" if group else ""
    late = ", devices late at random" if delays else ""
    print(f"{count} x {name}{between}, torch {torch.__version__}, seed {wanted.seed}{late}\n")
    print(
        "| transport | operations | of them in graphs | replays | seconds | wrong |\n|---|---|---|---|---|---|",
        flush=True,
    )
    outcomes: dict[str, Outcome] = {}
    workspaces: dict[str, list[tuple[int, int, int]]] = {}
    problems: list[str] = []
    is_early = False
    for transport in transports:
        compiled = partial(tpx.compile, plan, backend=wanted.backend, transport=transport, group=group)
        context, workspaces[transport] = compile_measured(plan, compiled)
        with suppress(ExecutionError), context:  # what has failed says so again when it is closed
            outcomes[transport] = outcome = soak(
                context,
                operations=operations,
                seconds=wanted.seconds / len(transports),
                seed=wanted.seed,
                largest=wanted.largest_kib * 1024,
                delays=delays,
                graphs=cuda and not wanted.calls_only,
                is_ended=is_ended,
            )
            mine = [*outcome.faults[:_TOLD], *outcome.growth.problems, *_unplanned(workspaces[transport])]
            told: list[Any] = [(len(outcome.faults), mine, is_ended())]
            # What all have found, if all are still there; who goes on with operations tells something else.
            told = [each for each in context.tell(told[0]) if not isinstance(each, bool)]
        counts, found, ends = zip(*told, strict=True)
        figures = (outcome.operations, outcome.replayed, outcome.replays, round(outcome.seconds))
        print(f"| {transport} | {' | '.join(f'{n:,}' for n in figures)} | {sum(counts)} |", flush=True)
        problems += [f"{transport}: {problem}" for problem in chain(*found)]
        are_all_here = not group or len(told) == group.size()
        if not are_all_here:  # the first process, whose screen is seen, does not know them
            print("\n".join(problems), file=sys.stderr)
        if is_early := any(ends) or not are_all_here:
            break
    _tell_memory(workspaces, outcomes)
    if driver:
        _tell_overheads(driver, overheads, problems)
    waiting = [way for way in transports if way != "events"]
    if cuda and count > 1 and waiting and not group and not is_early:
        _tell_losses(plan, waiting, wanted, problems)
    print("\n" + "ended early\n" * is_early + ("\n".join(problems) or "nothing wrong"), flush=True)
    return problems


def _unplanned(workspaces: list[tuple[int, int, int]]) -> list[str]:
    """Return which devices have allocated what was not planned, in words."""
    different = [each for each in workspaces if each[1] != each[2]]
    return [f"device {device} allocated {taken:,} bytes, planned {planned:,}" for device, planned, taken in different]


def _tell_memory(workspaces: dict[str, list[tuple[int, int, int]]], outcomes: dict[str, Outcome]) -> None:
    """Print the tables of what contexts took."""
    print("\n| transport | device | workspace planned | allocated |\n|---|---|---|---|")
    for transport, entries in workspaces.items():
        for device, planned, allocated in entries:
            print(f"| {transport} | {device} | {planned:,} | {allocated:,} |")
    print("\n| transport | memory | grown, MiB |\n|---|---|---|")
    for transport, outcome in outcomes.items():
        for what, grown in outcome.growth.grown.items():
            print(f"| {transport} | {what} | {grown / MIB:.1f} |")
        if not outcome.growth.grown:
            few = f"{counted(len(outcome.growth.looks), 'round')} of at least {ENOUGH}"
            print(f"| {transport} | all | not measured: too few rounds, {few} |")


def _driver() -> Driver | None:
    """Return the driver, or None where nobody can ask it."""
    try:
        return Driver()
    except ImportError:
        print("the overhead is not measured, that needs the extra probe")
        return None


def _overhead(driver: Driver, device: int) -> int:
    """Return what the first use of a GPU takes: the driver's context, and the libraries of a matrix product."""
    multiply(device)
    return driver.used_bytes(device)


def _tell_overheads(driver: Driver, overheads: list[int], problems: list[str]) -> None:
    """Print what the driver took of each GPU."""
    torch.cuda.empty_cache()
    print("\n| device | overhead planned, MiB | at first | in the end, without torch's memory |\n|---|---|---|---|")
    for i, first in enumerate(overheads):
        planned = overhead(".".join(map(str, torch.cuda.get_device_capability(i)))).bytes
        last = driver.used_bytes(i) - torch.cuda.memory_reserved(i)
        print(f"| {i} | {planned / MIB:.0f} | {first / MIB:.0f} | {last / MIB:.0f} |")
        if not is_enough(planned, last):
            problems.append(f"device {i}: the overhead is {last / MIB:.0f} MiB, planned {planned / MIB:.0f}")


def _tell_losses(plan: SplitPlan, transports: list[str], wanted: argparse.Namespace, problems: list[str]) -> None:
    """Lose a device by each transport, and soak a new context afterwards."""
    from benchmarks.reliability.lost_device import lose  # noqa: PLC0415 (needs CUDA's packages)

    print("\n| transport | rows | a lost device ends in an error after, s | a new context, wrong |\n|---|---|---|---|")
    large = {"peer": plan.request.max_rows, "host": FRAMED_ROWS}
    for transport, rows in ((way, rows) for way in transports for rows in (1, large[way])):
        loss = lose(plan, transport, rows)
        context = tpx.compile(plan, backend="cuda", transport=transport)
        with suppress(ExecutionError), context:  # what has failed says so again when it is closed
            after = soak(context, operations=CALLS, seconds=wanted.seconds, seed=wanted.seed, largest=2**20)
        print(f"| {transport} | {rows} | {loss.seconds:.1f} | {len(after.faults)} |", flush=True)
        problems += [f"{transport}: {problem}" for problem in (*loss.problems, *after.faults[:_TOLD])]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other words: soak interrupts, soak lost.")
    add = parser.add_argument
    add("--backend", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--processes", action="store_true", help="a process for each device")
    add("--devices", type=int, default=0, help="how many; by default all GPUs, or three virtual ones")
    add("--transport", choices=TRANSPORTS, default="", help="one instead of all three")
    add("--operations", type=_positive, help="of all transports together (default 1,000,000, or 3,000 virtual)")
    add("--seconds", type=float, default=3600, help="after which no round begins (default 3600)")
    add("--seed", type=int, default=1, help="of everything random (default 1)")
    add("--largest-kib", type=int, default=4096, help="of the largest tensor (default 4096)")
    add("--delays", action="store_true", help="let random GPUs be late")
    add("--calls-only", action="store_true", help="no graphs, and no look at what the driver takes")
    wanted = parser.parse_args(arguments)
    between = _between_processes(wanted.backend)
    if wanted.processes and wanted.transport and wanted.transport not in between:
        are = f"between processes with --backend {wanted.backend} there are: {', '.join(between)}"
        parser.error(f"argument --transport: invalid choice: {wanted.transport!r} ({are})")
    return wanted


def _positive(text: str) -> int:
    """Return a number of operations.

    Raises:
        argparse.ArgumentTypeError: there are none.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number above 0")
    return int(text)
