"""Room: the bytes of a device's scratch that a pass does not need for what it keeps, and pieces that fit in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.axes import Axis
from tpplan.workspace import ALIGNMENT, LOGIT_BYTES, areas

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpplan.exec.context import TPContext

#: Larger pieces of what could take any amount of memory are not faster.
MOST: Final = 2**25
#: Tensors of a piece that begin at a multiple of the alignment, at most.
_TENSORS: Final = 32


@frozen
class Room:
    """Memory of a device that is free for now.

    Attributes:
        size_bytes: of it; less than 0 if more is taken than there is.
    """

    size_bytes: int

    def less(self, size_bytes: int) -> Room:
        """Return what is left when something takes so many bytes."""
        return Room(self.size_bytes - size_bytes)

    def count(self, each: int) -> int:
        """Return how many things of so many bytes there is room for, one at least."""
        return max(1, (self.size_bytes - _TENSORS * ALIGNMENT) // each)

    def pieces(self, count: int, each: int) -> list[slice]:
        """Cut things of so many bytes each into pieces that there is room for, of one at least."""
        if count * each <= self.size_bytes:
            return [slice(0, count)]
        most = self.count(each)
        return [slice(first, min(first + most, count)) for first in range(0, count, most)]

    def by_rows(self, count: int, each: int, result: int, find: Callable[[slice], Tensor]) -> Tensor:
        """Return what is found for rows: at once, or piece by piece where there is too little room.

        Args:
            count: of the rows.
            each: bytes that it takes to find one, what is found included.
            result: bytes of what is found for one.
            find: what to find for some of them.
        """
        if count * each <= self.size_bytes:
            return find(slice(0, count))
        out: Tensor | None = None
        for some in self.less(count * result).pieces(count, each):
            new = find(some)
            if out is None:
                out = new.new_empty(count, *new.shape[1:])
            out[some] = new
            del new
        assert out is not None  # noqa: S101 (there is a row)
        return out


#: Where nobody counts.
AMPLE: Final = Room(2 * MOST)


def rooms_of(context: TPContext) -> dict[int, Room]:
    """Return the scratch of each device in use, but for what the plan counts for logits there."""
    plan = context.plan
    found = areas(plan.splits, plan.model.dtype, plan.request)
    logits = {
        part.device: (part.end - part.start) * plan.request.batch * LOGIT_BYTES for part in context.split(Axis.VC)
    }
    return {i: Room(found[i].scratch_bytes - logits.get(i, 0)) for i in context.all_devices}
