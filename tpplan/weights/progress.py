"""A progress bar on the terminal for bytes."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for ``total`` bytes on standard error if that is a terminal, else nothing.

    Yields:
        A function that any thread calls with the number of bytes that it has just processed.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 (only a terminal pays for it)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    numbers = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, *numbers, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
