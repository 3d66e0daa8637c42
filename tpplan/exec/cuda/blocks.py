"""The number of blocks that a kernel may have so that those of all devices run at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.exec.protocol.words import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Collection

#: Blocks of a slot, frame and straight kernel that a multiprocessor has room for; a straight one has many registers.
SLOT_BLOCKS, FRAME_BLOCKS, DIRECT_BLOCKS = 4, 4, 1


def most_blocks(places: Collection[torch.device], per_processor: int, others: Collection[int] = ()) -> int:
    """Return the maximum number of blocks of an exchange kernel, the same on all devices.

    One multiprocessor is left free: if two contexts reach two GPUs in different orders, a block without room would wait
    for one that waits for it.

    Args:
        places: torch device for each device of the plan in use; devices on the same GPU share its multiprocessors.
        per_processor: blocks that a multiprocessor has room for.
        others: multiprocessors of each GPU of another process.
    """
    processors = (torch.cuda.get_device_properties(place).multi_processor_count for place in places)
    shares = [(count - 1) // list(places).count(place) for count, place in zip(processors, places, strict=True)]
    shares += [count - 1 for count in others]
    return max(1, min(BLOCKS, min(shares, default=1) * per_processor))
