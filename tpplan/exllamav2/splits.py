"""What a TPContext of ExLlamaV2 is before data moves: the splits, planned by tpplan, and their compiled plan.

ExLlamaV2's device context makes a stream for its device. Here, :meth:`tpplan.exllamav2.TPContext.finalize` does so for
devices that have none yet. As everywhere in tpplan, operations follow the current streams: call
:func:`set_device_streams` before you compute, as ExLlamaV2 does, to make those of this module the current ones.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from tpplan.core.axes import Axis, Slice
from tpplan.core.plan import Cache, Request, SplitPlan
from tpplan.core.workspace import ITEM_BYTES, align, areas
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec import compile as compile_plan
from tpplan.exec.options import BACKENDS, TRANSPORTS_OR_AUTO, check_choice
from tpplan.exllamav2.areas import Scratch
from tpplan.exllamav2.gpus import read_gpu_split
from tpplan.exllamav2.model import DTYPE, MOST_ROWS, cache_kind, read_numbers, read_spec
from tpplan.exllamav2.pinned import BUFFERS, PinnedTemp
from tpplan.planner.attempt import attempt
from tpplan.planner.plan import plan
from tpplan.planner.request import check_devices, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from tpplan.exec import Tuning
    from tpplan.exec.context import TPContext as Compiled
    from tpplan.exllamav2.model import Numbers

    #: Device (its CUDA index), first element and one past the last.
    Part = tuple[int, int, int]


_ITEM = ITEM_BYTES[DTYPE]

#: What each layer slices for all rows at once: as wide as an axis on all of its devices, and as wide as their parts.
#: Attention does so where its output matrix is cut by query heads, and where it is cut by residual columns.
_LAYERS = (
    ((Axis.Q_HEADS, Axis.Q_HEADS, Axis.Q_HEADS), (Axis.Q_HEADS, Axis.KV_HEADS, Axis.KV_HEADS, Axis.Q_HEADS)),
    ((Axis.RESIDUAL, Axis.RESIDUAL, Axis.Q_HEADS), (Axis.Q_HEADS, Axis.KV_HEADS, Axis.KV_HEADS, Axis.RESIDUAL)),
    ((Axis.RESIDUAL, Axis.RESIDUAL, Axis.INTERMEDIATE), (Axis.INTERMEDIATE, Axis.INTERMEDIATE, Axis.RESIDUAL)),
)

#: The layers' matrices: the axis of the inputs, whole, and the one of the outputs, cut.
_MATRICES = (
    (Axis.RESIDUAL, Axis.Q_HEADS),
    (Axis.RESIDUAL, Axis.KV_HEADS),
    (Axis.Q_HEADS, Axis.Q_HEADS),
    (Axis.Q_HEADS, Axis.RESIDUAL),
    (Axis.RESIDUAL, Axis.INTERMEDIATE),
    (Axis.INTERMEDIATE, Axis.RESIDUAL),
)


def rows_with_scratch(plan: SplitPlan, numbers: Numbers, reserved: int | None) -> int:
    """Return the least ``max_rows``, from the config's rows on, whose scratch has room on every device for any layer.

    The ledger counts the scratch of tpplan's own executor, by rows; more rows make room for more.

    Args:
        plan: a plan with the same splits; its ``max_rows`` does not matter.
        numbers: numbers of the model's config.
        reserved: bytes kept free beside the slices on each device in use; None for as many as the widest matrix of a
            layer takes when it is dequantised there.
    """
    needs = [_need(plan, numbers, device, reserved) for device in range(len(plan.devices))]

    def suffices(rows: int) -> bool:
        found = areas(plan.splits, DTYPE, evolve(plan.request, max_rows=rows))
        return all(area.scratch_bytes >= need for area, need in zip(found, needs, strict=True))

    beyond = numbers.rows + max(needs) // (numbers.hidden * _ITEM) + 1  # every row has one of the residual stream
    return numbers.rows + bisect_left(range(numbers.rows, beyond), True, key=suffices)  # noqa: FBT003


def _need(plan: SplitPlan, numbers: Numbers, device: int, reserved: int | None) -> int:
    """Return the bytes of the hungriest layer on a device."""
    heads = {Axis.Q_HEADS: numbers.head_dim, Axis.KV_HEADS: numbers.head_dim}
    whole, part = {}, {}
    for axis in (Axis.KV_HEADS, Axis.INTERMEDIATE, Axis.RESIDUAL, Axis.Q_HEADS):
        bounds, width = plan.bounds(axis), heads.get(axis, 1)
        whole[axis], part[axis] = bounds[-1] * width, (bounds[device + 1] - bounds[device]) * width
    if reserved is None:
        elements = max(whole[inputs] * part[outputs] for inputs, outputs in _MATRICES)
        reserved = min(elements, numbers.dequantised) * _ITEM
    layers = (
        [*(whole[axis] for axis in full if part[axis]), *(part[axis] for axis in parts)] for full, parts in _LAYERS
    )
    slices = max(sum(align(numbers.rows * columns * _ITEM) for columns in layer) for layer in layers)
    return align(reserved) + slices if any(part.values()) else 0


__all__ = ["get_device_stream", "global_streams", "set_device_streams"]

#: The stream of each GPU that has one, by its CUDA index.
global_streams: dict[int, torch.cuda.Stream] = {}


def get_device_stream(index: int) -> torch.cuda.Stream | None:
    """Return the stream of a GPU, None if it has none."""
    return global_streams.get(index)


def set_device_streams() -> None:
    """Make the stream of each GPU its current one; the current device stays."""
    if global_streams:
        with torch.cuda.device(torch.cuda.current_device()):
            for stream in global_streams.values():
                torch.cuda.set_stream(stream)


def make_streams(places: Iterable[torch.device]) -> None:
    """Give each GPU that has no stream its current one, or instead of the default stream a new one.

    The default stream's address is 0, as of a device without a stream.
    """
    for place in places:
        if place.type == "cuda" and place.index not in global_streams:
            current = torch.cuda.current_stream(place)
            is_default = current == torch.cuda.default_stream(place)
            global_streams[place.index] = torch.cuda.Stream(place, priority=-1) if is_default else current  # type: ignore[no-untyped-call]


#: The axes by the original's numbers.
AXES = (Axis.KV_HEADS, Axis.INTERMEDIATE, Axis.VOCAB, Axis.RESIDUAL, Axis.Q_HEADS)

#: What makes room for more rows.
MORE_ROWS = "set a larger max_input_len or max_batch_size in the config"

#: More is a mistake; and so much fits nowhere.
_MOST_SCRATCH = 2**48

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
    kv_split_devs: list[int] | None
    id_split_devs: list[int] | None
    vc_split_devs: list[int] | None
    rs_split_devs: list[int] | None
    q_split_devs: list[int] | None
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
        transport: str = "auto",
        tuning: Tuning | None = None,
        scratch_bytes: int | None = None,
    ) -> None:
        """Plan; see :meth:`define_split` for the errors.

        Args:
            model: anything whose ``config`` has the attributes of an ExLlamaV2Config.
            gpu_split: budget of each GPU for everything, in units of 2^30 bytes, 0 to leave it alone; None for the
                GPUs of this machine with the memory that is free on them. Positions are torch's CUDA ordinals.
            expect_cache_tokens: tokens in the cache; 0 for ``max_seq_len * max_batch_size``.
            expect_cache_base: a cache class of ExLlamaV2, known by its name; None for float16.
            backend: ``cuda``, ``cpu`` (virtual devices in host memory), or ``auto``: virtual devices if this machine
                has fewer GPUs than the plan uses, with a warning in the log.
            transport: see :func:`tpplan.exec.compile`, also for ``tuning``: :meth:`finalize` passes both on.
            tuning: thresholds.
            scratch_bytes: room on every device for :meth:`tpplan.exllamav2.TPContext.reserve_scratch`, beside that for
                the slices of a layer; None for what the widest matrix of a layer takes, dequantised, of which the
                device has a part.
        """
        check_choice("transport", transport, TRANSPORTS_OR_AUTO)
        self.model = model
        self.context: Compiled | None = None
        self._pinned: PinnedTemp | None = None
        self.sin: list[Tensor] | None = None
        self.cos: list[Tensor] | None = None
        self._scratch = Scratch(model)
        self._backend = backend
        self._compile = partial(compile_plan, transport=transport, tuning=tuning)
        self._scratch_bytes = scratch_bytes
        self.define_split(gpu_split, expect_cache_tokens, expect_cache_base)

    def __repr__(self) -> str:
        state = "planned" if self.context is None else "finalized"
        return f"<TPContext {self.plan.model.name}, {state} for devices {', '.join(map(str, self.all_devs))}>"

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
            DeviceError: there is no GPU to be asked for its memory, or torch does not see one that was.
            RequestError: an argument has no meaning.
        """
        numbers = read_numbers(getattr(self.model, "config", None))
        ordinals, devices = read_gpu_split(gpu_split)
        kind, tokens = cache_kind(expect_cache_base), expect_cache_tokens or numbers.context * numbers.batch
        reserved = 0 if self._scratch_bytes is None else self._scratch_bytes
        if type(tokens) is not int or tokens < 0 or type(reserved) is not int or not 0 <= reserved <= _MOST_SCRATCH:
            message = f"expect_cache_tokens is {tokens!s:.40}, scratch_bytes {self._scratch_bytes!s:.40}"
            raise RequestError(message, f"pass whole numbers, 0 or more, and at most {_MOST_SCRATCH} bytes")
        # As many sequences as can each reach the longest context, so that the RoPE tables have its rows.
        batch = min(max(1, tokens // numbers.context), numbers.rows)
        spec = read_spec(self.model, numbers, max(numbers.context, -(-tokens // batch)))
        cache, rows = Cache(kind, tokens), numbers.rows
        first = resolve(spec, Request("gather", "exllamav2", cache, batch, rows, "idle"))
        check_devices(devices, first)
        cut = attempt(spec, devices, first)
        if cut is not None:  # the rows do not change the cuts
            rows = rows_with_scratch(cut.plan(), numbers, self._scratch_bytes)
        if rows > MOST_ROWS:
            message = f"scratch_bytes {self._scratch_bytes} is that of {rows} rows, expected at most {MOST_ROWS}"
            raise RequestError(message, "pass less")
        made = plan(spec, devices, cache=cache, layout="gather", strategy="exllamav2", batch=batch, max_rows=rows)
        self.unload()
        self.plan = made
        self._numbers = numbers
        self._ordinals = ordinals
        self._scratch.plan(made, ordinals)
        self._backend_here = ""
        self.kv_split, self.id_split, self.vc_split, self.rs_split, self.q_split = splits = [
            [self._part(part) for part in made.slices(axis)] for axis in AXES
        ]
        self.kv_split_devs, self.id_split_devs, self.vc_split_devs, self.rs_split_devs, self.q_split_devs = (
            [device for device, _, _ in split] for split in splits
        )
        self.all_devs = self.all_devices()
        self.device = self.all_devs[0]
        self.num_devices = self.all_devs[-1] + 1

    def finalize(self) -> None:
        """Compile the plan, and make the operations usable; a second call does it anew, and scratch stays as it is.

        Everything is allocated that is not yet. Weights and cache may have their memory already.

        Raises:
            ExecutionError: the plan does not fit this machine, with every difference.
        """
        self._close()
        places = self._places()
        backend = self._backend_here
        context = self._compile(self.plan, backend=backend, devices=places, scratch=False, weights_loaded=True)
        try:
            self._scratch.allocate(places)
            make_streams(device.device for device in context.devices.values())
        except BaseException:  # as an interrupt: nobody else would close it
            context.close()
            raise
        self.context = context
        n = self._numbers
        size = max(n.output_rows * n.vocab, n.rows * max(n.widest, n.hidden))
        self._pinned = PinnedTemp(size, lock_pages=backend == "cuda")

    def unload(self) -> None:
        """Give everything that :meth:`finalize` and scratch have allocated back; again, this does nothing."""
        self._close()
        self._scratch.close()

    def _close(self) -> None:
        """Close what :meth:`finalize` has made."""
        if self.context is not None:
            self.context.close()
        self.context = self._pinned = self.sin = self.cos = None

    def _places(self) -> list[torch.device]:
        """Return the torch device of each device of the plan.

        Raises:
            RequestError: there is no such backend.
        """
        if not self._backend_here:
            check_choice("backend", self._backend, BACKENDS)
            here = torch.cuda.device_count() if torch.cuda.is_available() else 0
            self._backend_here = self._backend
            if self._backend == "auto":
                self._backend_here = "cuda" if here >= self.num_devices else "cpu"
                if self._backend_here == "cpu":
                    _LOG.warning("%d GPUs planned for, %d here: running on virtual devices", self.num_devices, here)
        return [
            torch.device("cuda", i) if self._backend_here == "cuda" else torch.device("cpu") for i in self._ordinals
        ]

    @property
    def pinned_temp(self) -> list[Tensor] | None:
        """Both host buffers; None unless finalized."""
        return None if self._pinned is None else [self._pinned.flat(buffer) for buffer in range(BUFFERS)]

    @property
    def streams(self) -> list[int] | None:
        """By device number the address of its stream, 0 for a device that has none; None unless finalized."""
        if self.context is None:
            return None
        gpus = {device.device.index for device in self.context.devices.values() if device.device.type == "cuda"}
        return [global_streams[i].cuda_stream if i in gpus else 0 for i in range(self.num_devices)]

    def all_devices(self) -> list[int]:
        """Return the devices that hold a part of any axis, ascending."""
        return sorted({device for kind in range(len(AXES)) for device in self.get_devs(kind)})

    def get_split(self, broadcast_type: int) -> list[Part]:
        """Return the list ``kv_split`` and so on: (device, start, end) of each device that holds a part of an axis.

        Raises:
            RequestError: there is no such type.
        """
        axis_of(broadcast_type)
        splits = (self.kv_split, self.id_split, self.vc_split, self.rs_split, self.q_split)
        return splits[broadcast_type] or []

    def get_devs(self, broadcast_type: int) -> list[int]:
        """Return the list ``kv_split_devs`` and so on: the devices that hold a part of an axis.

        Raises:
            RequestError: there is no such type.
        """
        axis_of(broadcast_type)
        devs = (self.kv_split_devs, self.id_split_devs, self.vc_split_devs, self.rs_split_devs, self.q_split_devs)
        return devs[broadcast_type] or []

    def _ready(self, buffer: int = 0) -> Compiled:
        """Return the compiled plan, if there is one and such a buffer."""
        if self.context is None:
            raise ExecutionError("this TPContext is not finalized, or unloaded", "call finalize() first")
        if buffer not in range(BUFFERS):
            raise ExecutionError(f"there is no host buffer {buffer!s:.40}", "the buffers are 0 and 1")
        return self.context

    @contextmanager
    def _using(self, buffer: int = 0) -> Iterator[Compiled]:
        """Yield what :meth:`_ready` returns, and let its errors' hints name what there is here."""
        try:
            yield self._ready(buffer)
        except ExecutionError as error:
            raise ExecutionError(error.message, error.hint.replace("plan with more --max-rows", MORE_ROWS)) from error

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
