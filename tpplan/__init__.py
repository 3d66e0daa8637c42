"""Plan how to split a large language model over several GPUs, save the plan, and run it.

The plan half, which is every name here, imports neither torch nor numba; :mod:`tpplan.exec` runs plans. Names are
imported on first use, so that showing or validating a plan does not load the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan.core.axes import Axis, Slice
    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import Cache, Reserve, SplitPlan
    from tpplan.errors import DeviceError, ModelError, PlanError, RequestError, TpplanError
    from tpplan.files.codec import dumps
    from tpplan.hardware.spec import parse_devices
    from tpplan.models.reader import read_model
    from tpplan.planfile.codec import fingerprint, load, loads
    from tpplan.planfile.verify import problems, verify
    from tpplan.planner.infeasible import InfeasibleError
    from tpplan.planner.plan import plan
    from tpplan.reports.diff import PlanDiff, diff

__version__ = "0.1.0"

_HOME = {
    "core.axes": ("Axis", "Slice"),
    "core.device": ("Device",),
    "core.model": ("ModelSpec",),
    "core.plan": ("Cache", "Reserve", "SplitPlan"),
    "errors": ("DeviceError", "ModelError", "PlanError", "RequestError", "TpplanError"),
    "hardware.spec": ("parse_devices",),
    "models.reader": ("read_model",),
    "planfile.codec": ("dumps", "fingerprint", "load", "loads"),
    "planfile.verify": ("problems", "verify"),
    "planner.infeasible": ("InfeasibleError",),
    "planner.plan": ("plan",),
    "reports.diff": ("PlanDiff", "diff"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Axis",
    "Cache",
    "Device",
    "DeviceError",
    "InfeasibleError",
    "ModelError",
    "ModelSpec",
    "PlanDiff",
    "PlanError",
    "RequestError",
    "Reserve",
    "Slice",
    "SplitPlan",
    "TpplanError",
    "diff",
    "dumps",
    "fingerprint",
    "load",
    "loads",
    "parse_devices",
    "plan",
    "problems",
    "read_model",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        message = f"module 'tpplan' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"tpplan.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """List all public names for ``help()`` and completion, including those not imported yet."""
    return sorted({*globals(), *__all__})
