"""The process group of processes that a launcher such as torchrun has started, or an error that says who is missing."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Self

from attrs import frozen
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.group.lost import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

#: Seconds between two looks at the store, and for which a process that has the store waits until all have read why.
_POLL_S, _LINGER_S = 0.05, 0.5
_MAX_PORT = 2**16 - 1
#: The longest time-out: a week.
_MOST_S = 7 * 24 * 3600
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HINT = "start the processes with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
#: Linux's request for an interface's IPv4 address, and where the answer has it; a port that nothing is sent to.
_SIOCGIFADDR, _ADDRESS, _DISCARD = 0x8915, slice(20, 24), 9
#: What is in the store when every process has come.
_COMPLETE = "complete"


@contextmanager
def process_group(backend: str = "gloo", *, timeout_s: float = 60) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun has started, or that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Does what ``torch.distributed.init_process_group`` does, and when the block ends, ``destroy_process_group``. Where
    the processes do not all come, each of them gets an error in time that names the missing ones.

    Where MASTER_ADDR is an IP address or ``localhost``, process 0 listens on it alone, and gloo and NCCL connect by the
    interface that leads to it, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set. So nothing listens outside of
    this machine with 127.0.0.1. (A store of torchrun's own listens everywhere.) Other names may have another address on
    each machine: for them torch.distributed chooses.

    Args:
        backend: as for ``init_process_group``: ``"cpu:gloo,cuda:nccl"`` with GPUs, ``"gloo"`` without.
        timeout_s: seconds for which the processes wait for each other, here and in every operation of the group.

    Yields:
        The group of all processes.

    Raises:
        RequestError: a variable of the environment is missing, or it or the time-out has an impossible value.
        ExecutionError: processes are missing, or cannot be reached.
    """
    if not 0 < timeout_s <= _MOST_S:
        raise RequestError(f"timeout_s is {timeout_s}, expected seconds up to {_MOST_S}", "leave it out for a minute")
    place = _Place.of(os.environ)
    deadline = time.monotonic() + timeout_s
    interface = _interface(place.address) if place.is_exact else ""
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    chosen = {name: value for name, value in chosen.items() if name not in os.environ}
    os.environ.update(chosen)
    try:
        store = _store(place, deadline, timeout_s)
        _meet(place, store, deadline, timeout_s)
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore(place.key("group"), store),
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            message = f"process {place.rank} cannot connect to the others: {reason_of(error)}"
            raise ExecutionError(
                message, "see that the processes reach each other's ports (docs/processes.md)"
            ) from error
        try:
            group = distributed.group.WORLD
            assert group is not None  # noqa: S101 (just initialised)
            yield group
        except BaseException:
            _leave(place, store)
            raise
        finally:
            distributed.destroy_process_group()
    finally:
        for name in chosen:
            os.environ.pop(name, None)


@frozen
class _Place:
    """Which of the processes this is, and where they meet.

    Attributes:
        rank: index of this process.
        world: number of processes.
        host: MASTER_ADDR.
        address: one of its IP addresses.
        port: MASTER_PORT.
        is_exact: whether MASTER_ADDR is the same address on every machine.
        is_host: whether this process has the store.
        prefix: of keys in the store, which a launcher may use for several attempts.
    """

    rank: int
    world: int
    host: str
    address: str
    port: int
    is_exact: bool
    is_host: bool
    prefix: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables of a launcher.

        Raises:
            RequestError: one is missing or has an impossible value.
            ExecutionError: MASTER_ADDR has no address.
        """
        absent = [name for name in _NAMES if not environment.get(name)]
        if absent:
            raise RequestError(f"environment: {_listed(absent)} {'is' if len(absent) == 1 else 'are'} not set", _HINT)
        world = _whole(environment, "WORLD_SIZE", 1, 2**31 - 1)
        rank = _whole(environment, "RANK", 0, world - 1)
        port = _whole(environment, "MASTER_PORT", 1, _MAX_PORT)
        host = environment["MASTER_ADDR"]
        try:
            address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            raise ExecutionError(f"MASTER_ADDR={host} is no host that this machine knows: {error}", _HINT) from error
        is_exact = host in {"localhost", address}
        # torchrun's agent has the store, and keeps it from one attempt to the next
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, world, host, address, port, is_exact, rank == 0 and not by_agent, f"tpplan/{attempt}")

    def key(self, name: object) -> str:
        """Return a key of the store."""
        return f"{self.prefix}/{name}"

    @property
    def where(self) -> str:
        """Where the processes meet, in words."""
        return f"{self.host}:{self.port}"


def _whole(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    """Return a variable's whole number.

    Raises:
        RequestError: it is none, or not within bounds.
    """
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise RequestError(
            f"environment: {name} is {text!r:.40}, expected a whole number from {least} to {most}", _HINT
        )
    return int(text)


def _store(place: _Place, deadline: float, timeout_s: float) -> Store:
    """Return the store in which processes meet; process 0 has it, unless its launcher does.

    Raises:
        ExecutionError: the port is taken, or no store answers in time.
    """
    listening = _listening(place) if place.is_host else None
    if not listening:
        _reach(place, deadline, timeout_s)
    stores: list[Store | Exception] = []

    def connect() -> None:
        try:
            fd = listening.detach() if listening else None
            wait = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            stores.append(
                TCPStore(
                    place.address,
                    place.port,
                    is_master=place.is_host,
                    timeout=wait,
                    wait_for_workers=False,
                    master_listen_fd=fd,
                )
            )
        except Exception as error:  # noqa: BLE001 (raised in the caller)
            stores.append(error)

    thread = Thread(target=connect, daemon=True)  # torch waits for ever for a program that listens but says nothing
    thread.start()
    thread.join(max(1.0, deadline - time.monotonic()) + 1)
    store = stores[0] if stores else None
    if isinstance(store, Store):
        return store
    reason = f": {reason_of(store)}" if isinstance(store, RuntimeError) else ", but it is no store of torch.distributed"
    message = f"process {place.rank} reached {place.where}{reason}"
    raise ExecutionError(message, "another program uses this port: set another MASTER_PORT in all processes") from store


def _listening(place: _Place) -> socket.socket:
    """Return a socket that listens on MASTER_ADDR, if that is exact and an address of this machine, else everywhere.

    Raises:
        ExecutionError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    for address in (place.address,) * place.is_exact + ("",):
        try:
            return socket.create_server((address, place.port), family=family, backlog=2048)
        except OSError as error:
            if address and error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:  # such as that of a router
                continue
            hint = "end the program that listens there, or set another MASTER_PORT in all processes"
            raise ExecutionError(
                f"process 0 cannot listen on {place.where}: {os.strerror(error.errno or 0)}", hint
            ) from error
    raise AssertionError


def _interface(address: str) -> str:
    """Return the name of the interface by which an address is reached; empty if the system does not tell."""
    is_6 = ":" in address
    with (
        suppress(OSError, ImportError),
        socket.socket(socket.AF_INET6 if is_6 else socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((address, _DISCARD))  # sends nothing: it looks up the route
        own = ip_address(probe.getsockname()[0].partition("%")[0])
        if own.is_loopback:
            return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
        if is_6:
            rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
            return next((row[-1] for row in rows if bytes.fromhex(row[0]) == own.packed), "")
        import fcntl  # noqa: PLC0415 (not on Windows)

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[_ADDRESS] == own.packed:
                    return name
    return ""


def _reach(place: _Place, deadline: float, timeout_s: float) -> None:
    """Wait until something listens where the processes meet.

    Raises:
        ExecutionError: nothing does in time.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((place.address, place.port), timeout=max(left, _POLL_S)):
                return
        except OSError as error:
            if time.monotonic() + _POLL_S >= deadline:
                reason = error.strerror or "no answer"
                message = f"process 0 did not come within {timeout_s:g} s: nobody listens on {place.where} ({reason})"
                hint = "start process 0, and see that MASTER_ADDR and MASTER_PORT lead to it and no firewall is between"
                raise ExecutionError(message, hint) from error
            time.sleep(_POLL_S)


def _meet(place: _Place, store: Store, deadline: float, timeout_s: float) -> None:
    """Wait until all processes have come.

    Raises:
        ExecutionError: some are missing, or two have the same rank.
    """
    try:
        outcome = _outcome(place, store, deadline, timeout_s)
        if outcome == _COMPLETE:
            return
        store.add(place.key("left"), 1)
        if place.is_host:  # the others read it here
            _wait(lambda: store.add(place.key("left"), 0) >= store.add(place.key("count"), 0))
    except RuntimeError as error:
        message = f"process 0 has ended before all processes had come: {reason_of(error)}"
        raise ExecutionError(message, "see what it says, and start all processes again") from error
    hint = (
        "see that all processes run and have the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each with its own RANK"
    )
    raise ExecutionError(f"the processes did not meet at {place.where}: {outcome}", hint)


def _outcome(place: _Place, store: Store, deadline: float, timeout_s: float) -> str:
    """Return why processes do not meet, the same in all: the first that gives up decides which are missing.

    Raises:
        RuntimeError: the store has gone.
    """

    def decide(outcome: str) -> None:
        store.compare_set(place.key("outcome"), "", outcome)

    count = store.add(place.key("count"), 1)
    world = store.compare_set(place.key("world"), "", str(place.world)).decode()
    if world != str(place.world):
        decide(f"WORLD_SIZE is {place.world} in process {place.rank}, and {world} in others")
    if store.add(place.key(place.rank), 1) > 1:
        decide(f"RANK is {place.rank} in two processes")
    if count == place.world:
        decide(_COMPLETE)
    while not store.check([place.key("outcome")]):
        if time.monotonic() > deadline:
            late = [rank for rank in range(place.world) if not store.check([place.key(rank)])]
            who = f"process{'es' if len(late) > 1 else ''} {_listed(late or [place.rank])}"
            decide(f"{who} of {place.world} did not come within {timeout_s:g} s" if late else _COMPLETE)
        time.sleep(_POLL_S)
    return store.get(place.key("outcome")).decode()


def _leave(place: _Place, store: Store) -> None:
    """Say that this process leaves after a failure; the one with the store lets the others read there why, first."""

    def leave() -> None:
        with suppress(RuntimeError):
            if store.add(place.key("left"), 1) < place.world and place.is_host:
                _wait(lambda: store.add(place.key("left"), 0) >= place.world)

    thread = Thread(target=leave, daemon=True)  # a store that is lost answers nothing
    thread.start()
    thread.join(_LINGER_S if place.is_host else _POLL_S)


def _wait(done: Callable[[], bool]) -> None:
    """Wait until something is so, for some seconds at most."""
    end = time.monotonic() + _LINGER_S
    with suppress(RuntimeError):
        while not done() and time.monotonic() < end:
            time.sleep(_POLL_S)


def _listed(words: Sequence[object]) -> str:
    """Return words as in a sentence."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last
