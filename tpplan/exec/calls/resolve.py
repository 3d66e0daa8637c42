"""Resolving the arguments of an operation to its call: axes become devices and columns."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError
from tpplan.exec.calls.operands import SEQUENCES, check_count, columns_of, facts_of
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    import torch
    from torch import Tensor

    from tpplan.core.axes import Axis
    from tpplan.exec.calls.call import Call, Calls
    from tpplan.exec.calls.slices import Cuts

    #: Groups of an operation's inputs, each with one tensor per device.
    Groups: TypeAlias = tuple[Sequence[Tensor], ...]

#: Maximum number of cached calls of each operation: prompts may have any length.
_KEPT = 4096


class Resolver:
    """Finds and caches calls; each method takes the arguments of the context's method, the inputs, and the outputs.

    All raise ExecutionError for unsupported tensors, and RequestError for axes that the plan does not cut.
    """

    def __init__(self, cuts: Cuts, calls: Calls) -> None:
        """Create empty caches.

        Args:
            cuts: the plan's cuts.
            calls: creates calls.
        """
        self._cuts = cuts
        self._check_source = calls.check_source
        self._nothing = calls.nothing
        keep = lru_cache(maxsize=_KEPT)
        self._broadcasts = keep(calls.broadcast)
        self._scatters = keep(calls.scatter)
        self._allgathers = keep(calls.allgather)
        self._all_reduces = keep(calls.all_reduce)
        self._add_residuals = keep(calls.add_residual)

    def broadcast(
        self, axis: Axis | str | None, layer: int | None, source: int | None, given: Groups, _: object
    ) -> Call:
        """Return the call of a broadcast; ``given`` is one group of one tensor."""
        ((x,),) = given
        if source is not None:
            self._check_source("broadcast", source)
        facts = facts_of("broadcast: x", x)
        return self._broadcasts(source, self._cuts.devices_of(axis, layer), *facts, x.device)

    def scatter(
        self, axis: Axis | str, dim: int, layer: int | None, source: int | None, given: Groups, _: object
    ) -> Call:
        """Return the call of a scatter; ``given`` is one group of one tensor."""
        ((x,),) = given
        if source is not None:
            self._check_source("scatter", source)
        facts = facts_of("scatter: x", x)
        return self._scatters(source, self._cuts.columns("scatter", axis, layer, dim), *facts, x.device)

    def gather(
        self, axis: Axis | str, dim: int, layer: int | None, given: Groups, out: Sequence[Tensor] | None
    ) -> Call:
        """Return the call of a gather; ``given`` are the parts."""
        (parts,) = given
        slices = self._cuts.columns("gather", axis, layer, dim)
        if isinstance(parts, SEQUENCES) and parts:
            facts = facts_of("gather: parts[0]", parts[0])
        else:
            facts = self._facts("gather", parts, [device for device, _, _ in slices], {"out": out})
        return self._allgathers("gather", slices, (HOST,), *facts)

    def allgather(  # noqa: PLR0917 (the context's arguments, and the tensors)
        self,
        axis: Axis | str,
        to: Axis | str | None,
        dim: int,
        layer: int | None,
        given: Groups,
        out: Sequence[Tensor] | None,
    ) -> Call:
        """Return the call of an allgather; ``given`` are the parts."""
        (parts,) = given
        slices = self._cuts.columns("allgather", axis, layer, dim)
        targets = self._cuts.devices_of(to, layer)
        if isinstance(parts, SEQUENCES) and parts:
            facts = facts_of("allgather: parts[0]", parts[0])
        else:
            receivers, devices = self._cuts.own_of(targets), [device for device, _, _ in slices]
            if not receivers and not self._cuts.own_of(devices):
                check_count("allgather: parts", parts, ())
                return self._nothing("allgather", 1)
            facts = self._facts("allgather", parts, devices, {"out": out}, receivers)
        return self._allgathers("allgather", slices, targets, *facts)

    def all_reduce(
        self, axis: Axis | str | None, layer: int | None, given: Groups, out: Sequence[Tensor] | None
    ) -> Call:
        """Return the call of an all-reduce; ``given`` are the parts, and residuals if there are any."""
        parts, *residuals = given
        senders = self._cuts.devices_of(axis, layer)
        if isinstance(parts, SEQUENCES) and parts:
            check_count("all_reduce: parts", parts, self._cuts.own_of(senders))
            facts = facts_of("all_reduce: parts[0]", parts[0])
        else:
            others = {"residual": residuals[0] if residuals else None, "out": out}
            facts = self._facts("all_reduce", parts, senders, others, self._cuts.own)
        return self._all_reduces(senders, self._cuts.devices, bool(residuals), *facts)

    def add_residual(
        self,
        axis: Axis | str,
        dim: int,
        layer: int | None,
        given: Groups,
        target: Sequence[Tensor],
    ) -> Call:
        """Return the call that adds to each target its columns of a source; ``given`` are the sources."""
        (source,) = given
        every = self._cuts.columns("add_residual", axis, layer, dim)
        size, devices = every[-1][2], self._cuts.own_of([device for device, _, _ in every])
        slices = tuple([each for each in every if each[0] in devices])
        check_count("add_residual: target", target, devices)
        check_count("add_residual: source", source, devices)
        if not devices:
            return self._nothing("add_residual", 1)
        shapes = [facts_of(f"add_residual: source[{i}]", x)[0] for i, x in enumerate(source)]
        widths = [columns_of(f"add_residual: source[{i}]", shape) for i, shape in enumerate(shapes)]
        wholes = tuple([width == size for width in widths])
        return self._add_residuals(slices, size, wholes, *facts_of("add_residual: target[0]", target[0]))

    def _facts(
        self,
        name: str,
        parts: Sequence[Tensor],
        devices: Sequence[int],
        others: Mapping[str, Sequence[Tensor] | None],
        receivers: Sequence[int] = (HOST,),
    ) -> tuple[torch.Size, torch.dtype]:
        """Return shape and dtype of a tensor with as many rows as the parts, of which this process was given none.

        Args:
            name: name of the operation in errors.
            parts: this process's parts.
            devices: the devices that have a part, those of other processes too.
            others: the call's other tensors by name; None for those that were not given.
            receivers: where the other tensors are.

        Raises:
            ExecutionError: it should have some, or there is no such tensor.
        """
        check_count(f"{name}: parts", parts, self._cuts.own_of(devices))
        for what, group in others.items():
            if group is not None:
                check_count(f"{name}: {what}", group, receivers)
                return facts_of(f"{name}: {what}[0]", group[0])
        hint = "pass out=, whose shape and dtype are those of the result"
        raise ExecutionError(f"{name}: parts: this process has none, so it cannot know how many rows there are", hint)
