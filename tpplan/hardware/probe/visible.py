"""The variables that hide GPUs from programs, read as the drivers read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

_ORDINAL = re.compile(r"[+-]?[0-9]{1,9}")


def select(value: str, ordinals: Sequence[T], named: Mapping[str, T], *, mixed: bool = False) -> tuple[list[T], str]:
    """Return the GPUs that a list such as ``1,0`` or ``GPU-8932f937,GPU-5a`` leaves visible, in its order.

    The first entry that names no GPU ends the list: ``-1``, an ordinal that is too large, a prefix that fits several,
    or, in CUDA, an entry of another form than the first one's. A number counts as far as it goes (``1x`` is 1). A GPU
    that is named twice leaves none. This is what CUDA was seen to do (driver 580); AMD's runtimes document less.

    Args:
        value: of the variable.
        ordinals: the GPUs by number.
        named: the GPUs by UUID.
        mixed: whether numbers and UUIDs may stand in one list.

    Returns:
        The GPUs, and the entry that ended the list, quoted; empty if none did.
    """
    chosen: list[T] = []
    entries = [entry.strip() for entry in value.split(",")]
    form = _form(entries[0])
    for entry in entries:
        gpu = _find(entry, ordinals, named) if mixed or _form(entry) == form else None
        if gpu is None:
            return chosen, repr(entry[:60])
        if gpu in chosen:
            return [], f"{entry[:60]!r} again"
        chosen.append(gpu)
    return chosen, ""


def _form(entry: str) -> str:
    """Return the prefix of a UUID's kind; empty for numbers."""
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else ""


def _find(entry: str, ordinals: Sequence[T], named: Mapping[str, T]) -> T | None:
    """Return the one GPU that an entry names."""
    if form := _form(entry):
        digits = entry.removeprefix(form).casefold()
        fitting = [gpu for uuid, gpu in named.items() if _form(uuid) == form and uuid[4:].casefold().startswith(digits)]
        return fitting[0] if len(fitting) == 1 else None
    number = _ORDINAL.match(entry)
    return ordinals[int(number[0])] if number and 0 <= int(number[0]) < len(ordinals) else None
