"""What the tests of the self-test share: a schema, what compiles on virtual devices, and a wrong element."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jsonschema import Draft202012Validator

from schemas import generate
from tpplan.exec import compile as compile_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpplan.exec.context import TPContext
    from tpplan.plan import SplitPlan


EXAMPLES = Path(__file__).parents[1] / "examples/plans"
SCHEMA = Draft202012Validator(generate.schema("selftest-report"))

#: The element of an operand that is made wrong.
COLUMN = 3


def compiler_of(plan: SplitPlan) -> Callable[[str], TPContext]:
    """Return what compiles a plan for a transport, on virtual devices."""
    return lambda transport: compile_plan(plan, backend="cpu", transport=transport)


def flip(tensor: Tensor) -> None:
    """Change a bit in the first row, in the first byte of the fourth element."""
    if tensor.shape[0] and tensor.shape[1] > COLUMN:
        tensor.untyped_storage()[(tensor.storage_offset() + COLUMN * tensor.stride(1)) * tensor.itemsize] ^= 1
