"""A checkpoint of random weights, quantised if asked for, written as fast as the disk takes it.

Run it as ``python -m benchmarks.common.random_checkpoint CONFIG DIRECTORY``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_char
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

import tpplan
from tpplan.core.missing import needing
from tpplan.errors import TpplanError
from tpplan.weights import iter_slices

with needing("a checkpoint of random weights"):
    import torch

    from benchmarks.decode.random_codes import METHODS, block_of, constant_of, kind_of, quantised

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.weights import TensorSlice

#: Random values, over and over. Odd, so that no two rows of a matrix are equal, and no two tokens tie.
_BLOCK = 2**25 + 1
_PARTIAL = "model.safetensors.partial"
_THREADS = min(16, os.cpu_count() or 1)
#: Memory as a file system, and the share of what is free there that a checkpoint may take.
_MEMORY, _SHARE = Path("/dev/shm"), 0.8  # noqa: S108 (only asked for its room)


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config of so many layers, also in lists with an entry for each; 0 for all that it has."""
    if not layers:
        return dict(config)
    before = config.get("num_hidden_layers")
    lists = {key: each[:layers] for key, each in config.items() if isinstance(each, list) and len(each) == before}
    return {**config, **lists, "num_hidden_layers": layers}


def write(directory: Path, config: Mapping[str, Any], seed: int = 1) -> int:
    """Write config.json and model.safetensors, and return the bytes of the weights.

    Matrices are normal with deviation 0.02, vectors (norms) are ones. The file has its name once it is complete.

    Args:
        directory: an existing directory.
        config: config of a family whose tensors all have its dtype, or one that
            :func:`benchmarks.decode.random_codes.quantised` returned.
        seed: seed of the weights.
    """
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = sorted(_tensors(directory), key=kind_of)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.whole, "data_offsets": [starts[-1], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path, data = directory / _PARTIAL, 8 + len(text)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(data + end)
    normal = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed))
    places = {tensor.name: start for tensor, start in zip(tensors, starts, strict=True)}
    for kind, each in groupby(tensors, kind_of):
        alike = list(each)
        if kind:
            first, last = places[alike[0].name], places[alike[-1].name] + alike[-1].nbytes
            _fill(path, block_of(kind, normal), data + first, data + last)
        else:
            for tensor in alike:
                values = constant_of(tensor, config)
                _put(path, values, data + places[tensor.name], values.nbytes)
    path.rename(directory / "model.safetensors")
    return end


def size_of(config: Mapping[str, Any]) -> int:
    """Return the bytes of the weights of a model."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return sum(one.nbytes for one in _tensors(Path(directory)))


def room_for(size: int) -> Path:
    """Return where so many bytes have room: in memory, else where temporary files go."""
    if _MEMORY.is_dir() and size < shutil.disk_usage(_MEMORY).free * _SHARE:
        return _MEMORY
    return Path(gettempdir())


def read_rate(path: Path) -> float:
    """Return the bytes per second at which a few threads read a file into memory, and do nothing else."""
    size, piece = min(path.stat().st_size, 2**33), 2**23
    memory = [bytearray(piece) for _ in range(_THREADS)]

    def read(thread: int) -> None:
        with path.open("rb", buffering=0) as file:
            for start in range(thread * piece, size, _THREADS * piece):
                file.seek(start)
                file.readinto(memory[thread])

    begin = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(read, range(_THREADS)))
    return size / (time.perf_counter() - begin)


def _tensors(directory: Path) -> Sequence[TensorSlice]:
    """Return all tensors of a model, whole."""
    model = tpplan.read_model(directory)
    plan = tpplan.plan(model, [tpplan.Device(name="all", budget_bytes=2**50)], cache=tpplan.Cache(tokens=1))
    return list(iter_slices(plan, model))


def _fill(path: Path, block: torch.Tensor, start: int, end: int) -> None:
    """Write a block into a file again and again, by several threads."""
    places = range(start, end, block.nbytes)
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(partial(_put, path, block), places, (min(block.nbytes, end - place) for place in places)))


def _put(path: Path, values: torch.Tensor, start: int, size: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        bytes_left = memoryview((c_char * size).from_address(values.data_ptr())).cast("B")  # which takes no numpy
        while bytes_left:
            bytes_left = bytes_left[file.write(bytes_left) :]


def main() -> None:
    """Write the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write a checkpoint of random weights.")
    parser.add_argument("config", type=Path, help="config.json of the model, or its folder")
    parser.add_argument("directory", type=Path, help="that gets config.json and model.safetensors")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: all that it has)")
    parser.add_argument("--quantise", choices=[*METHODS], default="", help="how matrices are stored (default: dense)")
    asked = parser.parse_args()
    if (asked.directory / "config.json").exists():
        parser.error(f"{asked.directory} has a config.json already: name another directory")
    try:
        given = asked.config / "config.json" if asked.config.is_dir() else asked.config
        config = json.loads(given.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            config = quantised(shortened(config, asked.layers), asked.quantise)
        asked.directory.mkdir(parents=True, exist_ok=True)
        print(f"{write(asked.directory, config):,} bytes of weights in {asked.directory}")
    except BaseException as error:
        for name in ("config.json", _PARTIAL):  # the one would be in the way the next time, the other may be large
            with suppress(OSError):
                (asked.directory / name).unlink()
        if isinstance(error, (OSError, ValueError, TpplanError)):
            sys.exit(f"error: {error}")
        raise


if __name__ == "__main__":
    main()
