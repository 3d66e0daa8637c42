"""Reading the files of a checkpoint and sending their bytes to devices, in one thread."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from tpplan.errors import ExecutionError, ModelError
from tpplan.weights.staging import Buffers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

    from tpplan.weights.reads import Read

_HINT = "the file was changed or cut short meanwhile: fetch it again"


class Reader:
    """An open file and its read buffers; as a context manager, it waits on exit until all copies are complete."""

    def __init__(self, directory: Path, blocks: Mapping[int, Tensor]) -> None:
        """Create a reader without opening a file.

        Args:
            directory: directory of the files.
            blocks: the block of bytes on each device.
        """
        self._directory = directory
        self._buffers = Buffers(blocks)
        self._name = ""
        self._file: FileIO
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            try:
                self._buffers.wait()  # after an error too: source and target memory may be reused soon
            except ExecutionError:
                if error is None:  # otherwise the earlier error is more informative
                    raise

    def run(self, read: Read) -> None:
        """Perform a read and send each device its parts.

        Raises:
            ModelError: the file cannot be read, or ends early.
            ExecutionError: a copy to a device failed.
        """
        buffer = self._buffers.take()
        self._fill(buffer.bytes[: read.nbytes], read.file, read.start)
        buffer.send(read.moves)

    def _fill(self, view: memoryview, name: str, start: int) -> None:
        try:
            if name != self._name:  # reads are grouped by file
                self._stack.close()
                self._file = self._stack.enter_context((self._directory / name).open("rb", buffering=0))
                self._name = name
            self._file.seek(start)  # safe, because no other thread uses this file; os.preadv is not portable
            while view:
                got = self._file.readinto(view)
                if not got:
                    end = min(start, os.fstat(self._file.fileno()).st_size)
                    what = f"{name} ends at byte {end}, {start + len(view) - end} bytes before a tensor does"
                    raise ModelError(what, _HINT)
                view, start = view[got:], start + got
        except OSError as error:
            raise ModelError(f"{name} cannot be read: {error.strerror}", _HINT) from error
