"""Whose turn it is to issue kernels that devices exchange by."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from types import TracebackType

    from tpplan.exec.gpu.exchanges import Exchanges

#: Held while anything is issued that devices exchange by kernels: one program of one context at a time.
ISSUING = threading.RLock()


class Issuing:
    """Holds back other threads, for kernels of two contexts must not come in another order on another device.

    Attributes:
        closed: whether nothing may be issued any more.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self.closed = False

    def __enter__(self) -> None:
        """Begin.

        Raises:
            ExecutionError: the devices are closed, or one of them waited in vain, or the issue of a program was
                interrupted, so that devices do not agree any more on what they exchange.
        """
        ISSUING.acquire()
        try:
            self.check()
        except ExecutionError:
            ISSUING.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ISSUING.release()

    def check(self) -> None:
        """Refuse what comes after the end; whoever has waited for the others may come after it.

        Raises:
            ExecutionError: see :meth:`__enter__`.
        """
        if self.closed:
            raise ExecutionError("the context is closed", "compile the plan again")
        self._exchanges.check()
