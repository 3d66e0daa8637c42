"""What the tests of safetensors headers share: files and indexes that may be wrong in any way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


INDEX = "model.safetensors.index.json"


def write(path: Path, header: Any, data: bytes = b"") -> None:
    """Write a safetensors file with this header, which may be wrong in any way."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    """Return a header's entry for one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_index(directory: Path, weight_map: Any) -> None:
    """Write an index with this weight map."""
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
