"""Benchmark cases: one operation of one size, with its operands, results and the copies it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.core.axes import Axis
from tpplan.errors import ExecutionError
from tpplan.exec.explain import ALL, IN_GRAPH
from tpplan.reports.bench import Measured

if TYPE_CHECKING:
    from tpplan.exec.context import TPContext
    from tpplan.exec.explain import Way

#: Maximum total payload of the operations in one CUDA graph, in bytes.
_MOST_BYTES = 16 * 2**30

#: Target and source of a copy. The target is a view of a result or of a buffer to be summed, the source of an operand.
Move = tuple[Tensor, Tensor]


@frozen(kw_only=True, eq=False)
class Case:
    """One operation of one size.

    Attributes:
        operation: name of the operation.
        call: runs the operation with tpplan.
        inputs: one operand for each source device.
        residual: one residual for each device in use; empty if the operation adds none.
        outputs: results that ``call`` writes.
        expected: expected results, in host memory.
        slack: tolerance for sums that are rounded more than once, in host memory; None for operations without sums.
        moves: copies that a manual implementation needs.
        finish: computes the sums after these copies.
        captured: whether a CUDA graph can capture the operation.
    """

    operation: str
    call: Callable[[], object]
    inputs: Sequence[Tensor]
    residual: Sequence[Tensor] = ()
    outputs: Sequence[Tensor]
    expected: Sequence[Tensor]
    slack: Tensor | None = None
    moves: Sequence[Move]
    finish: Callable[[], None] = lambda: None
    captured: bool = True


class Cases:
    """Creates benchmark cases for a context, on rows of the residual stream or on its slices.

    Attributes:
        context: context of a compiled plan.
        explanation: explanation of the context.
        places: torch devices in use.
        cuts: slices of the residual stream: device, first column, end column (exclusive).
        columns: columns of a row.
        row_bytes: bytes of a row.
        in_a_step: operations in a decoding step: one to assemble the embedding and two for each layer.
        makers: functions that create a case for a number of rows, by operation name.
    """

    def __init__(self, context: TPContext) -> None:
        self.context = context
        self.explanation = context.explain()
        self.places = tuple(device.device for device in context.devices.values())
        self.cuts = tuple((s.device, s.start, s.end) for s in context.split(Axis.RESIDUAL))
        self.columns = context.plan.split(Axis.RESIDUAL).size
        self.row_bytes = self.columns * context.dtype.itemsize
        self.in_a_step = 2 * context.plan.model.layers + 1
        self.makers: dict[str, Callable[[int], Case]] = {
            "broadcast": self._broadcast,
            "allgather": self._allgather,
            "all_reduce": lambda rows: self._all_reduce(rows, residual=False),
            "all_reduce with residual": lambda rows: self._all_reduce(rows, residual=True),
            "scatter": self._scatter,
            "gather": self._gather,
        }

    def make(self, name: str, rows: int) -> Case:
        """Return the case of an operation on ``rows`` rows.

        Raises:
            ExecutionError: ``rows`` exceeds the context's maximum.
        """
        if rows > self.context.max_rows:
            message = f"takes {rows} rows, the plan has room for {self.context.max_rows}"
            raise ExecutionError(message, "plan with more --max-rows")
        return self.makers[name](rows)

    def in_a_graph(self, rows: int) -> int:
        """Return the number of operations in a CUDA graph: those of a decoding step, or fewer if they are large."""
        return max(1, min(self.in_a_step, _MOST_BYTES // (rows * self.row_bytes)))

    def way(self, name: str, rows: int, where: str = "") -> Way | None:
        """Return how the context runs an operation; None if it has no room for that many rows.

        Args:
            name: name of the operation.
            rows: rows of its tensors.
            where: empty for direct calls; ``IN_GRAPH`` of :mod:`tpplan.exec.explain` for graphs that differ from calls.
        """
        operation = name.partition(" ")[0]
        axis = ALL if operation in {"broadcast", "all_reduce"} else str(Axis.RESIDUAL)
        mine = (w for w in self.explanation.ways if w.operation == operation + where and axis in w.axes)
        return next((way for way in mine if way.first <= rows <= way.last), None)

    def untimed(self, name: str, rows: int) -> Measured:
        """Return what a report says of an operation beside its times."""
        way, graph_way = self.way(name, rows), self.way(name, rows, IN_GRAPH)
        how, in_graph = (f"{each.transport} {each.how}".strip() if each else "" for each in (way, graph_way))
        count = self.in_a_graph(rows)
        return Measured(
            operation=name,
            payload_bytes=rows * self.row_bytes,
            rows=rows,
            link_bytes=rows * way.row_bytes if way else 0,
            way=how,
            graph_way=in_graph if in_graph != how else "",
            in_a_graph=count if count < self.in_a_step else None,
        )

    def _broadcast(self, rows: int) -> Case:
        whole = self._noise(rows)
        x, outputs = whole.to(self.places[0]), self._empty(rows)
        return Case(
            operation="broadcast",
            call=lambda: self.context.broadcast(x, source=self.context.all_devices[0], out=outputs),
            inputs=(x,),
            outputs=outputs,
            expected=(whole,) * len(outputs),
            moves=[(output, x) for output in outputs],
        )

    def _scatter(self, rows: int) -> Case:
        whole = self._noise(rows)
        x = whole.to(self.places[0])
        outputs = [torch.empty_like(whole[:, a:b].contiguous(), device=self._place(d)) for d, a, b in self.cuts]
        return Case(
            operation="scatter",
            call=lambda: self.context.scatter(x, Axis.RESIDUAL, source=self.context.all_devices[0], out=outputs),
            inputs=(x,),
            outputs=outputs,
            expected=[whole[:, a:b] for _, a, b in self.cuts],
            moves=[(output, x[:, a:b]) for output, (_, a, b) in zip(outputs, self.cuts, strict=True)],
        )

    def _gather(self, rows: int) -> Case:
        whole, parts = self._parts(rows)
        pinned = self.places[0].type == "cuda"
        output = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=pinned)
        return Case(
            operation="gather",
            call=lambda: self.context.gather(parts, Axis.RESIDUAL, out=output).wait(),
            inputs=parts,
            outputs=(output,),
            expected=(whole,),
            moves=[(output[:, a:b], part) for part, (_, a, b) in zip(parts, self.cuts, strict=True)],
            captured=False,
        )

    def _allgather(self, rows: int) -> Case:
        whole, parts = self._parts(rows)
        outputs = self._empty(rows)
        return Case(
            operation="allgather",
            call=lambda: self.context.allgather(parts, Axis.RESIDUAL, out=outputs),
            inputs=parts,
            outputs=outputs,
            expected=(whole,) * len(outputs),
            moves=[(y[:, a:b], x) for y in outputs for x, (_, a, b) in zip(parts, self.cuts, strict=True)],
        )

    def _all_reduce(self, rows: int, *, residual: bool) -> Case:
        held = [self._noise(rows, seed) for seed in range(len(self.places) + residual)]
        parts, outputs = [x.to(place) for x, place in zip(held, self.places, strict=False)], self._empty(rows)
        residuals = [held[-1].to(place) for place in self.places] if residual else []
        # A manual implementation sums once in each memory; all virtual devices share one.
        near = {
            place: [x if x.device == place else torch.empty_like(x, device=place) for x in parts]
            for place in dict.fromkeys(self.places)
        }

        def finish() -> None:
            for place, addends in near.items():
                total = _sum([*addends, *[x for x in residuals if x.device == place][:1]])
                for output in (x for x in outputs if x.device == place):
                    output.copy_(total)

        right = _sum(held).to(self.context.dtype)
        return Case(
            operation="all_reduce with residual" if residual else "all_reduce",
            call=lambda: self.context.all_reduce(parts, residuals or None, out=outputs),
            inputs=parts,
            residual=residuals,
            outputs=outputs,
            expected=(right,) * len(outputs),
            slack=_sum([x.abs() for x in held]) * torch.finfo(self.context.dtype).eps * len(held),
            moves=[(y, x) for copies in near.values() for y, x in zip(copies, parts, strict=True) if y is not x],
            finish=finish,
        )

    def _noise(self, rows: int, seed: int = 0) -> Tensor:
        """Return a matrix of random elements in host memory."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, self.columns, generator=generator).to(self.context.dtype)

    def _parts(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return a random matrix in host memory, and each device's slice of it on that device."""
        whole = self._noise(rows)
        return whole, [whole[:, a:b].contiguous().to(self._place(d)) for d, a, b in self.cuts]

    def _empty(self, rows: int) -> list[Tensor]:
        """Return an uninitialised full-width matrix on each device in use."""
        return [torch.empty(rows, self.columns, dtype=self.context.dtype, device=place) for place in self.places]

    def _place(self, device: int) -> torch.device:
        return self.context.devices[device].device


def _sum(addends: Sequence[Tensor]) -> Tensor:
    """Return the float32 sum of tensors on one device."""
    total = addends[0].to(torch.float32, copy=True)
    for addend in addends[1:]:
        total += addend
    return total
