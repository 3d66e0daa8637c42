"""What the tests of moving share: machines whose links do or do not copy, and tensors on them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import permutations

import pytest
import torch
from attrs import define, field

from tpplan.exec.machine.link_report import Link, LinkReport, Mechanism, Verdict, routes

CPU, *GPU = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "cuda:2"))

#: The ways of a move from GPU 0 to GPU 1.
DIRECT, STAGED = [("cuda:0", "cuda:1")], [("cuda:0", "cpu"), ("cpu", "cuda:1")]


@define
class Machine:
    """Three GPUs in the CPU's memory. Peer copies between them do what the machine is made to do.

    A copy from or to the CPU that does not block reads and writes nothing before somebody waits for its GPU.
    """

    verified: frozenset[tuple[int, int]] = frozenset(permutations(range(3), 2))
    peer: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    untested: frozenset[tuple[int, int]] = frozenset()
    log: list[tuple[str, str, bool]] = field(factory=list)
    asked: list[tuple[int, ...]] = field(factory=list)
    queue: list[tuple[int | None, torch.Tensor, torch.Tensor]] = field(factory=list)

    def count(self) -> int:
        """Return 3."""
        return 3

    def current(self) -> int:
        """Return 1."""
        return 1

    def links(self, gpus: Collection[int]) -> LinkReport:
        """Return that copies work between those that are verified, and kernels nowhere."""
        self.asked.append((*gpus,))
        every = [Link(*route, self._verdict(*route), "") for route in routes(3) if {*route[1:]} <= {*gpus}]
        return LinkReport(("a", "b", "c"), tuple(every))

    def wait(self, index: int) -> None:
        """Do what is queued for a GPU, and note it."""
        self.log.append((f"cuda:{index}", "wait", False))
        for each, target, source in self.queue:
            if each == index:
                target.copy_(source)
        self.queue = [entry for entry in self.queue if entry[0] != index]

    def _verdict(self, mechanism: Mechanism, source: int, target: int) -> Verdict:
        if (source, target) in self.untested:
            return Verdict.UNTESTED
        works = mechanism == Mechanism.COPY and (source, target) in self.verified
        return Verdict.WORKS if works else Verdict.BROKEN

    def put(self, data: torch.Tensor, device: torch.device) -> Placed:
        """Return a tensor on a device of this machine, with the same strides."""
        placed = data.as_subclass(Placed)
        placed.machine, placed.place = self, device
        return placed

    def transfer(self, source: Placed, target: torch.device, *, non_blocking: bool) -> Placed:
        """Copy as torch does, noting it."""
        if source.place == target:
            return source
        self.log.append((str(source.place), str(target), non_blocking))
        data = source.as_subclass(torch.Tensor)
        if CPU in (source.place, target):
            copied = data.clone()
            if non_blocking:
                copied.zero_()
                self.queue.append(((source.place if target == CPU else target).index, copied, data))
            return self.put(copied, target)
        if data.stride() != data.clone().stride() or _is_lazy(data):  # a kernel stores them, which does not work here
            return self.put(torch.zeros_like(data), target)
        return self.put(self.peer(data), target)

    def ways(self) -> list[tuple[str, str]]:
        """Return the noted copies without their flags and without waiting, and forget them."""
        ways = [(source, target) for source, target, _ in self.log if target != "wait"]
        self.log.clear()
        return ways


class Placed(torch.Tensor):
    """A tensor that says that it is on some device of a machine."""

    machine: Machine
    place: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return where it is."""
        return self.place

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Placed:  # type: ignore[override]
        """Copy it elsewhere."""
        return self.machine.transfer(self, device, non_blocking=non_blocking)

    def copy_(self, source: Placed) -> Placed:  # type: ignore[override]
        """Write its bytes."""
        is_plain = self.is_contiguous() and not _is_lazy(self)
        if not is_plain and CPU not in (self.place, source.place) and self.place != source.place:
            pytest.fail("a peer copy into a target that is not contiguous, or lazy, is a kernel's")
        data = self.machine.transfer(source, self.place, non_blocking=False)
        self.as_subclass(torch.Tensor).copy_(data.as_subclass(torch.Tensor))
        return self

    def clone(self) -> Placed:  # type: ignore[override]
        """Copy it on its device."""
        return self.machine.put(self.as_subclass(torch.Tensor).clone(), self.place)

    def contiguous(self) -> Placed:  # type: ignore[override]
        """Copy it on its device if it is not contiguous."""
        return self.machine.put(self.as_subclass(torch.Tensor).contiguous(), self.place)

    def resolve_conj(self) -> Placed:
        """Copy it on its device if its values are to be conjugated."""
        return self.machine.put(self.as_subclass(torch.Tensor).resolve_conj(), self.place)

    def resolve_neg(self) -> Placed:
        """Copy it on its device if its values are to be negated."""
        return self.machine.put(self.as_subclass(torch.Tensor).resolve_neg(), self.place)


def _is_lazy(data: torch.Tensor) -> bool:
    """Tell whether who reads it has to conjugate or negate."""
    return data.is_conj() or data.is_neg()


def fails(_: torch.Tensor) -> torch.Tensor:
    """Do what a driver does that has no peer access."""
    raise RuntimeError("CUDA error: peer access is not supported")


def full(_: torch.Tensor) -> torch.Tensor:
    """Do what torch does without memory."""
    raise torch.OutOfMemoryError("no room")


def same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have the same dtype and values, wherever they are."""
    return torch.equal(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)) and a.dtype == b.dtype


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values, in the order of its indices."""
    plain = x.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().flatten().view(torch.uint8)


X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)

MACHINES: dict[str, tuple[Callable[[], Machine], list[tuple[str, str]]]] = {
    "verified": (Machine, DIRECT),
    "broken, and silently so": (lambda: Machine(frozenset(), torch.zeros_like), STAGED),
    "verified the other way only": (lambda: Machine(frozenset({(1, 0)}), torch.zeros_like), STAGED),
    "verified, but it fails": (lambda: Machine(peer=fails), DIRECT + STAGED),
}
EACH_MACHINE = pytest.mark.parametrize(("make", "ways"), MACHINES.values(), ids=MACHINES)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.permute(2, 0, 1),
    "every other column": lambda x: x[:, :, ::2],
    "every other column, transposed": lambda x: x[:, ::2].permute(2, 0, 1),
    "expanded": lambda x: x[:, :1].expand(2, 5, 4),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "one element": lambda x: x[0, 0, 0],
    "no element": lambda x: x[:, :0].transpose(0, 2),
    "bytes": lambda x: x.to(torch.uint8).t() if x.ndim == 2 else x.to(torch.uint8),
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "conjugated": lambda x: torch.complex(x, x + 1).conj(),
    "negated": lambda x: torch.complex(x, x + 1).conj().imag,
}
