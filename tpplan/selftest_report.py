"""What ``tpplan selftest`` tells: which operations were run, and whether every byte was right."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Tested:
    """An operation by one transport.

    Attributes:
        operation: its name; ``from the host`` where its tensor is in host memory.
        transport: of the context.
        schedule: ``plain``, or ``adversarial`` where commands ran in the worst of the orders that programs allow.
        axes: on which it ran, with the layers where these are cut differently.
        ways: that it went: ``slots``, ``straight``, ``1 part``, ``2 parts`` or ``on each device``.
        skipped: ways that only tensors too large for a test go.
        checks: how often it ran.
        compared_bytes: of results, and of inputs afterwards.
        wrong: how many of the checks found something wrong.
    """

    operation: str
    transport: str
    schedule: str
    axes: tuple[str, ...]
    ways: tuple[str, ...]
    skipped: tuple[str, ...]
    checks: int
    compared_bytes: int
    wrong: int


@frozen(kw_only=True)
class Fault:
    """Something that was wrong.

    Attributes:
        operation: its name.
        transport: of the context.
        schedule: ``plain`` or ``adversarial``.
        axis: on which it ran.
        rows: of its operands.
        elements: their dtype.
        operands: what was special about them.
        device: whose tensor was wrong, -1 for host memory; left out if the operation ended with an error.
        byte: the first one of that tensor that was wrong; left out likewise.
        message: all of it in words.
    """

    operation: str
    transport: str
    schedule: str
    axis: str
    rows: int
    elements: str
    operands: str
    device: int | None = None
    byte: int | None = None
    message: str


@frozen(kw_only=True)
class SelftestReport:
    """The test of a compiled plan.

    Attributes:
        ok: whether every byte was right.
        model: the name of the plan's model.
        devices: how many are in use.
        backend: ``cpu`` for virtual devices, or ``cuda``.
        max_rows: most rows of an operand.
        tested: every operation by every transport.
        checks: of all of them.
        compared_bytes: of all of them.
        wrong: how many of the checks found something wrong.
        faults: of each operation by each transport the first of these.
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
