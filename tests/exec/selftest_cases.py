"""What the tests of the self-test share: a schema, what compiles on virtual devices, graphs, and a wrong element."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonschema import Draft202012Validator
from torch import Tensor

from schemas import generate
from tests.watching import Watching
from tpplan.exec import compile as compile_plan
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.build import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.reports.selftest import SelftestReport, Tested


EXAMPLES = Path(__file__).parents[2] / "examples/plans"
SCHEMA = Draft202012Validator(generate.schema("selftest-report"))

#: What the host takes no part in.
IN_GRAPHS = {"broadcast", "scatter", "allgather", "all_reduce", "add_residual"}

#: The element of an operand that is made wrong.
COLUMN = 3


def compiler_of(plan: SplitPlan) -> Callable[[str], TPContext]:
    """Return what compiles a plan for a transport, on virtual devices."""
    return lambda transport: compile_plan(plan, backend="cpu", transport=transport)


class Recorded(Watching):
    """In the place of a CUDA graph: does again whatever torch was told to do, on the same tensors.

    Attributes:
        underway: how many are being captured.
        steps: what was done, to what, and what it gave.
    """

    underway = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Keep what is done, but for making room."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.overloadpacket.__name__.startswith("empty"):
            self.steps.append((func, args, kwargs or {}, made))
        return made

    def __enter__(self) -> Any:
        Recorded.underway += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        Recorded.underway -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        """Do it again."""
        with torch.inference_mode():
            for func, args, kwargs, made in self.steps:
                again = func(*args, **kwargs)
                if again.data_ptr() != made.data_ptr():
                    made.copy_(again)


class Capturable(VirtualDevices):
    """Virtual devices with graphs."""

    graph: type[Recorded] = Recorded

    def is_capturing(self) -> bool:
        """Tell whether a graph is being captured."""
        return Recorded.underway > 0

    def capture(self) -> Any:
        """Return a graph."""
        return self.graph()


def on(plan: SplitPlan, devices: type[VirtualDevices], **options: Any) -> Callable[[str], TPContext]:
    """Return what compiles a plan for a transport, on virtual devices that a test has made."""
    places, rows = (torch.device("cpu"),) * len(plan.devices), plan.request.max_rows
    return lambda transport: build(
        plan, places, devices, transport=transport, max_rows=rows, dtype=torch.bfloat16, **options
    )


def captured(report: SelftestReport) -> list[Tested]:
    """Return what a report tells of graphs."""
    return [one for one in report.tested if one.schedule == "captured"]


def flip(tensor: Tensor) -> None:
    """Change a bit in the first row, in the first byte of the fourth element."""
    if tensor.shape[0] and tensor.shape[1] > COLUMN:
        tensor.untyped_storage()[(tensor.storage_offset() + COLUMN * tensor.stride(1)) * tensor.itemsize] ^= 1
