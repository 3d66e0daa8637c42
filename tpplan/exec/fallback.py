"""What compiles plans for commands: on virtual devices where the machine has too few GPUs, if that may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.compiler import compile as compile_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.exec.context import TPContext
    from tpplan.plan import SplitPlan


def compiler(
    plan: SplitPlan, backend: str, note: Callable[[str], None], *, scratch: bool = True
) -> Callable[[str], TPContext]:
    """Return what compiles a plan for a transport: on virtual devices if ``backend`` is ``auto`` and GPUs are too few.

    Args:
        plan: to be compiled.
        backend: ``auto``, ``cpu`` or ``cuda``.
        note: told why the devices are virtual ones.
        scratch: whether to allocate it.
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
