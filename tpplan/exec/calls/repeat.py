"""Running operations: checked and prepared on first use, and issued directly when the same memory recurs.

Host memory that devices may still be writing is kept alive meanwhile.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, Self

from attrs import define
from torch import Tensor

from tpplan.core.axes import Axis
from tpplan.exec.checks import share_bytes
from tpplan.exec.handles import Pending
from tpplan.exec.toolchain.torch_shims import alike

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.exec.backends.engine import Backend
    from tpplan.exec.calls.call import Call
    from tpplan.exec.calls.resolve import Resolver


class Inflight:
    """The results of incomplete gathers.

    The host has no stream to order later uses of the same memory, and torch does not know of the copies. So the memory
    is kept alive here until they are complete, even if the caller has dropped it.
    """

    def __init__(self) -> None:
        self._writes: deque[tuple[Tensor, Pending]] = deque()

    def add(self, tensor: Tensor, pending: Pending) -> None:
        """Keep a tensor alive until a program has written it, and on until the next :meth:`settle`."""
        self._writes.append((tensor, pending))

    def settle(self, tensor: Tensor) -> None:
        """Wait for all writes that overlap a tensor's memory."""
        writes = self._writes
        while writes and writes[0][1].done():
            writes.popleft()
        for other, pending in writes:
            if not pending.done() and share_bytes(other, tensor):
                pending.wait()

    def clear(self) -> None:
        """Release all tensors, whose writes are complete."""
        self._writes.clear()


#: Maximum number of cached calls.
_KEPT = 1024
#: Types of the arguments, and of the tensor sequences, of calls that are cached; exact, as True must not match 1.
_WORDS, _GROUPS = {int, str, Axis, type(None)}, {list, tuple}


@define(eq=False)
class CachedCall:
    """A cached call, whose tensors were checked.

    Attributes:
        alike: returns whether tensors at the same addresses have the same properties; takes those of ``alone``.
        alone: indices of the tensors that are not the same object as an earlier one.
        twins: indices of those that are, each after that of the earlier one: outputs that are inputs.
        hosted: indices of the tensors in host memory.
        issue: issues the operation.
        is_stale: returns whether the memory at the addresses is another than it was; None if that makes no difference.
        pinned: the output last found to be pinned; None if the output need not be pinned.
    """

    alike: Callable[..., bool]
    alone: tuple[int, ...]
    twins: tuple[tuple[int, int], ...]
    hosted: tuple[int, ...]
    issue: Callable[[], Pending]
    is_stale: Callable[[], bool] | None
    pinned: weakref.ref[Tensor] | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], call: Call, issue: Callable[[], Pending], out: Tensor | None) -> Self:
        """Return a call that was just issued; ``out`` is the output that has to be pinned, if one has."""
        first: dict[int, int] = {}
        for i, tensor in enumerate(tensors):
            first.setdefault(id(tensor), i)
        alone = tuple(first.values())
        twins = tuple((first[id(tensor)], i) for i, tensor in enumerate(tensors) if first[id(tensor)] != i)
        guard = alike([tensors[i] for i in alone])  # which takes no tensor twice
        is_stale = getattr(issue, "is_stale", None)
        return cls(guard, alone, twins, call.hosted, issue, is_stale, None if out is None else weakref.ref(out))

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors at the same addresses are those that were checked, or of the same kind."""
        if self.is_stale and self.is_stale():
            return False
        if not self.twins:
            return self.alike(*tensors)
        for first, second in self.twins:
            if tensors[first] is not tensors[second]:
                return False
        return self.alike(*[tensors[i] for i in self.alone])

    def takes(self, out: Tensor) -> bool:
        """Return whether an output is pinned if required; memory at the same address may no longer be pinned."""
        if self.pinned is None or self.pinned() is out:
            return True
        if is_pinned := out.is_pinned():
            self.pinned = weakref.ref(out)
        return is_pinned


class Runner:
    """Runs the operations of a context, and caches calls by the addresses of their tensors.

    Servers reuse the same memory all the time, and torch's allocator does so for new results. The checks and the
    prepared program are valid for all tensors of the same kind at the same addresses. Only a storage that was shrunk,
    or host memory that is no longer pinned, goes unnoticed.
    """

    def __init__(self, backend: Backend, inflight: Inflight, resolvers: Mapping[tuple[bool, bool], Resolver]) -> None:
        """Start with an empty cache.

        Args:
            backend: issues programs.
            inflight: host memory that devices may still be writing.
            resolvers: resolvers by mode; the keys are plain tuples, as every call makes one.
        """
        self._resolvers = resolvers
        self._backend = backend
        self._inflight = inflight
        self._known: dict[object, CachedCall] = {}
        self._keys: list[object] = []
        self._random = Random(0)  # noqa: S311 (for reproducibility)

    def run(
        self,
        name: str,
        asked: tuple[object, ...],
        inputs: tuple[Sequence[Tensor], ...],
        out: Sequence[Tensor] | None,
    ) -> tuple[tuple[Tensor, ...], Pending | None]:
        """Issue an operation.

        Args:
            name: name of the resolvers' method.
            asked: its arguments before the tensors.
            inputs: the tensors of each group.
            out: tensors to write to; None for new ones.

        Returns:
            The outputs, and a handle for the issued program; None if there are no rows.

        Raises:
            ExecutionError: see :meth:`Call.admit` and :class:`~tpplan.exec.calls.resolve.Resolver`.
            RequestError: see :class:`~tpplan.exec.calls.resolve.Resolver`.
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
        except (RuntimeError, TypeError):  # from sparse tensors, which have no address, and from non-sequences
            key = None
        if known is None or not (known.fits(tensors) and known.takes(tensors[-1])):
            call = self._find(name, mode)(*asked, inputs, out)
            return tuple(out), self._run_first(call, inputs, out, key)
        for i in known.hosted:
            self._inflight.settle(tensors[i])
        return tuple(out), known.issue()

    def clear(self) -> None:
        """Clear the cache."""
        self._known.clear()
        self._keys.clear()

    def _find(self, name: str, mode: tuple[bool, bool]) -> Callable[..., Call]:
        """Return the resolver's method for an operation."""
        find: Callable[..., Call] = getattr(self._resolvers[mode], name)
        return find

    def _run_first(
        self, call: Call, inputs: tuple[Sequence[Tensor], ...], out: Sequence[Tensor], key: object
    ) -> Pending | None:
        """Check the tensors of a call, issue it, and cache it if possible."""
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
        if is_dense and key is not None:  # other operands may be copies
            self._remember(key, CachedCall.of(tensors, call, issue, out[-1] if has_to_be_pinned else None))
        return issue()

    def _remember(self, key: object, known: CachedCall) -> None:
        """Cache a call, evicting a random one if full: evicting the oldest would fail if too many calls take turns."""
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
    """Return the sizes of the groups and the addresses of all tensors; empty for a call that is not cached.

    Plain loops are faster than mapping over types.
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
        if type(tensor) is not Tensor:  # data_ptr() of others may warn
            return []
        found.append(tensor.data_ptr())
    return found
