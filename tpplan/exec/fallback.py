"""Compiling plans for commands, on virtual devices if the machine has too few GPUs and the backend is ``auto``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.compiler import compile as compile_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext


def compiler(
    plan: SplitPlan, backend: str, note: Callable[[str], None], *, scratch: bool = True
) -> Callable[[str], TPContext]:
    """Return a function that compiles a plan for a transport.

    Args:
        plan: the plan to compile.
        backend: ``auto``, ``cpu`` or ``cuda``; ``auto`` uses virtual devices if there are too few GPUs.
        note: called with the reason if the devices are virtual.
        scratch: whether to allocate scratch memory.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto" and here < len(plan.devices):
        note(f"on virtual devices, because the plan has {len(plan.devices)} and this machine {here} CUDA devices")
        backend = "cpu"

    def make(transport: str) -> TPContext:
        try:
            return compile_plan(plan, backend=backend, transport=transport, scratch=scratch)
        except ExecutionError as error:
            error.hint = error.hint.replace('backend="cpu"', "--backend cpu")  # of a command, not of a call
            raise

    return make
