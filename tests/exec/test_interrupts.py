"""Ctrl-C and signal handlers between any two opcodes of a context: it works on or is closed, and nothing is left."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from benchmarks.reliability.interruption import (
    CONTEXT,
    EVERYWHERE,
    FILES,
    AtOpcode,
    Blocks,
    noted_blocks,
    sees_opcodes,
    within,
)
from tests.contexts import UNEVEN, context, little_room
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

    from torch import Tensor

    from tpplan.exec.context import TPContext

__all__ = ["little_room"]  # a fixture
pytestmark = pytest.mark.skipif(not sees_opcodes(), reason="this Python shows no opcodes to trace functions")

X = torch.randn(3, 40)


class _Operation(NamedTuple):
    """An operation, and what it returns."""

    run: Callable[[TPContext], Any]
    expected: list[Tensor]

    def is_right(self, result: Any) -> bool:
        """Return whether it has returned the right tensors."""
        tensors = result if isinstance(result, tuple) else (result.tensor,)
        return len(tensors) == len(self.expected) and all(map(torch.equal, tensors, self.expected))


PARTS = [X[:, start:stop].clone() for start, stop in ((0, 11), (11, 29), (29, 40))]
OPERATIONS = {
    "broadcast": _Operation(lambda ctx: ctx.broadcast(X), [X] * 3),
    "allgather": _Operation(lambda ctx: ctx.allgather(PARTS, Axis.RESIDUAL), [X] * 3),
    "gather": _Operation(lambda ctx: ctx.gather(PARTS, Axis.RESIDUAL), [X]),
    "all_reduce": _Operation(lambda ctx: ctx.all_reduce([X, X, X]), [X + X + X] * 3),
}


@pytest.fixture(autouse=True)
def blocks() -> Iterator[Blocks]:
    """Note the memory of all contexts; no garbage collector frees it, and no thread and no open file is left."""
    before = threading.active_count(), _open_files()
    gc.disable()
    try:
        with noted_blocks() as blocks:
            yield blocks
    finally:
        gc.enable()
    assert (threading.active_count(), _open_files()) == before


def _open_files() -> int:
    descriptors = Path("/proc/self/fd")
    return len(list(descriptors.iterdir())) if descriptors.is_dir() else 0


def _elsewhere(work: Callable[[], object]) -> object:
    """Return the result of another thread, or its error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except ExecutionError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return results[0]


def _warm(operation: _Operation) -> TPContext:
    """Return a context in which the operation has run."""
    ctx = context(UNEVEN, "events")
    assert operation.is_right(operation.run(ctx))
    return ctx


def _interrupted(at: int, counts: Callable[[CodeType], bool], run: Callable[[], object]) -> str:
    """Interrupt a function at an opcode, and return where; empty if it has fewer."""
    try:
        with AtOpcode(at, counts) as tracer:
            run()
    except KeyboardInterrupt:
        assert tracer.place
    return tracer.place


def _opcodes(counts: Callable[[CodeType], bool], run: Callable[[], object]) -> list[int]:
    """Return the numbers of a function's opcodes; of one that it comes to again and again, the first and the last."""
    with AtOpcode(-1, counts) as tracer:
        run()
    first, last = dict[object, int](), dict[object, int]()
    for number, opcode in enumerate(tracer.opcodes):
        first.setdefault(opcode, number)
        last[opcode] = number
    return sorted({*first.values(), *last.values()})


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_interrupted_anywhere(name: str, blocks: Blocks) -> None:
    """The next one is right, in this thread and in another, and the context can be closed."""
    operation = OPERATIONS[name]
    ctx = _warm(operation)
    run = partial(operation.run, ctx)
    opcodes = _opcodes(EVERYWHERE, run)
    for i, at in enumerate(opcodes):
        place = _interrupted(at, EVERYWHERE, run)
        assert place
        assert operation.is_right(_elsewhere(run) if i % 2 else run()), place
        assert not ctx._guard._queue, place
    assert len(opcodes) > 500
    ctx.close()
    assert blocks.all_freed()


def test_tensors_of_an_interrupted_operation_are_not_kept() -> None:
    """Neither the guard nor a cycle holds the frame, or memory on the devices would be missing until the next call."""
    ctx, at, place = context(UNEVEN, "events"), 0, "start"
    ctx.broadcast(X)
    while place:
        x = X.clone()
        alive = weakref.ref(x)
        place = _interrupted(at, within(CONTEXT), partial(ctx.broadcast, x))
        del x
        assert alive() is None, place
        at += 1
    ctx.close()


def _try_to_close(ctx: TPContext, refusals: list[str]) -> None:
    """Close a context as a signal handler does, and note an error."""
    try:
        ctx.close()
    except ExecutionError as error:
        refusals.append(error.message)


def test_a_close_by_a_signal_handler_at_any_opcode(blocks: Blocks) -> None:
    """It ends: the context is closed, or it is refused because an operation is under way, which then is right."""
    operation, at, outcomes = OPERATIONS["broadcast"], 0, {"closed": 0, "refused": 0}
    while True:
        ctx, refusals = _warm(operation), list[str]()
        tracer = AtOpcode(at, EVERYWHERE, partial(_try_to_close, ctx, refusals))
        if message := _error_of(tracer, operation, ctx):
            assert (message, refusals) == ("the context is closed", []), tracer.place
        if not tracer.place:
            break
        assert refusals in ([], ["this thread is in an operation of the context"]), tracer.place
        outcomes["refused" if refusals else "closed"] += 1
        assert ctx._guard.closed is not bool(refusals), tracer.place
        if refusals:
            assert operation.is_right(operation.run(ctx)), tracer.place
        ctx.close()
        assert blocks.all_freed(), tracer.place
        at += 1
    ctx.close()
    assert outcomes["closed"] > 10, outcomes
    assert outcomes["refused"] > 500, outcomes


def _error_of(tracer: AtOpcode, operation: _Operation, ctx: TPContext) -> str:
    """Run an operation while something else happens, and return its error; if there is none, its result is right."""
    try:
        with tracer:
            result = operation.run(ctx)
    except ExecutionError as error:
        return error.message
    assert operation.is_right(result), tracer.place
    return ""


def test_a_call_of_another_thread_at_any_opcode() -> None:
    """It is right or refused; never does it come in between, or drop the turn of the one that is running."""
    operation, at, outcomes = OPERATIONS["broadcast"], 0, {"right": 0, "refused": 0}
    ctx = _warm(operation)
    run = partial(operation.run, ctx)
    while True:
        found: list[Any] = []
        tracer = AtOpcode(at, EVERYWHERE, lambda found=found: found.append(_elsewhere(run)))  # type: ignore[misc]
        assert not _error_of(tracer, operation, ctx), tracer.place
        if not tracer.place:
            break
        is_refused = isinstance(found[0], ExecutionError)
        if is_refused:
            assert found[0].message == "another thread is using this context", tracer.place
        else:
            assert operation.is_right(found[0]), tracer.place
        outcomes["refused" if is_refused else "right"] += 1
        at += 1
    ctx.close()
    assert outcomes["right"] > 10, outcomes
    assert outcomes["refused"] > 500, outcomes


def test_a_close_by_another_thread_at_any_opcode(blocks: Blocks) -> None:
    """It waits for a running operation, which is right; one that begins later is refused."""
    operation, at = OPERATIONS["broadcast"], 0
    while True:
        ctx = _warm(operation)
        thread = threading.Thread(target=ctx.close, daemon=True)
        tracer = AtOpcode(at, within(CONTEXT), partial(_start_to_close, thread, ctx))
        assert _error_of(tracer, operation, ctx) in ("", "the context is closed"), tracer.place
        if not tracer.place:
            break
        thread.join(20)
        assert not thread.is_alive(), tracer.place
        assert blocks.all_freed(), tracer.place
        at += 5  # a thread for each, and half a millisecond of waiting
    assert at > 500
    ctx.close()


def _start_to_close(thread: threading.Thread, ctx: TPContext) -> None:
    """Start a thread that closes a context, and return when no operation can begin any more."""
    thread.start()
    while not ctx._guard.closed:
        pass


@pytest.mark.parametrize("transport", ["events", "host"])
def test_a_close_interrupted_anywhere(transport: str, blocks: Blocks) -> None:
    """The context is closed or works, another close frees what is left, and further ones do nothing."""
    operation, at, place = OPERATIONS["allgather"], 0, "start"
    while place:
        ctx = context(UNEVEN, transport)
        operation.run(ctx)
        place = _interrupted(at, EVERYWHERE, ctx.close)
        if ctx._guard.closed:
            with pytest.raises(ExecutionError, match="the context is closed"):
                operation.run(ctx)
        else:
            assert operation.is_right(operation.run(ctx)), place
        _elsewhere(ctx.close) if at % 2 else ctx.close()
        ctx.close()
        assert blocks.all_freed(), place
        at += 1
    assert at > 300


def test_a_close_within_a_close(blocks: Blocks) -> None:
    """A signal handler that closes a context while it is closed already ends, and so does the first."""
    at, place = 0, "start"
    while place:
        ctx, refusals = _warm(OPERATIONS["broadcast"]), list[str]()
        with AtOpcode(at, EVERYWHERE, partial(_try_to_close, ctx, refusals)) as tracer:
            ctx.close()
        place = tracer.place
        assert refusals in ([], ["this thread is in an operation of the context"]), place
        assert blocks.all_freed(), place
        at += 1
    assert at > 300


def test_a_compile_interrupted_anywhere(blocks: Blocks) -> None:
    """Also between its return and the beginning of the ``with`` block, and inside and at the end of that.

    Of the functions that only check the plan and count, each is interrupted a few times; all of their opcodes are in
    ``python -m benchmarks.soak interrupts``.
    """

    def use() -> None:
        with compile_plan(UNEVEN, backend="cpu") as ctx:
            ctx.devices_of(None)

    use()
    assert blocks.all_freed()
    names = "compiler build context memory/device memory/host memory/arena"
    files = [f"{CONTEXT}/{name}.py" for name in (*names.split(), "backends/cpu")]
    assert all(Path(file).is_file() for file in files)
    for counts, step in (
        ((lambda code: code is use.__code__ or code.co_filename in files), 1),
        (EVERYWHERE, 31),
    ):
        opcodes = _opcodes(counts, use)
        assert len(opcodes) > 1000
        for at in opcodes[::step]:
            place = _interrupted(at, counts, use)
            assert place
            assert blocks.all_freed(), place
    use()
    assert blocks.all_freed()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # an interrupt may come before the with block
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of that warning
@pytest.mark.parametrize("old", [True, False])
def test_a_save_interrupted_anywhere(tmp_path: Path, *, old: bool) -> None:
    """The old file or the new one is there, whole, and neither a temporary file nor a new folder without it."""
    new = tmp_path / "new.json"
    UNEVEN.save(new)
    text = new.read_text()
    new.unlink()
    path, at = tmp_path / "folder" / "plan.json", 0
    counts = within(FILES)
    while True:
        if old:
            path.parent.mkdir(exist_ok=True)
            path.write_text("old")
        place = _interrupted(at, counts, lambda: UNEVEN.save(path))
        if path.exists():
            assert path.read_text() in (["old", text] if old else [text]), place
            assert list(path.parent.iterdir()) == [path], place
            path.unlink()
            path.parent.rmdir()
        else:
            assert not old, place
        assert not list(tmp_path.iterdir()), place
        if not place:
            break
        at += 1
    assert at > 150
