"""Tensors of a process that the kernels of others read and write: opened in these when they are first used.

Torch cuts tensors out of allocations of its own. When an operation first touches one of them, the other processes are
asked to open it by CUDA's inter-process communication, and answer with the address that they see it at. From then on
kernels tell each other such addresses; the hosts have nothing more to do with it. What cannot be opened, or has not
been in time, goes over mirrors this time, for which nobody else need know why.

The processes ask by messages through sockets, and answer in a thread. Opening waits for no kernel, so that a GPU may
wait meanwhile for one that is not launched yet; closing does, and nobody waits for it.

An allocation that torch gives back is another one if memory comes to its place again: the driver tells them apart by a
number. That is asked at each call, and twice a second, so that nobody keeps the memory for long.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from math import inf
from struct import Struct
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Final

from attrs import Factory, define

from tpplan.errors import ExecutionError, InternalError
from tpplan.exec.processes import ipc

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

#: Kinds of messages: asking to open an allocation, where it was opened (0: it cannot be), and asking to close it.
_OPEN, _OPENED, _CLOSE = 1, 2, 3
#: The kind, the process that sends it, the number of the allocation among its own, bytes or an address, and a handle.
_MESSAGE: Final = Struct("<BIIQ64s")
#: What the system says of who has sent a message: process, user and group.
_SENDER: Final = Struct("3i")
#: Seconds between two looks at what torch has given back, and after which a process is asked again.
_LOOK_S: Final = 0.5
#: Seconds that a call waits for others to open memory, and that a graph does, which keeps what it finds.
SOON_S, PATIENT_S = 0.05, 2.0


@define(eq=False)
class Allocation:
    """An allocation of this process.

    Attributes:
        number: its number among them.
        identity: the driver's number.
        start: its first address.
        stop: the address behind it.
        handle: what others open it by; empty if it cannot be shared.
        addresses: where each process has opened it; 0 if it cannot.
        is_open: set once all have answered.
        asked: when they were asked last.
    """

    number: int
    identity: int
    start: int
    stop: int
    handle: bytes
    addresses: dict[int, int] = Factory(dict)
    is_open: Event = Factory(Event)
    asked: float = -inf

    @property
    def is_reached(self) -> bool:
        """Whether all other processes have opened it."""
        return self.is_open.is_set() and all(self.addresses.values())

    @property
    def is_late(self) -> bool:
        """Whether some may open it yet."""
        return bool(self.handle) and not self.is_open.is_set()


class Reach:
    """What other processes reach of this one's memory, and what this one has opened of theirs."""

    def __init__(self, name: str, gpu: torch.device, process: int, owners: Mapping[int, int]) -> None:
        """Begin to answer the others, all of whom have to be there before anything is asked.

        Args:
            name: a name of the processes that nobody else has.
            gpu: the GPU of this process.
            process: index of this process.
            owners: index of the process of each device of another one.

        Raises:
            ExecutionError: the system has no such sockets.
        """
        self._name, self._gpu, self._process, self._owners = name, gpu, process, dict(owners)
        self._others = tuple(sorted(set(owners.values())))
        self._own: dict[int, Allocation] = {}
        self._opened: dict[tuple[int, int], ipc.Opened] = {}
        self._unsent: list[tuple[int, int]] = []
        self._gone: set[int] = set()  # processes without a socket here
        self._lock, self._number, self._is_over = Lock(), 0, False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(self._path(process))
        except OSError as error:
            self._socket.close()
            message = f"processes of this host cannot send each other messages: {error.strerror}"
            raise ExecutionError(message, 'compile with transport="events"') from error
        self._socket.settimeout(0)
        self._thread = Thread(target=self._answer, name="tpplan reach", daemon=True)
        self._thread.start()

    def know(self, start: int, stop: int, addresses: Mapping[int, int]) -> None:
        """Note where other processes see memory that they have opened already.

        Args:
            start: the first address.
            stop: the address behind it.
            addresses: the first address as each process sees it.
        """
        with self._lock:
            self._number += 1
            found = Allocation(self._number, ipc.identity_of(start), start, stop, b"", dict(addresses))
            found.is_open.set()
            self._own[found.number] = found

    def find(self, address: int, seconds: float) -> Allocation:
        """Return the allocation that an address is in, once all others have answered whether they open it.

        Args:
            address: the address.
            seconds: how long to wait for them; if less than for the next question, once for each question.
        """
        with self._lock:
            found = self._known(address) or self._new(address)
        end = time.monotonic() + seconds
        while found.is_late and (left := end - time.monotonic()) > 0:
            if not self._ask(found) and left < _LOOK_S:
                break  # somebody has waited for this answer already
            found.is_open.wait(min(left, _LOOK_S))
        return found

    def address(self, address: int, device: int) -> int:
        """Return where the process of another device sees an address of this one, that :meth:`find` has found."""
        for each in tuple(self._own.values()):
            if each.start <= address < each.stop and each.is_reached:
                return each.addresses[self._owners[device]] + address - each.start
        raise InternalError(f"nobody else has opened address {address:#x}")

    def is_current(self, allocation: Allocation) -> bool:
        """Return whether an allocation is still there, and no other one in its place."""
        return ipc.identity_of(allocation.start) == allocation.identity

    def close(self) -> None:
        """Close what is of others; closing again does nothing. No kernel may use it any more."""
        self._is_over = True
        self._send(self._process, _CLOSE, 0)  # wakes the thread
        self._thread.join()
        self._socket.close()
        for each in self._opened.values():
            each.close()
        self._opened.clear()
        self._own.clear()

    def _path(self, process: int) -> str:
        """Return the name of a process's socket, which is in no file system."""
        return f"\0tpplan-{self._name}-{process}"

    def _known(self, address: int) -> Allocation | None:
        """Return the allocation that an address is in, if it is known, and still there."""
        for each in [each for each in self._own.values() if each.start <= address < each.stop]:
            if self.is_current(each):
                return each
            self._forget(each)
        return None

    def _new(self, address: int) -> Allocation:
        """Note the allocation that an address is in."""
        self._number += 1
        start, stop, handle = ipc.allocation_of(address, self._gpu)
        found = Allocation(self._number, ipc.identity_of(start), start, stop, handle)
        if found.identity:  # else nothing would tell that it was given back
            self._own[found.number] = found
        return found

    def _ask(self, allocation: Allocation) -> bool:
        """Ask those that have not answered to open an allocation, unless they were asked just now; return whether."""
        if (now := time.monotonic()) - allocation.asked < _LOOK_S:
            return False
        allocation.asked = now
        for other in self._others:
            if other not in allocation.addresses:
                size = allocation.stop - allocation.start
                self._send(other, _OPEN, allocation.number, size, allocation.handle)
                if other in self._gone:
                    self._note(allocation, other, 0)
        return True

    def _note(self, allocation: Allocation, process: int, address: int) -> None:
        """Note where another process has opened an allocation."""
        allocation.addresses[process] = address
        if len(allocation.addresses) == len(self._others):
            allocation.is_open.set()

    def _forget(self, allocation: Allocation) -> None:
        """Have the others close an allocation that torch has given back."""
        self._own.pop(allocation.number, None)
        self._unsent += [(other, allocation.number) for other in self._others if allocation.asked > -inf]
        self._have_closed()

    def _have_closed(self) -> None:
        """Have the others close what they have not been told of yet."""
        self._unsent = [each for each in self._unsent if not self._send(each[0], _CLOSE, each[1])]

    def _send(self, process: int, kind: int, number: int, value: int = 0, handle: bytes = b"") -> bool:
        """Send a message unless that would have to wait, for a thread that closes memory; return whether it did not."""
        message = _MESSAGE.pack(kind, self._process, number, value, handle)
        try:
            self._socket.sendto(message, self._path(process))
        except (ConnectionRefusedError, FileNotFoundError):  # it is lost, or in another network namespace
            self._gone.add(process)
        except OSError:
            return False
        return True

    def _answer(self) -> None:
        """Answer the others until this is closed, and look at own allocations now and then."""
        ipc.enter(self._gpu)
        looked, messages = time.monotonic(), select.poll()
        messages.register(self._socket, select.POLLIN)
        while not self._is_over:
            messages.poll(1000 * _LOOK_S)
            with suppress(OSError):  # there may be none
                data, about, _, _ = self._socket.recvmsg(_MESSAGE.size + 1, socket.CMSG_SPACE(_SENDER.size))
                if len(data) == _MESSAGE.size and any(_is_ours(level, kind, sent) for level, kind, sent in about):
                    self._take(*_MESSAGE.unpack(data))
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                with self._lock:
                    for each in [each for each in self._own.values() if not self.is_current(each)]:
                        self._forget(each)
                    self._have_closed()

    def _take(self, kind: int, process: int, number: int, value: int, handle: bytes) -> None:
        """Do what a message asks for."""
        if process not in self._others:
            return
        if kind == _OPEN:
            self._send(process, _OPENED, number, self._open(process, number, value, handle))
        elif kind == _OPENED:
            with self._lock:
                own = self._own.get(number)
            if own is not None:
                self._note(own, process, value)
        elif opened := self._opened.pop((process, number), None):
            opened.close()

    def _open(self, process: int, number: int, nbytes: int, handle: bytes) -> int:
        """Open an allocation of another process, and return its address here; 0 if that is impossible."""
        if (process, number) not in self._opened:
            try:
                self._opened[process, number] = ipc.Opened.on(self._gpu, ipc.Handle(handle, 0, nbytes))
            except Exception:  # noqa: BLE001 (whatever it is, mirrors do it)
                return 0
        return self._opened[process, number].tensor.data_ptr()


def _is_ours(level: int, kind: int, sent: bytes) -> bool:
    """Return whether a message's sender, as the system tells, is the same user."""
    is_about = (level, kind, len(sent)) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, _SENDER.size)
    return is_about and _SENDER.unpack(sent)[1] == os.getuid()
