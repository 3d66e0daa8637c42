"""The counters of exchanges, on CUDA devices and in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError
from tpplan.exec.programs.program import HOST
from tpplan.exec.protocol.words import ALONE, COUNTER_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from torch import Tensor


class Counters:
    """Numbers the counters of each device and of the host, and gives each its place in memory on first use."""

    def __init__(self, flags: Mapping[int, Tensor], others: Collection[int] = ()) -> None:
        """Set all counters to 0.

        Args:
            flags: memory for the counters of each device and of the host.
            others: devices of other processes, which set theirs to 0.
        """
        self._addresses = {home: area.data_ptr() for home, area in flags.items()}
        self._rooms = {home: len(area) // COUNTER_BYTES for home, area in flags.items()}
        self._used = {home: 0 if home == HOST else ALONE + 1 for home in flags}
        self._numbers: dict[Hashable, int] = {}
        for home, area in flags.items():
            if home not in others:
                area.zero_()

    def number(self, home: int, *key: Hashable, count: int = 1) -> int:
        """Return the number of a counter among those of its device.

        Args:
            home: the device whose memory it is in, or HOST.
            key: identifies what it counts.
            count: number of consecutive counters, of which it is the first.

        Raises:
            ExecutionError: there is no room for more.
        """
        whole = (home, *key)
        if whole not in self._numbers:
            if self._used[home] + count > self._rooms[home]:
                where = "the host" if home == HOST else f"device {home}"
                raise ExecutionError(
                    f"{where} has no room for more than {self._used[home]} counters", "use fewer devices"
                )
            self._numbers[whole] = self._used[home]
            self._used[home] += count
        return self._numbers[whole]

    def address(self, home: int, *key: Hashable, count: int = 1) -> int:
        """Return the address of a counter; for the arguments see :meth:`number`."""
        return self._addresses[home] + COUNTER_BYTES * self.number(home, *key, count=count)

    def area(self, device: int) -> int:
        """Return the address of a device's counters."""
        return self._addresses[device]

    def __contains__(self, key: tuple[Hashable, ...]) -> bool:
        return key in self._numbers
