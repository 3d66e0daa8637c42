"""The benchmark of a compiled plan's operations on this machine, against other implementations.

Beside each time stand the least time that the links allow, and the time of even slices of as many bytes.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

import torch
from attrs import evolve
from torch.cuda import nccl

from tpplan.core.axes import Axis
from tpplan.core.plan import DeviceMemory
from tpplan.core.sizes import format_bytes
from tpplan.core.workspace import workspace_bytes
from tpplan.errors import ExecutionError, RequestError, TpplanError
from tpplan.exec.compiler import compile as compile_plan
from tpplan.exec.programs.program import HOST
from tpplan.exec.tools.bench.case import Cases
from tpplan.exec.tools.bench.clock import Clock, Run, undisturbed
from tpplan.exec.tools.bench.peers import OURS, contenders
from tpplan.reports.bench import BenchReport, Limit, Measured, Timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.exec.tools.bench.case import Case
    from tpplan.exec.tools.bench.peers import Contender


_COPY_BYTES = 2**26
_COPIES = 16
_TURNS = 3


def measure(places: Mapping[int, torch.device]) -> tuple[Limit, ...]:
    """Return the bandwidth between all pairs of CUDA devices and pinned host memory, in both directions.

    Args:
        places: torch devices in use, by device index in the plan. With virtual devices the result is empty.
    """
    if any(place.type != "cuda" for place in places.values()):
        return ()
    memory = {
        HOST: torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True),
        **{i: torch.empty(_COPY_BYTES, dtype=torch.uint8, device=place) for i, place in places.items()},
    }
    return tuple(
        Limit(source=a, target=b, bytes_per_second=_rate(memory[a], memory[b])) for a, b in permutations(memory, 2)
    )


def _rate(source: torch.Tensor, target: torch.Tensor) -> int:
    """Return the bandwidth of consecutive copies in bytes per second, from the fastest turn."""
    place = source.device if source.is_cuda else target.device  # torch copies on the current stream of this device
    stream = torch.cuda.current_stream(place)
    best = float("inf")
    for _ in range(_TURNS):
        torch.cuda.synchronize(place)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return round(_COPIES * _COPY_BYTES / best)


def least_ns(case: Case, limits: Sequence[Limit], places: Mapping[int, torch.device]) -> int | None:
    """Return the time that the busiest device needs in ns, if it sends and receives only on its fastest link.

    Data sent to several devices counts once, because the receivers can forward it. For a sum over n devices, each sends
    and receives 2 (n - 1) / n of the bytes of the result. None if nothing is sent or no limit was measured.
    """
    if not limits:
        return None
    rates = {(limit.source, limit.target): limit.bytes_per_second for limit in limits}
    index = {place: i for i, place in places.items()}
    sent, received = (dict.fromkeys(places, 0) for _ in range(2))
    if case.slack is not None:
        share = 2 * (len(places) - 1) * case.outputs[0].nbytes // len(places)
        sent, received = (dict.fromkeys(places, share) for _ in range(2))
    else:
        remote = [(target, source) for target, source in case.moves if target.device != source.device]
        for target, source in remote:
            if target.device in index:
                received[index[target.device]] += source.nbytes
        for source in {id(source): source for _, source in remote}.values():
            sent[index[source.device]] += source.nbytes
    others = places if case.captured else (HOST,)
    seconds = [
        amount / max(rates[(i, j) if amounts is sent else (j, i)] for j in others if j != i)
        for amounts in (sent, received)
        for i, amount in amounts.items()
        if amount
    ]
    return round(max(seconds, default=0) * 10**9) or None


#: Name of tpplan with even slices in the benchmark report.
EVEN = "even"
#: Operations whose time depends on the slices.
SLICED = ("allgather", "scatter", "gather")


def even_context(context: TPContext) -> TPContext | None:
    """Return a context with even slices, on the same devices and transport; None if the slices are already even.

    Raises:
        ExecutionError: the devices have no room for both contexts.
    """
    plan, kind = even_plan(context.plan), context.devices[context.all_devices[0]].device.type
    if plan is None:
        return None
    return compile_plan(plan, backend=kind, transport=context.explain().transport, scratch=False)


def even_plan(plan: SplitPlan) -> SplitPlan | None:
    """Return a plan that splits the residual stream evenly between the devices that hold a part of it.

    Returns:
        A plan to run beside the given one, with only the workspace in its ledger. None if the split is already even, up
        to the size of a unit.
    """
    split = plan.split(Axis.RESIDUAL)
    widths = [stop - start for start, stop in pairwise(split.bounds)]
    count = sum(width > 0 for width in widths)
    units = -(-split.size // split.unit)
    cuts = [min(split.size, units * i // count * split.unit) for i in range(count + 1)]
    even = [stop - start for start, stop in pairwise(cuts)]
    if sorted(even) == sorted(filter(None, widths)) or not all(even):
        return None
    held = [sum(width > 0 for width in widths[:i]) for i in range(len(split.bounds))]
    bounds = tuple(cuts[i] for i in held)
    splits = tuple(evolve(each, bounds=bounds) if each is split else each for each in plan.splits)
    sizes = workspace_bytes(splits, plan.model.dtype, plan.request)
    return evolve(
        plan,
        request=evolve(plan.request, strategy="balanced"),  # the ledger of "latency" would include the bytes read
        splits=splits,
        devices=tuple(
            evolve(device, budget_bytes=size + 1, overhead_bytes=0)
            for device, size in zip(plan.devices, sizes, strict=True)
        ),
        memory=tuple(DeviceMemory(i, 0, 0, size, 0, 1) for i, size in enumerate(sizes)),
    )


#: Default payloads in bytes.
USUAL = (8 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
_VIRTUAL = "virtual devices are parts of this machine's host memory: their times say nothing about GPUs"
#: Disables peer copies in NCCL, and enables sums in NVLink's switches; NCCL reads both at its first operation.
_NO_LINKS, _NVLS = "NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE"


def bench(
    make: Callable[[str], TPContext],
    transport: str,
    *,
    sizes: Sequence[int],
    rounds: int,
    busy: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    told: Callable[[BenchReport], None] = lambda _: None,
) -> BenchReport:
    """Time each operation of a compiled plan and its other implementations, after checking their results.

    A failure is reported in its place and does not stop the rest. NCCL goes without NVLS, and with the host transport
    through the host's memory, unless this process has already used it or the environment says otherwise.

    Args:
        make: compiles a plan for a transport.
        transport: transport to time, or ``auto``.
        sizes: payloads in bytes, rounded up to whole rows of the residual stream. If empty: 8 KiB, 64 KiB, 1 MiB and
            16 MiB, as far as the plan has room for these rows.
        rounds: number of rounds in which the implementations take turns, at least 2.
        busy: returns a context that is active while the named step runs.
        told: called with the partial report after all sizes of an operation are timed.

    Raises:
        RequestError: the plan has room for none of the sizes.
        TpplanError: the plan cannot be compiled.
    """
    with undisturbed(), ExitStack() as stack:
        context = make(transport)
        _closed_by(stack, context)
        cases = Cases(context)
        notes: list[str] = []
        counts = sorted({-(-size // cases.row_bytes) for size in sizes or USUAL})
        if not sizes:
            counts = with_room(counts, cases.context.max_rows, cases.row_bytes, notes.append)
        check_room(counts, cases.context.max_rows, cases.row_bytes)
        limits: tuple[Limit, ...] = ()
        try:
            with busy("measuring the links"):
                limits = measure({i: device.device for i, device in context.devices.items()})
        except Exception as error:  # noqa: BLE001 (operations can be timed without limits)
            notes.append(f"no limits were measured: {reason(error)}")
        even = None
        try:
            if made := even_context(context):
                _closed_by(stack, made)
                even = Cases(made)
        except Exception as error:  # noqa: BLE001 (operations can be timed without it)
            notes.append(f"even slices were not timed: {reason(error)}")
        if cases.places[0].type == "cuda":
            notes += _told_nccl(cases.explanation.transport)
        report = head(cases, even, rounds, limits, notes)
        turns = _Turns(cases, even, limits, Clock(cases.places, rounds))
        for name in cases.makers:
            measured = []
            for rows in counts:
                with busy(f"timing {name} of {format_bytes(rows * cases.row_bytes)}"):
                    measured.append(turns.measured(name, rows))
            report = evolve(report, measured=(*report.measured, *measured))
            told(report)
        return report


def with_room(counts: list[int], most: int, row_bytes: int, note: Callable[[str], None]) -> list[int]:
    """Return the row counts up to the plan's maximum and note the others; if none fits, return that."""
    found = [rows for rows in counts if rows <= most]
    if len(found) < len(counts):
        left = ", ".join(format_bytes(rows * row_bytes) for rows in counts[len(found) :])
        note(f"{left} left out: the plan has room for {most} rows, {format_bytes(most * row_bytes)}")
    return found or [most]


def check_room(counts: list[int], most: int, row_bytes: int) -> None:
    """Check that a plan with a maximum of rows has room for at least one of the row counts, which are ascending.

    Raises:
        RequestError: it has room for none.
    """
    least = counts[0]
    if least > most:
        takes = f"{format_bytes(least * row_bytes)} takes {least} rows"
        message = f"none of --sizes fits: {takes}, the plan has room for {most}, {format_bytes(most * row_bytes)}"
        raise RequestError(message, "leave out --sizes for those that fit, or plan with more --max-rows")


def _closed_by(stack: ExitStack, context: TPContext) -> None:
    """Close a context with the stack and ignore its errors, as timeouts are reported where they happen."""

    def close() -> None:
        with suppress(ExecutionError):
            context.close()

    stack.callback(close)


def head(cases: Cases, even: Cases | None, rounds: int, limits: tuple[Limit, ...], notes: list[str]) -> BenchReport:
    """Return the report without measurements."""
    devices, is_cuda = cases.context.devices, cases.places[0].type == "cuda"
    names = [torch.cuda.get_device_name(each.device) if is_cuda else each.name for each in devices.values()]
    versions = tuple(_software(notes.append)) if is_cuda else (f"torch {torch.__version__}",)
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
        software=versions,
        limits=limits,
        measured=(),
        notes=tuple(notes) if is_cuda else (_VIRTUAL, *notes),
    )


def _widths(cases: Cases) -> tuple[int, ...]:
    return tuple(stop - start for _, start, stop in cases.cuts)


class _Turns:
    """Times all implementations of a context's operations."""

    def __init__(self, cases: Cases, even: Cases | None, limits: tuple[Limit, ...], clock: Clock) -> None:
        self._cases = cases
        self._even = even
        self._limits = limits
        self._clock = clock
        #: By implementation and whether it runs in a graph: the run to time, or the reason why there is none.
        self._entries: dict[tuple[str, bool], Run | str] = {}

    def measured(self, name: str, rows: int) -> Measured:
        """Return the times of an operation by all implementations, or the reason why there are none."""
        count, told = self._cases.in_a_graph(rows), partial(evolve, self._cases.untimed(name, rows))
        try:
            case = self._cases.make(name, rows)
        except Exception as error:  # noqa: BLE001 (no memory or no room in the plan; the next case may have it)
            return told(failed=reason(error))
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
            except TpplanError as error:  # some of tpplan's operations did not complete
                for key in [key for key in times if key[0] == who]:
                    del times[key]
                    self._fail(key, error)
        timed = (
            Timed(by=by, graph=graph, time=times.get((by, graph)), failed=entry if isinstance(entry, str) else "")
            for (by, graph), entry in self._entries.items()
        )
        places = {i: device.device for i, device in self._cases.context.devices.items()}
        return told(least_ns=least_ns(case, self._limits, places), timed=tuple(timed))

    def _prepare(self, who: str, make: Callable[[], Contender], context: TPContext, count: int) -> None:
        """Check an implementation and register its runs, or the error.

        Args:
            who: name of the implementation.
            make: creates it.
            context: context that captures the graph.
            count: number of operations in a graph.
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
        except Exception as error:  # noqa: BLE001 (from any library; the others may work)
            self._fail(key, error)

    def _fail(self, key: tuple[str, bool], error: Exception) -> None:
        self._entries[key] = reason(error)


def _evenly(cases: Cases, name: str, rows: int) -> Contender:
    """Return tpplan's implementation of an operation, on the even slices of ``cases``."""
    _, make = next(contenders(cases.make(name, rows)))
    return make()


def reason(error: Exception) -> str:
    """Return an error as one line of text."""
    message = error.message if isinstance(error, TpplanError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())


def _told_nccl(transport: str) -> Iterator[str]:
    """Let NCCL go without NVLS, and without peer copies as the host transport does, unless the environment decides.

    Yields:
        A note on each that it was told to go without. It reads that at its first operation in this process, which may
        have been long ago.
    """
    os.environ.setdefault(_NVLS, "0")
    if transport == "host":
        os.environ.setdefault(_NO_LINKS, "1")
    for what, name, value in (("links between GPUs", _NO_LINKS, "1"), ("NVLS", _NVLS, "0")):
        if os.environ.get(name) == value:
            yield f"NCCL was told to go without {what}, which it heeds if it was not used before: {name}={value}"


def _software(note: Callable[[str], None]) -> Iterator[str]:
    """Yield the versions of torch, CUDA and NCCL."""
    yield f"torch {torch.__version__}"
    yield f"CUDA {torch.version.cuda}"
    try:
        yield f"NCCL {'.'.join(map(str, nccl.version()))}"  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 (a torch without NCCL)
        note(f"NCCL is not here: {reason(error)}")
