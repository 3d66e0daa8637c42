"""Operations beside peers: what results are right, that wrong ones are found, and how they are told."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

from tests.contexts import ALONE
from tpplan import exec as tpx
from tpplan.exec.tools.bench.between import turns
from tpplan.exec.tools.bench.between.case import OPERATIONS, Case, Contender
from tpplan.exec.tools.bench.between.peers import Nccl
from tpplan.exec.tools.bench.between.turns import Turns
from tpplan.exec.tools.bench.between.worker import measure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


def _cases(operation: str, widths: tuple[int, ...]) -> list[Case]:
    """Return the case of each process, with its residual filled."""
    cases = [Case(operation, 2, widths, process, place=CPU) for process in range(len(widths))]
    for case in cases:
        case.refill()
    return cases


def _given(case: Case) -> torch.Tensor:
    assert case.given is not None
    return case.given.double()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_sums_are_those_of_all_operands(count: int) -> None:
    """Of one call and of many in place, with and without a residual; beyond the dtype's range they are infinite."""
    plain, more = (_cases(operation, (4,) * count) for operation in ("all_reduce", "all_reduce with residual"))
    total = sum((_given(case) for case in plain[1:]), _given(plain[0]))
    assert torch.equal(plain[0].expected(1).double(), total)
    assert torch.equal(plain[1].expected(3).double(), (total * count**2).bfloat16().double())
    assert torch.equal(plain[1].expected(200).isinf(), total != 0)
    with_more = sum((_given(case) for case in more[1:]), _given(more[0]))
    for case in more:
        assert case.residual is not None
        assert case.residual.abs().max() > 0
        once = with_more + case.residual.double()
        assert torch.equal(case.expected(1).double(), once)
        assert torch.equal(case.expected(100).double(), count * once + case.residual.double())


def test_parts_make_the_whole() -> None:
    """Of an allgather of uneven parts, also as a collective of even ones leaves them; a broadcast has one source."""
    cases = _cases("allgather", (3, 1, 2))
    whole = cases[0].expected(5)
    assert torch.equal(torch.cat([_given(case) for case in cases], 1), whole.double())
    gathered = torch.full((3, 2, 3), 9.0)
    for case, part in zip(cases, gathered, strict=True):
        part[:, : case.widths[case.process]] = _given(case)
        assert torch.equal(whole[:, case.columns()].double(), _given(case))
    assert torch.equal(cases[1].assembled(gathered.view(6, 3)), whole.float())
    scattered = _cases("scatter", (3, 1, 2))
    assert torch.equal(torch.cat([case.expected(2) for case in scattered], 1).double(), _given(scattered[0]))
    assert torch.equal(scattered[0].assembled(scattered[0].cut(whole)), whole)
    source, *others = _cases("broadcast", (3, 3))
    assert torch.equal(_given(source), source.expected(7).double())
    assert [case.given for case in others] == [None]


def test_a_wrong_result_is_found() -> None:
    """One element, whatever was in the result before."""
    (case,) = _cases("all_reduce", (4,))
    operand, result = torch.zeros(2, 4).bfloat16(), torch.zeros(2, 4).bfloat16()
    error = 0

    def call() -> torch.Tensor:
        result.copy_(operand)
        result[1, 2] += error
        return result

    contender = Contender(who="copy", operand=operand, call=call)
    contender.check(case, call, 1, lambda: None)
    assert not operand.any()
    error = 1
    with pytest.raises(ValueError, match="1 of 8 elements are wrong"):
        contender.check(case, call, 1, lambda: None)
    lazy = Contender(who="lazy", operand=operand, call=lambda: result)
    with pytest.raises(ValueError, match="8 of 8 elements are wrong"):
        lazy.check(case, lazy.call, 1, lambda: None)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make this process a group."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_peer_that_is_wrong_or_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And told with its reason; the others are timed."""

    def broken(self: Nccl, case: Case) -> Iterator[Contender]:
        operand = self._operand[: 2 * case.widths[0]].view(2, -1)

        def fail() -> torch.Tensor:
            raise OSError("no\nlink")

        yield Contender(who="NCCL", operand=operand, call=lambda: operand + 1, in_place=True)
        yield Contender(who="symm_mem one-shot", operand=operand, call=fail)

    monkeypatch.setattr(Nccl, "contenders", broken)
    monkeypatch.setitem(turns._PEERS, "cpu", turns._PEERS["cuda"])
    with tpx.compile(ALONE, backend="cpu", group=distributed.group.WORLD, scratch=False) as ctx:
        found = Turns(ctx, CPU, 2, rounds=2).measured("all_reduce", 2)
    assert (found.rows, found.payload_bytes) == (2, 2 * 16 * ctx.dtype.itemsize)
    (ours, *others) = found.timed
    assert ours.by == "tpplan"
    assert ours.time is not None
    assert ours.time.low_ns <= ours.time.median_ns <= ours.time.high_ns
    reasons = {each.by: each.failed for each in others if each.time is None}
    assert reasons["NCCL"] == "ValueError: 32 of 32 elements are wrong"
    assert reasons["symm_mem one-shot"] == "OSError: no link"
    assert "gloo" in reasons["NCCL window"]
    assert reasons["symm_mem two-shot"].startswith("RuntimeError: SymmetricMemory")


@pytest.mark.usefixtures("alone")
def test_windows_are_taken_back_once_all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the group is still there: NCCL crashes if it ends with some."""
    done: list[str] = []

    class Windows(Nccl):
        def contenders(self, case: Case) -> Iterator[Contender]:
            done.append(case.operation)
            return super().contenders(case)

        def close(self) -> None:
            done.append("closed" if distributed.is_initialized() else "too late")

    monkeypatch.setattr(turns, "Window", Windows)
    monkeypatch.setitem(turns._PEERS, "cpu", (Windows,))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)  # which would end the tests
    with tpx.compile(ALONE, backend="cpu", group=distributed.group.WORLD, scratch=False) as ctx:
        measure(ctx, CPU, [2], 2)
    assert done == [*OPERATIONS, "closed"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fails", [False, True])
def test_windows_that_not_all_have_are_taken_back(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Where another process cannot register its own, a communicator would end with this one's; once, where it has."""
    done: list[str] = []

    class Windows(Nccl):
        who = "NCCL window"
        WAYS = dict.fromkeys(OPERATIONS, (who,))

        def __init__(self, *arguments: Any) -> None:
            if fails:
                raise OSError("no window here")
            super().__init__(*arguments)

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(turns, "Window", Windows)
    monkeypatch.setitem(turns._PEERS, "cpu", (Windows,))
    with tpx.compile(ALONE, backend="cpu", group=distributed.group.WORLD, scratch=False) as ctx:
        with monkeypatch.context() as patch:
            patch.setattr(turns, "all_of", lambda own: [own, "no window there"])
            found = Turns(ctx, CPU, 2, rounds=2)
        reasons = {each.by: each.failed for each in found.measured("all_reduce", 2).timed if each.failed}
        found.close()
    assert reasons == {"NCCL window": "OSError: no window here" if fails else "no window there"}
    assert done == ([] if fails else ["closed"])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("off", [False, True])
def test_sums_of_sums_are_rounded_where_they_have_to(count: int, off: bool) -> None:
    """As many as a decoding step has: exact between two processes, rounded between three."""
    cases = [Case("all_reduce", 4, (8,) * count, process, place=CPU) for process in range(count)]
    operand = torch.zeros(4, 8 * count).bfloat16()

    def run() -> torch.Tensor:
        total = sum((_given(case) for case in cases[1:]), _given(cases[0])).bfloat16()
        for _ in range(64):
            total = (count * total.float()).bfloat16()
        total[3, 5] *= 1 + 3 * off
        return total

    contender = Contender(who="sums", operand=operand, call=run, in_place=True)
    if off:
        with pytest.raises(ValueError, match="1 of"):
            contender.check(cases[0], run, 65, lambda: None)
    else:
        contender.check(cases[0], run, 65, lambda: None)
