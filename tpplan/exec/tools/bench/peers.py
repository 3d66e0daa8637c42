"""Implementations to compare with tpplan's operations: torch, NCCL, ExLlamaV2, and copies staged in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.cuda import nccl

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.exec.tools.bench.case import Case

#: Name of tpplan in the benchmark report.
OURS = "tpplan"


@frozen(kw_only=True, eq=False)
class Contender:
    """An implementation of an operation.

    Attributes:
        call: runs the operation.
        results: tensors that ``call`` writes and does not read.
        expected: expected first elements of the results, in host memory.
        slack: tolerance of the comparison; None for equality.
        captured: whether a CUDA graph can capture the operation.
    """

    call: Callable[[], object]
    results: Sequence[Tensor]
    expected: Sequence[Tensor]
    slack: Tensor | None = None
    captured: bool = False

    def check(self, run: Callable[[], object], synchronize: Callable[[], None]) -> None:
        """Zero the results, run ``call`` or a graph of it, and check the results.

        Raises:
            ExecutionError: a result is wrong.
        """
        for result in self.results:
            result.zero_()
        synchronize()
        run()
        synchronize()
        for i, (result, right) in enumerate(zip(self.results, self.expected, strict=True)):
            found = result.cpu().flatten()[: right.numel()].view(right.shape)
            off = found != right if self.slack is None else ~((found.float() - right.float()).abs() <= self.slack)
            if count := int(off.sum()):
                message = f"result {i} has {count} wrong elements of {right.numel()}"
                raise ExecutionError(message, "tpplan selftest says more of tpplan's own")


def contenders(case: Case) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Yield the name and the factory of each implementation of a case, tpplan first; a factory may raise."""
    plain = partial(Contender, results=case.outputs, expected=case.expected)
    yield OURS, partial(plain, call=case.call, captured=case.captured)
    yield "torch", partial(plain, call=partial(_torch, case), slack=case.slack)
    if case.inputs[0].device.type == "cpu":
        return
    if case.operation in _NCCL:
        yield "NCCL", partial(_NCCL[case.operation], case)
    if not case.captured:
        yield "ExLlamaV2", partial(_exllamav2, case)
    elif any(target.device != source.device for target, source in case.moves):
        yield "staged", lambda: plain(call=_Staged(case).run, slack=case.slack)


def _torch(case: Case) -> None:
    """Run a case with torch copies, between devices or to the host."""
    for target, source in case.moves:
        target.copy_(source, non_blocking=True)
    case.finish()
    if not case.captured:
        _wait_for(case)


def _wait_for(case: Case) -> None:
    for source in case.inputs:
        if source.device.type == "cuda":
            torch.cuda.current_stream(source.device).synchronize()


def _exllamav2(case: Case) -> Contender:
    """Gather as ExLlamaV2 does: each device writes its columns of pinned memory. Here the host also waits for them."""
    from tpplan.exec.toolchain.bindings import runtime  # noqa: PLC0415 (needs a driver)

    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def copy(stream: int, target: Tensor, source: Tensor) -> None:
        size, ends = source.element_size(), (target, source)
        places = [number for x in ends for number in (x.data_ptr(), x.stride(0) * size)]
        (error,) = runtime.cudaMemcpy2DAsync(*places, source.shape[1] * size, source.shape[0], kind, stream)
        if error != runtime.cudaError_t.cudaSuccess:
            raise ExecutionError(f"a copy failed: {error.name}", "earlier work may have failed")

    streams = [torch.cuda.Stream(source.device) for source in case.inputs]  # type: ignore[no-untyped-call]

    def call() -> None:
        for stream, (target, source) in zip(streams, case.moves, strict=True):
            copy(stream.cuda_stream, target, source)
        for stream in streams:
            stream.synchronize()

    return Contender(call=call, results=case.outputs, expected=case.expected)


class _Staged:
    """An implementation that stages each copy in pinned host memory and orders download and uploads by events."""

    def __init__(self, case: Case) -> None:
        """Allocate a pinned buffer for each source."""
        self._case = case
        self._stages = {
            id(source): (source, torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True))
            for target, source in case.moves
            if target.device != source.device
        }
        self._uploaded: list[torch.cuda.Event] = []

    def run(self) -> None:
        """Issue all copies, ordered after those of the previous run, and then the sums."""
        arrived = {}
        for key, (source, stage) in self._stages.items():
            stream = torch.cuda.current_stream(source.device)
            for event in self._uploaded:  # the previous uploads may still read the buffer
                stream.wait_event(event)
            stage.copy_(source, non_blocking=True)
            arrived[key] = stream.record_event()
        self._uploaded = []
        for target, source in self._case.moves:
            if target.device == source.device:
                target.copy_(source)
                continue
            stream = torch.cuda.current_stream(target.device)
            stream.wait_event(arrived[id(source)])
            target.copy_(self._stages[id(source)][1], non_blocking=True)
            self._uploaded.append(stream.record_event())
        self._case.finish()


def _nccl_broadcast(case: Case) -> Contender:
    (x,), results = case.inputs, case.outputs[1:]
    call = partial(nccl.broadcast, [x, *results])
    return Contender(call=call, results=results, expected=case.expected[1:], captured=True)


def _nccl_allgather(case: Case) -> Contender:
    """Allgather equal parts, as NCCL has no uneven slices; the last part may be padded."""
    whole, places = case.expected[0].flatten(), [x.device for x in case.outputs]
    each = -(-whole.numel() // len(places))
    padded = torch.nn.functional.pad(whole, (0, each * len(places) - whole.numel()))
    parts = [part.to(place) for part, place in zip(torch.split(padded, each), places, strict=True)]
    results = [torch.empty_like(padded, device=place) for place in places]
    call = partial(nccl.all_gather, parts, results)
    return Contender(call=call, results=results, expected=case.expected, captured=True)


def _nccl_all_reduce(case: Case) -> Contender:
    parts, results, residual = list(case.inputs), list(case.outputs), case.residual

    def call() -> None:
        nccl.all_reduce(parts, results)  # type: ignore[no-untyped-call]
        for result, more in zip(results, residual, strict=False):
            result.add_(more)

    return Contender(call=call, results=results, expected=case.expected, slack=case.slack, captured=True)


_NCCL: dict[str, Callable[[Case], Contender]] = {
    "broadcast": _nccl_broadcast,
    "allgather": _nccl_allgather,
    "all_reduce": _nccl_all_reduce,
    "all_reduce with residual": _nccl_all_reduce,
}
