"""Loading a checkpoint by a plan: every device gets its slices, and nothing else is kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.errors import ModelError, PlanError, RequestError
from tpplan.exec.arena import Arena
from tpplan.formats.storage import split_name
from tpplan.weights.progress import progress
from tpplan.weights.reader import Reader
from tpplan.weights.reads import joined, reads_of
from tpplan.weights.slices import iter_slices
from tpplan.weights.source import Source
from tpplan.workspace import align

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.exec.context import TPContext
    from tpplan.plan import SplitPlan
    from tpplan.weights.reads import Read
    from tpplan.weights.slices import TensorSlice

    Held = dict[str, list[tuple[TensorSlice, int]]]

#: Threads that read: one copies some 6 GB a second out of the system's cache, and a link takes 55.
THREADS: Final = 8

#: The number of a layer in a tensor's name.
_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")

#: torch's names of the dtypes of the safetensors format; it has none of 4 and 6 bits.
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

    ``weights[device]`` has the device's tensors by name, each cut to what the plan gives the device. A device without
    a part of a tensor has no tensor of this name.

    Attributes:
        tensors: by device, an index into the plan's devices, and name.
    """

    tensors: Mapping[int, Mapping[str, Tensor]]

    def __getitem__(self, device: int) -> Mapping[str, Tensor]:
        return self.tensors[device]


def load_weights(plan: SplitPlan, model_dir: str | Path, ctx: TPContext) -> Weights:
    """Load from a model's directory what each device of a plan holds.

    A device's tensors are one block of its memory: the matrices of a layer in the order of :func:`iter_slices`, of
    quantised ones all codes, all scales and so on, and last the vectors, each from a multiple of 64 bytes on. So the
    query, key and value projections of a layer follow each other.

    Args:
        plan: to load by.
        model_dir: with config.json and safetensors files.
        ctx: the compiled plan, whose devices the tensors go to.

    Raises:
        PlanError: the plan breaks a rule, or its ledger counts other bytes than its slices take.
        ModelError: the directory has another model than the plan is for, or tensors are missing, too many, or of other
            shapes or dtypes; nothing was read of any then.
        ExecutionError: there is no room on a device, or the context is closed.
        RequestError: the context is of another plan.
    """
    if ctx.plan != plan:
        what = f"the context was compiled from another plan ({ctx.plan.model.name}) than the one to load by"
        raise RequestError(f"{what} ({plan.model.name})", "pass the plan that was compiled")
    ctx.synchronize()  # which fails where the context is closed
    source = Source.read(Path(model_dir))
    source.check(plan)
    parts: dict[int, list[TensorSlice]] = {device: [] for device in ctx.all_devices}
    for part in iter_slices(plan, source.model):
        parts[part.device].append(part)
    _check(plan, source, parts)
    held, blocks, weights = _allocate(ctx, parts)
    headers = {name: source.find(name) for name in held}
    order = sorted(held, key=lambda name: (headers[name].file, headers[name].start))
    reads = joined(read for name in order for read in reads_of(headers[name], held[name]))
    for block in blocks.values():
        if block.device.type == "cuda":
            torch.cuda.synchronize(block.device)  # whoever had this memory before is done with it
    with progress(f"loading {plan.model.name}", sum(headers[name].nbytes for name in held)) as done:
        _run(reads, source.directory, blocks, done)
    return weights


def _check(plan: SplitPlan, source: Source, parts: Mapping[int, Sequence[TensorSlice]]) -> None:
    """Make sure that torch has all the dtypes, and that the ledger counts all the bytes.

    Raises:
        ModelError: a tensor has a dtype that torch has not.
        PlanError: the plan promises other bytes than its slices take.
    """
    for part in {each.dtype: each for found in parts.values() for each in found}.values():
        if part.dtype not in DTYPES:
            what = f"{part.name} in {source.find(part.name).file} has the dtype {part.dtype}, which torch has not"
            raise ModelError(what, f"known are {', '.join(DTYPES)}")
    for device, found in parts.items():
        size, promised = sum(part.nbytes for part in found), plan.memory[device].weights_bytes
        if size != promised:
            what = f"memory[{device}].weights_bytes is {promised}, but the slices of device {device} take {size}"
            raise PlanError(f"the plan for {plan.model.name}: {what}", "make it again with tpplan plan")


def _allocate(ctx: TPContext, parts: Mapping[int, Sequence[TensorSlice]]) -> tuple[Held, Mapping[int, Tensor], Weights]:
    """Make room for all parts, a single block on each device.

    Returns:
        Who holds what of each tensor, and where in its block; the blocks; and the tensors that they are made of.

    Raises:
        ExecutionError: there is no room.
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


def _order(part: TensorSlice) -> tuple[bool, int, str]:
    """Return what says where a tensor lies: alike ones of a layer's matrices side by side, no biases between them."""
    layer = _LAYER.search(part.name)
    return len(part.whole) < 2, int(layer[1]) if layer else -1, split_name(part.name)[1]  # noqa: PLR2004 (a vector)


def _run(reads: Iterator[Read], directory: Path, blocks: Mapping[int, Tensor], done: Callable[[int], None]) -> None:
    """Do all reads with a few threads; where one fails, the others stop too.

    Raises:
        ModelError: a file cannot be read.
        ExecutionError: a device takes nothing.
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
