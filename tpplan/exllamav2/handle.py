"""What stands in ``ext_tp_context`` for the address that ExLlamaV2 has there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from tpplan.exllamav2.tensor_p import TPContext


class Handle:
    """Names a TPContext to Python functions that take the place of ExLlamaV2's C++ functions.

    It is no number, and none can be made of it: C++ functions that expect an address refuse it with a TypeError that
    names it. It does not keep the context alive, which holds it.
    """

    def __init__(self, tp_context: TPContext) -> None:
        """Name a context."""
        self._tp_context = ref(tp_context)

    def __repr__(self) -> str:
        return f"<Handle, which is no address, of {self._tp_context()!r}>"

    @property
    def tp_context(self) -> TPContext:
        """The context; its operations raise an error where it has been unloaded meanwhile.

        Raises:
            ExecutionError: the context no longer exists.
        """
        context = self._tp_context()
        if context is None:
            raise ExecutionError("the TPContext of this handle no longer exists", "keep the TPContext while it is used")
        return context
