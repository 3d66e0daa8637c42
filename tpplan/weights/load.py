"""Loading a checkpoint by a plan: each device gets its slices, and nothing else is kept in memory.

One thread reads the files and sends their bytes to the devices, and shows its progress on a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import frozen
from torch import Tensor

from tpplan.core.workspace import align
from tpplan.errors import ExecutionError, ModelError, RequestError
from tpplan.exec.memory.arena import Arena
from tpplan.exec.processes.agreement import agree
from tpplan.models.formats.storage import split_name
from tpplan.models.hub import local
from tpplan.weights.digests import check_same, digests_of
from tpplan.weights.reads import joined, reads_of
from tpplan.weights.slices import iter_slices
from tpplan.weights.source import Source
from tpplan.weights.staging import Buffers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.weights.digests import Digests
    from tpplan.weights.reads import Read
    from tpplan.weights.slices import TensorSlice

    Held = dict[str, list[tuple[TensorSlice, int]]]
    Parts = dict[int, list[TensorSlice]]


_HINT = "the file was changed or cut short meanwhile: fetch it again"


class Reader:
    """An open file and its read buffers; as a context manager, it waits on exit until all copies are complete."""

    def __init__(self, directory: Path, blocks: Mapping[int, Tensor]) -> None:
        """Create a reader without opening a file.

        Args:
            directory: directory of the files.
            blocks: the block of bytes on each device.
        """
        self._directory = directory
        self._buffers = Buffers(blocks)
        self._name = ""
        self._file: FileIO
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            try:
                self._buffers.wait()  # after an error too: source and target memory may be reused soon
            except ExecutionError:
                if error is None:  # otherwise the earlier error is more informative
                    raise

    def run(self, read: Read) -> None:
        """Perform a read and send each device its parts.

        Raises:
            ModelError: the file cannot be read, or ends early.
            ExecutionError: a copy to a device failed.
        """
        buffer = self._buffers.take()
        self._fill(buffer.bytes[: read.nbytes], read.file, read.start)
        buffer.send(read.moves)

    def _fill(self, view: memoryview, name: str, start: int) -> None:
        try:
            if name != self._name:  # reads are grouped by file
                self._stack.close()
                self._file = self._stack.enter_context((self._directory / name).open("rb", buffering=0))
                self._name = name
            self._file.seek(start)  # safe, because no other thread uses this file; os.preadv is not portable
            while view:
                got = self._file.readinto(view)
                if not got:
                    end = min(start, os.fstat(self._file.fileno()).st_size)
                    what = f"{name} ends at byte {end}, {start + len(view) - end} bytes before a tensor does"
                    raise ModelError(what, _HINT)
                view, start = view[got:], start + got
        except OSError as error:
            raise ModelError(f"{name} cannot be read: {error.strerror}", _HINT) from error


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


#: Threads that read: one copies some 6 GB a second from the page cache, and a link takes 55.
THREADS: Final = 8

#: The number of a layer in a tensor's name.
_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")
#: What names of matrices have that lead down to the latents of multi-head latent attention.
_DOWN: Final = "_a_proj"

#: torch's names of the dtypes of the safetensors format; torch has none with 4 or 6 bits.
_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",  # not in torch 2.6
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, of) for name, of in _NAMES.items() if hasattr(torch, of)}


@frozen
class Weights:
    """The tensors of a model on the devices of a plan.

    ``weights[device]`` has the device's tensors by name, each cut to the device's slice. Tensors of which a device has
    no part are left out.

    Attributes:
        tensors: tensors by index of the device in the plan, then by name.
    """

    tensors: Mapping[int, Mapping[str, Tensor]]

    def __getitem__(self, device: int) -> Mapping[str, Tensor]:
        return self.tensors[device]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of this process's devices."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())


def load_weights(plan: SplitPlan, model_dir: str | Path | Source, ctx: TPContext) -> Weights:
    """Load each device's slices of a checkpoint.

    The tensors of a device lie in one block of its memory, each aligned to 64 bytes: first the matrices of each layer
    in the order of :func:`iter_slices` (quantised ones as all codes, all scales and so on), but those that lead down to
    the latents of attention first, and ``w2`` behind ``w1`` and ``w3``; last the vectors. So the query, key and value
    projections of a layer are adjacent, and gate and up projections.

    Args:
        plan: the plan to load by.
        model_dir: directory with config.json and safetensors files; or a GGUF file; or what was read of either.
        ctx: the compiled plan, to whose devices the tensors go; of several processes, each loads its own, and all call
            this at once.

    Returns:
        The tensors of each device of this process.

    Raises:
        PlanError: the plan breaks a rule, or a value of it is not what the model or the plan's own cuts decide.
        ModelError: the directory has another model than the plan is for, or tensors are missing, unexpected, or of the
            wrong shape or dtype; no tensor is read then.
        ExecutionError: a device has too little memory, or the context is closed; or of several processes, one failed,
            or they have different weights: the same error in all.
        RequestError: the context is for another plan.
    """
    source, parts, digests = agree(ctx, "reading the checkpoint", lambda: _checked(plan, model_dir, ctx))
    check_same(ctx, digests)
    return agree(ctx, "loading the weights", lambda: _load(ctx, source, parts))


def _checked(plan: SplitPlan, where: str | Path | Source, ctx: TPContext) -> tuple[Source, Parts, Digests]:
    """Return a checkpoint, the slices of this process's devices and, of several processes, digests of all tensors.

    Raises:
        TpplanError: see :func:`load_weights`.
    """
    if ctx.plan != plan:
        what = f"the context was compiled from another plan ({ctx.plan.model.name}) than the one to load by"
        raise RequestError(f"{what} ({plan.model.name})", "pass the plan that was compiled")
    ctx.synchronize()  # fails if the context is closed
    source = where if isinstance(where, Source) else Source.read(local(where))
    source.check(plan)
    parts: Parts = {device: [] for device in ctx.devices}
    for part in iter_slices(plan, source.model):
        if part.device in parts:  # not another process's
            parts[part.device].append(part)
    _check(source, parts)
    return source, parts, digests_of(source) if ctx.processes > 1 else []


def _load(ctx: TPContext, source: Source, parts: Parts) -> Weights:
    """Load the slices of this process's devices.

    Raises:
        ModelError: a file cannot be read.
        ExecutionError: a device has too little memory, or a copy to it fails.
    """
    held, blocks, weights = _allocate(ctx, parts)
    headers = {name: source.find(name) for name in held}
    order = sorted(held, key=lambda name: (headers[name].file, headers[name].start))
    reads = joined(read for name in order for read in reads_of(headers[name], held[name]))
    for block in blocks.values():
        if block.device.type == "cuda":
            torch.cuda.synchronize(block.device)  # earlier users of this memory are done
    with progress(f"loading {ctx.plan.model.name}", sum(headers[name].nbytes for name in held)) as done:
        _run(reads, source.directory, blocks, done)
    return weights


def _check(source: Source, parts: Parts) -> None:
    """Check that torch has all dtypes.

    Raises:
        ModelError: a tensor has a dtype that torch lacks.
    """
    for part in {each.dtype: each for found in parts.values() for each in found}.values():
        if part.dtype not in DTYPES:
            what = f"{part.name} in {source.find(part.name).file} has the dtype {part.dtype}, which torch has not"
            raise ModelError(what, f"known are {', '.join(DTYPES)}")


def _allocate(ctx: TPContext, parts: Parts) -> tuple[Held, Mapping[int, Tensor], Weights]:
    """Allocate memory for all parts, a single block on each device.

    Returns:
        For each tensor its parts and their offsets in the blocks; the blocks; and the tensors, as views of them.

    Raises:
        ExecutionError: there is not enough memory.
    """
    held: Held = {}
    blocks: dict[int, Tensor] = {}
    weights: dict[int, dict[str, Tensor]] = {}
    for device, found in parts.items():
        here = ctx.devices[device]
        size = sum(align(part.nbytes) for part in found)
        blocks[device] = block = Arena(size, here.device, f"weights of device {device} ({here.name})").keep(size)
        weights[device] = {}
        at = 0
        for part in sorted(found, key=_order):
            held.setdefault(part.name, []).append((part, at))
            weights[device][part.name] = block[at : at + part.nbytes].view(DTYPES[part.dtype]).view(part.shape)
            at += align(part.nbytes)
    return held, blocks, Weights(weights)


def _order(part: TensorSlice) -> tuple[bool, int, str, bool, bool]:
    """Return the sort key of a tensor in its block: tensors of one kind in a layer are adjacent, vectors come last.

    Of Mixtral's ``w1`` (gate), ``w2`` (down) and ``w3`` (up), those with the same input are.
    """
    layer, (stem, suffix) = _LAYER.search(part.name), split_name(part.name)
    is_vector, leads_up = len(part.whole) < 2, _DOWN not in part.name  # noqa: PLR2004 (dimensions of a matrix)
    return is_vector, int(layer[1]) if layer else -1, suffix, leads_up, stem.endswith(".w2")


def _run(reads: Iterator[Read], directory: Path, blocks: Mapping[int, Tensor], done: Callable[[int], None]) -> None:
    """Run all reads in a few threads; if one fails, the others stop too.

    Raises:
        ModelError: a file cannot be read.
        ExecutionError: a copy to a device fails.
    """
    turn = Lock()
    stop = False

    def work() -> None:
        nonlocal stop
        try:
            with Reader(directory, blocks) as reader:
                while True:
                    with turn:
                        read = None if stop else next(reads, None)
                    if read is None:
                        break
                    reader.run(read)
                    done(read.nbytes)
        except BaseException:
            stop = True
            raise

    with ThreadPoolExecutor(THREADS) as threads:
        try:
            for each in [threads.submit(work) for _ in range(THREADS)]:
                each.result()
        finally:
            stop = True
