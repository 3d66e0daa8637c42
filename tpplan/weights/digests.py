"""Digests of a checkpoint's tensors by samples of their bytes, to tell whether processes load the same weights."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from typing import IO, TYPE_CHECKING, Final
from zlib import crc32

from tpplan.errors import ExecutionError, ModelError
from tpplan.exec.group.members import differing
from tpplan.models.families import tolerated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tpplan.exec.context import TPContext
    from tpplan.models.checkpoint import Tensor
    from tpplan.weights.source import Source

    #: Names and digests of tensors, by name.
    Digests = list[tuple[str, bytes]]

#: Bytes of a sample: what storage reads at once.
SAMPLE_BYTES: Final = 4096
#: Aim for the samples of a checkpoint, and the most of a tensor; a tensor has one at least.
_SAMPLES: Final = 4096
_MOST: Final = 8
#: Bytes of a tensor's digest.
_DIGEST_BYTES: Final = 8
#: Threads that read: storage answers many small reads at once.
_THREADS: Final = 8


def digests_of(source: Source) -> Digests:
    """Return the name and a digest of every tensor of a checkpoint, by name.

    Digests depend on names, dtypes, shapes and samples of the bytes, not on how tensors are spread over files. Samples
    are at the same places in all copies: the first and the last bytes of a tensor and some between; small tensors are
    read whole.

    Raises:
        ModelError: a file cannot be read.
    """
    prefix = tolerated(source.model.model_type).prefix  # which a copy may leave out
    named = source.headers.tensors.items()
    tensors = {name.removeprefix(prefix): (name, tensor) for name, tensor in named}
    count = max(1, min(_MOST, _SAMPLES // max(1, len(tensors))))
    by_place = sorted(tensors, key=lambda each: (tensors[each][1].file, tensors[each][1].start))
    size = -(-len(by_place) // _THREADS) or 1
    pieces = [by_place[first : first + size] for first in range(0, len(by_place), size)]

    def read(piece: Sequence[str]) -> dict[str, bytes]:
        return dict(_digests(source.directory, [(name, tensors[name][1]) for name in piece], count))

    with ThreadPoolExecutor(_THREADS) as threads:
        found = {name: digest for each in threads.map(read, pieces) for name, digest in each.items()}
    return [(tensors[name][0], found[name]) for name in sorted(found)]


def check_same(context: TPContext, digests: Digests) -> None:
    """Check that all processes of a context have a checkpoint of the same weights; all call it at once.

    Args:
        context: the context.
        digests: those of this process's checkpoint.

    Raises:
        ExecutionError: their weights differ, the same error in all.
    """
    every = context.tell(b"".join(digest for _, digest in digests))
    if len({*every}) == 1:
        return
    model = context.plan.model.name
    hint = "give all processes copies of the same checkpoint; the published hashes of its files tell which is right"
    if different := differing([{"tensors": str(len(each) // _DIGEST_BYTES)} for each in every]):
        raise ExecutionError(f"the processes have different weights for {model}: {different[0]}", hint)
    count = 0
    first = ""
    for i, (name, _) in enumerate(digests):
        here = slice(i * _DIGEST_BYTES, (i + 1) * _DIGEST_BYTES)
        if different := differing([{name: f"bytes of hash {each[here].hex()}"} for each in every]):
            count += 1
            first = first or different[0]
    what = f"the processes have different weights for {model}: {count} of {len(digests)} tensors, first"
    raise ExecutionError(f"{what} {first}", hint)


def _digests(directory: Path, tensors: Sequence[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the digest of tensors, which are in the order of the files."""
    opened = ""
    with ExitStack() as stack:
        for name, tensor in tensors:
            try:
                if tensor.file != opened:
                    stack.close()
                    file: IO[bytes] = stack.enter_context((directory / tensor.file).open("rb", buffering=0))
                    opened = tensor.file
                digest = sha256(f"{name} {tensor.dtype} {tensor.shape}".encode(errors="surrogatepass"))
                for start, size in places(name, tensor.nbytes, count):
                    digest.update(_read(file, size, tensor.start + start))
            except OSError as error:
                what = f"{tensor.file} cannot be read: {error.strerror}"
                raise ModelError(what, "check the file's permissions and its disk") from error
            yield name, digest.digest()[:_DIGEST_BYTES]


def _read(file: IO[bytes], size: int, start: int) -> bytes:
    """Return bytes of a file, by a single call of the system where it has one."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, start)
    file.seek(start)
    return file.read(size)


def places(name: str, nbytes: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the size of each sample of a tensor.

    Args:
        name: the tensor's name, on which the places depend.
        nbytes: its bytes.
        count: number of samples.
    """
    if nbytes <= count * SAMPLE_BYTES:
        yield 0, nbytes
        return
    last = nbytes - SAMPLE_BYTES
    if count > 1:
        yield 0, SAMPLE_BYTES
        yield last, SAMPLE_BYTES
    for i in range(2 if count > 1 else 0, count):
        yield crc32(f"{name} {i}".encode(errors="surrogatepass")) * last >> 32, SAMPLE_BYTES
