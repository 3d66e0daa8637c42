"""Who is beside tpplan in the bench, on which operands, and what the links leave to everybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tests.contexts import UNEVEN, little_room  # noqa: F401 (for every test here)
from tests.exec.bench.cases import RATES
from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.exec.programs.program import HOST
from tpplan.exec.tools.bench import peers as bench_peers
from tpplan.exec.tools.bench import run as bench_limits
from tpplan.exec.tools.bench.case import Case, Cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tpplan.exec.context import TPContext


@pytest.fixture
def context() -> Iterator[TPContext]:
    """Return the uneven plan, compiled."""
    with compile_plan(UNEVEN, backend="cpu") as compiled:
        yield compiled


class _Nccl:
    """NCCL, as far as it is needed here, on tensors of the CPU."""

    @staticmethod
    def broadcast(tensors: Sequence[Tensor]) -> None:
        """Copy the first one to all others."""
        for tensor in tensors[1:]:
            tensor.copy_(tensors[0])

    @staticmethod
    def all_reduce(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Add up in the inputs' own dtype, the last one first."""
        total = sum(reversed(inputs[:-1]), inputs[-1])
        for output in outputs:
            output.copy_(total)

    @staticmethod
    def all_gather(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Copy all of the inputs, which are of one size, one after another."""
        assert len({tensor.shape for tensor in inputs}) == 1
        for output in outputs:
            output.copy_(torch.cat(list(inputs)))


@pytest.mark.parametrize("operation", bench_peers._NCCL)
def test_nccl_does_the_same(operation: str, context: TPContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's results pass, rounded in another order and from even slices; a small change of them does not."""
    monkeypatch.setattr(bench_peers, "nccl", _Nccl)
    case = Cases(context).make(operation, 5)
    contender = bench_peers._NCCL[operation](case)
    contender.check(contender.call, lambda: None)

    def wrong() -> None:
        contender.call()
        contender.results[-1].flatten()[-6:-5].add_(0.5)  # no padding

    with pytest.raises(ExecutionError, match=r"result \d has 1 wrong elements of 200"):
        contender.check(wrong, lambda: None)


def test_missing_nccl_is_a_reason(context: TPContext) -> None:
    """Where torch has no NCCL, its contender fails with that when it is called, as any other may."""
    case = Cases(context).make("broadcast", 1)
    with pytest.raises((AttributeError, RuntimeError)):
        bench_peers._NCCL["broadcast"](case).call()


PLACES = {i: torch.device("cuda", i) for i in range(3)}


def _on(device: int, nbytes: int) -> Any:
    return SimpleNamespace(device=PLACES.get(device, torch.device("cpu")), nbytes=nbytes)


def _case(moves: Sequence[tuple[Any, Any]] = (), **more: Any) -> Case:
    outputs = [target for target, _ in moves] or [_on(0, 300)]
    nothing = cast("Callable[[], object]", lambda: None)
    return Case(operation="", call=nothing, inputs=(), outputs=outputs, expected=(), moves=moves, **more)


def test_the_least_time() -> None:
    """It is that of the device with the most to send or receive on its fastest link; copies can be passed on."""
    x, second = _on(0, 1000), 10**9
    moves = [(_on(i, 1000), x) for i in PLACES]
    assert bench_limits.least_ns(_case(moves), RATES, PLACES) == 10 * second
    parts = [_on(0, 100), _on(1, 600), _on(2, 300)]
    assert (
        bench_limits.least_ns(_case([(_on(i, 0), part) for i in PLACES for part in parts]), RATES, PLACES) == 9 * second
    )
    assert (
        bench_limits.least_ns(_case([(_on(HOST, 0), part) for part in parts], captured=False), RATES, PLACES)
        == 30 * second
    )
    assert bench_limits.least_ns(_case(slack=torch.zeros(1)), RATES, PLACES) == 4 * second
    assert bench_limits.least_ns(_case(moves), (), PLACES) is None
    alone = {0: PLACES[0]}
    assert bench_limits.least_ns(_case([(_on(0, 5), _on(0, 5))]), RATES, alone) is None
    assert bench_limits.least_ns(_case(slack=torch.zeros(1)), RATES, alone) is None
    assert (
        bench_limits.least_ns(_case([(_on(HOST, 0), parts[0])], captured=False), RATES, alone) == 5 * second
    )  # a single GPU, too, has a link to the host


def test_every_slice_counts(context: TPContext) -> None:
    """Operands are the plan's own slices: uneven, and none for a device that has none."""
    cases = Cases(context)
    assert [part.shape for part in cases.make("allgather", 2).inputs] == [
        (2, s.end - s.start) for s in context.split(Axis.RESIDUAL)
    ]
