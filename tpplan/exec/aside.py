"""Operations that run concurrently with other work on a context's devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from types import TracebackType


class Noting(Protocol):
    """A backend that counts the open :class:`Aside` blocks.

    Attributes:
        asides: number of open blocks.
    """

    asides: int


class Aside:
    """A context manager whose block runs operations concurrently with work issued outside of it, until :meth:`wait`.

    On virtual devices everything runs in order.
    """

    def __init__(self, backend: Noting) -> None:
        """Create it closed; the ``with`` statement opens it.

        Args:
            backend: the backend that issues programs, and whose ``asides`` the block is counted in.
        """
        self._backend = backend
        self._is_open = self._has_ended = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise ExecutionError("this aside is open already", "ask the context for another one")
        self._is_open, self._has_ended = True, False
        self._backend.asides += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open, self._has_ended = False, True
        self._backend.asides -= 1

    def wait(self) -> None:
        """Order work issued from now on after the work of the block, without blocking the host.

        Raises:
            ExecutionError: the block has not ended.
        """
        if not self._has_ended:
            raise ExecutionError("an aside is waited for that has not ended", "call wait() behind the with statement")
