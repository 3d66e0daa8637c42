"""The weights of a checkpoint, cut by a plan: computing each device's slices, and loading them.

Names are imported on first use, as in ``tpplan`` itself: computing the slices does not need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tpplan.core.missing import needing

if TYPE_CHECKING:
    from tpplan.weights.load import Weights, load_weights
    from tpplan.weights.slices import TensorSlice, iter_slices

_MODULE_OF = {"TensorSlice": "slices", "Weights": "load", "iter_slices": "slices", "load_weights": "load"}

__all__ = ["TensorSlice", "Weights", "iter_slices", "load_weights"]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use.

    Raises:
        MissingError: torch is not installed.
    """
    if name not in _MODULE_OF:
        message = f"module 'tpplan.weights' has no attribute {name!r}"
        raise AttributeError(message)
    with needing(f"tpplan.weights.{name}"):
        return getattr(import_module(f"tpplan.weights.{_MODULE_OF[name]}"), name)
