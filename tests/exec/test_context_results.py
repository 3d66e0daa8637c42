"""What the operations of a context leave to their caller: results of its own, and its state as it was."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.contexts import BACKENDS, MAX_ROWS, UNEVEN, context, little_room
from tests.exec.caller import total
from tests.exec.reference import same, values
from tpplan.core.axes import Axis
from tpplan.exec.options import TRANSPORTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["little_room"]  # a fixture


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_later_call_changes_a_result(transport: str) -> None:
    """Results have memory of their own: what any other operation writes is elsewhere."""
    random = Random(7)
    with context(UNEVEN, transport) as ctx:
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(3):
            for rows in (1, MAX_ROWS):
                x, r = values((rows,), 40, torch.bfloat16, random), values((rows,), 40, torch.bfloat16, random)
                parts = ctx.scatter(x, Axis.RESIDUAL)
                results = [
                    *ctx.broadcast(x),
                    *parts,
                    *ctx.allgather(parts, Axis.RESIDUAL),
                    ctx.gather(parts, Axis.RESIDUAL).tensor,
                ]
                results += ctx.all_reduce([x, r, x], [r, r, r])
                kept += [(result, result.clone()) for result in results]
                ctx.copy_pinned(0, r)
                ctx.begin_scratch()
                for slot in ctx.scratch(rows, Axis.RESIDUAL, full=True):
                    slot.fill_(1)
        assert all(same(result, truth) for result, truth in kept)
        storages = [result.untyped_storage().data_ptr() for result, _ in kept]
        assert len({*storages}) == len(storages)


@pytest.mark.parametrize("inference", [False, True])
def test_results_are_the_callers(inference: bool) -> None:
    """Results have no history, may be written to, and may take part in autograd if the caller's mode allows it."""
    with context(UNEVEN, "host") as ctx, torch.inference_mode(inference):
        x = torch.randn(3, 40).requires_grad_(not inference)
        parts = ctx.scatter(x, Axis.RESIDUAL)
        results = [*parts, *ctx.broadcast(x), *ctx.all_reduce([x, x, x]), ctx.gather(parts, Axis.RESIDUAL).tensor]
        for result in results:
            assert result.grad_fn is None
            assert result.is_leaf
            assert result.is_inference() == inference
            result.add_(1)
            if not inference:
                (slope,) = torch.autograd.grad(result.requires_grad_().sum(), result)
                assert (slope == 1).all()


def state() -> tuple[object, ...]:
    """Return what torch keeps for each thread."""
    cuda = (torch.cuda.current_device(), torch.cuda.current_stream()) if torch.cuda.is_available() else ()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    return (*modes, torch.get_default_device(), torch.get_num_threads(), torch.random.get_rng_state().tolist(), *cuda)


@pytest.mark.parametrize("seed", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_no_call_changes_the_callers_state(mode: type, default: str, seed: int | None) -> None:
    """The current device, stream and modes are what they were, and none of them changes what a call does."""
    x = torch.randn(MAX_ROWS, 40)
    with mode(), torch.device(default):
        before = state()
        ctx = context(UNEVEN, "host", seed)
        parts = ctx.scatter(x, Axis.RESIDUAL)
        results = [*ctx.broadcast(x), *ctx.allgather(parts, Axis.RESIDUAL), ctx.gather(parts, Axis.RESIDUAL).tensor]
        sums = ctx.all_reduce([x, x, x], [x, x, x])
        ctx.add_residual(ctx.scratch(MAX_ROWS, Axis.RESIDUAL, dtype=torch.float32), parts, Axis.RESIDUAL)
        ctx.copy_pinned(1, x)
        ctx.synchronize()
        ctx.close()
        assert state() == before
    assert all(same(result, x) for result in results)
    assert all(same(result, total(x, x, x, x)) for result in sums)


def test_zero_rows_move_nothing() -> None:
    """Tensors without rows are checked like others, and give results without rows."""
    with context(UNEVEN, "events") as ctx:
        empty = torch.empty(0, 40, dtype=torch.bfloat16)
        assert [y.shape for y in ctx.broadcast(empty)] == [(0, 40)] * 3
        handle = ctx.gather(ctx.scatter(empty, Axis.RESIDUAL), Axis.RESIDUAL)
        assert handle.done()
        assert handle.tensor.shape == (0, 40)
        assert ctx.all_reduce([empty] * 3, [empty] * 3)[0].shape == (0, 40)
