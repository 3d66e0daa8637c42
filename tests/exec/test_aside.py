"""Operations beside other work: which ways they go, on which streams, and what is current afterwards."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from tests.contexts import CPU, UNEVEN, context, little_room  # noqa: F401 (for every test here)
from tests.exec.test_thresholds import ALL_REDUCE, ALLGATHER, BROADCAST, LIMITS
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import HOST, Gathered
from tpplan.exec.cuda import streams as gpu_aside
from tpplan.exec.cuda.streams import StreamsAside
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs import operation
from tpplan.exec.programs.lower import Mode, Route, route
from tpplan.exec.toolchain import torch_shims
from tpplan.exec.toolchain.torch_shims import leaving_processors
from tpplan.exec.tuning import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
FROM_HOST = operation.broadcast(HOST, (0, 1), 512)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("asked", "transport", "rows", "way"),
    [
        (BROADCAST, "peer", 8, Route("peer", small=True)),
        (BROADCAST, "peer", 9, Route("events")),
        (ALLGATHER, "peer", 7, Route("events")),
        (ALL_REDUCE, "peer", 4, Route("peer", small=True)),
        (ALL_REDUCE, "peer", 5, Route("events")),
        (BROADCAST, "host", 2, Route("host", small=True)),
        (BROADCAST, "host", 3, Route("host")),
        (ALLGATHER, "host", 4, Route("host")),
        (ALL_REDUCE, "host", 65, Route("host")),
        (ALL_REDUCE, "events", 1, Route("events")),
        (FROM_HOST, "peer", 1, Route("host")),
    ],
)
def test_what_no_slot_takes_is_left_to_copy_engines(
    asked: operation.Operation,
    transport: str,
    rows: int,
    way: Route,
    captured: bool,
) -> None:
    """Where kernels would send it in frames, straight, or pass it on, they would keep others from multiprocessors."""
    limits = evolve(LIMITS, frame_bytes=64 * KIB, streams=True, tuning=evolve(LIMITS.tuning, passed_on_bytes=1))
    found = route(asked, transport, rows, 2, limits, mode=Mode(captured, aside=True))
    assert found == way
    alone = route(asked, transport, rows, 2, limits)
    assert (alone == way) == (way.small or asked is FROM_HOST or transport == "events")


@pytest.mark.parametrize("seed", [None, 1, 2], ids=["plain", "adversarial", "adversarial again"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_operation_goes_beside_other_work(transport: str, seed: int | None) -> None:
    """Of any size, with the same results; what is large and does not come from the host, by other programs."""
    ways = set[Route]()
    with context(UNEVEN, transport, seed) as ctx:
        for rows in (1, 12):
            x = torch.randn(rows, 40)
            parts = [torch.randn(rows, 40) for _ in ctx.all_devices]
            pieces = [torch.randn(rows, part.end - part.start) for part in ctx.split(Axis.RESIDUAL)]
            calls: list[Callable[[], Sequence[torch.Tensor] | Gathered]] = [
                partial(ctx.broadcast, x),
                partial(ctx.broadcast, x, source=HOST),
                partial(ctx.scatter, x, Axis.RESIDUAL),
                partial(ctx.allgather, pieces, Axis.RESIDUAL),
                partial(ctx.all_reduce, parts, parts),
                partial(ctx.gather, pieces, Axis.RESIDUAL),
            ]
            for call in calls:
                alone, known = call(), set(ctx._engine._programs)
                with ctx.aside() as aside:
                    beside = call()
                aside.wait()
                ctx.synchronize()
                pairs = zip(*([x.tensor] if isinstance(x, Gathered) else x for x in (alone, beside)), strict=True)
                assert all(torch.equal(*pair) for pair in pairs)
                ways |= {way for _, way in set(ctx._engine._programs) - known}
    assert {way.transport for way in ways} == {"peer": {"events"}, "host": {"host"}}.get(transport, set())
    assert not any(way.framed or way.small for way in ways)


def test_a_block_ends_whatever_happens() -> None:
    """Also by an error; one within another does not end that, nor one that ends before another one."""
    with context(UNEVEN, "host") as ctx:
        backend = ctx._engine.backend
        with pytest.raises(KeyError), ctx.aside():
            _fail()
        assert backend.asides == 0
        first, second = ctx.aside(), ctx.aside()
        with ExitStack() as stack:
            stack.enter_context(first)
            second.__enter__()
            with pytest.raises(ExecutionError, match="this aside is open already"):
                first.__enter__()
        assert backend.asides == 1
        second.__exit__(None, None, None)
        assert backend.asides == 0
        with first:
            assert backend.asides == 1
        with pytest.raises(ExecutionError, match="that has not ended"):
            ctx.aside().wait()
        with pytest.raises(ExecutionError, match="that has not ended"), first:
            first.wait()
        first.wait()


def test_a_row_that_has_no_room_to_be_copied_goes_as_it_would_alone() -> None:
    """By any transport; what has no room there either is refused as it is alone."""
    with context(UNEVEN, "peer") as ctx:
        ctx._engine.limits = evolve(ctx._engine.limits, exchange_bytes=256)
        parts = [torch.randn(2, 2000) for _ in ctx.all_devices]
        with pytest.raises(ExecutionError, match="one row takes"):
            route(
                operation.all_reduce(2000, (0, 2, 3), (0, 2, 3), residual=False),
                "peer",
                2,
                4,
                ctx._engine.limits,
                mode=Mode(aside=True),
            )
        with ctx.aside() as aside:
            sums = ctx.all_reduce(parts)
        aside.wait()
        assert all(map(torch.equal, sums, ctx.all_reduce(parts)))
    with context(UNEVEN, "events") as ctx:
        ctx._engine.limits = evolve(ctx._engine.limits, exchange_bytes=256)
        with pytest.raises(ExecutionError, match="one row takes"), ctx.aside():
            ctx.all_reduce(parts)


def _fail() -> None:
    raise KeyError


@pytest.mark.parametrize("fails", [False, True])
def test_second_streams_are_current_in_the_block(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin behind the current ones, which go on behind them when somebody waits, whichever these are by then."""
    said: list[str] = []
    current = {0: "main 0", 1: "main 1"}

    def stream(name: str) -> Any:
        return SimpleNamespace(
            device=int(name[-1]),
            name=name,
            wait_stream=lambda other: said.append(f"{name} waits for {other.name}"),
            record_event=lambda: f"the end of {name}",
            wait_event=lambda event: said.append(f"{name} waits for {event}"),
        )

    def make_current(streams: Any) -> None:
        for each in streams:
            current[each.device] = each.name
        said.append(f"current: {', '.join(current.values())}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream(current[device]))
    monkeypatch.setattr(gpu_aside, "make_current", make_current)
    backend: Any = SimpleNamespace(asides=0)
    aside = StreamsAside(backend, [stream("second 0"), stream("second 1")])
    with suppress(KeyError), aside:
        said.append("block" * backend.asides)
        if fails:
            _fail()
    assert not backend.asides
    if fails:  # nobody else may wait
        assert said[5:] == ["main 0 waits for the end of second 0", "main 1 waits for the end of second 1"]
        del said[5:]
    current[1] = "other 1"
    aside.wait()
    assert said == [
        "second 0 waits for main 0",
        "second 1 waits for main 1",
        "current: second 0, second 1",
        "block",
        "current: main 0, main 1",
        "main 0 waits for the end of second 0",
        "other 1 waits for the end of second 1",
    ]


def test_products_leave_multiprocessors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every CUDA device, until the block ends, whatever ends it; nothing is asked where there are none."""
    told: list[tuple[int, int]] = []
    at = [torch.device("cuda", 0)]

    class On:
        """Makes a device current."""

        def __init__(self, place: torch.device) -> None:
            self.place = place

        def __enter__(self) -> None:
            at[0] = self.place

        def __exit__(self, *_: object) -> None:
            pass

    def set_target(handle: int, count: int) -> int:
        told.append((handle, count))
        return 0

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 70 + (at[0].index or 0))
    counts = SimpleNamespace(multi_processor_count=132), SimpleNamespace(multi_processor_count=84)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: counts[place.index])
    monkeypatch.setattr(torch_shims, "_sm_count_target", lambda: set_target)
    places = [torch.device("cuda", i) for i in range(2)]
    with pytest.raises(KeyError), leaving_processors(places, 8):
        _fail()
    assert told == [(70, 124), (71, 79), (70, 0), (71, 0)]
    with leaving_processors([CPU], 8):
        pass
    assert len(told) == 4


def test_a_torch_without_cublas_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it knows no CUDA, or its library is not found."""
    for version in (None, "999.1"):
        torch_shims._sm_count_target.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        with leaving_processors([torch.device("cuda", 0)], 8):
            pass
    torch_shims._sm_count_target.cache_clear()
