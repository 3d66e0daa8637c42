"""Agreement of the processes that own a decoder's devices on how they go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.context import TPContext


def agreed(context: TPContext, facts: Sequence[bool]) -> list[bool]:
    """Return which facts hold in all processes; each process gives as many, at the same time.

    What a process can do may depend on its devices. Whatever decides on the operations that follow, or on their rows,
    has to be the same in all processes.
    """
    return [all(each) for each in zip(*context.tell(list(facts)), strict=True)]
