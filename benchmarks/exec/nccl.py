"""torch.distributed's collectives by NCCL: on any memory, or by its kernels for windows on memory that it registers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed

from benchmarks.exec.contender import DTYPE, OPERATIONS, Case, Contender

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor


class Nccl:
    """NCCL; gloo in processes without GPUs.

    Attributes:
        WAYS: who runs each operation.
    """

    who: ClassVar = "NCCL"
    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, (who,))

    def __init__(self, place: torch.device, elements: int) -> None:
        """Allocate the tensors for operations of up to so many elements, of which an allgather's parts are even."""
        self._operand, self._result = (torch.zeros(elements, dtype=DTYPE, device=place) for _ in range(2))

    def contenders(self, case: Case) -> Iterator[Contender]:
        """Yield the implementations of a case, as :attr:`WAYS` names them."""
        width = max(case.widths) if case.operation == "allgather" else sum(case.widths)
        operand = self._operand[: case.rows * width].view(case.rows, width)
        contender = partial(Contender, who=self.WAYS[case.operation][0], operand=operand)
        if case.operation == "allgather":
            result = self._result[: len(case.widths) * operand.numel()].view(-1, width)

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


class Window(Nccl):
    """NCCL on memory of its own, which all processes register as windows: it has kernels for these."""

    who: ClassVar = "NCCL window"
    WAYS: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(OPERATIONS, (who,))

    def __init__(self, place: torch.device, elements: int) -> None:
        """Allocate and register the tensors."""
        distributed.all_reduce(torch.zeros(1, device=place))  # a communicator has to be there
        backend: Any = distributed.distributed_c10d._get_default_group()._get_backend(place)  # noqa: SLF001
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            super().__init__(place, elements)
        backend.register_mem_pool(self._pool, symm=True)
