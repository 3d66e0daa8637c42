"""Plan how to split a large language model over several GPUs, save the plan, and run it.

The plan half, which is every name here, imports neither torch nor numba; :mod:`tpplan.exec` runs plans. Names are
imported on first use, so that showing or validating a plan does not load the planner.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan.axes import Axis, Slice
    from tpplan.codec import dumps, fingerprint, load, loads
    from tpplan.devices import Device, parse_devices
    from tpplan.diff import diff
    from tpplan.errors import DeviceError, ModelError, PlanError, RequestError, TpplanError
    from tpplan.infeasible import InfeasibleError
    from tpplan.model import ModelSpec
    from tpplan.plan import Cache, Reserve, SplitPlan
    from tpplan.plandiff import PlanDiff
    from tpplan.planner import plan
    from tpplan.reader import read_model
    from tpplan.verify import problems, verify

__version__ = "0.1.0"

_HOME = {
    "axes": ("Axis", "Slice"),
    "codec": ("dumps", "fingerprint", "load", "loads"),
    "devices": ("Device", "parse_devices"),
    "diff": ("diff",),
    "errors": ("DeviceError", "ModelError", "PlanError", "RequestError", "TpplanError"),
    "infeasible": ("InfeasibleError",),
    "model": ("ModelSpec",),
    "plan": ("Cache", "Reserve", "SplitPlan"),
    "plandiff": ("PlanDiff",),
    "planner": ("plan",),
    "reader": ("read_model",),
    "verify": ("problems", "verify"),
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


class _Package(ModuleType):
    """A module that keeps ``tpplan.plan`` a function when the submodule of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
