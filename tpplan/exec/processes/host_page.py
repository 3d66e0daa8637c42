"""A page of host memory that all processes of a context see, and their GPUs too."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Self

import torch
from cuda.bindings import runtime

from tpplan.errors import ExecutionError
from tpplan.exec.handles import wait_within
from tpplan.exec.processes.presence import Presence

if TYPE_CHECKING:
    from torch import Tensor

#: int32 words of the page: first the status of the kernels, the others as in Presence.
_WORDS = 1024
#: Start of the name of its file.
_NAME = "tpplan-"
_HINT = 'compile with transport="events"'


class Page:
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
        # Another process names it, and kernels write to it.
        if path.parent != _folder() or not path.name.startswith(_NAME) or path.stat().st_size != 4 * _WORDS:
            raise ExecutionError(f"{str(path)!a:.80} is no memory that processes of tpplan share", _HINT)
        words = torch.from_file(str(path), shared=True, size=_WORDS, dtype=torch.int32)
        presence = Presence(path, memoryview(words.numpy()), process, count)  # type: ignore[arg-type]
        with torch.cuda.device(gpu):
            (error,) = runtime.cudaHostRegister(words.data_ptr(), words.nbytes, runtime.cudaHostRegisterPortable)
            if error == runtime.cudaError_t.cudaSuccess:
                error, address = runtime.cudaHostGetDevicePointer(words.data_ptr(), 0)
                if error == runtime.cudaError_t.cudaSuccess and int(address) == words.data_ptr():
                    return cls(words, presence)
        presence.close()
        raise ExecutionError(f"GPUs cannot use memory that processes share: {error.name}", _HINT)

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
        self.presence.close()
        runtime.cudaHostUnregister(self._words.data_ptr())
        self._words = self.status = torch.empty(0, dtype=torch.int32)


def _folder() -> Path:
    """Return the folder of pages: memory if the system has a file system of it."""
    memory = Path("/dev/shm")  # noqa: S108 (files have names of their own)
    return memory if memory.is_dir() else Path(gettempdir())
