"""The backend for devices of several processes: each runs its part of every program."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.backends.cpu import Pending, add
from tpplan.exec.backends.engine import Virtual
from tpplan.exec.checks import name_of
from tpplan.exec.group.lost import PeerError, reason_of
from tpplan.exec.group.transport import Message
from tpplan.exec.memory.binding import no_memory, resolve
from tpplan.exec.processes.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.backends.cpu import Place
    from tpplan.exec.group.transport import MessageTransport
    from tpplan.exec.memory.binding import Memory
    from tpplan.exec.processes.rounds import Round
    from tpplan.exec.programs.program import Buffer, Program

#: Maximum number of cached programs.
_KEPT = 1024

_DONE = Pending()


class _CachedPart(NamedTuple):
    """A program and this process's part of it.

    Attributes:
        program: the program, kept alive because its identity is the key.
        mark: a hash of the program, by which processes tell messages of different programs apart.
        rounds: this process's part.
    """

    program: Program
    mark: int
    rounds: tuple[Round, ...]


class Processes(Virtual):
    """Runs a process's part of programs; not thread-safe.

    Every process has to run the same programs in the same order. Work on GPUs is issued on the callers' current
    streams; the host waits only where host memory is involved.

    Attributes:
        is_on_host: whether messages pass through host memory.
    """

    def __init__(
        self,
        memory: Memory,
        owners: Mapping[int, int],
        process: int,
        carrier: MessageTransport,
        gpus: Sequence[torch.device],
    ) -> None:
        """Use the context's memory.

        Args:
            memory: memory of the devices that this process owns, and its host memory.
            owners: index of the process that owns each device in use.
            process: index of this process.
            carrier: carries messages to and from the other processes.
            gpus: the GPUs that this process owns, on which calls are ordered here; none if the caller does that.
        """
        self._memory = memory
        self._owners = owners
        self._process = process
        self.is_on_host = carrier.place.type == "cpu"
        self._carrier = carrier
        self._gpus = gpus
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: dict[int, _CachedPart] = {}
        self._failure = ""

    def run(self, program: Program, operands: Mapping[Buffer, Tensor]) -> Pending:
        """Run this process's part of a program.

        Args:
            program: a program of ``events``; use the same object each time.
            operands: this process's tensors, ``[rows, columns]`` each. A ``broadcast`` or ``scatter`` from another
                process's device has an ``input`` on ``meta``, which gives rows and dtype.

        Raises:
            ExecutionError: a message was not delivered, now or earlier.
        """
        if self._failure:
            hint = "close the context in all processes, and compile the plan again"
            raise ExecutionError(f"the processes no longer agree: {self._failure}", hint)
        some = next(iter(operands.values()))
        rows, dtype = some.shape[0], some.dtype
        kept = self._kept.get(id(program)) or self._keep(program)

        def find(place: Place) -> Tensor:
            return resolve(place.view, operands, self._memory, rows, dtype, slot=place.slot)

        doing = f"{program.name} of {rows} rows of {name_of(dtype)}"
        try:
            self._turn_to_current()
            with torch.inference_mode():  # autograd does not matter: only bytes are moved
                for each in kept.rounds:
                    self._run(each, find, f"{doing} {kept.mark}")
        except RuntimeError as error:  # mostly from torch.distributed, such as time-outs and lost connections
            failure = f"failed in {doing}: {reason_of(error)}"
            if not isinstance(error, PeerError):
                self._carrier.fail(failure)
            self._failure = f"process {self._process} {failure}"
            hint = "see whether all processes run, and call the same operations in the same order with the same shapes"
            raise ExecutionError(self._failure, hint) from error
        except BaseException as error:  # such as Ctrl-C, when messages may have been sent
            failure = f"was interrupted in {doing}: {error!r:.40}"
            self._failure = f"process {self._process} {failure}"
            self._carrier.fail(failure)
            raise
        return _DONE

    def synchronize(self) -> None:
        """Block until all work of this process is complete."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def capture(self) -> NoReturn:
        """Raise an error: several processes have no common CUDA graph.

        Raises:
            ExecutionError: always.
        """
        hint = "a process with one GPU may capture its own with torch.cuda.graph, if all processes do at the same time"
        raise ExecutionError("devices of several processes have no common CUDA graph", hint)

    def close(self) -> None:
        """Release the memory; closing again does nothing."""
        self._memory = no_memory()
        self._kept.clear()

    def _turn_to_current(self) -> None:
        """Order what is issued from now on after earlier calls, which may have had other current streams."""
        for gpu in self._gpus:
            current = torch.cuda.current_stream(gpu)
            with torch.cuda.stream(current):
                if torch.cuda.is_current_stream_capturing():
                    continue  # a graph cannot wait for work outside of it
            before = self._streams.get(gpu, current)
            if before != current:
                current.wait_stream(before)
            self._streams[gpu] = current

    def _keep(self, program: Program) -> _CachedPart:
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        part, mark = rounds(program, self._owners, self._process), zlib.crc32(str(program).encode())
        kept = self._kept[id(program)] = _CachedPart(program, mark, part)
        return kept

    def _run(self, each: Round, find: Callable[[Place], Tensor], mark: str) -> None:
        """Run a round: work within this process while messages are on their way.

        Args:
            each: the round.
            find: returns the tensor at a place.
            mark: what distinguishes the messages from those of other programs and shapes.
        """
        transfers: list[Message] = []
        arrivals: list[tuple[Tensor, Sequence[Tensor]]] = []  # received data, and where it is copied to
        for message in each.messages:
            if message.sender == self._process:
                data, process = find(message.source).contiguous().to(self._carrier.place), message.receiver
            else:
                data, copies = self._room([find(target) for target in message.targets])
                process = message.sender
                arrivals.append((data, copies))
            if data.numel():
                is_sent = message.sender == self._process
                flat = data.as_strided((data.numel(),), (1,))  # a single element may have any strides
                transfers.append(Message(flat.view(torch.uint8), process, is_sent))
        wait = self._carrier.carry(transfers, mark) if transfers else None
        for work in each.work:
            target, sources = find(work.target), [find(source) for source in work.sources]
            if target.numel():
                target.copy_(sources[0]) if len(sources) == 1 else add(target, sources)
        if wait:
            wait()
        for data, copies in arrivals:
            for target in copies:
                target.copy_(data)

    def _room(self, targets: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return room for a message, one of its targets if possible, and the targets to copy it to."""
        place = self._carrier.place
        for target in targets:
            if target.is_contiguous() and target.device == place:
                return target, [other for other in targets if other is not target]
        return torch.empty_like(targets[0], device=place, memory_format=torch.contiguous_format), targets
