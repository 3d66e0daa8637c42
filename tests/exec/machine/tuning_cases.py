"""What the tests of thresholds share: a machine whose times are known, and GPUs by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.exec.tuning import COPIES, FANS, KIB, MIB, ONE_SHOT, RELAYED, SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence


ROOM = {"peer": 2 * MIB, "host": 64 * KIB}


@frozen
class Machine:
    """GPUs whose times are straight lines: so many µs, and so many per KiB, by each way.

    Attributes:
        slots: through slots, of any transport.
        straight: by kernels that write straight, or in parts through host memory.
        copies: by copy engines.
        fans: by copy engines, if one device sends.
        passed: by kernels that pass on what others want too.
        one_shot: by kernels of which each adds up all; as straight if not given.
        bad: a size that seems to take many times as long through slots.
    """

    slots: tuple[float, float] = (2, 0.02)
    direct: tuple[float, float] = (6, 0.01)
    copies: tuple[float, float] = (20, 0.008)
    fans: tuple[float, float] = (20, 0.008)
    passed: tuple[float, float] = (70, 0.004)
    one_shot: tuple[float, float] | None = None
    bad: int = 0

    def time(self, transport: str, kind: str, size: int, ways: tuple[str, ...]) -> Sequence[float]:
        """Return the time by each way."""
        assert size <= ROOM[transport] or SLOTS not in ways
        lines = {SLOTS: self.slots, COPIES: self.fans if kind == FANS else self.copies, RELAYED: self.passed}
        lines[ONE_SHOT] = self.one_shot or self.direct
        times = []
        for way in ways:
            start, each = lines.get(way, self.direct)
            times.append((start + each * size / KIB) * (1.5 if (way, size) == (SLOTS, self.bad) else 1))
        return times


class Gpus:
    """What the driver tells of two GPUs."""

    names = ("GPU-a", "GPU-b")
    driver = "driver 1"

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs."""
        return Gpus.names

    def software(self) -> str:
        """Return the driver."""
        return Gpus.driver
