"""Who runs operations between processes: tpplan, NCCL, its kernels for windows, and torch's symmetric memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed
from torch.distributed import _symmetric_memory as symm_mem

from tpplan.core.axes import Axis
from tpplan.exec.tools.bench.between.case import OPERATIONS, Case, Contender
from tpplan.exec.tools.bench.peers import OURS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.context import TPContext

_ONE_SHOT, _TWO_SHOT = "symm_mem one-shot", "symm_mem two-shot"


class Ours:
    """tpplan, which sums in place.

    Attributes:
        WAYS: who runs each operation.
    """

    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, (OURS,))

    def __init__(self, ctx: TPContext) -> None:
        """Take a context."""
        self._ctx = ctx

    def contenders(self, case: Case) -> Iterator[Contender]:
        """Yield the implementation of a case."""
        ctx = self._ctx
        (device,) = ctx.devices.values()
        new = partial(torch.zeros, case.rows, dtype=case.dtype, device=device.device)
        whole = new(sum(case.widths))
        if case.operation == "allgather":
            part = new(case.widths[case.process])
            gather = partial(ctx.allgather, [part], Axis.RESIDUAL, out=[whole])
            yield Contender(who=OURS, operand=part, call=lambda: gather()[0])
        elif case.operation in {"broadcast", "scatter"}:
            operand, source = new(sum(case.widths)), ctx.all_devices[0]
            given = operand if case.given is not None else operand.to("meta")
            if case.operation == "broadcast":
                send = partial(ctx.broadcast, given, source=source, out=[whole])
            else:
                part = new(case.widths[case.process])
                send = partial(ctx.scatter, given, Axis.RESIDUAL, source=source, out=[part])
            yield Contender(who=OURS, operand=operand, call=lambda: send()[0])
        else:
            more = None if case.residual is None else [case.residual]
            add_up = partial(ctx.all_reduce, [whole], more, out=[whole])
            yield Contender(who=OURS, operand=whole, call=lambda: add_up()[0], in_place=True)


class Nccl:
    """NCCL.

    Attributes:
        WAYS: who runs each operation.
    """

    who: ClassVar = "NCCL"
    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, (who,))

    def __init__(self, place: torch.device, elements: int, dtype: torch.dtype) -> None:
        """Allocate the tensors for operations of up to so many elements, of which a process's parts are even."""
        self._operand, self._result = (torch.zeros(elements, dtype=dtype, device=place) for _ in range(2))

    def contenders(self, case: Case) -> Iterator[Contender]:
        """Yield the implementations of a case, as :attr:`WAYS` names them."""
        count, width = len(case.widths), sum(case.widths)
        if case.operation in {"scatter", "allgather"}:  # in parts, all as wide as the widest
            width = max(case.widths)
        rows = case.rows * (count if case.operation == "scatter" else 1)
        operand = self._operand[: rows * width].view(rows, width)
        contender = partial(Contender, who=self.WAYS[case.operation][0], operand=operand)
        if case.operation == "scatter":
            part = self._result[: case.rows * width].view(-1, width)
            parts = None if case.given is None else [*operand.chunk(count)]

            def scatter() -> Tensor:
                distributed.scatter(part, parts)
                return part

            own = case.widths[case.process]
            yield contender(call=scatter, lay=case.cut, arrange=lambda written: written[:, :own])
        elif case.operation == "allgather":
            result = self._result[: count * operand.numel()].view(-1, width)

            def gather() -> Tensor:
                distributed.all_gather_into_tensor(result, operand)
                return result

            yield contender(call=gather, arrange=case.assembled)
        elif case.operation == "broadcast":

            def broadcast() -> Tensor:
                distributed.broadcast(operand, 0)
                return operand

            yield contender(call=broadcast, in_place=True)
        else:

            def add_up() -> Tensor:
                distributed.all_reduce(operand)
                return operand if case.residual is None else operand.add_(case.residual)

            yield contender(call=add_up, in_place=True)


class Gloo(Nccl):
    """Gloo, in processes without GPUs."""

    who: ClassVar = "gloo"
    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, (who,))


class Window(Nccl):
    """NCCL on memory of its own, which all processes register as windows: it has kernels for these."""

    who: ClassVar = "NCCL window"
    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, (who,))

    def __init__(self, place: torch.device, elements: int, dtype: torch.dtype) -> None:
        """Allocate and register the tensors."""
        distributed.all_reduce(torch.zeros(1, device=place))  # a communicator has to be there
        backend: Any = distributed.distributed_c10d._get_default_group()._get_backend(place)  # noqa: SLF001
        self._backend, self._pool = backend, torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            super().__init__(place, elements, dtype)
        backend.register_mem_pool(self._pool, symm=True)

    def close(self) -> None:
        """Take the windows back, once nobody uses them: a communicator that ends with some may crash."""
        self._backend.deregister_mem_pool(self._pool)


class Symmetric:
    """torch.ops.symm_mem on symmetric tensors, without multicast.

    Attributes:
        WAYS: who runs each operation.
    """

    WAYS: ClassVar[Mapping[str, Sequence[str]]] = {
        "all_reduce": (_ONE_SHOT, _TWO_SHOT),
        "all_reduce with residual": (_ONE_SHOT, _TWO_SHOT),
        "allgather": ("symm_mem low-contention", "symm_mem copies"),
    }

    def __init__(self, place: torch.device, elements: int, dtype: torch.dtype) -> None:
        """Allocate a symmetric tensor of so many elements, and an ordinary one."""
        if symm_mem.get_backend(place) != "CUDA":  # which may be none that can be set, but is the one by default
            symm_mem.set_backend("CUDA")
        self._group = distributed.distributed_c10d._get_default_group().group_name  # noqa: SLF001
        self._operand = symm_mem.empty(elements, dtype=dtype, device=place).zero_()
        self._handle = symm_mem.rendezvous(self._operand, self._group)
        self._result = torch.zeros_like(self._operand)

    def contenders(self, case: Case) -> Iterator[Contender]:
        """Yield the implementations of a case, as :attr:`WAYS` names them."""
        ops, group = torch.ops.symm_mem, self._group
        if case.operation == "allgather":
            width = max(case.widths)
            operand = self._operand[: case.rows * width].view(case.rows, width)
            low, copies = (
                partial(Contender, who=who, operand=operand, arrange=case.assembled) for who in self.WAYS["allgather"]
            )
            wait = torch.ops._c10d_functional.wait_tensor  # noqa: SLF001
            yield low(call=lambda: wait(ops._low_contention_all_gather(operand, group)))  # noqa: SLF001
            yield copies(call=partial(self._copies, case, operand))
            return
        if case.operation not in self.WAYS:
            return
        size = case.rows * sum(case.widths)
        operand, result = (x[:size].view(case.rows, -1) for x in (self._operand, self._result))

        def plus(total: Tensor) -> Tensor:
            return total if case.residual is None else total.add_(case.residual)

        yield Contender(
            who=_ONE_SHOT,
            operand=operand,
            call=lambda: plus(ops.one_shot_all_reduce_out(operand, "sum", group, result)),
        )
        yield Contender(
            who=_TWO_SHOT,
            operand=operand,
            call=lambda: plus(ops.two_shot_all_reduce_(operand, "sum", group)),
            in_place=True,
        )

    def _copies(self, case: Case, operand: Tensor) -> Tensor:
        """Copy all processes' parts on the current stream, between two barriers of the devices."""
        result = self._result[: len(case.widths) * operand.numel()].view(-1, operand.shape[1])
        self._handle.barrier()
        for process, part in enumerate(result.chunk(len(case.widths))):
            part.copy_(self._handle.get_buffer(process, operand.shape, case.dtype))
        self._handle.barrier()
        return result
