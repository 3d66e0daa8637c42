"""The lock under which kernels that exchange data are issued."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from types import TracebackType

    from tpplan.exec.gpu.exchanges import Exchanges

#: Held while kernels that exchange data are issued: one program of one context at a time.
ISSUING = threading.RLock()


class Issuing:
    """Holds the lock, so that kernels of two contexts are in the same order on all devices.

    Attributes:
        closed: whether the context is closed.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self.closed = False

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            ExecutionError: see :meth:`check`.
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
        """Check that the context may issue anything; it may have been closed while a thread waited for the lock.

        Raises:
            ExecutionError: it is closed, a device timed out, or the issue of a program was interrupted, so that devices
                do not agree any more on what they exchange.
        """
        if self.closed:
            raise ExecutionError("the context is closed", "compile the plan again")
        self._exchanges.check()
