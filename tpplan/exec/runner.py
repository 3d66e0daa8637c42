"""Running operations: checked and prepared the first time, and issued at once where the same memory comes again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import TYPE_CHECKING

from attrs import define
from torch import Tensor

from tpplan.axes import Axis
from tpplan.exec.gathered import Pending
from tpplan.exec.torch_shims import alike

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.exec.calls import Call
    from tpplan.exec.engine import Backend
    from tpplan.exec.inflight import Inflight
    from tpplan.exec.resolver import Resolver

#: On how many memories operations are remembered.
_KEPT = 1024
#: What operations that come again are asked for by, and of what their inputs and outputs are; True is no 1.
_WORDS, _GROUPS = {int, str, Axis, type(None)}, {list, tuple}


@define(eq=False)
class _Known:
    """An operation on tensors that were right.

    Attributes:
        fits: tells whether what is at the same addresses is of the same kind.
        hosted: which of them are in host memory.
        issue: issues it.
        pinned: the output that was last found to be pinned; None if it need not be.
    """

    fits: Callable[..., bool]
    hosted: tuple[int, ...]
    issue: Callable[[], Pending]
    pinned: weakref.ref[Tensor] | None

    def takes(self, out: Tensor) -> bool:
        """Tell whether an output will do: memory that comes again need not be pinned, but the same tensor is."""
        if self.pinned is None or self.pinned() is out:
            return True
        if is_pinned := out.is_pinned():
            self.pinned = weakref.ref(out)
        return is_pinned


class Runner:
    """Runs the operations of a context.

    Servers use the same memory all the time, and so does torch's allocator where results are new tensors: what was
    found right about tensors holds of all others of their kind that lie where they did, and what was worked out, too.
    Only a storage that somebody has shrunk, or host memory that is not pinned any more, goes unnoticed.
    """

    def __init__(self, backend: Backend, inflight: Inflight, resolvers: Mapping[tuple[bool, bool], Resolver]) -> None:
        """Start without anything that could come again.

        Args:
            backend: issues programs.
            inflight: host memory that devices may still be writing.
            resolvers: find calls, by whether these become part of a graph, and whether they go beside other work.
        """
        self._resolvers = resolvers
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
        mode = self._backend.is_capturing(), self._backend.asides > 0
        if out is None:
            out = self._find(name, mode)(*asked, inputs, out).new()
        key = known = None
        try:
            tensors = (*chain.from_iterable(inputs), *out) if len(inputs) > 1 else (*inputs[0], *out)
            if tensors and (where := _where(asked, inputs, out, tensors)):
                key = (name, mode, asked, tensors[0].shape, *where)
                known = self._known.get(key)
        except (RuntimeError, TypeError):  # of sparse tensors, which have no addresses, and of what is no sequence
            key = None
        if known is None or not (known.fits(*tensors) and known.takes(tensors[-1])):
            call = self._find(name, mode)(*asked, inputs, out)
            return tuple(out), self._run_first(call, inputs, out, key)
        for i in known.hosted:
            self._inflight.settle(tensors[i])
        return tuple(out), known.issue()

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._keys.clear()

    def _find(self, name: str, mode: tuple[bool, bool]) -> Callable[..., Call]:
        """Return what finds the calls of an operation."""
        find: Callable[..., Call] = getattr(self._resolvers[mode], name)
        return find

    def _run_first(
        self, call: Call, inputs: tuple[Sequence[Tensor], ...], out: Sequence[Tensor], key: object
    ) -> Pending | None:
        """Check the tensors of a call, and issue it."""
        tensors, is_dense = call.admit(inputs, out)
        for i in call.hosted:
            self._inflight.settle(tensors[i])
        if call.program is None:
            return None
        has_to_be_pinned = call.unpinned is not None and out[-1].is_pinned()
        program = call.program if call.unpinned is None or has_to_be_pinned else call.unpinned
        operands = call.operands(tensors, is_dense=is_dense)
        issue = self._backend.bind(program, operands)
        if issue is None:
            return self._backend.run(program, operands)
        if is_dense and key is not None:  # of others there may be copies
            pinned = weakref.ref(out[-1]) if has_to_be_pinned else None
            self._remember(key, _Known(alike(tensors), call.hosted, issue, pinned))
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


def _where(
    asked: tuple[object, ...],
    inputs: tuple[Sequence[Tensor], ...],
    out: Sequence[Tensor],
    tensors: tuple[Tensor, ...],
) -> list[int]:
    """Return how many tensors the groups have, and the addresses of all; nothing of what never comes again.

    Loops take less time than what maps types.
    """
    found = [len(inputs), len(inputs[0]), len(out)]
    for word in asked:
        if type(word) not in _WORDS:
            return []
    for group in inputs:
        if type(group) not in _GROUPS:
            return []
    if type(out) not in _GROUPS:
        return []
    for tensor in tensors:
        if type(tensor) is not Tensor:  # others warn of the question
            return []
        found.append(tensor.data_ptr())
    return found
