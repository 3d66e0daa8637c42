"""Sharing memory with the other processes: that of a context's GPUs, and a page of host memory that all GPUs see."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Self

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.handles import wait_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.build import Areas
    from tpplan.exec.group.meeting import Meeting
    from tpplan.exec.processes.ipc import Handle, Opened
    from tpplan.exec.processes.presence import Presence
    from tpplan.exec.processes.reach import Reach

    #: Handles of a device's control area and exchange buffer.
    Handles = tuple[Handle, Handle]


#: int32 words of the page: first the status of the kernels, the others as in Presence.
_WORDS = 1024
#: Start of the name of its file.
_NAME = "tpplan-"
_HINT = 'compile with transport="events"'


class SharedHostPage:
    """A page of shared memory.

    Attributes:
        status: the status words of the kernels of all processes: what one reports, all hosts see.
        presence: this process among the others.
    """

    def __init__(self, words: Tensor, presence: Presence) -> None:
        self.status = words[:16]
        self.presence = presence
        self._words = words

    @classmethod
    def create(cls) -> Path:
        """Create a page of zeros, and return its file."""
        path = _folder() / f"{_NAME}{os.getpid()}-{time.monotonic_ns()}"
        try:
            path.touch(0o600, exist_ok=False)  # for no other user
            path.write_bytes(bytes(4 * _WORDS))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    @classmethod
    def open(cls, path: Path, gpu: torch.device, process: int, count: int) -> Self:
        """Open a page and make it known to a GPU.

        Args:
            path: its file.
            gpu: the GPU of this process.
            process: index of this process.
            count: number of processes.

        Raises:
            ExecutionError: the GPUs cannot use it, or it is no page of tpplan's.
        """
        from tpplan.exec.processes.presence import Presence  # noqa: PLC0415 (needs locks as Linux has them)
        from tpplan.exec.toolchain.bindings import runtime  # noqa: PLC0415 (needs CUDA)

        # Another process names it, and kernels write to it.
        if path.parent != _folder() or not path.name.startswith(_NAME) or path.stat().st_size != 4 * _WORDS:
            raise ExecutionError(f"{str(path)!a:.80} is no memory that processes of tpplan share", _HINT)
        words = torch.from_file(str(path), shared=True, size=_WORDS, dtype=torch.int32)
        presence = Presence(path, memoryview(words.numpy()), process, count)  # type: ignore[arg-type]
        with torch.cuda.device(gpu):
            (error,) = runtime.cudaHostRegister(words.data_ptr(), words.nbytes, runtime.cudaHostRegisterPortable)
            why = error.name
            if error == runtime.cudaError_t.cudaSuccess:
                error, address = runtime.cudaHostGetDevicePointer(words.data_ptr(), 0)
                if error == runtime.cudaError_t.cudaSuccess and int(address) == words.data_ptr():
                    return cls(words, presence)
                why = "its address is another one on a GPU" if error == runtime.cudaError_t.cudaSuccess else error.name
                runtime.cudaHostUnregister(words.data_ptr())
        presence.close()
        raise ExecutionError(f"GPUs cannot use memory that processes share: {why}", _HINT)

    def leave(self, seconds: float) -> bool:
        """Tell the other processes that this one uses no memory of theirs; return whether all tell the same in time.

        Those that are lost are not waited for. Their GPUs may still write for a moment.
        """
        self.presence.leave()
        with suppress(TimeoutError):
            wait_within(seconds, self.presence.is_alone)
        return self.presence.is_left()

    def close(self) -> None:
        """Let go of the page; no kernel may use it any more."""
        from tpplan.exec.toolchain.bindings import runtime  # noqa: PLC0415 (needs CUDA)

        self.presence.close()
        runtime.cudaHostUnregister(self._words.data_ptr())
        self._words = self.status = torch.empty(0, dtype=torch.int32)


def _folder() -> Path:
    """Return the folder of pages: memory if the system has a file system of it."""
    memory = Path("/dev/shm")  # noqa: S108 (files have names of their own)
    return memory if memory.is_dir() else Path(gettempdir())


#: What is shared: kept until no other process uses it, even if this one forgets its context.
_HELD: set[Sharing] = set()


class Sharing:
    """The memory that the processes of a context share.

    Attributes:
        page: host memory that all of them see; None if nothing is shared.
        reach: what the others reach beside that; None as long as there is no backend.
    """

    def __init__(self, meeting: Meeting, gpu: torch.device | None) -> None:
        """Prepare it.

        Args:
            meeting: the processes.
            gpu: the GPU whose kernels write to other processes' memory; None if nothing is shared.
        """
        self.page: SharedHostPage | None = None
        self.reach: Reach | None = None
        self._opened: dict[int, list[Opened]] = {}
        self._own: Areas = {}
        self._meeting = meeting
        self._gpu = gpu
        self._has_told = self._is_over = False
        self._path: Path | None = None

    def share(self, areas: Areas) -> Areas:
        """Share the areas of this process's devices, and return those of the others; all processes call it at once.

        Raises:
            ExecutionError: memory cannot be shared, or, without a message, another process has failed.
        """
        handles = self._handles(areas)
        if self._gpu is not None and not self._meeting.process:
            self._path = SharedHostPage.create()
        told = self._tell("", handles)
        if any(failure for failure, _, _ in told):
            raise ExecutionError("")
        if self._gpu is None:
            return {}
        self._own = areas
        _HELD.add(self)
        theirs = {d: pair for _, some, _ in told for d, pair in some.items() if d not in areas}
        self._open(self._gpu, told[0][2], theirs)
        return {device: (control.tensor, exchange.tensor) for device, (control, exchange) in self._opened.items()}

    @property
    def addresses(self) -> dict[int, int]:
        """Where this process sees the exchange buffers of the others, by device."""
        return {device: exchange.tensor.data_ptr() for device, (_, exchange) in self._opened.items()}

    def learn(self, every: Sequence[Mapping[int, int]]) -> None:
        """Note where the others see the exchange buffers of this process, given the :attr:`addresses` of all."""
        for device, (_, exchange) in self._own.items():
            if self.reach:
                start, seen = exchange.data_ptr(), {i: each[device] for i, each in enumerate(every) if device in each}
                self.reach.know(start, start + len(exchange), seen)

    def fail(self, failure: str) -> None:
        """Tell the others why nothing is shared, unless they know already that this process had come so far."""
        if not self._has_told:
            self._tell(failure, {})

    def end(self) -> None:
        """Share nothing any more, as a process has failed before any kernel ran; all processes call it at once."""
        self._close()
        self._meeting.tell(None)  # now nobody has the memory of others
        self._forget()

    def named(self, processes: Sequence[int]) -> str:
        """Return the names of processes, as in a sentence."""
        return self._meeting.named(processes)

    def forget_name(self) -> None:
        """Remove the page's name, once all processes have opened it or failed."""
        if self._path:
            self._path.unlink(missing_ok=True)
            self._path = None

    def leave(self, seconds: float) -> None:
        """Stop using other processes' memory, and wait until they do so, too.

        What one of them may still write to after these seconds is kept until this process ends.
        """
        if self._is_over:
            return
        self._close()
        if self.page and self.page.leave(seconds):
            self._forget()

    def _close(self) -> None:
        for each in chain.from_iterable(self._opened.values()):
            each.close()
        self._opened.clear()

    def _forget(self) -> None:
        self._is_over = True
        self._own = {}
        if self.page:
            self.page.close()
        _HELD.discard(self)

    def _handles(self, areas: Areas) -> dict[int, Handles]:
        if self._gpu is None:
            return {}
        from tpplan.exec.processes.ipc import Handle  # noqa: PLC0415 (needs CUDA)

        return {device: (Handle.of(control), Handle.of(exchange)) for device, (control, exchange) in areas.items()}

    def _open(self, gpu: torch.device, path: Path, handles: Mapping[int, Handles]) -> None:
        from tpplan.exec.processes.ipc import Opened  # noqa: PLC0415 (needs CUDA)

        self.page = SharedHostPage.open(path, gpu, self._meeting.process, self._meeting.count)
        for device, (control, exchange) in handles.items():
            opened = self._opened[device] = [Opened.on(gpu, control)]  # which is closed if the other cannot be opened
            opened.append(Opened.on(gpu, exchange))

    def _tell(self, failure: str, handles: dict[int, Handles]) -> list[tuple[str, dict[int, Handles], Path]]:
        """Tell all processes why this one shares nothing, or its handles and the page's path."""
        self._has_told = True
        plain = {device: tuple(map(tuple, pair)) for device, pair in handles.items()}
        return self._meeting.tell_and_read((failure, plain, str(self._path or "")), _read)


def _read(told: Any) -> tuple[str, dict[int, Handles], Path]:
    """Return what a process has told."""
    failure, plain, path = told
    if not plain:
        return str(failure), {}, Path(path)
    from tpplan.exec.processes.ipc import Handle  # noqa: PLC0415 (needs CUDA)

    handles = {int(d): (Handle(*control), Handle(*exchange)) for d, (control, exchange) in plain.items()}
    return str(failure), handles, Path(path)
