"""The lock under which kernels that exchange data are issued."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from tpplan.exec.cuda.exchanges import Exchanges

#: Held while kernels that exchange data are issued: one program of one context at a time, so that kernels of two
#: contexts are in the same order on all devices. Only a ``with`` statement takes it: its own methods are in C, where no
#: interrupt comes between taking the lock and noting that it has to be released.
ISSUING = threading.RLock()


class Issuing:
    """Whether a context may issue kernels that exchange data.

    Attributes:
        closed: whether the context is closed.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self.closed = False

    def check(self) -> None:
        """Check it, with the lock: the context may have been closed while a thread waited for that.

        Raises:
            ExecutionError: it is closed, a device timed out, or the issue of a program was interrupted, so that devices
                do not agree any more on what they exchange.
        """
        if self.closed:
            raise ExecutionError("the context is closed", "compile the plan again")
        self._exchanges.check()
