"""Loading a checkpoint by a plan: every device gets its slices, and nothing else is kept."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.checkpoint import read_headers
from tpplan.errors import ModelError, RequestError
from tpplan.exec.arena import Arena
from tpplan.families import tolerated
from tpplan.reader import read_model
from tpplan.weights.files import MappedFile
from tpplan.weights.slices import iter_slices
from tpplan.workspace import align

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.checkpoint import Tensor as Header
    from tpplan.exec.context import TPContext
    from tpplan.plan import SplitPlan
    from tpplan.weights.slices import TensorSlice

#: torch's dtypes by the names of the safetensors format; the others (4 and 6 bits) torch has not.
DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


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
        PlanError: the plan breaks a rule.
        ModelError: the directory has another model than the plan is for, lacks tensors or has others.
        RequestError: the context is of another plan.
    """
    if ctx.plan != plan:
        what = f"the context was compiled from another plan ({ctx.plan.model.name}) than the one to load by"
        raise RequestError(f"{what} ({plan.model.name})", "pass the plan that was compiled")
    directory = Path(model_dir)
    model = read_model(directory)
    headers = read_headers(directory)
    if headers is None:
        raise ModelError(f"{directory} has no safetensors files", "fetch the checkpoint's .safetensors files")
    prefix = tolerated(model.model_type).prefix
    parts: dict[int, list[tuple[TensorSlice, Header]]] = {device: [] for device in ctx.all_devices}
    for part in iter_slices(plan, model):
        header = headers.tensors.get(part.name) or headers.tensors[part.name.removeprefix(prefix)]
        parts[part.device].append((part, header))
    files = {name: MappedFile(directory / name) for name in {header.file for header in headers.tensors.values()}}
    with ThreadPoolExecutor(len(parts)) as threads:
        loaded = threads.map(lambda device: _load(ctx, device, parts[device], files), parts)
        return Weights(dict(zip(parts, loaded, strict=True)))


def _load(
    ctx: TPContext, device: int, parts: Sequence[tuple[TensorSlice, Header]], files: Mapping[str, MappedFile]
) -> dict[str, Tensor]:
    """Load what one device holds into a single block of its memory."""
    here = ctx.devices[device]
    size = sum(align(part.nbytes) for part, _ in parts)
    arena = Arena(size, here.device, f"the weights of device {device} ({here.name})")
    tensors = {}
    for part, header in sorted(parts, key=lambda pair: (pair[1].file, pair[1].start)):
        memory = arena.keep(part.nbytes)
        at = 0
        for piece in files[header.file].pieces(header, part):
            rows, width = len(piece[0]), sum(source.shape[1] for source in piece)
            target = memory[at : at + rows * width].view(rows, width)
            torch.cat(piece, 1, out=target)
            at += rows * width
        tensors[part.name] = memory.view(DTYPES[part.dtype]).view(part.shape)
    return tensors
