"""GPUs in this process's memory, with links that lie as real ones do, for the probe of links."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field

from tpplan.exec.machine import probe as link_probe
from tpplan.exec.machine.link_report import Mechanism, Route
from tpplan.exec.machine.probe import PeersExhaustedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GPUS = ("GPU-a", "GPU-b", "GPU-c")

if "pytest" not in sys.modules:  # in a child, which has a deadline for each step: small ones, on however busy a machine
    link_probe.ALONE, link_probe.TOGETHER = (16, 4096, 4096, 4112, 8192, 8192), (4096, 4096, 8192)


@define(eq=False)
class Piece:
    """A piece of a GPU's memory."""

    gpu: int
    data: bytearray


@define
class Move:
    """What a link is asked to do, and under which circumstances."""

    driver: FakeDriver
    source: Piece
    target: Piece
    part: slice
    at_once: int
    mechanisms: int

    @property
    def size(self) -> int:
        """How many bytes to move."""
        size: int = self.part.stop - self.part.start
        return size

    def deliver(self, data: bytes) -> None:
        """Write the target's memory."""
        self.target.data[self.part] = data

    def sent(self) -> bytes:
        """Return the bytes to move: those of the target GPU's mirror of the source, if it has one."""
        mirror = self.driver.mirrors.get((self.target.gpu, self.source))
        return bytes(self.source.data if mirror is None else mirror)[self.part]

    def honestly(self) -> None:
        """Do what was asked."""
        self.deliver(self.sent())


@define
class FakeDriver:
    """Any number of GPUs whose links do what was asked, but for those that lie."""

    lies: dict[Route, Callable[[Move], None]] = field(factory=dict)
    names: tuple[str, ...] = GPUS
    untestable: dict[Mechanism, str] = field(factory=dict)
    apart: frozenset[tuple[int, int]] = frozenset()
    mirrors: dict[tuple[int, Piece], bytes] = field(factory=dict)
    late: list[Move] = field(factory=list)
    prepares_s: float = 0

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs."""
        return self.names

    def software(self) -> str:
        """Return what a test has set."""
        return os.environ.get("FAKE_SOFTWARE", "fake driver 1")

    def lacks(self, mechanism: Mechanism) -> str:
        """Return why a mechanism cannot be tested."""
        return self.untestable.get(mechanism, "")

    def peers(self, a: int, b: int) -> bool:
        """Return whether two GPUs have access to each other's memory."""
        return (min(a, b), max(a, b)) not in self.apart

    def prepare(self) -> None:
        """Take the time that compiling takes."""
        time.sleep(self.prepares_s)

    def allocate(self, gpu: int, size: int) -> Piece:
        """Return memory that holds zeros."""
        return Piece(gpu, bytearray(size))

    def write(self, buffer: Piece, data: memoryview) -> None:
        """Write as the owner."""
        buffer.data[: len(data)] = data

    def read(self, buffer: Piece, size: int) -> bytes:
        """Read as the owner."""
        return bytes(buffer.data[:size])

    def move(self, moves: Mapping[Mechanism, Sequence[tuple[Piece, Piece, Piece]]], part: slice) -> None:
        """Move as each link does it, and read behind an event; what is late arrives when the host has waited."""
        at_once = sum(map(len, moves.values()))
        for mechanism, ends in moves.items():
            for source, target, read in ends:
                route = mechanism, source.gpu, target.gpu
                move = Move(self, source, target, part, at_once, len(moves))
                self.lies.get(route, Move.honestly)(move)
                read.data[:] = target.data
        while self.late:
            self.late.pop().honestly()


def zeros(move: Move) -> None:
    """Zeros arrive."""
    move.deliver(bytes(move.size))


def lost(move: Move) -> None:
    """Nothing arrives."""


def private_mirror(move: Move) -> None:
    """The writer writes a mirror of the target's memory that only it sees."""
    move.driver.mirrors[move.source.gpu, move.target] = bytes(move.part.start) + move.sent()


def stale(move: Move) -> None:
    """What was read of the source before is taken from a cache for ever."""
    old = move.driver.mirrors.setdefault((move.target.gpu, move.source), b"")
    fresh = move.driver.read(move.source, move.part.stop)[len(old) :]
    move.deliver((old + fresh)[move.part])
    move.driver.mirrors[move.target.gpu, move.source] = old + fresh


def when_concurrent(move: Move) -> None:
    """Zeros arrive while other links are busy."""
    (zeros if move.at_once > 1 else Move.honestly)(move)


def beside_others(move: Move) -> None:
    """Zeros arrive while links of another mechanism are busy."""
    (zeros if move.mechanisms > 1 else Move.honestly)(move)


def in_pages(move: Move) -> None:
    """Whole pages of 4 KiB arrive."""
    move.part = slice(move.part.start, move.part.start + -(-move.size // 2**12) * 2**12)
    move.honestly()


def from_even_on(move: Move) -> None:
    """The byte before an odd address arrives too."""
    move.part = slice(move.part.start // 2 * 2, move.part.stop)
    move.honestly()


def when_not_small(move: Move) -> None:
    """Fewer than 16 bytes are lost."""
    (lost if move.size < 16 else Move.honestly)(move)


def in_pairs(move: Move) -> None:
    """The last one of an odd number of bytes is lost."""
    move.part = slice(move.part.start, move.part.start + move.size // 2 * 2)
    move.honestly()


def when_large(move: Move) -> None:
    """The last byte of more than 4 MiB is lost."""
    last = move.target.data[move.size - 1]
    move.honestly()
    if move.size > 4 * 2**20:
        move.target.data[move.size - 1] = last


def hang(_: Move) -> None:
    """Never return."""
    time.sleep(3600)


def hang_when_concurrent(move: Move) -> None:
    """Never return while other links are busy."""
    (hang if move.at_once > 1 else Move.honestly)(move)


def fail(move: Move) -> None:
    """Raise."""
    raise RuntimeError(f"illegal access at GPU {move.target.gpu}")


def too_late(move: Move) -> None:
    """The data is there once the host has waited, but not yet for who waits for the event alone."""
    move.driver.late.append(move)


def crowd(_: Move) -> None:
    """Be refused a place among the peers of a GPU."""
    raise PeersExhaustedError("no place")


def kill(_: Move) -> None:
    """Be killed, as by a system that has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def die(_: Move) -> None:
    """Take the process along, as a crash inside a driver does."""
    os._exit(86)


@define
class FullDriver(FakeDriver):
    """GPUs that each have room for one piece."""

    used: set[int] = field(factory=set)

    def allocate(self, gpu: int, size: int) -> Piece:
        """Raise from the second piece on."""
        if gpu in self.used:
            raise MemoryError(f"GPU {gpu} has no {size} bytes")
        self.used.add(gpu)
        return super().allocate(gpu, size)


@define
class EightPeersDriver(FakeDriver):
    """GPUs that each map the memory of eight others, for as long as a process lives."""

    mapped: dict[int, set[int]] = field(factory=dict)
    says: type[Exception] = PeersExhaustedError

    def move(self, moves: Mapping[Mechanism, Sequence[tuple[Piece, Piece, Piece]]], part: slice) -> None:
        """Map the ends of each move first."""
        for source, target, _ in (move for ends in moves.values() for move in ends):
            for one, other in ((source.gpu, target.gpu), (target.gpu, source.gpu)):
                mine = self.mapped.setdefault(one, set())
                if other not in mine and len(mine) == 8:
                    raise self.says(f"GPU {one} maps no further GPU")
                mine.add(other)
        super().move(moves, part)


@define
class ForgetfulDriver(FakeDriver):
    """GPUs of which the second loses what its host wrote."""

    def read(self, buffer: Piece, size: int) -> bytes:
        """Return nothing but zeros from it."""
        return bytes(size) if buffer.gpu == 1 else super().read(buffer, size)


@define
class StuckDriver(FakeDriver):
    """GPUs of which the second cannot be used at all."""

    def write(self, buffer: Piece, data: memoryview) -> None:
        """Never return from writing to it."""
        if buffer.gpu == 1:
            time.sleep(3600)
        super().write(buffer, data)


def _only(*mechanisms: Mechanism) -> dict[Mechanism, str]:
    return {m: "no kernel" for m in Mechanism if m not in mechanisms}


_COPY, _STORE, _FLAG, _LOAD = Mechanism
_PAIR = GPUS[:2]
_TEN = tuple(f"GPU-{i}" for i in range(10))

#: Factories that a child process imports by name.
honest = FakeDriver
reordered = partial(FakeDriver, names=(GPUS[2], GPUS[0], GPUS[1]))
pair = partial(FakeDriver, names=_PAIR)
single = partial(FakeDriver, names=GPUS[:1])
nameless = partial(FakeDriver, names=("", "GPU-b"))
twins = partial(FakeDriver, names=("GPU-a", "GPU-a"))
swapped = partial(FakeDriver, {(_COPY, 0, 1): zeros}, _PAIR[::-1])
apart = partial(FakeDriver, apart=frozenset({(0, 2)}))
crowded = partial(FakeDriver, {(_STORE, 0, 1): crowd}, _PAIR)
full = partial(FullDriver, names=_PAIR)
ten = partial(EightPeersDriver, names=_TEN)
killed = partial(FakeDriver, {(_COPY, 0, 1): kill}, _PAIR)
mortal = partial(FakeDriver, {(m, 0, b): die for m in Mechanism for b in (1, 2)})
forgetful = partial(ForgetfulDriver, names=_PAIR)
slow_to_start = partial(FakeDriver, names=_PAIR, prepares_s=4.0)
stuck = partial(StuckDriver, names=_PAIR)
copies_only = partial(FakeDriver, untestable=_only(_COPY))
one_way = partial(FakeDriver, {(_COPY, 1, 0): zeros})
beside_copies = partial(FakeDriver, {(_COPY, 1, 0): zeros, (_STORE, 0, 1): beside_others, (_STORE, 1, 0): die}, _PAIR)
hanging_together = partial(FakeDriver, {(_LOAD, 0, 1): hang_when_concurrent}, _PAIR, _only(_STORE, _LOAD))
hanging_loads = partial(FakeDriver, {(_LOAD, a, b): hang for a in (0, 1) for b in (0, 1)}, _PAIR)
hanging_always = partial(FakeDriver, {(m, a, b): hang for m in Mechanism for a in (0, 1) for b in (0, 1)}, _PAIR)


def faulty() -> FakeDriver:
    """Return GPUs of which some links crash, hang or lie, of a driver that prints to both of the process's outputs."""
    os.write(1, b"driver: hello\n")
    print("driver: hello")  # noqa: T201
    return FakeDriver({(_COPY, 1, 0): die, (_STORE, 1, 0): hang, (_LOAD, 0, 1): lost, (_FLAG, 0, 1): fail}, _PAIR)


def changing() -> FakeDriver:
    """Return other GPUs to a child than to its parent."""
    return FakeDriver(names=GPUS if "pytest" in sys.modules else GPUS[::-1])


def visible() -> FakeDriver:
    """Return the GPUs a, b and c as far as CUDA_VISIBLE_DEVICES names them.

    From b to c, copies bring zeros; a and b cannot access each other's memory.
    """
    found = [name.removeprefix("GPU-") for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    names = tuple(name for name in found if name in {"a", "b", "c"})
    lies: dict[Route, Callable[[Move], None]] = {}
    if {"b", "c"} <= {*names}:
        lies[_COPY, names.index("b"), names.index("c")] = zeros
    ends = sorted(names.index(name) for name in names if name in {"a", "b"})
    return FakeDriver(lies, names, apart=frozenset({(ends[0], ends[1])} if len(ends) > 1 else ()))


def broken_driver() -> FakeDriver:
    """Return honest GPUs to a parent, and fail in a child."""
    if "pytest" not in sys.modules:
        raise OSError("no such driver")
    return FakeDriver()
