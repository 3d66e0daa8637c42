"""One thread's way through the files of a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from ctypes import c_char
from typing import TYPE_CHECKING, Self

from tpplan.errors import ModelError
from tpplan.weights.staging import Buffers

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

    from tpplan.weights.reads import Move, Read

_HINT = "the file was changed or cut short meanwhile: fetch it again"


class Reader:
    """The file that is open, and memory for what is read of it; a context manager."""

    def __init__(self, directory: Path, *, pinned: bool) -> None:
        """Allocate the memory.

        Args:
            directory: of the files.
            pinned: whether it goes to CUDA devices.
        """
        self._directory = directory
        self._pinned = pinned
        self._whole, self._cut = Buffers(pinned=pinned), Buffers(pinned=pinned)
        self._name = ""
        self._file: FileIO
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, read: Read) -> None:
        """Read, and send to every device what it gets of it.

        Raises:
            ModelError: the file cannot be read, or ends early.
        """
        buffer = self._whole.take()
        data = buffer.memory[: read.rows * read.width]
        self._fill(data, read.file, read.start)
        rows = data.view(read.rows, read.width)
        for move in read.moves:
            start, end = move.ranges[0]
            if len(move.ranges) == 1 and (read.rows == 1 or end - start == read.width):
                buffer.send(rows[:, start:end].flatten(), move.target)
            elif self._pinned:
                cut = self._cut.take()
                packed = cut.memory[: len(move.target)]
                _pack(rows, move, packed)
                cut.send(packed, move.target)
            else:
                _pack(rows, move, move.target)

    def wait(self) -> None:
        """Return when everything is on the devices."""
        self._whole.wait()
        self._cut.wait()

    def _fill(self, data: Tensor, name: str, start: int) -> None:
        try:
            if name != self._name:  # reads come file by file
                self._stack.close()
                self._file = self._stack.enter_context((self._directory / name).open("rb", buffering=0))
                self._name = name
            file = self._file
            file.seek(start)
            view = memoryview((c_char * len(data)).from_address(data.data_ptr())).cast("B")
            while view:
                got = file.readinto(view)
                if not got:
                    what = f"{name} ends at byte {file.tell()}, {len(view)} bytes before a tensor does"
                    raise ModelError(what, _HINT)
                view = view[got:]
        except OSError as error:
            raise ModelError(f"{name} cannot be read: {error.strerror}", _HINT) from error


def _pack(rows: Tensor, move: Move, target: Tensor) -> None:
    """Put ranges of the rows side by side."""
    packed = target.view(len(rows), -1)
    at = 0
    for start, end in move.ranges:
        packed[:, at : at + end - start].copy_(rows[:, start:end])
        at += end - start
