"""What ``tpplan selftest`` tells: which operations were run, and whether every byte was right."""

from __future__ import annotations

from attrs import frozen

from tpplan.files.codec import document


@frozen(kw_only=True)
class TestedAxis:
    """An axis that an operation ran on.

    Attributes:
        axis: its name, with the layers where it is cut differently, or ``all devices``.
        rows: numbers of rows that ran with the plan's own width: that of heads, or of the residual stream where nothing
            is cut.
        narrow_rows: numbers of rows that ran with fewer columns.
        ways: that operands of the plan's width went: ``slots``, ``frames``, ``shared frames``, ``straight``,
            ``passed on``, ``1 part``, ``2 parts`` or ``on each device``; of what goes aside it is not told.
        skipped: ways that only operands too large for a test go.
    """

    axis: str
    rows: tuple[int, ...]
    narrow_rows: tuple[int, ...]
    ways: tuple[str, ...]
    skipped: tuple[str, ...]


@frozen(kw_only=True)
class Tested:
    """An operation by one transport.

    Attributes:
        operation: its name; ``from the host`` where its tensor is in host memory.
        transport: of the context.
        schedule: ``plain``; ``aside`` where some sizes are issued beside other work; ``captured`` where some sizes that
            go each way, and some aside, are replayed in a CUDA graph, on other contents; or ``adversarial`` on virtual
            devices where commands run in the worst of the orders that programs allow.
        axes: on which it ran.
        checks: how often it ran.
        compared_bytes: of results, and of inputs afterwards.
        wrong: how many of the checks found something wrong.
    """

    operation: str
    transport: str
    schedule: str
    axes: tuple[TestedAxis, ...]
    checks: int
    compared_bytes: int
    wrong: int


@frozen(kw_only=True)
class Fault:
    """Something that was wrong.

    Attributes:
        operation: its name.
        transport: of the context.
        schedule: ``plain``, ``aside``, ``captured`` or ``adversarial``.
        axis: on which it ran.
        rows: of its operands.
        dim: columns per element of the axis; of operations that cut nothing, the columns.
        elements: their dtype.
        operands: what was special about them, and whether they went ``aside``.
        device: whose tensor was wrong, -1 for host memory; left out if the operation ended with an error.
        byte: the first one of that tensor that was wrong; left out likewise.
        message: all of it in words.
    """

    operation: str
    transport: str
    schedule: str
    axis: str
    rows: int
    dim: int
    elements: str
    operands: str
    device: int | None = None
    byte: int | None = None
    message: str


@frozen(kw_only=True)
class Refusal:
    """A transport that was not tested, or not to the end.

    Attributes:
        transport: its name.
        unverified: whether it is only refused because of what it needs of the links or of the environment; any other
            error makes the whole test fail.
        message: the error.
    """

    transport: str
    unverified: bool
    message: str


@document("selftest-report")
@frozen(kw_only=True)
class SelftestReport:
    """The test of a compiled plan.

    Attributes:
        ok: whether every byte was right, and no transport ended with an error.
        model: the name of the plan's model.
        devices: how many are in use.
        backend: ``cpu`` for virtual devices, or ``cuda``.
        max_rows: most rows of an operand; which ones ran is told by axis.
        tested: every operation by every transport.
        checks: of all of them.
        compared_bytes: of all of them.
        wrong: how many of the checks found something wrong.
        faults: of each operation by each transport the first of these.
        refused: transports that were not tested, and why.
    """

    ok: bool
    model: str
    devices: int
    backend: str
    max_rows: int
    tested: tuple[Tested, ...]
    checks: int
    compared_bytes: int
    wrong: int
    faults: tuple[Fault, ...]
    refused: tuple[Refusal, ...]
