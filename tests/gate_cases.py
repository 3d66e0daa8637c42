"""Gates as kernels round them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.model.gates import ALPHA, LIMIT, SWIGLU_OAI, gated

if TYPE_CHECKING:
    from torch import Tensor


def rounded_gate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return a gate whose activation and product are rounded, and nothing else."""
    if name != SWIGLU_OAI:
        return gated(name, gate.clone(), up)
    limited = gate.float().clamp(max=LIMIT)
    acted = (limited * (ALPHA * limited).sigmoid()).to(gate.dtype)
    return (acted.float() * (up.float().clamp(-LIMIT, LIMIT) + 1)).to(gate.dtype)
