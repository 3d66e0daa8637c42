"""What takes long to make and follows from its sources alone is kept on disk, for other workers and the next run."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.files.text import save_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

#: To make everything again, delete it.
_FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "kept"


def digest_of(*sources: object) -> str:
    """Return a name for what follows from these: numbers, texts, bytes, and tuples and lists of them."""
    name: str = _hashed(sources).hexdigest()
    return name[:32]


def _hashed(source: object) -> Any:
    """Return the hash of a source and its type; long bytes are read once."""
    if isinstance(source, tuple | list):
        return sha256(b"several" + b"".join(_hashed(each).digest() for each in source))
    if isinstance(source, bytes):
        return sha256(source)
    return sha256(repr(source).encode())


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the bytes that have a name, which are made if they are not on disk."""
    path = _FOLDER / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        data = make()
    save_bytes(data, path)
    return data
