"""Channels: memory through which a caller's own kernels sum across devices while they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.protocol.channel import (
    ADDERS,
    CALLERS,
    DEVICES,
    ELEMENT,
    MEMORIES,
    MOST_ADDERS,
    MOST_BLOCKS,
    NUMBERS,
    OWN,
    SET,
    SLOT,
)
from tpplan.exec.protocol.words import MOST_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def adders_on(processors: int) -> int:
    """Return how many blocks may wait for other devices on a GPU with this many multiprocessors.

    Two contexts may reach two GPUs in different orders. Then the waiting blocks of both occupy each GPU, and one more
    block, which sends, must still fit; a multiprocessor has room for at least one block.
    """
    return max(1, min(MOST_ADDERS, (processors - 1) // 2))


class Channel:
    """Memory through which the caller's kernels on all devices of a context sum their results.

    A kernel that uses it does in one launch the work of a matrix product and an ``all_reduce``. It takes :meth:`words`
    as its parameter, laid out as in :mod:`tpplan.exec.protocol.channel`. :meth:`run` launches the kernels of all
    devices. A channel takes 16 bytes × devices × elements on each device, from torch's allocator.

    Attributes:
        elements: maximum elements of a sum.
    """

    def __init__(
        self,
        elements: int,
        places: Mapping[int, torch.device],
        headers: Mapping[int, Mapping[int, int]],
        issue: Callable[[Sequence[Callable[[], None]]], None],
    ) -> None:
        """Allocate the memory.

        Args:
            elements: maximum elements of a sum.
            places: torch's CUDA device for each device of the plan in use.
            headers: for each device, the words that exchange kernels take, by their index.
            issue: a bound method that runs a callable for each device when it is the context's turn.
        """
        self.elements = elements
        self._issue = WeakMethod(issue)  # or a dropped context would live until garbage collection
        devices, slot = len(places), elements * ELEMENT
        memories = [torch.zeros(2 * devices * slot, dtype=torch.uint8, device=place) for place in places.values()]
        numbers = [torch.ones(MOST_BLOCKS, dtype=torch.int32, device=place) for place in places.values()]
        self._held = memories, numbers
        self._words: dict[int, list[int]] = {}
        for own, (device, place) in enumerate(places.items()):
            table = {NUMBERS: numbers[own].data_ptr(), DEVICES: devices, OWN: own, SLOT: slot, SET: devices * slot}
            table[ADDERS] = adders_on(torch.cuda.get_device_properties(place).multi_processor_count)
            table |= {MEMORIES + i: memory.data_ptr() for i, memory in enumerate(memories)}
            words = {**headers[device], **table}
            self._words[device] = [words.get(index, 0) for index in range(MOST_WORDS)]
            torch.cuda.synchronize(place)  # before other devices write there

    def words(self, device: int, own: Sequence[int] = ()) -> list[int]:
        """Return the parameter array of a kernel on a device, including the caller's own words.

        Args:
            device: index of the device in the plan.
            own: the caller's words, placed from :data:`tpplan.exec.protocol.channel.CALLERS` on; the rest are 0.
        """
        words = list(self._words[device])
        words[CALLERS : CALLERS + len(own)] = own
        return words

    def run(self, launches: Sequence[Callable[[], None]]) -> None:
        """Launch a kernel on every device in use, on the current streams, to take part in one sum.

        An exception from a launch propagates. If it comes after the first launch, the devices are out of step and the
        context refuses all further work.

        Args:
            launches: one callable for each device in use, in device order.

        Raises:
            ExecutionError: the number of launches is wrong, the context is closed, or a device timed out earlier.
        """
        if len(launches) != len(self._words):
            message = f"{len(launches)} launches for a channel of {len(self._words)} devices"
            raise ExecutionError(message, "launch one kernel on each")
        issue = self._issue()
        if issue is None:
            raise ExecutionError("the context is gone", "keep it as long as its channels")
        issue(launches)
