"""Calls on memory that comes again: issued without being checked or prepared, and never on other memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from attrs import evolve

from tests.contexts import ALONE, UNEVEN, context
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.calls.call import Calls
from tpplan.exec.calls.repeat import Runner
from tpplan.exec.programs.lower import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tpplan.exec import TPContext
    from tpplan.exec.calls.call import Call
    from tpplan.exec.handles import Pending
    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Buffer, Program


class Backend:
    """Virtual devices that keep what they are told to issue again."""

    def __init__(self, devices: Any) -> None:
        self.devices, self.bound, self.issued, self.captures, self.asides = devices, 0, 0, False, 0
        self.names: list[str] = []

    def bind(self, program: Program, operands: Mapping[Buffer, torch.Tensor]) -> Callable[[], Pending]:
        """Return what runs the program on the same tensors."""
        self.bound += 1
        self.names.append(program.name)
        return partial(self.run, program, operands)

    def is_capturing(self) -> bool:
        """Tell what a test has set."""
        return self.captures

    def run(self, program: Program, operands: Mapping[Buffer, torch.Tensor]) -> Pending:
        """Run a program."""
        self.issued += 1
        pending: Pending = self.devices.run(program, operands)
        return pending


def _watched(ctx: TPContext) -> Backend:
    """Return the backend of a context's runner from now on."""
    found = Backend(ctx._engine.backend)
    ctx._runner = Runner(found, ctx._inflight, ctx._runner._resolvers)  # type: ignore[arg-type]
    return found


@pytest.fixture
def backend(ctx: TPContext) -> Backend:
    """Return the backend of the context's runner."""
    return _watched(ctx)


@pytest.fixture
def ctx() -> Iterator[TPContext]:
    """Return a context of virtual devices."""
    with context(UNEVEN, "peer") as made:
        yield made


def _parts(ctx: TPContext, rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(rows, part.end - part.start).to(dtype) for part in ctx.split(Axis.RESIDUAL)]


def test_in_place(ctx: TPContext, backend: Backend) -> None:
    """Sums over their own parts are prepared once, as long as the same tensors are inputs and outputs."""
    parts = [torch.ones(3, 40) for _ in ctx.all_devices]
    for times in range(4):
        ctx.all_reduce(parts, out=parts)
        assert all(torch.equal(part, torch.full((3, 40), len(parts) ** (times + 1.0))) for part in parts)
    assert backend.bound == 1
    views = [part.view(3, 40) for part in parts]  # at the same addresses, but other objects
    ctx.all_reduce(views, out=parts)
    ctx.all_reduce(parts, out=views)
    assert backend.bound == 2
    with pytest.raises(ExecutionError, match="dtype"):
        ctx.all_reduce(parts, out=[part.view(torch.int32) for part in parts])
    with pytest.raises(ExecutionError, match="dtype"):
        ctx.all_reduce([part.view(torch.int32) for part in parts], out=parts)
    ctx.all_reduce(parts, [part.clone() for part in parts], out=parts)
    assert all(torch.equal(part, parts[0]) for part in parts)


def _outputs(ctx: TPContext, rows: int) -> list[torch.Tensor]:
    return [torch.empty(rows, 40) for _ in ctx.all_devices]


def test_what_comes_again_is_issued_at_once(ctx: TPContext, backend: Backend) -> None:
    """With the contents that the memory has by then."""
    parts = _parts(ctx, 3)
    out = _outputs(ctx, 3)
    for _ in range(3):
        for part in parts:
            part.normal_()
        found = ctx.allgather(parts, Axis.RESIDUAL, out=out)
        assert all(a is b for a, b in zip(found, out, strict=True))
        assert all(torch.equal(whole, torch.cat(parts, dim=1)) for whole in out)
    assert (backend.bound, backend.issued) == (1, 3)


def test_other_memory_shapes_and_dtypes_are_other_calls(ctx: TPContext, backend: Backend) -> None:
    """Also where they begin at the same address; those that differ in shape come again, too."""
    parts, out = _parts(ctx, 4), _outputs(ctx, 4)
    copies = [part.clone() for part in parts]
    for _ in range(2):
        ctx.allgather(parts, Axis.RESIDUAL, out=out)
        ctx.allgather([part[:2] for part in parts], Axis.RESIDUAL, out=[each[:2] for each in out])
        ctx.allgather(copies, Axis.RESIDUAL, out=out)
        ctx.allgather([part[None] for part in parts], Axis.RESIDUAL, out=[each[None] for each in out])
    assert (backend.bound, backend.issued) == (4, 8)
    ctx.allgather(
        [part.view(torch.int32) for part in parts], Axis.RESIDUAL, out=[each.view(torch.int32) for each in out]
    )
    assert (backend.bound, backend.issued) == (5, 9)


def test_what_goes_beside_other_work_is_another_call(ctx: TPContext, backend: Backend) -> None:
    """On the same memory: it may go another way."""
    parts, out = _parts(ctx, 12), _outputs(ctx, 12)
    for turn in range(6):
        backend.asides = turn % 2
        ctx.allgather(parts, Axis.RESIDUAL, out=out)
    assert (backend.bound, backend.issued) == (2, 6)


def test_another_operation_on_the_same_tensors_is_another_call() -> None:
    """Also where it is asked for with the same words."""
    with context(ALONE, "peer") as ctx:
        backend = _watched(ctx)
        x, y = torch.ones(2, 16), torch.zeros(2, 16)
        ctx.gather((x,), Axis.RESIDUAL, out=y).wait()
        ctx.add_residual((y,), (x,), Axis.RESIDUAL)
    assert torch.equal(y, x + x)
    assert backend.bound == 2


def test_a_gather_that_comes_again_waits_for_what_writes_there(ctx: TPContext, backend: Backend) -> None:
    """No stream keeps it behind the one before."""
    parts, host = _parts(ctx, 3), torch.empty(3, 40)
    for _ in range(2):
        ctx.gather(parts, Axis.RESIDUAL, out=host).wait()
    earlier = Mock(done=lambda: False)
    ctx._inflight.add(host[1:2], earlier)
    ctx.gather(parts, Axis.RESIDUAL, out=host)
    earlier.wait.assert_called_once()
    assert (backend.bound, backend.issued) == (1, 3)


def test_memory_is_pinned_as_long_as_its_tensor_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write nowhere else: of other tensors in the same place it is asked again, and those go by copies."""
    asked, answer = [], [True]
    call = Calls._call

    def on_gpus(calls: Calls, what: Operation, *given: Any) -> Call:
        return evolve(call(calls, what, *given), unpinned=calls.engine.program(what, Route("local")))

    def is_pinned(tensor: torch.Tensor) -> bool:
        asked.append(tensor)
        return answer[0]

    monkeypatch.setattr(Calls, "_call", on_gpus)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    with context(UNEVEN, "peer") as ctx:
        backend = _watched(ctx)
        parts, host = _parts(ctx, 3), torch.empty(3, 40)
        for _ in range(3):
            ctx.gather(parts, Axis.RESIDUAL, out=host).wait()
        assert (backend.bound, len(asked)) == (1, 1)
        view = host[:]
        for _ in range(2):
            ctx.gather(parts, Axis.RESIDUAL, out=view).wait()
        assert (backend.bound, len(asked)) == (1, 2)
        answer[0] = False
        for whole in (host[:], host, host[:]):
            ctx.gather(parts, Axis.RESIDUAL, out=whole).wait()
        assert backend.names == ["gather by kernels of each device", "gather on each device"]
        assert backend.issued == 8


def test_what_is_captured_is_another_call(ctx: TPContext, backend: Backend) -> None:
    """It may go another way, and nothing that was made for calls is in the graph."""
    parts, out = _parts(ctx, 4), _outputs(ctx, 4)
    for backend.captures in (False, True, False, True):
        ctx.allgather(parts, Axis.RESIDUAL, out=out)
    assert (backend.bound, backend.issued) == (2, 4)


def test_what_was_refused_is_refused_again(ctx: TPContext, backend: Backend) -> None:
    """Outputs of other calls do not make up for inputs that do not fit."""
    parts = _parts(ctx, 2)
    out = _outputs(ctx, 2)
    ctx.allgather(parts, Axis.RESIDUAL, out=out)
    for _ in range(2):
        for wrong in (parts[:1], [*parts, parts[0]], parts[::-1][1:] + parts[2:]):
            with pytest.raises(ExecutionError):
                ctx.allgather(wrong, Axis.RESIDUAL, out=out)
        with pytest.raises(ExecutionError, match="shares memory"):
            ctx.allgather(parts, Axis.RESIDUAL, out=[out[0], out[0], *out[2:]])
        with pytest.raises(ExecutionError):
            ctx.allgather(parts, Axis.RESIDUAL, out=[out[0].to_sparse(), *out[1:]])
        with pytest.raises(ExecutionError, match="whole number"):
            ctx.allgather(parts, Axis.RESIDUAL, dim=True, out=out)
    assert backend.issued == 1


def test_the_same_memory_as_another_dtype_is_refused(ctx: TPContext, backend: Backend) -> None:
    """Inputs and outputs are compared, each with what they were."""
    parts, out = _parts(ctx, 2), _outputs(ctx, 2)
    ctx.allgather(parts, Axis.RESIDUAL, out=out)
    for tensors in (parts, out):
        before = tensors[1]
        tensors[1] = before.view(torch.int32)
        with pytest.raises(ExecutionError, match="int32"):
            ctx.allgather(parts, Axis.RESIDUAL, out=out)
        tensors[1] = before
    assert backend.issued == 1


def test_the_same_tensors_in_other_places_are_refused(ctx: TPContext, backend: Backend) -> None:
    """What was an input does not become an output, nor something else than a sequence one, because all is known."""
    parts, residual, out = (_outputs(ctx, 2) for _ in range(3))
    ctx.all_reduce(parts, residual, out=out)
    with pytest.raises(ExecutionError, match="one for each"):
        ctx.all_reduce(parts, residual[:-1], out=[residual[-1], *out])
    with pytest.raises(ExecutionError, match="generator"):
        ctx.all_reduce(parts, (each for each in residual), out=out)  # type: ignore[arg-type]
    assert backend.issued == 1


def test_tensors_that_were_copied_are_copied_again(ctx: TPContext, backend: Backend) -> None:
    """Those with strides, gradients or negated bits are seen anew every time."""
    for special in (
        [part.t().contiguous().t() for part in _parts(ctx, 5)],
        [part.requires_grad_() for part in _parts(ctx, 5)],
        [torch.complex(part, part).conj().imag for part in _parts(ctx, 5)],
    ):
        for _ in range(2):
            whole = ctx.allgather(special, Axis.RESIDUAL)[0]
            assert torch.equal(whole, torch.cat([part.detach() for part in special], dim=1))
    assert backend.bound == backend.issued == 6


def test_outputs_with_gradients_are_refused_where_they_are_recorded(ctx: TPContext, backend: Backend) -> None:
    """Also if they were written before, where they were not."""
    parts, out = _parts(ctx, 2), [each.requires_grad_() for each in _outputs(ctx, 2)]
    with torch.no_grad():
        ctx.allgather(parts, Axis.RESIDUAL, out=out)
    with pytest.raises(ExecutionError, match="requires grad"):
        ctx.allgather(parts, Axis.RESIDUAL, out=out)
    assert backend.issued == 1


def test_memories_do_not_add_up(ctx: TPContext, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many, one is forgotten for each that comes, and after the context's end, all are."""
    monkeypatch.setattr("tpplan.exec.calls.repeat._KEPT", 3)
    out = _outputs(ctx, 1)
    kept = [_parts(ctx, 1) for _ in range(5)]
    for i, parts in enumerate(kept, 1):
        ctx.allgather(parts, Axis.RESIDUAL, out=out)
        assert len(ctx._runner._known) == min(i, 3)
    ctx.allgather(kept[-1], Axis.RESIDUAL, out=out)
    assert backend.bound == 5
    ctx.close()
    assert not ctx._runner._known
    assert backend.issued == 6


def test_a_few_more_than_are_remembered_are_mostly_known(
    ctx: TPContext, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they take turns, too, so that the one that was not used for longest is always the next to come."""
    monkeypatch.setattr("tpplan.exec.calls.repeat._KEPT", 100)
    kept, out = [_parts(ctx, 1) for _ in range(107)], _outputs(ctx, 1)
    for _ in range(10):
        for parts in kept:
            ctx.allgather(parts, Axis.RESIDUAL, out=out)
    assert backend.bound < len(kept) * 10 / 3
    assert len(ctx._runner._known) == 100


def test_what_is_found_anew_takes_no_other_place(
    ctx: TPContext, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is of another dtype every time does not push out what else is remembered."""
    monkeypatch.setattr("tpplan.exec.calls.repeat._KEPT", 2)
    others, parts, out = _parts(ctx, 1), _parts(ctx, 1), _outputs(ctx, 1)
    ctx.allgather(others, Axis.RESIDUAL, out=out)
    for dtype in (torch.float32, torch.int32) * 5:
        ctx.allgather([part.view(dtype) for part in parts], Axis.RESIDUAL, out=[each.view(dtype) for each in out])
    assert backend.bound == 11
    ctx.allgather(others, Axis.RESIDUAL, out=out)
    assert backend.bound == 11
