"""Memory to leave to something else, in the form in which users write it."""

from __future__ import annotations

import re

from tpplan.errors import DeviceError, RequestError
from tpplan.plan import Reserve
from tpplan.sizes import parse_bytes

_INDEX = re.compile("[0-9]{1,9}")
_HINT = "write --reserve 2GiB for every device, or --reserve 2GiB@0 for the first one"


def parse_reserve(text: str) -> Reserve:
    """Parse ``SIZE`` (on every device that has no reserve of its own) or ``SIZE@DEVICE``, such as ``2GiB@0``.

    Raises:
        RequestError: the size is none, or the device is no index.
    """
    size, at, device = (part.strip() for part in text.partition("@"))
    if at and not _INDEX.fullmatch(device):
        raise RequestError(f"--reserve is {text[:40]!r}, and {device[:20]!r} is not the index of a device", _HINT)
    try:
        return Reserve(parse_bytes(size), int(device) if at else -1)
    except DeviceError as error:
        raise RequestError(f"--reserve is {text[:40]!r}: {error.message}", error.hint) from error
