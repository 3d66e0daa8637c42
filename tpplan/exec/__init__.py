"""Running a plan: compile it, and move data by it. Needs torch.

Names are imported when they are first used, as in ``tpplan`` itself.
"""

from __future__ import annotations

from tpplan.exec.compiler import compile  # noqa: A004
from tpplan.exec.context import TPContext
from tpplan.exec.device import DeviceContext
from tpplan.exec.gathered import Gathered
from tpplan.exec.program import HOST
from tpplan.exec.rope import Rope

__all__ = ["HOST", "DeviceContext", "Gathered", "Rope", "TPContext", "compile"]
