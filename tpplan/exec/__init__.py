"""Running a plan: compile it, and move data by it. Needs torch.

``compiler`` makes a ``context``, whose operations become programs (``programs``). They run on virtual devices (``cpu``)
or on CUDA devices (``gpu``), by the kernels in ``kernels``; ``links`` knows by which ways data gets from GPU to GPU,
and up to which size each is the fastest. ``rope`` makes the tables of position embeddings. ``selftest`` and ``bench``
are what the commands of these names do.

Names are imported when they are first used, as in ``tpplan`` itself.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tpplan.core.missing import needing

if TYPE_CHECKING:
    from tpplan.exec.aside import Aside
    from tpplan.exec.cluster.process_group import process_group
    from tpplan.exec.compiler import compile  # noqa: A004
    from tpplan.exec.context import TPContext
    from tpplan.exec.device import DeviceContext
    from tpplan.exec.gathered import Gathered
    from tpplan.exec.links.tuning import Tuning
    from tpplan.exec.programs.program import HOST
    from tpplan.exec.rope.tables import Rope

_MODULE_OF = {
    "HOST": "programs.program",
    "Aside": "aside",
    "DeviceContext": "device",
    "Gathered": "gathered",
    "Rope": "rope.tables",
    "TPContext": "context",
    "Tuning": "links.tuning",
    "compile": "compiler",
    "process_group": "cluster.process_group",
}

__all__ = ["HOST", "Aside", "DeviceContext", "Gathered", "Rope", "TPContext", "Tuning", "compile", "process_group"]


def __getattr__(name: str) -> object:
    """Import a public name from its module.

    Raises:
        MissingError: torch is not installed.
    """
    if name not in _MODULE_OF:
        message = f"module 'tpplan.exec' has no attribute {name!r}"
        raise AttributeError(message)
    with needing(f"tpplan.exec.{name}"):
        return getattr(import_module(f"tpplan.exec.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """Name what there is, for ``help()`` and completion, whether or not it was used yet."""
    return sorted({*globals(), *(__all__ if find_spec("torch") else ())})
