"""What a context issues beside its devices' other work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType


class Noting(Protocol):
    """What has to know that something is issued beside other work.

    Attributes:
        is_aside: whether it is.
    """

    is_aside: bool


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
        self._was_aside = False

    def __enter__(self) -> Self:
        self._was_aside, self._backend.is_aside = self._backend.is_aside, True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.is_aside = self._was_aside

    def wait(self) -> None:
        """Let what is issued from now on come after what the block has issued; does not wait on the host."""
