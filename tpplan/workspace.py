"""The workspace: every buffer that the executor allocates on a device, and the host memory that it pins.

The planner, the rules and the executor share this arithmetic, which is why the ledger's workspace is exact. Pinned
memory is the host's: it is sized here too, but no device's ledger counts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.axes import Axis, parse_layers, slices_of, unit_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpplan.plan import Request, Split

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Every buffer starts at a multiple of this.
ALIGNMENT = 64
#: Flags, epochs and the slots of small exchanges, on every device in use.
CONTROL_BYTES = 8 * 2**20
#: Of them, the flags and epochs; the rest are slots.
FLAG_BYTES = 128 * 2**10
#: Slots on devices come in pairs: one is filled while the other is read. A staging ring has room for two chunks.
PAIR = 2
#: Slots of a queue in host memory, a power of two: until its sender sees there that a message was read, as many more
#: could be sent as fill two or three.
HOST_SLOTS = 4
#: Buffers of ``max_rows`` rows per axis: how many as wide as the device's slice, for the layer in flight (queries and
#: attention output share one; keys and values; gate and up, of experts for each that a token is routed to).
SLICE_BUFFERS = {Axis.Q: 1, Axis.KV: 2, Axis.ID: 2, Axis.EX: 2, Axis.SX: 2}
#: Buffers as wide as the residual stream, on every device in use: the stream, its normed copy, and an exchange.
FULL_BUFFERS = 3
#: More of them where there are experts: the rows that are routed to one.
EXPERT_BUFFERS = 1
#: For the alignment of pieces of the exchange buffer.
SPARE_BYTES = 64 * 2**10
#: Sine and cosine.
ROPE_TABLES = 2
LOGIT_BYTES = 4
#: Copies through host memory are cut into chunks of at least this.
CHUNK_BYTES = 2 * 2**20
#: And into this many, or a few more: while one is filled another is read, and every one costs some commands.
CHUNKS = 8
#: Bytes of data of a small message in a slot in host memory.
HOST_SLOT_BYTES = 128 * 2**10
#: And of the counters of such a queue.
HOST_FLAG_BYTES = 4 * 2**10
#: What is larger goes there in frames, each with a flag beside it: the bytes of one, and of a slot, which has one for
#: each block of threads; how many slots a queue has.
FRAME_BYTES = 8 * 2**10
FRAME_SLOT_BYTES = 128 * FRAME_BYTES
FRAME_SLOTS = 8
#: Bytes of such a queue's flags: a line of 64 for each frame of a slot, of the sender and of up to seven receivers.
FRAME_FLAG_BYTES = 64 * 2**10
#: Of the widest element that an operation may move.
LARGEST_ITEM = 8


@frozen
class Areas:
    """How the executor divides a device's workspace, in bytes; all 0 on an idle device.

    Attributes:
        control_bytes: flags, and the slots of small exchanges, see :func:`slot_bytes`.
        exchange_bytes: one buffer of ``max_rows`` rows of the residual stream, for large exchanges.
        rope_bytes: the sine and cosine tables of every cut of the KV heads of which the device holds a part.
        scratch_bytes: everything else, handed out in slices.
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
    """The host memory that the executor pins, in bytes; not on any device, so in no ledger.

    Attributes:
        buffer_bytes: each of two buffers that callers may use. Holds ``max_rows`` rows of the widest axis but the
            vocabulary in the activations' dtype, or ``batch`` rows of logits.
        chunk_bytes: the most that a copy through host memory moves at once: an eighth of the rows that such a buffer
            holds, but at least 2 MiB, and a row of any axis in the widest dtype.
        rings: of a pair of chunks: one for each device in use, and one for what the host itself sends.
        queues: of slots in host memory, which only the transport ``host`` has: each device in use may send to the
            devices of every axis, and to all of them, small messages and, through slots of their own, larger ones.
    """

    buffer_bytes: int
    chunk_bytes: int
    rings: int
    queues: int

    @property
    def total_bytes(self) -> int:
        """Both buffers, the rings, and the queues, whose small slots take twice the bytes of their data."""
        slots = HOST_SLOTS * 2 * HOST_SLOT_BYTES + FRAME_SLOTS * FRAME_SLOT_BYTES
        return (
            2 * self.buffer_bytes
            + PAIR * self.rings * self.chunk_bytes
            + self.queues * (slots + HOST_FLAG_BYTES + FRAME_FLAG_BYTES)
        )


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


def rope_workspace(width: int, dtype: str, request: Request) -> int:
    """Return the bytes of the RoPE tables of a cut of the KV heads, on every device that holds any of them.

    A table has a row of ``width`` elements for every position that a sequence can reach.
    """
    positions = -(-request.cache.tokens // request.batch)
    return ROPE_TABLES * align(positions * width * ITEM_BYTES[dtype])


def common_workspace(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    """Return the bytes of workspace that every device in use has, whatever it holds.

    Args:
        splits: axis, size and width of every split, query heads included.
        dtype: of the activations.
        request: its ``max_rows`` and layout. ``gather`` also needs the whole input of the matrices that are cut by
            residual columns: one buffer as wide as the widest of them.
    """
    sizes = tuple(splits)
    inputs = max((size * width for axis, size, width in sizes if axis in SLICE_BUFFERS), default=0)
    gathered = align(request.max_rows * inputs * ITEM_BYTES[dtype]) if request.layout == "gather" else 0
    count = FULL_BUFFERS - 1 + EXPERT_BUFFERS * any(axis is Axis.EX for axis, _, _ in sizes)
    return CONTROL_BYTES + _exchange(sizes, dtype, request) + count * _full_buffer(sizes, dtype, request) + gathered


def _full_buffer(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    hidden = max((size for axis, size, _ in splits if axis is Axis.RS), default=0)
    return align(request.max_rows * hidden * ITEM_BYTES[dtype])


def _exchange(splits: Iterable[tuple[Axis, int, int]], dtype: str, request: Request) -> int:
    """Return the bytes of the exchange buffer: a row of float32 always fits, in as many aligned pieces as devices."""
    sizes = tuple(splits)
    hidden = max((size for axis, size, _ in sizes if axis is Axis.RS), default=0)
    return max(_full_buffer(sizes, dtype, request), align(hidden * LOGIT_BYTES) + SPARE_BYTES)


def areas(splits: Sequence[Split], dtype: str, request: Request) -> tuple[Areas, ...]:
    """Return how each device's workspace is divided; all 0 where a device holds no part of any axis.

    Args:
        splits: of a plan, all of them.
        dtype: of the activations.
        request: what was asked of the planner.
    """
    # Layers that share a cut of the query heads need not share one of the KV heads.
    queries = {layer: s.size for s in splits if s.axis is Axis.Q for layer in parse_layers(s.layers)}
    sizes = [(s.axis, s.size, s.width) for s in splits]
    exchange = _exchange(sizes, dtype, request)
    scratch = common_workspace(sizes, dtype, request) - CONTROL_BYTES - exchange
    count = len(splits[0].bounds) - 1
    slices, ropes = [0] * count, [0] * count
    for split in splits:
        if split.axis is Axis.Q:
            continue
        group = queries[min(parse_layers(split.layers))] // split.size if split.axis is Axis.KV else 0
        each = unit_workspace(split.axis, split.unit, split.width, group, dtype, request=request)
        for held in slices_of(split.bounds):
            slices[held.device] += each * unit_count(held.end - held.start, split.unit)
            if split.axis is Axis.KV:
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
    """Return the bytes of data that one message of a small exchange may have, a multiple of 64; 0 for one device.

    The control area has, after its flags, two slots for the incoming messages of each other device. A slot takes twice
    the bytes of its data: flags travel inside the data, 8 bytes of them with every 8 bytes of it.
    """
    senders = devices_in_use - 1
    if senders < 1:
        return 0
    slot = (CONTROL_BYTES - FLAG_BYTES) // (senders * PAIR)
    return slot // 2 // ALIGNMENT * ALIGNMENT


def pinned_bytes(splits: Sequence[Split], dtype: str, request: Request) -> Pinned:
    """Return the host memory that the executor pins; for the arguments see :func:`areas`."""
    vocab = max((s.size for s in splits if s.axis is Axis.VC), default=0)
    widest = max((s.size * s.width for s in splits if s.axis is not Axis.VC), default=0)
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
    """Return the devices that hold a slice."""
    return frozenset(held.device for split in splits for held in slices_of(split.bounds))
