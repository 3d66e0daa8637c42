"""Running a plan: compile it, and move data by it. Needs torch.

``compiler`` makes a ``context``, whose operations (``calls``) become ``programs``. ``backends`` run these on virtual
devices in host memory, ``cuda`` on GPUs, by ``kernels`` that share a ``protocol`` with the host. ``memory`` is what a
context holds, ``machine`` what is known of the devices and their links, and ``processes`` are several that run one plan
together. ``rope`` makes the tables of position embeddings; ``tools`` are what commands do.

Names are imported when they are first used, as in ``tpplan`` itself.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from tpplan.core.missing import on_first_use

if TYPE_CHECKING:
    from tpplan.exec.compiler import compile  # noqa: A004
    from tpplan.exec.context import TPContext
    from tpplan.exec.group.process_group import process_group
    from tpplan.exec.handles import Aside, Gathered
    from tpplan.exec.memory.device import DeviceContext
    from tpplan.exec.programs.program import HOST
    from tpplan.exec.rope.tables import Rope
    from tpplan.exec.tuning import Tuning

_MODULE_OF = {
    "HOST": "programs.program",
    "Aside": "handles",
    "DeviceContext": "memory.device",
    "Gathered": "handles",
    "Rope": "rope.tables",
    "TPContext": "context",
    "Tuning": "tuning",
    "compile": "compiler",
    "process_group": "group.process_group",
}

__all__ = ["HOST", "Aside", "DeviceContext", "Gathered", "Rope", "TPContext", "Tuning", "compile", "process_group"]

__getattr__ = on_first_use(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    """Name what there is, for ``help()`` and completion, whether or not it was used yet."""
    return sorted({*globals(), *(__all__ if find_spec("torch") else ())})
