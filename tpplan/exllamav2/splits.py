"""What a TPContext of ExLlamaV2 is before data moves: the splits, planned by tpplan, and their compiled plan."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from tpplan.axes import Axis, Slice
from tpplan.devices import Device, parse_devices
from tpplan.errors import DeviceError, ExecutionError, RequestError
from tpplan.exec import compile as compile_plan
from tpplan.exllamav2.model import DTYPE, Numbers, cache_kind, read_numbers, read_spec
from tpplan.plan import Cache, SplitPlan
from tpplan.planner import plan
from tpplan.workspace import ALIGNMENT, ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.exec.context import TPContext as Compiled

    #: Device (its CUDA index), first element and one past the last.
    Part = tuple[int, int, int]

#: The axes by the original's numbers.
AXES = (Axis.KV, Axis.ID, Axis.VC, Axis.RS, Axis.Q)

_BUFFERS = 2
_LOG = logging.getLogger(__name__)


class Splits:
    """The plan, the splits, and what finalizing them makes; :class:`tpplan.exllamav2.TPContext` adds the operations.

    The attributes are described there.
    """

    kv_split: list[Part] | None
    id_split: list[Part] | None
    vc_split: list[Part] | None
    rs_split: list[Part] | None
    q_split: list[Part] | None
    plan: SplitPlan
    all_devs: list[int]
    device: int
    num_devices: int

    def __init__(
        self,
        model: Any,
        gpu_split: Sequence[float] | None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type | None = None,
        *,
        backend: str = "auto",
        scratch_bytes: int = 0,
    ) -> None:
        """Plan; see :meth:`define_split` for the errors.

        Args:
            model: anything whose ``config`` has the attributes of an ExLlamaV2Config.
            gpu_split: budget of each GPU for everything, in units of 2^30 bytes, 0 to leave it alone; None for the
                GPUs of this machine with the memory that is free on them.
            expect_cache_tokens: tokens in the cache; 0 for ``max_seq_len * max_batch_size``.
            expect_cache_base: a cache class of ExLlamaV2, known by its name; None for float16.
            backend: ``cuda``, ``cpu`` (virtual devices in host memory), or ``auto``: virtual devices if this machine
                has fewer GPUs than the plan uses, with a warning in the log.
            scratch_bytes: room on every device for :meth:`reserve_scratch`, beside that for the slices of a layer.
        """
        self.model = model
        self.context: Compiled | None = None
        self.pinned_temp: list[Tensor] | None = None
        self.sin: list[Tensor | None] | None = None
        self.cos: list[Tensor | None] | None = None
        self._backend = backend
        self._scratch_bytes = scratch_bytes
        self.define_split(gpu_split, expect_cache_tokens, expect_cache_base)

    def define_split(
        self,
        gpu_split: Sequence[float] | None,
        expect_cache_tokens: int = 0,
        expect_cache_base: type | None = None,
    ) -> None:
        """Plan anew, by the original's arithmetic; a finalized context is unloaded.

        Args:
            gpu_split: see the constructor, also for the others.
            expect_cache_tokens: tokens in the cache.
            expect_cache_base: class of the cache.

        Raises:
            InfeasibleError: a budget does not suffice, with the bytes that are missing.
            ModelError: the config has not what is needed.
            DeviceError: there is no GPU to be asked for its memory.
            RequestError: an argument has no meaning.
        """
        numbers = read_numbers(self.model.config)
        ordinals, devices = _devices(gpu_split)
        kind, tokens = cache_kind(expect_cache_base), expect_cache_tokens or numbers.context * numbers.batch
        if type(tokens) is not int or tokens < 0 or type(self._scratch_bytes) is not int or self._scratch_bytes < 0:
            message = f"expect_cache_tokens is {tokens!s:.40}, scratch_bytes {self._scratch_bytes!s:.40}"
            raise RequestError(message, "pass whole numbers, 0 or more")
        # As many sequences as can each reach the longest context, so that the RoPE tables have its rows.
        batch = min(max(1, tokens // numbers.context), numbers.rows)
        made = plan(
            read_spec(self.model, numbers, max(numbers.context, -(-tokens // batch))),
            devices,
            cache=Cache(kind, tokens),
            layout="gather",
            strategy="exllamav2",
            batch=batch,
            max_rows=_planned_rows(numbers, self._scratch_bytes),
        )
        self.unload()
        self.plan = made
        self._numbers = numbers
        self._ordinals = ordinals
        self.kv_split, self.id_split, self.vc_split, self.rs_split, self.q_split = (
            [self._part(part) for part in made.slices(axis)] for axis in AXES
        )
        self.all_devs = self.all_devices()
        self.device = self.all_devs[0]
        self.num_devices = self.all_devs[-1] + 1

    def finalize(self) -> None:
        """Compile the plan: allocate everything, and make the operations usable; a second call does it anew.

        Raises:
            ExecutionError: the plan does not fit this machine, with every difference.
        """
        self.unload()
        backend = self._backend
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if backend == "auto":
            backend = "cuda" if here >= self.num_devices else "cpu"
            if backend == "cpu":
                _LOG.warning("%d GPUs planned for, %d here: running on virtual devices", self.num_devices, here)
        on_gpus = backend == "cuda"
        places = [torch.device("cuda", i) if on_gpus else torch.device("cpu") for i in self._ordinals]
        context = compile_plan(self.plan, backend=backend, devices=places)
        n = self._numbers
        size = max(n.output_rows * n.vocab, n.rows * max(n.widest, n.hidden))
        try:
            self.pinned_temp = [torch.empty(size, dtype=torch.half, pin_memory=on_gpus) for _ in range(_BUFFERS)]
        except RuntimeError as error:
            context.close()
            message = f"cannot allocate {_BUFFERS} host buffers of {size} float16: {str(error).partition(chr(10))[0]}"
            raise ExecutionError(message, "set a smaller max_output_len or max_input_len in the config") from error
        self.context = context

    def unload(self) -> None:
        """Give everything that :meth:`finalize` made back; again, or before it, this does nothing."""
        if self.context is not None:
            self.context.close()
        self.context = self.pinned_temp = self.sin = self.cos = None

    @property
    def ext_tp_context(self) -> int | None:
        """A number that is not 0 while the context is finalized, else None."""
        return None if self.context is None else id(self.context)

    def all_devices(self) -> list[int]:
        """Return the devices that hold a part of any axis, ascending."""
        return sorted({device for kind in range(len(AXES)) for device in self.get_devs(kind)})

    def get_split(self, broadcast_type: int) -> list[Part]:
        """Return (device, start, end) of each device that holds a part of an axis.

        Raises:
            RequestError: there is no such type.
        """
        axis = axis_of(broadcast_type)
        return [self._part(part) for part in self.plan.slices(axis)]

    def get_devs(self, broadcast_type: int) -> list[int]:
        """Return the devices that hold a part of an axis; see :meth:`get_split` for errors."""
        return [device for device, _, _ in self.get_split(broadcast_type)]

    def _ready(self, buffer: int = 0) -> Compiled:
        """Return the compiled plan, if there is one and such a buffer."""
        if self.context is None:
            raise ExecutionError("this TPContext is not finalized, or unloaded", "call finalize() first")
        if buffer not in range(_BUFFERS):
            raise ExecutionError(f"there is no host buffer {buffer!s:.40}", "the buffers are 0 and 1")
        return self.context

    def _part(self, part: Slice) -> Part:
        return self._ordinals[part.device], part.start, part.end


def axis_of(broadcast_type: int) -> Axis:
    """Return the axis of a number of the original's.

    Raises:
        RequestError: there is no such number.
    """
    if broadcast_type not in range(len(AXES)):
        names = ", ".join(f"{i} ({axis})" for i, axis in enumerate(AXES))
        raise RequestError(f"unknown broadcast type {broadcast_type!s:.40}, expected {names}", "use a BROADCAST_ name")
    return AXES[broadcast_type]


def _devices(gpu_split: Any) -> tuple[tuple[int, ...], tuple[Device, ...]]:
    """Return the CUDA indices and the devices of the GPUs that have a budget."""
    if gpu_split is None:
        try:
            found = parse_devices("auto", _LOG.info)
        except DeviceError as error:
            raise DeviceError(error.message, "pass gpu_split, such as [20.0, 20.0]") from error
        return tuple(range(len(found))), found
    if not isinstance(gpu_split, list | tuple):
        raise RequestError(f"gpu_split is {gpu_split!s:.40}", "pass a list of GiB, such as [20.0, 20.0]")
    for i, budget in enumerate(gpu_split):
        if not isinstance(budget, int | float) or not 0 <= budget < math.inf:
            raise RequestError(f"gpu_split[{i}] is {budget!s:.40}", "pass GiB, 0 to leave a GPU alone")
    kept = {i: int(budget * 2**30) for i, budget in enumerate(gpu_split) if int(budget * 2**30)}
    return tuple(kept), tuple(Device(name=f"GPU {i}", budget_bytes=budget) for i, budget in kept.items())


def _planned_rows(numbers: Numbers, scratch_bytes: int) -> int:
    """Return the rows to plan for so that the scratch of any device has room for what ExLlamaV2's layers slice.

    That is what the ledger counts, and a slice of the residual stream, which a device may hold without holding any
    heads. Every further row makes room for two rows of the stream and one of the widest input.
    """
    item = ITEM_BYTES[DTYPE]
    more = numbers.rows * numbers.hidden * item + scratch_bytes + 16 * ALIGNMENT
    return numbers.rows - -more // ((2 * numbers.hidden + numbers.widest) * item)
