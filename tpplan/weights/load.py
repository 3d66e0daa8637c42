"""Loading a checkpoint by a plan: every device gets its slices, and nothing else is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from attrs import define, frozen
from torch import Tensor

from tpplan.errors import ModelError, PlanError, RequestError
from tpplan.exec.arena import Arena
from tpplan.weights.files import MappedFile
from tpplan.weights.progress import progress
from tpplan.weights.send import Pinned, Straight
from tpplan.weights.slices import iter_slices
from tpplan.weights.source import Source
from tpplan.workspace import align

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.context import TPContext
    from tpplan.exec.device import DeviceContext
    from tpplan.plan import SplitPlan
    from tpplan.weights.slices import TensorSlice

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
    files = {header.file for header in source.headers.tensors.values()}
    mapped = {name: MappedFile(source.directory / name) for name in files}
    total = sum(part.nbytes for found in parts.values() for part in found)
    with progress(f"loading {plan.model.name}", total) as done, ThreadPoolExecutor(len(parts)) as threads:
        run = _Run(source, mapped, done)
        loading = {device: threads.submit(run.load, ctx.devices[device], found) for device, found in parts.items()}
        try:
            return Weights({device: one.result() for device, one in loading.items()})
        finally:
            run.stopped = True


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


@define
class _Run:
    """One loading of a checkpoint, which several threads take part in.

    Attributes:
        source: the checkpoint.
        files: of it, by name.
        done: to be called with the bytes that were copied.
        stopped: whether to give up, because a thread has failed.
    """

    source: Source
    files: Mapping[str, MappedFile]
    done: Callable[[int], None]
    stopped: bool = False

    def load(self, device: DeviceContext, parts: Sequence[TensorSlice]) -> dict[str, Tensor]:
        """Load what one device holds into a single block of its memory, in the order of the files."""
        size = sum(align(part.nbytes) for part in parts)
        arena = Arena(size, device.device, f"weights of device {device.index} ({device.name})")
        way = Pinned(device.device) if device.device.type == "cuda" else Straight()
        found = [(part, self.source.find(part.name)) for part in parts]
        tensors = {}
        try:
            for part, header in sorted(found, key=lambda pair: (pair[1].file, pair[1].start)):
                memory = arena.keep(part.nbytes)
                tensors[part.name] = memory.view(DTYPES[part.dtype]).view(part.shape)
                at = 0
                for piece in self.files[header.file].pieces(header, part):
                    rows, width = len(piece[0]), sum(source.shape[1] for source in piece)
                    way.send(piece, memory[at : at + rows * width].view(rows, width))
                    at += rows * width
                    self.done(rows * width)
                    if self.stopped:
                        return {}
            way.finish()
        except BaseException:
            self.stopped = True
            raise
        return tensors
