"""What ``tpplan bench`` tells: how long every operation takes, beside other ways to do the same.

Times are whole nanoseconds and rates bytes per second, for documents have no fractions.
"""

from __future__ import annotations

from attrs import frozen

from tpplan.files.codec import document


@frozen(kw_only=True)
class Limit:
    """How fast large copies between two memories are, in one direction, with nothing else going on.

    Attributes:
        source: the device that is read, -1 for pinned host memory.
        target: the device that is written, -1 for pinned host memory.
        bytes_per_second: of the copy engine.
    """

    source: int
    target: int
    bytes_per_second: int


@frozen(kw_only=True)
class Spread:
    """The time of one operation of many in a row, over the rounds.

    Attributes:
        median_ns: half of the rounds were faster.
        low_ns: a tenth of the rounds was faster; of fewer than ten rounds, the fastest.
        high_ns: a tenth of the rounds was slower; of fewer than ten rounds, the slowest.
    """

    median_ns: int
    low_ns: int
    high_ns: int


@frozen(kw_only=True)
class Timed:
    """How long one way to do an operation takes.

    Attributes:
        by: ``tpplan``, or who does the same: ``torch``, ``NCCL``, ``staged`` or ``ExLlamaV2``; between processes
            ``NCCL``, ``NCCL window`` and several ``symm_mem``; ``even`` is tpplan, too, with even slices that are as
            many bytes together as the plan's uneven ones.
        graph: whether many of them were captured in one CUDA graph, instead of called one by one.
        time: of one operation; left out if it failed.
        failed: why there is no time; left out if there is one.
    """

    by: str
    graph: bool
    time: Spread | None = None
    failed: str = ""


@frozen(kw_only=True)
class Measured:
    """An operation of some size.

    Attributes:
        operation: its name.
        payload_bytes: that every device holds in the end; of a scatter and a gather those of all slices together.
        rows: of the operands.
        link_bytes: that tpplan moves from one memory to another, all devices together.
        way: how tpplan does it, as ``explain()`` says.
        graph_way: how it does it in a graph; left out where that is the same.
        in_a_graph: operations that a CUDA graph has; left out where they are as many as the report says.
        least_ns: that the measured limits leave, however it is done; left out where no limit was measured.
        timed: each way to do it, tpplan's first.
        failed: why nothing could be timed; left out otherwise.
    """

    operation: str
    payload_bytes: int
    rows: int
    link_bytes: int
    way: str
    graph_way: str = ""
    in_a_graph: int | None = None
    least_ns: int | None = None
    timed: tuple[Timed, ...] = ()
    failed: str = ""


@document("bench-report")
@frozen(kw_only=True)
class BenchReport:
    """The times of a compiled plan's operations.

    Attributes:
        model: the name of the plan's model.
        backend: ``cpu`` for virtual devices, or ``cuda``.
        devices: in use, by the names that the driver or, of virtual ones, the plan has for them.
        transport: of the context.
        dtype: of the elements.
        columns: of a row, those of the residual stream.
        slice_columns: of each slice of it that is gathered or scattered.
        even_columns: of each slice of the even cut beside it; left out if the plan's own is even, or nothing was timed.
        rounds: in which all took turns.
        in_a_graph: operations that a CUDA graph has: as many as a decoding step of the plan's model, one for its
            embedding and two for each of its layers. The start of the graph is a part of the time of each.
        software: versions of torch and of what it was built with.
        limits: measured between the devices and to the host; none between virtual devices.
        measured: by operation, then size.
        notes: what else to know.
        failed: why processes ended with an error, though they had measured this; left out if none did.
    """

    model: str
    backend: str
    devices: tuple[str, ...]
    transport: str
    dtype: str
    columns: int
    slice_columns: tuple[int, ...]
    rounds: int
    in_a_graph: int
    software: tuple[str, ...]
    limits: tuple[Limit, ...]
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]
    even_columns: tuple[int, ...] = ()
    failed: str = ""
