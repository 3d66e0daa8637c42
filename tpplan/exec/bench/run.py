"""How long a compiled plan's operations take on this machine, beside others who do the same."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import evolve
from torch.cuda import nccl

from tpplan.bench_report import BenchReport, Measured, Timed
from tpplan.errors import DeviceError, ExecutionError, RequestError, TpplanError
from tpplan.exec.bench import limits as bench_limits
from tpplan.exec.bench.case import Cases
from tpplan.exec.bench.clock import Clock, Run
from tpplan.exec.bench.even import EVEN, SLICED, even_context
from tpplan.exec.bench.peers import OURS, contenders
from tpplan.exec.explain import IN_GRAPH
from tpplan.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tpplan.bench_report import Limit
    from tpplan.exec.bench.peers import Contender
    from tpplan.exec.context import TPContext

#: Payloads in bytes where nobody says which.
_USUAL = (8 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 1000
#: Keeps NCCL from copies between GPUs; read when it first does something.
_NO_LINKS = "NCCL_P2P_DISABLE"


def bench(
    make: Callable[[str], TPContext],
    transport: str,
    *,
    sizes: Sequence[int],
    rounds: int,
    busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    told: Callable[[BenchReport], None] = lambda _: None,
) -> BenchReport:
    """Time every operation of a compiled plan, and others who do the same, whose results are compared first.

    What fails is told in its place in the report: it does not end the rest. Where tpplan goes through the host's
    memory, so does NCCL, if it was not used in this process before, nor the environment says otherwise.

    Args:
        make: compiles a plan for a transport.
        transport: to be timed, or ``auto``.
        sizes: payloads in bytes, which are rounded up to whole rows of the residual stream; if empty 8 KiB, 64 KiB,
            1 MiB and 16 MiB, as far as the plan has room for as many rows.
        rounds: in which all take turns, at least 2.
        busy: told what is being timed, for as long as it takes.
        told: told the report as far as it is, whenever an operation has all of its sizes.

    Raises:
        RequestError: the plan has room for none of the sizes.
        TpplanError: the plan cannot be compiled.
    """
    with _undisturbed(), ExitStack() as stack:
        context = make(transport)
        _closed_by(stack, context)
        cases = Cases(context)
        notes: list[str] = []
        counts = sorted({-(-size // cases.row_bytes) for size in sizes or _USUAL})
        if not sizes:
            counts = _with_room(counts, cases, notes.append)
        _check_room(counts, cases)
        limits: tuple[Limit, ...] = ()
        try:
            with busy("measuring the links"):
                limits = bench_limits.measure({i: device.device for i, device in context.devices.items()})
        except Exception as error:  # noqa: BLE001 (whatever it is, operations can be timed without)
            notes.append(f"no limits were measured: {_reason(error)}")
        even = None
        try:
            if made := even_context(context):
                _closed_by(stack, made)
                even = Cases(made)
        except Exception as error:  # noqa: BLE001 (the same)
            notes.append(f"even slices were not timed: {_reason(error)}")
        if cases.places[0].type == "cuda":
            notes += _unlinked(cases.explanation.transport)
        report = _head(cases, even, rounds, limits, notes)
        turns = _Turns(cases, even, limits, Clock(cases.places, rounds))
        for name in cases.makers:
            measured = []
            for rows in counts:
                with busy(f"timing {name} of {format_bytes(rows * cases.row_bytes)}"):
                    measured.append(turns.measured(name, rows))
            report = evolve(report, measured=(*report.measured, *measured))
            told(report)
        return report


def _with_room(counts: list[int], cases: Cases, note: Callable[[str], None]) -> list[int]:
    """Leave out numbers of rows that the plan has no room for; of none, take the most that it has."""
    most = cases.context.max_rows
    found = [rows for rows in counts if rows <= most]
    if len(found) < len(counts):
        left = ", ".join(format_bytes(rows * cases.row_bytes) for rows in counts[len(found) :])
        note(f"{left} left out: the plan has room for {most} rows, {format_bytes(most * cases.row_bytes)}")
    return found or [most]


def _check_room(counts: list[int], cases: Cases) -> None:
    """Refuse numbers of rows, ascending, none of which the plan has room for.

    Raises:
        RequestError: it has not.
    """
    most, least = cases.context.max_rows, counts[0]
    if least > most:
        takes = f"{format_bytes(least * cases.row_bytes)} takes {least} rows"
        message = f"none of --sizes fits: {takes}, the plan has room for {most}, {format_bytes(most * cases.row_bytes)}"
        raise RequestError(message, "leave out --sizes for those that fit, or plan with more --max-rows")


def _closed_by(stack: ExitStack, context: TPContext) -> None:
    """Close a context in the end, whatever it says then: that a device waited in vain is told where it did."""

    def close() -> None:
        with suppress(ExecutionError):
            context.close()

    stack.callback(close)


def _head(cases: Cases, even: Cases | None, rounds: int, limits: tuple[Limit, ...], notes: list[str]) -> BenchReport:
    """Return a report without times."""
    devices, is_cuda = cases.context.devices, cases.places[0].type == "cuda"
    names = [torch.cuda.get_device_name(each.device) if is_cuda else each.name for each in devices.values()]
    software = tuple(_software(notes.append)) if is_cuda else (f"torch {torch.__version__}",)
    return BenchReport(
        model=cases.context.plan.model.name,
        backend="cuda" if is_cuda else "cpu",
        devices=tuple(names),
        transport=cases.explanation.transport,
        dtype=cases.explanation.dtype,
        columns=cases.columns,
        slice_columns=_widths(cases),
        even_columns=_widths(even) if even else (),
        rounds=rounds,
        in_a_graph=cases.in_a_step,
        software=software,
        limits=limits,
        measured=(),
        notes=tuple(notes),
    )


def _widths(cases: Cases) -> tuple[int, ...]:
    return tuple(stop - start for _, start, stop in cases.cuts)


def checked_rounds(rounds: int) -> int:
    """Return how many rounds to measure.

    Raises:
        RequestError: too few to have a spread, or more than anybody waits for.
    """
    if not _FEWEST_ROUNDS <= rounds <= _MOST_ROUNDS:
        message = f"--rounds is {rounds}, expected {_FEWEST_ROUNDS} to {_MOST_ROUNDS}"
        raise RequestError(message, "7, the default, take about a minute")
    return rounds


def payloads(text: str) -> tuple[int, ...]:
    """Return the sizes in a list such as ``8KiB,1MiB``.

    Raises:
        RequestError: one of them is none.
    """
    try:
        return tuple(parse_bytes(size) for size in text.split(","))
    except DeviceError as error:
        message = f"--sizes: {error.message}".replace("memory size", "size")
        raise RequestError(message, "list sizes such as 8KiB,64KiB,1MiB") from error


class _Turns:
    """Times the operations of a context."""

    def __init__(self, cases: Cases, even: Cases | None, limits: tuple[Limit, ...], clock: Clock) -> None:
        self._cases = cases
        self._even = even
        self._limits = limits
        self._clock = clock
        #: By who does the operation, and whether in a graph: what to time, or why there is nothing.
        self._entries: dict[tuple[str, bool], Run | str] = {}

    def measured(self, name: str, rows: int) -> Measured:
        """Return the times of an operation by all who do it, or why there are none."""
        way, graph_way = self._cases.way(name, rows), self._cases.way(name, rows, IN_GRAPH)
        count = self._cases.in_a_graph(rows)
        how, in_graph = (f"{each.transport} {each.how}".strip() if each else "" for each in (way, graph_way))
        told = partial(
            Measured,
            operation=name,
            payload_bytes=rows * self._cases.row_bytes,
            rows=rows,
            link_bytes=rows * way.row_bytes if way else 0,
            way=how,
            graph_way=in_graph if in_graph != how else "",
            in_a_graph=count if count < self._cases.in_a_step else None,
        )
        try:
            case = self._cases.make(name, rows)
        except Exception as error:  # noqa: BLE001 (no memory, or no room in the plan: the next one may have it)
            return told(failed=_reason(error))
        self._entries = {}
        (ours, make), *others = contenders(case)
        self._prepare(ours, make, self._cases.context, count)
        if self._even and name in SLICED:
            self._prepare(EVEN, partial(_evenly, self._even, name, rows), self._even.context, count)
        for who, make in others:
            self._prepare(who, make, self._cases.context, count)
        times = self._clock.times({k: run for k, run in self._entries.items() if isinstance(run, Run)}, self._fail)
        for who, cases in ((OURS, self._cases), (EVEN, self._even)):
            try:
                if cases:
                    cases.context.synchronize()
            except TpplanError as error:  # some of tpplan's results never came
                for key in [key for key in times if key[0] == who]:
                    del times[key]
                    self._fail(key, error)
        timed = (
            Timed(by=by, graph=graph, time=times.get((by, graph)), failed=entry if isinstance(entry, str) else "")
            for (by, graph), entry in self._entries.items()
        )
        places = {i: device.device for i, device in self._cases.context.devices.items()}
        return told(least_ns=bench_limits.least_ns(case, self._limits, places), timed=tuple(timed))

    def _prepare(self, who: str, make: Callable[[], Contender], context: TPContext, count: int) -> None:
        """Note what to time of somebody whose results are right, or what failed.

        Args:
            who: it is.
            make: makes it.
            context: captures it.
            count: of operations in a graph.
        """
        key = (who, False)
        try:
            contender = make()
            contender.check(contender.call, self._clock.synchronize)
            self._entries[key] = Run(contender.call)
            if contender.captured and self._cases.places[0].type == "cuda":
                key = (who, True)
                with context.capture() as graph:
                    for _ in range(count):
                        contender.call()
                contender.check(graph.replay, self._clock.synchronize)
                self._entries[key] = Run(graph.replay, count)
        except Exception as error:  # noqa: BLE001 (of whatever library; the others may do better)
            self._fail(key, error)

    def _fail(self, key: tuple[str, bool], error: Exception) -> None:
        self._entries[key] = _reason(error)


def _evenly(cases: Cases, name: str, rows: int) -> Contender:
    """Return tpplan as it does an operation of other cases."""
    _, make = next(contenders(cases.make(name, rows)))
    return make()


def _reason(error: Exception) -> str:
    """Return an error in one line."""
    message = error.message if isinstance(error, TpplanError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())


def _unlinked(transport: str) -> Iterator[str]:
    """Tell NCCL to go without links where tpplan does, unless the environment says otherwise; yield a note if it is."""
    if transport == "host":
        os.environ.setdefault(_NO_LINKS, "1")
    if os.environ.get(_NO_LINKS) == "1":
        yield f"NCCL was told to go without links between GPUs: {_NO_LINKS}=1"


def _software(note: Callable[[str], None]) -> Iterator[str]:
    """Yield the versions of torch, CUDA and NCCL."""
    yield f"torch {torch.__version__}"
    yield f"CUDA {torch.version.cuda}"
    try:
        yield f"NCCL {'.'.join(map(str, nccl.version()))}"  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 (a torch without NCCL)
        note(f"NCCL is not here: {_reason(error)}")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave torch's threads as they were; meanwhile it works in one, as the programs of virtual devices do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
