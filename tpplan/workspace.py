"""The workspace: every buffer that the executor allocates on a device.

The planner, the rules and the executor share this arithmetic, which is why the ledger's workspace is exact.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tpplan.axes import Axis, unit_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.plan import Request, Split

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Every buffer starts at a multiple of this.
ALIGNMENT = 64
#: Flags, epochs and the slots of small exchanges, on every device in use.
CONTROL_BYTES = 8 * 2**20
#: Buffers of ``max_rows`` rows per axis: how many as wide as the device's slice, for the layer in flight (queries and
#: attention output share one; keys and values; gate and up).
SLICE_BUFFERS = {Axis.Q: 1, Axis.KV: 2, Axis.ID: 2, Axis.EX: 2, Axis.SX: 2}
#: Buffers as wide as the residual stream, on every device in use: the stream, its normed copy, and an exchange.
FULL_BUFFERS = 3
LOGIT_BYTES = 4


def align(size: int) -> int:
    """Round a buffer's bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def unit_workspace(axis: Axis, unit: int, width: int, group: int, dtype: str, *, request: Request) -> int:
    """Return the bytes of workspace per unit of an axis; a ragged unit takes as much as a whole one."""
    item = ITEM_BYTES[dtype]
    if axis is Axis.VC:
        return align(request.batch * unit * LOGIT_BYTES)
    wide = align(request.max_rows * unit * width * item)
    queries = align(request.max_rows * unit * group * width * item)
    return SLICE_BUFFERS.get(axis, 0) * wide + (SLICE_BUFFERS[Axis.Q] * queries if axis is Axis.KV else 0)


def common_workspace(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    """Return the bytes of workspace that every device in use has, whatever it holds.

    Args:
        splits: axis, size and width of every split, query heads included.
        dtype: of the activations.
        request: its ``max_rows`` and layout. ``gather`` also needs the whole input of the matrices that are cut by
            residual columns: one buffer as wide as the widest of them.
    """
    row = request.max_rows * ITEM_BYTES[dtype]
    hidden = max((size for axis, size, _ in splits if axis is Axis.RS), default=0)
    inputs = max((size * width for axis, size, width in splits if axis in SLICE_BUFFERS), default=0)
    gathered = align(row * inputs) if request.layout == "gather" else 0
    return CONTROL_BYTES + FULL_BUFFERS * align(row * hidden) + gathered


def workspace_bytes(splits: Sequence[Split], dtype: str, request: Request) -> tuple[int, ...]:
    """Return the bytes that the executor allocates on each device; 0 where a device holds no part of any axis.

    The planner, the rules and the executor all use this arithmetic, so that the ledger's workspace is exact.
    """
    groups = {s.layers: s.size for s in splits if s.axis is Axis.Q}
    common = common_workspace([(s.axis, s.size, s.width) for s in splits], dtype, request)
    totals = [0] * (len(splits[0].bounds) - 1)
    used = [False] * len(totals)
    for split in splits:
        group = groups[split.layers] // split.size if split.axis is Axis.KV else 0
        each = 0 if split.axis is Axis.Q else unit_workspace(
            split.axis, split.unit, split.width, group, dtype, request=request
        )  # fmt: skip
        for device, (start, end) in enumerate(pairwise(split.bounds)):
            totals[device] += each * unit_count(end - start, split.unit)
            used[device] |= end > start
    return tuple(total + common if use else 0 for total, use in zip(totals, used, strict=True))
