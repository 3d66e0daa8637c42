"""Reading a checkpoint's files ahead while Python imports torch, which takes seconds."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.weights.source import Source

#: Bytes to read of a file before looking whether reading ahead is still of use.
_STEP: Final = 2**26


@contextmanager
def reading_ahead(source: Source) -> Iterator[None]:
    """Let the system read the checkpoint's files into its page cache until a ``with`` block ends.

    Nothing here raises or reports an error: who needs what failed here tries it again.
    """
    done, files = Event(), [source.directory / name for name in sorted(source.headers.files)]
    with suppress(RuntimeError):  # no further thread
        Thread(target=_read, args=(files, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _read(files: Sequence[Path], done: Event) -> None:
    """Read files into the page cache until done.

    They are sent to nowhere, which copies nothing, and which only Linux does; to advise it of what will be needed
    (``posix_fadvise``) reads only a few MiB.
    """
    with suppress(OSError, AttributeError), Path(os.devnull).open("wb") as nowhere:
        for path in files:
            with path.open("rb") as file:
                at = 0
                while not done.is_set() and (sent := os.sendfile(nowhere.fileno(), file.fileno(), at, _STEP)):
                    at += sent
