"""The files of a checkpoint, mapped into memory and read piece by piece."""

from __future__ import annotations

import mmap
import warnings
from math import prod
from typing import TYPE_CHECKING, Final

import torch

from tpplan.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from tpplan.checkpoint import Tensor as Header
    from tpplan.weights.slices import TensorSlice

#: Bytes that are read and sent at a time.
CHUNK_BYTES: Final = 16 * 2**20

#: Rows of a piece of a tensor: side by side in memory, ``[rows, bytes]`` each, they are what is loaded.
Rows = tuple["Tensor", ...]


class MappedFile:
    """A file that is opened once; its pages come when they are read, and go when they are not needed any more."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            ModelError: it cannot be opened.
        """
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # the latter for an empty file
            reason = getattr(error, "strerror", None) or error
            raise ModelError(f"{path.name} cannot be read: {reason}", "check the file and its permissions") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no tensors that are read-only; nothing writes this one
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def pieces(self, header: Header, part: TensorSlice) -> Iterator[Rows]:
        """Yield what makes up a part of a tensor, in order, up to 16 MiB at a time.

        A piece is given back when the next one is asked for, and must not be read any more then.
        """
        for rows in _runs(self._bytes[header.start : header.start + header.nbytes], part):
            self._advise("MADV_WILLNEED", rows)
            step = max(1, CHUNK_BYTES // sum(row.shape[1] for row in rows))
            for first in range(0, len(rows[0]), step):
                piece = tuple(row[first : first + step] for row in rows)
                yield piece
                self._advise("MADV_DONTNEED", piece)

    def _advise(self, advice: str, rows: Rows) -> None:
        """Tell the system about the pages from the first to the last byte of these rows, where systems listen."""
        if not hasattr(mmap, advice):
            return
        first, last = rows[0], rows[-1]
        start = int(first.storage_offset()) // mmap.PAGESIZE * mmap.PAGESIZE
        end = int(last.storage_offset()) + (len(last) - 1) * last.stride(0) + last.shape[1]
        self._map.madvise(getattr(mmap, advice), start, end - start)


def _runs(data: Tensor, part: TensorSlice) -> Iterator[Rows]:
    """Yield the bytes of a part of a tensor as rows that lie at equal distances, given all of the tensor's."""
    if part.dim is None:
        yield (data.view(part.whole[0] if part.whole else 1, -1),)
        return
    outer, length = prod(part.whole[: part.dim]), part.whole[part.dim]
    if outer == 1:
        rows = data.view(length, -1)
        yield from ((rows[start:end],) for start, end in part.ranges)
        return
    rows = data.view(outer, -1)
    size = rows.shape[1] // length
    yield tuple(rows[:, start * size : end * size] for start, end in part.ranges)
