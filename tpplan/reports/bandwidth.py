"""How many tokens a second the memory bandwidths of a plan's devices allow: bytes ÷ bandwidth, a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.planner.attempt import attempt
from tpplan.planner.ledger import demands, ledger
from tpplan.planner.place import Effort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import DeviceMemory, SplitPlan


def most_tokens_per_second(memory: Sequence[DeviceMemory], devices: Sequence[Device], batch: int = 1) -> int:
    """Return how many tokens a second all devices can read the bytes for, rounded down; each decodes every token.

    Args:
        memory: ledgers with ``reads_bytes``.
        devices: with known bandwidths.
        batch: sequences that decode together, for which ``reads_bytes`` are read once.
    """
    pairs = zip(memory, devices, strict=True)
    rates = [d.bandwidth_bytes_per_second * batch // e.reads_bytes for e, d in pairs if e.reads_bytes]
    return min(rates, default=0)


def faster_by_latency(plan: SplitPlan, model: ModelSpec) -> tuple[int, int] | None:
    """Return the tokens a second that bandwidths allow by a balanced plan, and by the strategy ``latency``.

    Returns:
        None where the other strategy is not at least 20 % faster, or no bandwidth says so.
    """
    if plan.request.strategy != "balanced" or not all(d.bandwidth_bytes_per_second for d in plan.devices):
        return None
    request = evolve(plan.request, strategy="latency")
    wanted = demands(model, request, len(plan.devices))
    cuts = {(split.axis, split.layers): split.bounds for split in plan.splits}
    memory = ledger([cuts[d.axis, d.layers] for d in wanted.axes], wanted, plan.devices, request)
    other = attempt(model, plan.devices, request, effort=Effort.QUICK, wanted=wanted)
    if other is None:
        return None
    now, then = (most_tokens_per_second(m, plan.devices, request.batch) for m in (memory, other.memory))
    return (now, then) if 5 * then >= 6 * now else None
