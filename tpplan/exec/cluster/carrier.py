"""Carrying messages between processes with torch.distributed."""

from __future__ import annotations

import re
import zlib
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen
from torch import Tensor, distributed

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

#: Tags of messages are numbers of 31 bits.
_TAGS = 2**31


@frozen(eq=False)
class Parcel:
    """A message on its way.

    Attributes:
        data: contiguous uint8 on the carrier's device: the data to send, or room for what is received.
        process: index of the other process in the group.
        is_sent: whether it is sent, not received.
    """

    data: Tensor
    process: int
    is_sent: bool


class Carrier(Protocol):
    """Carries messages between processes.

    Attributes:
        place: the torch device whose memory it reads and writes.
    """

    place: torch.device

    def carry(self, parcels: Sequence[Parcel], mark: str) -> Callable[[], None]:
        """Start to send and to receive, and return a callable after which the data may be used.

        Args:
            parcels: the parcels, in the same order in both processes of each.
            mark: what distinguishes these messages from others; the same in both processes.
        """


class GroupCarrier:
    """Carries messages with the processes of a group.

    Attributes:
        place: the torch device whose memory it reads and writes: the first of the process's GPUs if the group has a
            backend for GPUs, other than gloo, which copies through host memory itself; else the CPU.
        backend: name of the backend that carries the messages.
        name: what distinguishes its messages from those of other carriers of the group; the same in all processes.
    """

    name = ""

    def __init__(self, group: ProcessGroup, places: Sequence[torch.device]) -> None:
        """Choose where messages start and arrive.

        Args:
            group: the processes.
            places: torch devices that this process owns.

        Raises:
            ExecutionError: the group has no backend for such devices.
        """
        backends = backends_of(group)
        gpus = [place for place in places if place.type == "cuda"]
        kind = "cuda" if gpus and backends.get("cuda", "gloo") != "gloo" else "cpu"
        if kind not in backends:
            found = " and ".join(f"{backend} for {each}" for each, backend in backends.items())
            hint = 'initialise torch.distributed with "cpu:gloo,cuda:nccl" or "gloo"'
            raise ExecutionError(f"group: it has {found}, but messages in host memory need one for {kind}", hint)
        self.backend = backends[kind]
        self.place = gpus[0] if kind == "cuda" else torch.device("cpu")
        self._group = group
        self._ranks = distributed.get_process_group_ranks(group)

    def open(self) -> None:
        """Exchange a first message with all processes of the group, as NCCL requires before some exchange any."""
        with self.current():
            distributed.all_reduce(torch.zeros(1, device=self.place), group=self._group)
            if self.place.type == "cuda":
                torch.cuda.synchronize(self.place)

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager in which the GPU that messages use is current, as NCCL requires."""
        return torch.cuda.device(self.place) if self.place.type == "cuda" else nullcontext()

    def carry(self, parcels: Sequence[Parcel], mark: str) -> Callable[[], None]:
        """Start to send and to receive; see :class:`Carrier`. The current streams order it on GPUs."""
        tag = zlib.crc32(f"{self.name} {mark}".encode()) % _TAGS  # so that no message is taken for another
        with self.current(), self._naming(parcels):
            works = distributed.batch_isend_irecv(
                [
                    distributed.P2POp(
                        distributed.isend if parcel.is_sent else distributed.irecv,
                        parcel.data,
                        self._ranks[parcel.process],
                        self._group,
                        tag,
                    )
                    for parcel in parcels
                ]
            )

        def wait() -> None:
            with self.current():
                for i, work in enumerate(works):  # one for each parcel, or one for all
                    with self._naming(parcels if len(works) < len(parcels) else parcels[i : i + 1]):
                        work.wait()

        return wait

    @contextmanager
    def _naming(self, parcels: Sequence[Parcel]) -> Iterator[None]:
        """Add to an error the processes that parcels are for or from: torch.distributed tells their ports, at most."""
        try:
            yield
        except RuntimeError as error:
            others = sorted({parcel.process for parcel in parcels})
            names = " and ".join(
                f"process {other}" if other == self._ranks[other] else f"process {other} (rank {self._ranks[other]})"
                for other in others
            )
            raise RuntimeError(f"{reason_of(error)}, in messages with {names}") from error


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """Return the name of a group's backend for each kind of device, such as ``nccl`` for ``cuda``."""
    config = distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(entry.split(":", 1) for entry in config.split(","))


def reason_of(error: RuntimeError) -> str:
    """Return what torch.distributed says of a failure, in one line, without the place in its source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error).partition("\n")[0])
