"""The checkpoint of random weights that the commands of whole models run."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.common.random_checkpoint import room_for, shortened, size_of, write
from benchmarks.common.rows import ROOT
from benchmarks.decode.random_codes import quantised

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

MODEL = ROOT / "examples" / "models" / "Llama-3.1-8B" / "config.json"


@contextmanager
def checkpoint(config: Mapping[str, Any], folder: str, *, asked: bool) -> Iterator[Path]:
    """Make a checkpoint of random weights, and remove it in the end; one in a folder that was named stays.

    Args:
        config: config of the model.
        folder: where; empty for where there is room. A checkpoint that is there is taken as it is.
        asked: whether it has to be of this config then.

    Yields:
        Its directory.

    Raises:
        SystemExit: the folder has a config of another model.
    """
    if folder:
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        is_there, path = any(directory.glob("*.safetensors")), directory / "config.json"
        if (asked or not is_there) and path.exists() and json.loads(path.read_text(encoding="utf-8")) != config:
            hint = "leave out --config, --layers and --quantise, or name a new folder"
            sys.exit(f"{path} is of another model or size\nhint: {hint}")
        if not is_there:
            write(directory, config)
        yield directory
        return
    with TemporaryDirectory(prefix="bench-decode-", dir=room_for(size_of(config))) as name:
        write(Path(name), config)
        yield Path(name)


def checkpoint_of(wanted: argparse.Namespace) -> AbstractContextManager[Path]:
    """Make the checkpoint that options ask for, see :func:`benchmarks.decode.options.parser_of`."""
    config = json.loads(Path(wanted.config or MODEL).read_text(encoding="utf-8"))
    config = quantised(shortened(config, wanted.layers), wanted.quantise)
    return checkpoint(config, wanted.folder, asked=bool(wanted.config or wanted.layers or wanted.quantise))
