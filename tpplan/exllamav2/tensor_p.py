"""ExLlamaV2's TPContext, planned and run by tpplan, and what stands for its address in ``ext_tp_context``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from weakref import ref

import torch

from tpplan.errors import ExecutionError
from tpplan.exllamav2.areas import model_context
from tpplan.exllamav2.rope import read_rope
from tpplan.exllamav2.splits import Splits, axis_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.exllamav2.pinned import PinnedTemp

# Indices of tpplan.exllamav2.splits.AXES.
#: The split of the key/value heads.
BROADCAST_KV = 0
#: The split of the intermediate size.
BROADCAST_ID = 1
#: The split of the vocabulary.
BROADCAST_VC = 2
#: The split of the residual stream.
BROADCAST_RS = 3
#: The split of the query heads.
BROADCAST_Q = 4


class TPContext(Splits):
    """The splits of a model over several GPUs, and the movements of data between them.

    The constructor plans, after which there is scratch; :meth:`finalize` compiles the plan, after which data moves.
    Operations take and return a list with one tensor for each device of a split, in device order. ``buffer`` is 0 or 1,
    as in the original; operations stage in memory of their own, and only :meth:`gather` leaves something in a buffer.

    Ordering is that of :class:`tpplan.exec.TPContext`: an operation follows what the caller's current streams hold, and
    these go on after its results. No call changes the current device or stream.

    Attributes:
        model: the model that was given.
        plan: the splits and the ledger, to be saved, shown and compared.
        context: the compiled plan, without scratch, which is this context's; None before :meth:`finalize` and after
            :meth:`unload`.
        kv_split: the split of the KV heads: (device, start, end) for each device that holds a part.
        id_split: that of the intermediate size.
        vc_split: that of the vocabulary, padded to a multiple of 32.
        rs_split: that of the residual stream.
        q_split: that of the query heads.
        kv_split_devs: the devices of ``kv_split``; likewise ``id_split_devs``, ``vc_split_devs``, ``rs_split_devs`` and
            ``q_split_devs``.
        pinned_temp: two flat float16 tensors in host memory, pinned where there are GPUs, and each allocated when it is
            first used; None unless finalized.
        device: the first device in use.
        all_devs: the devices in use, ascending.
        num_devices: one more than the last device in use.
        streams: by device number the address of the stream in :mod:`tpplan.exllamav2.splits`, 0 for a device that is
            virtual or not in use; None unless finalized.
        ext_tp_context: while finalized a :class:`tpplan.exllamav2.tensor_p.Handle`, whose ``tp_context`` is this
            context, else None.
        sin: by device the sine table, an empty tensor on ``meta`` where there is none; None before
            :meth:`get_sin_cos`.
        cos: likewise the cosine table.
    """

    @property
    def ext_tp_context(self) -> Handle | None:
        """A handle for functions in place of ExLlamaV2's C++ functions, always the same; None unless finalized."""
        return None if self.context is None else self._handle

    @cached_property
    def _handle(self) -> Handle:
        return Handle(self)

    def broadcast(
        self,
        buffer: int,
        input_tensor: Tensor,
        broadcast_type: int,
        dim: int = 1,  # noqa: ARG002
        *,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Copy a tensor to every device of a split.

        Args:
            buffer: 0 or 1.
            input_tensor: ``[..., columns]`` of any dtype, on a device of the plan or in host memory.
            broadcast_type: number of the split whose devices get it.
            dim: without effect, as in the original.
            out: preallocated tensors for the results.

        Returns:
            A tensor like the input on each device.

        Raises:
            ExecutionError: an operand of the wrong kind, shape, dtype or device, or the context is not finalized.
            RequestError: there is no such type.
        """
        with self._using(buffer) as context:
            return list(context.broadcast(input_tensor, axis_of(broadcast_type), out=out))

    def gather(self, buffer: int, inputs: Sequence[Tensor], broadcast_type: int, dim: int = 1) -> Tensor:
        """Copy the parts of all devices of a split into one tensor in host memory.

        Args:
            buffer: gets a copy of the result at its start, if it has room; see :meth:`get_pinned`.
            inputs: ``[rows, elements × dim]`` on each device of the split.
            broadcast_type: number of the split.
            dim: columns per element.

        Returns:
            ``[rows, size × dim]``, complete, in memory of its own.

        Raises:
            ExecutionError: see :meth:`broadcast`.
            RequestError: there is no such type.
        """
        with self._using(buffer) as context:
            whole = context.gather(inputs, axis_of(broadcast_type), dim=dim).result()
        self._buffers(buffer).leave(buffer, whole)
        return whole

    def gather_pinned(self, buffer: int, inputs: Sequence[Tensor], broadcast_type: int, dim: int = 1) -> None:
        """Copy the parts of all devices of a split to the start of a host buffer, without waiting for them.

        Operations of this context that read the buffer wait; for all else, call :meth:`wait_streams` first.

        Args:
            buffer: 0 or 1; see :meth:`get_pinned`.
            inputs: ``[rows, elements × dim]`` on each device of the split.
            broadcast_type: number of the split.
            dim: columns per element.

        Raises:
            ExecutionError: the buffer is too small, or see :meth:`broadcast`.
            RequestError: there is no such type.
        """
        with self._using(buffer) as context:
            shape = *inputs[0].shape[:-1], self.get_split(broadcast_type)[-1][2] * dim
            whole = self._buffers(buffer).view(buffer, shape, inputs[0].dtype)
            context.gather(inputs, axis_of(broadcast_type), dim=dim, out=whole)

    def allgather(
        self,
        buffer: int,
        inputs: Sequence[Tensor],
        broadcast_type_g: int,
        broadcast_type_b: int,
        dim: int = 1,
        *,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Copy the parts of all devices of one split into one tensor on every device of another.

        Args:
            buffer: 0 or 1.
            inputs: ``[rows, elements × dim]`` on each device of the split ``broadcast_type_g``.
            broadcast_type_g: number of the split of the parts.
            broadcast_type_b: number of the split whose devices get the whole.
            dim: columns per element of the parts' axis.
            out: preallocated tensors for the results.

        Returns:
            ``[rows, size × dim]`` on each device of ``broadcast_type_b``, with the size of the parts' axis.

        Raises:
            ExecutionError: see :meth:`broadcast`.
            RequestError: there is no such type.
        """
        with self._using(buffer) as context:
            axes = axis_of(broadcast_type_g), axis_of(broadcast_type_b)
            return list(context.allgather(inputs, *axes, dim=dim, out=out))

    def all_reduce(self, buffer: int, tensors: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
        """Add up tensors over all devices in use, onto each device's residual in place (``tp_all_reduce``).

        Args:
            buffer: 0 or 1.
            tensors: ``[rows, columns]`` in float16, bfloat16 or float32, one on each device in use.
            residuals: likewise, all with the same contents; each becomes itself plus the sum, rounded once.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        with self._using(buffer) as context:
            context.all_reduce(tensors, residuals, out=residuals)

    def add_residual(
        self, target: Sequence[Tensor], source: Sequence[Tensor], broadcast_type: int, dim: int = 1
    ) -> None:
        """Add to every target, in place, the columns of its source that belong to the device's part.

        Args:
            target: ``[rows, elements × dim]`` on each device of the split.
            source: ``[rows, size × dim]``, likewise.
            broadcast_type: number of the split.
            dim: columns per element.

        Raises:
            ExecutionError: see :meth:`broadcast`.
            RequestError: there is no such type.
        """
        with self._using() as context:
            context.add_residual(target, source, axis_of(broadcast_type), dim=dim)

    def wait_streams(self) -> None:
        """Return when everything on the devices in use is complete, the caller's work too.

        Raises:
            ExecutionError: the context is not finalized.
        """
        context = self._ready()
        context.synchronize()
        for device in context.devices.values():
            if device.device.type == "cuda":
                torch.cuda.synchronize(device.device)

    def get_sin_cos(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the RoPE tables of each device, made once.

        Returns:
            Sines and cosines by device number. If the model has device contexts, their tables. Else for each device
            with KV heads ``[1, 1, positions, head size]`` in float16, with as many positions as the context or the
            cache has tokens. Where there is no table, an empty tensor on ``meta``.

        Raises:
            ExecutionError: the context is not finalized, and the model has no device contexts.
            ModelError: the config's RoPE is unknown or incomplete.
        """
        if self.sin is None or self.cos is None:
            made = self._model_tables() or self._own_tables()
            none = torch.empty(0, dtype=torch.half, device="meta")
            by_device = [made.get(device, (none, none)) for device in range(self.num_devices)]
            self.sin, self.cos = [sin for sin, _ in by_device], [cos for _, cos in by_device]
        return self.sin, self.cos

    def _model_tables(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return sines and cosines of the model's device contexts, which makes them if need be."""
        made = {}
        for device in self.all_devs:
            if model_context(self.model, device) is not None:
                context = self.model.get_device_context(device)
                made[device] = torch.cat(context.sin), torch.cat(context.cos)  # one for each base
        return made

    def _own_tables(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return sines and cosines of devices with KV heads, as the config has them."""
        context = self._ready()
        rope = read_rope(self.model.config, self._numbers.head_dim, self._numbers.context)
        if rope is None:
            return {}
        tables = context.rope_tables(rope, min(self._numbers.context, self.plan.request.cache.tokens))
        devices = self.get_devs(BROADCAST_KV)
        return {device: (sin[None, None], cos[None, None]) for device, (sin, cos) in zip(devices, tables, strict=True)}

    def get_pinned(self, buffer: int, batch_size: int, q_len: int, dim: int) -> Tensor:
        """Return the start of a host buffer as float16 ``[batch_size, q_len, dim]``.

        Raises:
            ExecutionError: the buffer is too small, or the context is not finalized.
        """
        return self._buffers(buffer).view(buffer, (batch_size, q_len, dim), torch.half)

    def copy_pinned(self, buffer: int, inputs: Tensor) -> Tensor:
        """Copy a tensor of any shape, dtype and device to the start of a host buffer, and wait until it is there.

        Raises:
            ExecutionError: see :meth:`get_pinned`.
        """
        return self._buffers(buffer).view(buffer, inputs.shape, inputs.dtype).copy_(inputs.detach())

    def begin_scratch_alloc_tp(self) -> None:
        """Make the scratch of all devices free again: slices from now on may alias older ones."""
        self._scratch.begin()

    def get_scratch_slice_tp(self, rows: int, dtype: torch.dtype, broadcast_type: int, dim: int = 1) -> list[Tensor]:
        """Return uninitialised scratch ``[rows, elements × dim]`` on each device of a split.

        It needs no :meth:`finalize`, which leaves slices valid. The memory is that of the model's device contexts, if
        it has some; else it is allocated here, once on each device.

        Raises:
            ExecutionError: a device has too little room, or memory.
            RequestError: there is no such type.
        """
        return self._scratch.slices(self._widths(broadcast_type, dim), rows, dtype, self._places())

    def get_scratch_slice_tp_bc(self, rows: int, dtype: torch.dtype, broadcast_type: int, dim: int = 1) -> list[Tensor]:
        """Return uninitialised scratch ``[rows, size × dim]``, as wide as the whole axis, on each device of a split.

        Raises:
            ExecutionError: see :meth:`get_scratch_slice_tp`.
            RequestError: there is no such type.
        """
        return self._scratch.slices(self._widths(broadcast_type, dim, whole=True), rows, dtype, self._places())

    def reserve_scratch(self, scratch: Sequence[int]) -> None:
        """Set bytes of scratch aside on each device, by device number, until :meth:`begin_scratch_alloc_tp`.

        There is room for so many bytes that the widest matrix of a layer can be dequantised on each of its devices,
        and the layer's slices follow; or for ``scratch_bytes`` of the constructor.

        Raises:
            ExecutionError: a device has too little room or is not in use.
        """
        sizes = {device: size for device, size in enumerate(scratch) if size}
        self._scratch.slices(sizes, 1, torch.uint8, self._places())

    def get_temp_tensors(self, rows: int, dtype: torch.dtype, broadcast_type: int, dim: int = 1) -> list[Tensor]:
        """Return new uninitialised tensors ``[rows, elements × dim]``, one on each device of a split.

        Raises:
            RequestError: there is no such type.
        """
        return self._temp_tensors(rows, dtype, self._widths(broadcast_type, dim))

    def get_temp_tensors_bc(self, rows: int, dtype: torch.dtype, broadcast_type: int, dim: int = 1) -> list[Tensor]:
        """Return new uninitialised tensors ``[rows, size × dim]``, as wide as the whole axis; else as the above.

        Raises:
            RequestError: there is no such type.
        """
        return self._temp_tensors(rows, dtype, self._widths(broadcast_type, dim, whole=True))

    def get_temp_tensors_s(self, rows: int, esize: int, broadcast_type: int, dim: int = 1) -> list[int]:
        """Return by device number the bytes of :meth:`get_temp_tensors`, with elements of ``esize`` bytes.

        Raises:
            RequestError: there is no such type.
        """
        widths = self._widths(broadcast_type, dim)
        return [rows * widths.get(device, 0) * esize for device in range(self.num_devices)]

    def get_temp_tensors_bc_s(self, rows: int, esize: int, broadcast_type: int, dim: int = 1) -> list[int]:
        """Return by device number the bytes of :meth:`get_temp_tensors_bc`, with elements of ``esize`` bytes.

        Raises:
            RequestError: there is no such type.
        """
        widths = self._widths(broadcast_type, dim, whole=True)
        return [rows * widths.get(device, 0) * esize for device in range(self.num_devices)]

    def _widths(self, broadcast_type: int, dim: int, *, whole: bool = False) -> dict[int, int]:
        """Return the columns of each device of a split, or of the whole axis, by device number."""
        split = self.get_split(broadcast_type)
        return {device: (split[-1][2] if whole else b - a) * dim for device, a, b in split}

    def _temp_tensors(self, rows: int, dtype: torch.dtype, widths: dict[int, int]) -> list[Tensor]:
        """Return a new tensor on each of the devices."""
        places = dict(zip(self._ordinals, self._places(), strict=True))
        return [torch.empty(rows, width, dtype=dtype, device=places[device]) for device, width in widths.items()]

    def _buffers(self, buffer: int) -> PinnedTemp:
        """Return the host buffers, of which there is such a one; the context is finalized."""
        self._ready(buffer)
        assert self._pinned is not None  # noqa: S101
        return self._pinned


class Handle:
    """Names a TPContext to Python functions that take the place of ExLlamaV2's C++ functions.

    It is no number, and none can be made of it: C++ functions that expect an address refuse it with a TypeError that
    names it. It does not keep the context alive, which holds it.
    """

    def __init__(self, tp_context: TPContext) -> None:
        """Name a context."""
        self._tp_context = ref(tp_context)

    def __repr__(self) -> str:
        return f"<Handle, which is no address, of {self._tp_context()!r}>"

    @property
    def tp_context(self) -> TPContext:
        """The context; its operations raise an error where it has been unloaded meanwhile.

        Raises:
            ExecutionError: the context no longer exists.
        """
        context = self._tp_context()
        if context is None:
            raise ExecutionError("the TPContext of this handle no longer exists", "keep the TPContext while it is used")
        return context
