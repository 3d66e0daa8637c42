"""What a context issues beside its devices' other work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from types import TracebackType


class Noting(Protocol):
    """What has to know that something is issued beside other work.

    Attributes:
        asides: how many blocks are open in which it is.
    """

    asides: int


class Aside:
    """Lets a ``with`` block issue operations beside what is issued outside of it, until somebody waits for them.

    On virtual devices everything runs in order.
    """

    def __init__(self, backend: Noting) -> None:
        """Begin and end with the block.

        Args:
            backend: issues programs.
        """
        self._backend = backend
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise ExecutionError("this aside is open already", "ask the context for another one")
        self._is_open = True
        self._backend.asides += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._backend.asides -= 1

    def wait(self) -> None:
        """Let what is issued from now on come after what the block has issued, if anything; the host does not wait."""
