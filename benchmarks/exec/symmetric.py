"""torch's symmetric memory: its all-reduces, and gathering by copies from the other processes' memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import distributed
from torch.distributed import _symmetric_memory as symm_mem

from benchmarks.exec.contender import DTYPE, Case, Contender

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

_ONE_SHOT, _TWO_SHOT = "symm_mem one-shot", "symm_mem two-shot"


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

    def __init__(self, place: torch.device, elements: int) -> None:
        """Allocate a symmetric tensor of so many elements, and an ordinary one."""
        if symm_mem.get_backend(place) != "CUDA":  # which may be none that can be set, but is the one by default
            symm_mem.set_backend("CUDA")
        self._group = distributed.distributed_c10d._get_default_group().group_name  # noqa: SLF001
        self._operand = symm_mem.empty(elements, dtype=DTYPE, device=place).zero_()
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
            part.copy_(self._handle.get_buffer(process, operand.shape, DTYPE))
        self._handle.barrier()
        return result
