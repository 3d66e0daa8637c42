"""The weights of a checkpoint, cut by a plan: computing each device's slices, and loading them.

Names are imported on first use, as in ``tpplan`` itself: computing the slices does not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.missing import on_first_use

if TYPE_CHECKING:
    from tpplan.weights.load import Weights, load_weights
    from tpplan.weights.slices import TensorSlice, iter_slices

_MODULE_OF = {"TensorSlice": "slices", "Weights": "load", "iter_slices": "slices", "load_weights": "load"}

__all__ = ["TensorSlice", "Weights", "iter_slices", "load_weights"]

__getattr__ = on_first_use(__name__, _MODULE_OF)
