"""Contents for operands that every device can work out by itself, so that results are checked where they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpplan.exec.calls.operands import ADDABLE
from tpplan.exec.memory.binding import BITS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

#: How many contents a window has, which take turns, and how many elements they are apart.
VERSIONS, _STEP = 61, 67
#: Where windows may start, and how far beyond that the last one may be moved.
STARTS, _SHIFTS = 4096, 1024
#: Nine numbers of at most this add up to less than 256, which is exact in bfloat16, in any order.
_LARGEST = 28
#: Rooms for operands of one device, and bytes in each for what lies between rows.
_ROOMS, _SPARE = 3, 2**18
#: Checks that are told apart between two readings.
MOST_CHECKS = 4096


class Window(NamedTuple):
    """A matrix within the contents.

    Attributes:
        start: its first element.
        columns: number of its columns.
        pitch: elements from one row to the next.
    """

    start: int
    columns: int
    pitch: int


class Bank:
    """Random bytes, and random whole numbers of each dtype that is added up; the same in every memory.

    Attributes:
        largest: bytes of the largest window.
        place: the device that holds them.
    """

    def __init__(self, place: torch.device, largest: int) -> None:
        """Make them; one seed serves all."""
        self.largest, self.place = largest, place
        generator = torch.Generator().manual_seed(largest)
        more = STARTS + _SHIFTS + VERSIONS * _STEP
        content = torch.randint(256, (largest + 8 * more,), dtype=torch.uint8, generator=generator)
        self._bits = {bits: content.to(place).view(bits) for bits in BITS.values()}
        self._numbers: dict[torch.dtype, Tensor] = {}
        for dtype in ADDABLE:
            size = (largest // dtype.itemsize + more,)
            numbers = torch.randint(-_LARGEST, _LARGEST + 1, size, generator=generator)
            self._numbers[dtype] = numbers.to(dtype).to(place)

    def read(self, window: Window, rows: int, dtype: torch.dtype, version: Tensor, *, numbers: bool) -> Tensor:
        """Return a new matrix with the contents of a window that the version, a tensor there, selects."""
        source = self._numbers[dtype] if numbers else self._bits[BITS[dtype.itemsize]]
        every = source.as_strided((VERSIONS, rows, window.columns), (_STEP, window.pitch, 1), window.start)
        return every.index_select(0, version)[0].view(dtype)


class Lane:
    """The operands on one device of a context or on the host, with what their checks have found.

    Attributes:
        bank: the contents.
        version: version of the contents that are written next.
        wrong: number of wrong elements in each check.
        stream: stream of all the device's work; None for the current one.
    """

    def __init__(self, bank: Bank, stream: torch.cuda.Stream | None = None) -> None:
        """Allocate all of it."""
        self.bank, self.stream = bank, stream
        self.version = torch.zeros(1, dtype=torch.int64, device=bank.place)
        self.wrong = torch.zeros(MOST_CHECKS, dtype=torch.int64, device=bank.place)
        size = bank.largest + _SPARE
        self._rooms = [torch.zeros(size, dtype=torch.uint8, device=bank.place) for _ in range(_ROOMS)]

    def working(self) -> AbstractContextManager[object]:
        """Make the device's stream current."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def advance(self) -> None:
        """Turn to the next version."""
        with self.working():
            self.version.add_(1).remainder_(VERSIONS)

    def delay(self, cycles: int) -> None:
        """Keep the device's stream busy for so many cycles."""
        with torch.cuda.device(self.bank.place), self.working():
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 (there is no other)

    def room(self, index: int, rows: int, columns: int, dtype: torch.dtype, *, gap: int, shift: int) -> Tensor:
        """Return a matrix in one of the rooms.

        Args:
            index: number of the room, 0 to 2.
            rows: number of the matrix's rows.
            columns: number of the matrix's columns.
            dtype: dtype of the matrix.
            gap: columns between its rows.
            shift: elements before the first.
        """
        pitch = columns + gap
        whole = self._rooms[index].view(dtype)[shift : shift + rows * pitch]
        return whole.view(rows, pitch)[:, :columns]

    def fill(self, target: Tensor, window: Window, *, numbers: bool) -> None:
        """Write a window's contents of this version to a matrix."""
        with self.working():
            content = self.bank.read(window, target.shape[0], target.dtype, self.version, numbers=numbers)
            bits = BITS[target.element_size()]
            target.view(bits).copy_(content.view(bits))

    def compare(self, check: int, found: Tensor, windows: Sequence[Window], *, numbers: bool) -> None:
        """Count the elements that are not the sum of some windows, without waiting."""
        with self.working():
            rows, dtype, bits = found.shape[0], found.dtype, BITS[found.element_size()]
            first, *rest = (self.bank.read(each, rows, dtype, self.version, numbers=numbers) for each in windows)
            for each in rest:
                first += each
            self.wrong[check].add_(torch.ne(found.view(bits), first.view(bits)).sum())
