"""How many blocks of threads a kernel may have so that those of all devices run at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.exec.gpu.exchange_table import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Collection

#: Blocks of a slot kernel, of one for frames, and of a straight one, which has many registers, that a multiprocessor
#: has room for.
SLOT_BLOCKS, FRAME_BLOCKS, STRAIGHT_BLOCKS = 4, 4, 1


def most_blocks(places: Collection[torch.device], per_processor: int) -> int:
    """Return the most blocks of an exchange's kernel, the same on all devices.

    One multiprocessor is left free: where two contexts have come to the GPUs in different orders, a block that has room
    nowhere would wait for one that waits for it.

    Args:
        places: torch's CUDA device for each of the plan's in use; those that share one share its multiprocessors.
        per_processor: blocks that a multiprocessor has room for.
    """
    processors = (torch.cuda.get_device_properties(place).multi_processor_count for place in places)
    shares = [(count - 1) // list(places).count(place) for count, place in zip(processors, places, strict=True)]
    return max(1, min(BLOCKS, min(shares, default=1) * per_processor))
