"""Calls: the requirements of an operation on tensors of some shape, computed once and checked for each use."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.errors import ExecutionError
from tpplan.exec.calls.operands import Group, check_facts, columns_of, matrix
from tpplan.exec.checks import are_apart, check_apart, check_writable
from tpplan.exec.programs import operation
from tpplan.exec.programs.lower import Route
from tpplan.exec.programs.operation import Moves, Reduction
from tpplan.exec.programs.program import HOST, INPUT, OUTPUT, RESIDUAL, Buffer, Program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.backends.engine import Engine
    from tpplan.exec.calls.operands import Slices
    from tpplan.exec.programs.lower import Mode
    from tpplan.exec.programs.operation import Operation


@frozen(eq=False)
class Call:
    """An operation on tensors of some shape and dtype.

    Attributes:
        name: name of the operation, for errors.
        inputs: groups of tensors that are only read.
        outputs: the group of tensors that are written.
        own: for each input, the index of the output that may be the same tensor; empty if no output may be an input.
        rows: rows of every tensor.
        program: the program to run; None if there are no rows.
        unpinned: the program to run if the output in host memory is not pinned; None if pinning makes no difference.
        buffers: the program's buffers for the inputs, then for the outputs.
        sizes: bytes of each tensor.
        hosted: indices of the tensors in host memory.
        pinned: whether to create outputs in host memory as pinned.
    """

    name: str
    inputs: tuple[Group, ...]
    outputs: Group
    own: tuple[int, ...]
    rows: int
    program: Program | None
    unpinned: Program | None
    buffers: tuple[Buffer, ...]
    sizes: tuple[int, ...]
    hosted: tuple[int, ...]
    pinned: bool

    def admit(self, inputs: tuple[Sequence[Tensor], ...], out: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], bool]:
        """Check the tensors of a call.

        Returns:
            The inputs followed by the outputs, and whether all are dense: contiguous, with their values as stored.

        Raises:
            ExecutionError: see :meth:`Group.check`, :func:`~tpplan.exec.checks.check_writable` and
                :func:`~tpplan.exec.checks.check_apart`.
        """
        is_dense = True
        for group, tensors in zip(self.inputs, inputs, strict=True):
            if not group.fits(tensors):
                group.check(tensors)
                is_dense = False
        read = inputs[0] if len(inputs) == 1 else [tensor for tensors in inputs for tensor in tensors]
        if not self.outputs.fits(out):
            self.outputs.check(out)
            for i, tensor in enumerate(out):
                check_writable(f"{self.name}: out[{i}]", tensor)
            is_dense = False
        tensors = (*read, *out)
        if not is_dense or not self._are_apart(tensors):
            check_apart(self.name, out, read, self.own)
        return tensors, is_dense

    def operands(self, tensors: tuple[Tensor, ...], *, is_dense: bool) -> dict[Buffer, Tensor]:
        """Return the tensors from :meth:`admit` as matrices, by the program's buffers."""
        matrices: Sequence[Tensor] = tensors
        if not is_dense:
            matrices = [matrix(tensor) for tensor in tensors]
        elif tensors[0].dim() != 2:  # noqa: PLR2004
            matrices = [tensor.view(self.rows, -1) for tensor in tensors]
        return dict(zip(self.buffers, matrices, strict=True))

    def _are_apart(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether dense tensors do not overlap, except for outputs that are their own input."""
        if are_apart(tensors, self.sizes):
            return True
        out = tensors[len(self.own) :]
        others = [x for x, i in zip(tensors, self.own, strict=False) if x is not out[i]]
        return bool(self.own) and are_apart((*out, *others), self.sizes)  # all have the same size

    def new(self) -> list[Tensor]:
        """Create uninitialised outputs; those in host memory are pinned if CUDA devices write them."""
        wants, dtype = self.outputs.wants, self.outputs.dtype
        if self.pinned:
            return [torch.empty(*shape, dtype=dtype, device=place, pin_memory=True) for shape, place, _ in wants]
        return [torch.empty(*shape, dtype=dtype, device=place) for shape, place, _ in wants]


class Calls:
    """Creates the calls of a context.

    Each method takes devices, which are already checked, and the shape and dtype of the first tensor, which are not.

    Attributes:
        engine: provides the programs.
        places: torch device for each device of the plan in use, and for HOST; ``meta`` for those of other processes.
        max_rows: maximum rows of an operand.
        mode: how the calls are issued.
    """

    def __init__(self, engine: Engine, places: Mapping[int, torch.device], max_rows: int, mode: Mode) -> None:
        self.engine = engine
        self.places = places
        self.owns_all = all(place.type != "meta" for place in places.values())
        self.max_rows = max_rows
        self.mode = mode

    def check_source(self, what: str, source: int) -> None:
        """Check that a source is a device of the context or HOST.

        Raises:
            ExecutionError: it is neither; the message lists the valid ones.
        """
        if type(source) is not int or source not in self.places:
            names = ", ".join(map(str, self.places))
            raise ExecutionError(f"{what}: source is {source!r:.40}, expected one of {names}", f"{HOST} is the host")

    def broadcast(
        self, source: int | None, targets: tuple[int, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Call:
        """Return the call that copies one tensor to the targets.

        Raises:
            ExecutionError: shape or dtype is not supported, or no device of the context is on ``device``.
        """
        rows = check_facts("broadcast: x", shape, dtype, self.max_rows)
        origin, columns = self._origin("broadcast", source, device), shape[-1]
        x = self._single("broadcast: x", origin, shape, dtype)
        outputs = self._group("broadcast: out", [(target, columns) for target in targets], shape, dtype)
        return self._call(operation.broadcast(origin, targets, columns), (x,), outputs, rows)

    def scatter(
        self, source: int | None, slices: Slices, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Call:
        """Return the call that copies to each device its slice of a tensor.

        Raises:
            ExecutionError: see :meth:`broadcast`.
        """
        rows = check_facts("scatter: x", shape, dtype, self.max_rows)
        origin = self._origin("scatter", source, device)
        x = self._single("scatter: x", origin, (*shape[:-1], slices[-1][2]), dtype)
        outputs = self._group("scatter: out", [(d, b - a) for d, a, b in slices], shape, dtype)
        return self._call(operation.scatter(origin, slices), (x,), outputs, rows)

    def allgather(
        self, name: str, slices: Slices, targets: tuple[int, ...], shape: torch.Size, dtype: torch.dtype
    ) -> Call:
        """Return the call that copies the parts of all slices to every target.

        Raises:
            ExecutionError: shape or dtype is not supported.
        """
        rows = check_facts(f"{name}: parts[0]", shape, dtype, self.max_rows)
        parts = self._group(f"{name}: parts", [(d, b - a) for d, a, b in slices], shape, dtype)
        outputs = self._group(f"{name}: out", [(target, slices[-1][2]) for target in targets], shape, dtype)
        return self._call(operation.allgather(name, slices, targets), (parts,), outputs, rows)

    def all_reduce(
        self,
        senders: tuple[int, ...],
        receivers: tuple[int, ...],
        residual: bool,  # noqa: FBT001
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Call:
        """Return the call that sums the senders' tensors, and optionally the receivers' residuals, on all receivers.

        Raises:
            ExecutionError: shape or dtype is not supported.
        """
        columns = columns_of("all_reduce: parts[0]", shape)
        rows = check_facts("all_reduce: parts[0]", shape, dtype, self.max_rows, adds=True)
        parts = self._group("all_reduce: parts", [(sender, columns) for sender in senders], shape, dtype)
        sums = [(receiver, columns) for receiver in receivers]
        residuals = (self._group("all_reduce: residual", sums, shape, dtype),) if residual else ()
        outputs = self._group("all_reduce: out", sums, shape, dtype)
        return self._call(
            operation.all_reduce(columns, senders, receivers, residual), (parts, *residuals), outputs, rows
        )

    def add_residual(
        self, slices: Slices, size: int, wholes: tuple[bool, ...], shape: torch.Size, dtype: torch.dtype
    ) -> Call:
        """Return the call that adds to each device's tensor its slice of a source.

        Args:
            slices: slices of this process's devices.
            size: columns of the axis.
            wholes: for each slice, whether the source is as wide as the axis.
            shape: shape of the first target.
            dtype: dtype of all tensors.

        Raises:
            ExecutionError: shape or dtype is not supported.
        """
        rows = check_facts("add_residual: target[0]", shape, dtype, self.max_rows, adds=True)
        cut = list(zip(slices, wholes, strict=True))
        taken = tuple((d, a, b) if whole else (d, 0, b - a) for (d, a, b), whole in cut)
        given = [(d, size if whole else b - a) for (d, a, b), whole in cut]
        sources = self._group("add_residual: source", given, shape, dtype)
        targets = self._group("add_residual: target", [(d, b - a) for d, a, b in slices], shape, dtype)
        return self._call(operation.add(taken), (sources,), targets, rows)

    def nothing(self, name: str, inputs: int) -> Call:
        """Return the call of an operation without any tensors of this process."""
        nothing = self._group(f"{name}: out", [], torch.Size(), torch.uint8)
        return Call(name, (nothing,) * inputs, nothing, (), 0, None, None, (), (), (), pinned=False)

    def _origin(self, what: str, source: int | None, device: torch.device) -> int:
        """Return the source given by the caller, or else the plan's device that a tensor is on, or HOST.

        Raises:
            ExecutionError: it has to be given, as each process would find another one, or the tensor is elsewhere.
        """
        if source is not None:
            return source
        on_host = device.type == "cpu" and not any(p.type == "cpu" for i, p in self.places.items() if i != HOST)
        if not self.owns_all and not on_host:
            hint = "pass source=, the same in all processes: the device that x is on, or HOST"
            raise ExecutionError(f"{what}: x is on {device}, which each process may take for another device", hint)
        found = next((index for index, place in self.places.items() if place == device), None)
        if found is None:
            names = ", ".join(map(str, dict.fromkeys(self.places.values())))
            raise ExecutionError(f"{what}: x is on {device}, expected one of {names}", "move it there first")
        return found

    def _single(self, what: str, origin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Group:
        return Group(what, (what,), (origin,), (self._want(origin, shape, dtype),), dtype)

    def _group(self, what: str, widths: list[tuple[int, int]], shape: torch.Size, dtype: torch.dtype) -> Group:
        """Return the group with a tensor of the given width (device, columns) on each device of this process."""
        own = [(device, width) for device, width in widths if self.places[device].type != "meta"]
        names = tuple(f"{what}[{i}] of device {device}" for i, (device, _) in enumerate(own))
        wants = tuple(self._want(device, (*shape[:-1], width), dtype) for device, width in own)
        return Group(what, names, tuple(device for device, _ in own), wants, dtype)

    def _want(
        self, device: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.device, int]:
        return tuple(shape), self.places[device], prod(shape) * dtype.itemsize

    def _call(self, what: Operation, inputs: tuple[Group, ...], outputs: Group, rows: int) -> Call:
        program = unpinned = None
        on_gpus = any(place.type == "cuda" for place in self.places.values())
        if rows:
            way = self.engine.route(what, rows, outputs.dtype.itemsize, self.mode)
            program = self.engine.program(what, way)
            if (
                on_gpus and self.owns_all and way == Route("local", small=True)
            ):  # by kernels, which write only to pinned memory
                unpinned = self.engine.program(what, Route("local"))
        devices = [device for group in (*inputs, outputs) for device in group.devices]
        read = devices[: len(devices) - len(outputs.devices)]
        own = [outputs.devices.index(device) for device in read] if isinstance(what, Reduction) else []
        return Call(
            what.name,
            inputs,
            outputs,
            tuple(own),
            rows,
            program,
            unpinned,
            _buffers(what, {INPUT: inputs[0], RESIDUAL: inputs[-1], OUTPUT: outputs}),
            tuple(size for group in (*inputs, outputs) for _, _, size in group.wants),
            tuple(i for i, device in enumerate(devices) if device == HOST),
            on_gpus and HOST in outputs.devices,
        )


def _buffers(operation: Operation, groups: Mapping[str, Group]) -> tuple[Buffer, ...]:
    """Return the buffers of an operation that have a tensor in the group of their role, inputs first."""
    return tuple(buffer for buffer in _every_buffer(operation) if buffer.device in groups[buffer.role].devices)


def _every_buffer(operation: Operation) -> tuple[Buffer, ...]:
    if isinstance(operation, Moves):
        ends = [view.buffer for ends in zip(*operation.moves, strict=True) for view in ends]
        return tuple(dict.fromkeys(ends))
    inputs = operation.senders if isinstance(operation, Reduction) else operation.devices
    outputs = operation.receivers if isinstance(operation, Reduction) else operation.devices
    residuals = outputs if isinstance(operation, Reduction) and operation.residual else ()
    buffers = [Buffer(INPUT, d) for d in inputs] + [Buffer(RESIDUAL, d) for d in residuals]
    return (*buffers, *(Buffer(OUTPUT, d) for d in outputs))
