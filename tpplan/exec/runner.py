"""Running operations: checked and prepared the first time, and issued at once where the same memory comes again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from random import Random
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tpplan.exec.gathered import Pending
from tpplan.exec.torch_shims import alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.exec.calls import Call
    from tpplan.exec.engine import Backend
    from tpplan.exec.inflight import Inflight
    from tpplan.exec.resolver import Resolver

#: On how many memories operations are remembered.
_KEPT = 1024
_PLAIN, _ADDRESS = {torch.Tensor}, torch.Tensor.data_ptr


@frozen(eq=False)
class _Known:
    """An operation on tensors that were right.

    Attributes:
        fits: tells whether what is read from the same addresses is of the same kind.
        takes: tells whether what is written there is, which may be what is read.
        hosted: which of them are in host memory.
        issue: issues it.
    """

    fits: Callable[..., bool]
    takes: Callable[..., bool]
    hosted: tuple[int, ...]
    issue: Callable[[], Pending]


class Runner:
    """Runs the operations of a context.

    Servers use the same memory all the time, and so does torch's allocator where results are new tensors: what was
    found right about tensors holds of all others of their kind that lie where they did, and what was worked out, too.
    Only a storage that somebody has shrunk goes unnoticed.
    """

    def __init__(self, backend: Backend, inflight: Inflight, called: Resolver, captured: Resolver) -> None:
        """Start without anything that could come again.

        Args:
            backend: issues programs.
            inflight: host memory that devices may still be writing.
            called: finds calls.
            captured: finds those that become part of a graph.
        """
        self._resolvers = called, captured
        self._backend = backend
        self._inflight = inflight
        self._known: dict[object, _Known] = {}
        self._keys: list[object] = []
        self._random = Random(0)  # noqa: S311 (to be the same every time)

    def run(
        self,
        name: str,
        asked: tuple[object, ...],
        inputs: tuple[Sequence[Tensor], ...],
        out: Sequence[Tensor] | None,
    ) -> tuple[tuple[Tensor, ...], Pending | None]:
        """Issue an operation.

        Args:
            name: of a method of the resolvers.
            asked: of it, before the tensors.
            inputs: the tensors of each group.
            out: tensors to write to; None for new ones.

        Returns:
            The outputs, and what is issued if there are any rows.

        Raises:
            ExecutionError: see :meth:`Call.admit`, and :class:`~tpplan.exec.resolver.Resolver`.
            RequestError: see there.
        """
        is_captured = self._backend.is_capturing()
        find = getattr(self._resolvers[is_captured], name)
        if out is None:
            out = find(*asked, inputs, out).new()
        groups, key, known = (*inputs, out), None, None
        try:
            read = (*chain.from_iterable(inputs),)
            tensors = (*read, *out)
            if _PLAIN.issuperset(map(type, tensors)):  # others warn of the question
                kinds = *map(type, asked), *map(type, groups)  # True is no 1
                key = (name, is_captured, asked, kinds, *map(len, groups), tensors[0].shape, *map(_ADDRESS, tensors))
                known = self._known.get(key)
        except (RuntimeError, TypeError):  # of sparse tensors, which have no addresses, and of what is no sequence
            key = None
        if known is None or not (known.fits(*read) and known.takes(*out)):
            return tuple(out), self._run_first(find(*asked, inputs, out), inputs, out, key)
        if known.hosted:
            self._settle(known.hosted, tensors)
        return tuple(out), known.issue()

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._keys.clear()

    def _run_first(
        self, call: Call, inputs: tuple[Sequence[Tensor], ...], out: Sequence[Tensor], key: object
    ) -> Pending | None:
        """Check the tensors of a call, and issue it."""
        tensors, is_dense = call.admit(inputs, out)
        self._settle(call.hosted, tensors)
        if call.program is None:
            return None
        program = call.program if call.unpinned is None or _are_pinned(out) else call.unpinned
        operands = call.operands(tensors, is_dense=is_dense)
        issue = self._backend.bind(program, operands)
        if issue is None:
            return self._backend.run(program, operands)
        if is_dense and key is not None:  # of others there may be copies
            has_to_be_pinned = call.unpinned is not None and program is not call.unpinned
            takes = _pinned(alike(out)) if has_to_be_pinned else alike(out)
            self._remember(key, _Known(alike(tensors[: -len(out)]), takes, call.hosted, issue))
        return issue()

    def _remember(self, key: object, known: _Known) -> None:
        """Remember a call; of too many, any other goes: if the oldest did, none of more that take turns would last."""
        if key not in self._known:
            if len(self._keys) < _KEPT:
                self._keys.append(key)
            else:
                place = self._random.randrange(_KEPT)
                self._known.pop(self._keys[place], None)  # Ctrl-C may have come in between
                self._keys[place] = key
        self._known[key] = known

    def _settle(self, hosted: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Wait for whatever writes to tensors in host memory."""
        for i in hosted:
            self._inflight.settle(tensors[i])


def _are_pinned(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_pinned() for tensor in tensors)


def _pinned(takes: Callable[..., bool]) -> Callable[..., bool]:
    """Return what tells besides whether outputs are pinned, as memory that comes again need not be."""
    return lambda *out: takes(*out) and _are_pinned(out)
