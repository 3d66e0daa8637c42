"""Channels: memory by which kernels of a caller's add up what all devices have, as soon as they have it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.gpu.channel_table import (
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
from tpplan.exec.gpu.exchange_table import MOST_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def adders_on(processors: int) -> int:
    """Return how many blocks may wait on a GPU of so many multiprocessors.

    Where two contexts have come to two GPUs in different orders, those of both wait on each of them, for blocks that
    send: one more needs room, and a multiprocessor has that of one block at least.
    """
    return max(1, min(MOST_ADDERS, (processors - 1) // 2))


class Channel:
    """What :mod:`tpplan.exec.gpu.channel_table` describes, on a context's devices, all of which give and take parts.

    A kernel that adds up by it does what a product and ``all_reduce`` do in two, and is told :meth:`words`. Those of
    all devices are issued by :meth:`run`. On each it takes 16 bytes × devices × elements, of torch's allocator.

    Attributes:
        elements: most of a sum.
    """

    def __init__(
        self,
        elements: int,
        places: Mapping[int, torch.device],
        headers: Mapping[int, Mapping[int, int]],
        issue: Callable[[Sequence[Callable[[], None]]], None],
    ) -> None:
        """Take the memory.

        Args:
            elements: most of a sum.
            places: torch's CUDA device for each of the plan's in use.
            headers: words that kernels of exchanges are told on each, by their place.
            issue: a method of the context's that calls something for each device, when it is its turn.
        """
        self.elements = elements
        self._issue = WeakMethod(issue)  # or nothing of a dropped context would go before a collector comes
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
            torch.cuda.synchronize(place)  # before anybody writes there

    def words(self, device: int, own: Sequence[int] = ()) -> list[int]:
        """Return what a kernel of a device is told: all words of its parameter, those of the caller's own among them.

        Args:
            device: the plan's.
            own: the caller's, from :data:`tpplan.exec.gpu.channel_table.CALLERS` on; the others are 0.
        """
        words = list(self._words[device])
        words[CALLERS : CALLERS + len(own)] = own
        return words

    def run(self, launches: Sequence[Callable[[], None]]) -> None:
        """Launch a kernel on every device in use, on the current streams; all of them take part in one sum.

        What a launch raises is raised. Behind the first one, devices do not agree any more, and the context refuses
        everything from then on.

        Args:
            launches: one for each device, in device order.

        Raises:
            ExecutionError: there are more or fewer, the context is closed, or a device waited in vain earlier.
        """
        if len(launches) != len(self._words):
            message = f"{len(launches)} launches for a channel of {len(self._words)} devices"
            raise ExecutionError(message, "launch one kernel on each")
        issue = self._issue()
        if issue is None:
            raise ExecutionError("the context is gone", "keep it as long as its channels")
        issue(launches)
