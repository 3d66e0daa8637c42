"""Sizes of the workspace (the buffers that the executor allocates on a device) and of the host memory that it pins.

The planner, the rules and the executor share this arithmetic, so the workspace in the ledger is exact. Pinned memory
belongs to the host and is in no device's ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.axes import Axis, parse_layers, slices_of, unit_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.core.plan import Request, Split

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Alignment of every buffer, in bytes.
ALIGNMENT = 64
#: The control area of every device in use: flags, epochs and the slots of small exchanges.
CONTROL_BYTES = 8 * 2**20
#: The part of the control area for flags and epochs; the rest is slots.
FLAG_BYTES = 128 * 2**10
#: Slots on devices come in pairs: one is filled while the other is read. A staging ring has room for two chunks.
PAIR = 2
#: Slots of a queue in host memory, a power of two. Before its sender sees that a message was read, it could have sent
#: enough messages to fill two or three more slots.
HOST_SLOTS = 4
#: Number of buffers per axis with ``max_rows`` rows as wide as the device's slice, for the current layer: one shared by
#: queries and attention output, keys and values, gate and up (for experts: for each that a token is routed to). For
#: linear attention: queries, keys and values, which the convolution replaces in place, the output, and its gate.
SLICE_BUFFERS = {
    Axis.Q_HEADS: 1,
    Axis.KV_HEADS: 2,
    Axis.INTERMEDIATE: 2,
    Axis.EXPERT_INTERMEDIATE: 2,
    Axis.SHARED_INTERMEDIATE: 2,
    Axis.LINEAR_HEADS: 5,
}
#: Additional buffers as wide as the queries if there is linear attention: models with it gate what attention gives. A
#: plan does not say of others whether they do; afmoe, which does, has to do without.
GATE_BUFFERS = 1
#: Buffers as wide as the residual stream, on every device in use: the stream, its normed copy, and an exchange.
FULL_BUFFERS = 3
#: Additional full buffers if there are experts: the rows that are routed to one expert.
EXPERT_BUFFERS = 1
#: Reserve for aligning the pieces of the exchange buffer.
SPARE_BYTES = 64 * 2**10
#: Number of RoPE tables: sine and cosine.
ROPE_TABLES = 2
LOGIT_BYTES = 4
#: Smallest chunk of a copy through host memory, in bytes.
CHUNK_BYTES = 2 * 2**20
#: Target number of chunks of such a copy. Chunks overlap filling with reading, but each costs some commands.
CHUNKS = 8
#: Bytes of data in a slot for small messages in host memory.
HOST_SLOT_BYTES = 128 * 2**10
#: Bytes of the counters of such a queue.
HOST_FLAG_BYTES = 4 * 2**10
#: Larger messages go through host memory in frames, each with a flag beside it: the bytes of a frame, the bytes of a
#: slot (one frame for each block of threads), and the slots of a queue.
FRAME_BYTES = 8 * 2**10
FRAME_SLOT_BYTES = 128 * FRAME_BYTES
FRAME_SLOTS = 8
#: Bytes of such a queue's flags: 64 for each frame of a slot, for the sender and each of up to seven receivers.
FRAME_FLAG_BYTES = 64 * 2**10
#: Bytes of the widest element that an operation may move.
LARGEST_ITEM = 8


@frozen
class Areas:
    """How the executor divides a device's workspace, in bytes; all 0 on an idle device.

    Attributes:
        control_bytes: flags and the slots of small exchanges, see :func:`slot_bytes`.
        exchange_bytes: one buffer of ``max_rows`` rows of the residual stream, for large exchanges.
        rope_bytes: sine and cosine tables, for every cut of the KV heads of which the device holds a slice.
        scratch_bytes: the remaining buffers, allocated as slices of this area.
    """

    control_bytes: int = 0
    exchange_bytes: int = 0
    rope_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The device's workspace in the ledger."""
        return self.control_bytes + self.exchange_bytes + self.rope_bytes + self.scratch_bytes


@frozen
class Pinned:
    """The host memory that the executor pins, in bytes; it is in no device's ledger.

    Attributes:
        buffer_bytes: size of each of the two buffers that callers may use. A buffer holds ``max_rows`` rows of the
            widest axis except the vocabulary, in the dtype of the activations, or ``batch`` rows of logits.
        chunk_bytes: size of the chunks that copies through host memory are cut into: an eighth of those ``max_rows``
            rows, but at least 2 MiB and one row of any axis in the widest dtype.
        rings: number of rings of two chunks each: one for each device in use, and one for data that the host sends.
        queues: number of message queues in host memory, which only the transport ``host`` uses: for each device in
            use, one to the devices of every axis and one to all devices. Small and larger messages have separate slots.
    """

    buffer_bytes: int
    chunk_bytes: int
    rings: int
    queues: int

    @property
    def total_bytes(self) -> int:
        """Both buffers, the rings and the queues; a slot for small messages takes twice the bytes of its data."""
        slots = HOST_SLOTS * 2 * HOST_SLOT_BYTES + FRAME_SLOTS * FRAME_SLOT_BYTES
        return (
            2 * self.buffer_bytes
            + PAIR * self.rings * self.chunk_bytes
            + self.queues * (slots + HOST_FLAG_BYTES + FRAME_FLAG_BYTES)
        )


def align(size: int) -> int:
    """Round a number of bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def unit_workspace(axis: Axis, unit: int, width: int, group: int, dtype: str, *, request: Request, gated: bool) -> int:
    """Return the workspace bytes per unit of an axis; a ragged last unit takes as much as a whole one.

    Args:
        axis: the axis.
        unit: elements of a unit.
        width: tensor elements per element of the axis.
        group: query heads per KV head.
        dtype: dtype of the activations.
        request: the request, for its ``max_rows`` and ``batch``.
        gated: whether any layer has linear attention.
    """
    item = ITEM_BYTES[dtype]
    if axis is Axis.VOCAB:
        return align(request.batch * unit * LOGIT_BYTES)
    wide = align(request.max_rows * unit * width * item)
    queries = align(request.max_rows * unit * group * width * item)
    of_queries = (SLICE_BUFFERS[Axis.Q_HEADS] + GATE_BUFFERS * gated) * queries
    return SLICE_BUFFERS.get(axis, 0) * wide + (of_queries if axis is Axis.KV_HEADS else 0)


def rope_workspace(width: int, dtype: str, request: Request) -> int:
    """Return the bytes of the RoPE tables for a cut of the KV heads, on each device that holds any of the heads.

    A table has one row of ``width`` elements per position of a sequence.
    """
    return ROPE_TABLES * align(request.sequence_tokens * width * ITEM_BYTES[dtype])


def common_workspace(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    """Return the workspace bytes of every device in use that do not depend on its slices.

    Args:
        splits: axis, size and width of every split, query heads included.
        dtype: dtype of the activations.
        request: the request, for its ``max_rows`` and layout. The layout ``gather`` also needs the whole input of the
            matrices that are cut by residual columns: one buffer as wide as the widest input.
    """
    sizes = tuple(splits)
    inputs = max((size * width for axis, size, width in sizes if axis in SLICE_BUFFERS), default=0)
    gathered = align(request.max_rows * inputs * ITEM_BYTES[dtype]) if request.layout == "gather" else 0
    count = FULL_BUFFERS - 1 + EXPERT_BUFFERS * any(axis is Axis.EXPERT_INTERMEDIATE for axis, _, _ in sizes)
    return CONTROL_BYTES + _exchange(sizes, dtype, request) + count * _full_buffer(sizes, dtype, request) + gathered


def _full_buffer(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    hidden = max((size for axis, size, _ in splits if axis is Axis.RESIDUAL), default=0)
    return align(request.max_rows * hidden * ITEM_BYTES[dtype])


def _exchange(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    """Return the bytes of the exchange buffer; one row of float32 always fits, in an aligned piece per device."""
    sizes = tuple(splits)
    hidden = max((size for axis, size, _ in sizes if axis is Axis.RESIDUAL), default=0)
    return max(_full_buffer(sizes, dtype, request), align(hidden * LOGIT_BYTES) + SPARE_BYTES)


def areas(splits: Sequence[Split], dtype: str, request: Request) -> tuple[Areas, ...]:
    """Return how each device's workspace is divided; all areas are 0 if the device holds no slice of any axis.

    Args:
        splits: all splits of a plan.
        dtype: dtype of the activations.
        request: the request that the plan answers.
    """
    # Layers with the same cut of the query heads may have different cuts of the KV heads.
    queries = {layer: s.size for s in splits if s.axis is Axis.Q_HEADS for layer in parse_layers(s.layers)}
    sizes = [(s.axis, s.size, s.width) for s in splits]
    gated = any(s.axis is Axis.LINEAR_HEADS for s in splits)
    exchange = _exchange(sizes, dtype, request)
    scratch = common_workspace(sizes, dtype, request) - CONTROL_BYTES - exchange
    count = len(splits[0].bounds) - 1
    slices, ropes = [0] * count, [0] * count
    for split in splits:
        if split.axis is Axis.Q_HEADS:
            continue
        group = queries[min(parse_layers(split.layers))] // split.size if split.axis is Axis.KV_HEADS else 0
        each = unit_workspace(split.axis, split.unit, split.width, group, dtype, request=request, gated=gated)
        for held in slices_of(split.bounds):
            slices[held.device] += each * unit_count(held.end - held.start, split.unit)
            if split.axis is Axis.KV_HEADS:
                ropes[held.device] += rope_workspace(split.width, dtype, request)
    used = _used(splits)
    return tuple(
        Areas(CONTROL_BYTES, exchange, ropes[i], scratch + slices[i]) if i in used else Areas() for i in range(count)
    )


def workspace_bytes(splits: Sequence[Split], dtype: str, request: Request) -> tuple[int, ...]:
    """Return the bytes that the executor allocates on each device; see :func:`areas`.

    The planner, the rules and the executor all use this arithmetic, so that the ledger's workspace is exact.
    """
    return tuple(area.total_bytes for area in areas(splits, dtype, request))


def slot_bytes(devices_in_use: int) -> int:
    """Return the most bytes of data in a message of a small exchange, a multiple of 64; 0 for one device.

    After its flags, the control area has two slots for incoming messages from each other device. A slot takes twice the
    bytes of its data, because 8 bytes of flags accompany every 8 bytes of data.
    """
    senders = devices_in_use - 1
    if senders < 1:
        return 0
    slot = (CONTROL_BYTES - FLAG_BYTES) // (senders * PAIR)
    return slot // 2 // ALIGNMENT * ALIGNMENT


def pinned_bytes(splits: Sequence[Split], dtype: str, request: Request) -> Pinned:
    """Return the sizes of the host memory that the executor pins; for the arguments see :func:`areas`."""
    vocab = max((s.size for s in splits if s.axis is Axis.VOCAB), default=0)
    widest = max((s.size * s.width for s in splits if s.axis is not Axis.VOCAB), default=0)
    message = align(request.max_rows * widest * ITEM_BYTES[dtype])
    used = _used(splits)
    groups = {used, *(frozenset(held.device for held in slices_of(s.bounds)) for s in splits)}
    return Pinned(
        buffer_bytes=max(message, align(request.batch * vocab * LOGIT_BYTES)),
        chunk_bytes=max(CHUNK_BYTES, align(max(vocab, widest) * LARGEST_ITEM), align(-(-message // CHUNKS))),
        rings=len(used) + 1,
        queues=len(used) * len(groups) if len(used) > 1 else 0,
    )


def _used(splits: Iterable[Split]) -> frozenset[int]:
    """Return the devices that hold a slice of any axis."""
    return frozenset(held.device for split in splits for held in slices_of(split.bounds))
