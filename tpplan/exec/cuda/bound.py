"""Programs on CUDA devices, ready for all operands of a dtype, and bound to those of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import define, frozen

from tpplan.exec.handles import Pending
from tpplan.exec.programs.program import Program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.programs.program import Buffer


class Step(Protocol):
    """A command of a program, ready for all operands of a dtype."""

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return a callable that issues it to the stream whose handle it is given.

        If that is a default stream, its device must be current.

        Args:
            operands: the caller's tensors.
            rows: rows of each tensor.
        """


@frozen(eq=False)
class ReadyProgram:
    """A program, ready for all operands of a dtype.

    Attributes:
        program: the program, kept alive because it is cached by its identity.
        steps: its commands, without those that are redundant as tpplan's streams are the caller's; each with its
            device, and the handle of its stream, or 0 for the device's current one.
        devices: the devices that it uses.
        loads: the devices whose second streams it uses.
        pending: returns a handle for the results of the call that was issued last.
        on_host: whether the host takes part in it.
        copies: whether the host copies in it.
    """

    program: Program
    steps: tuple[tuple[Step, int, int], ...]
    devices: tuple[int, ...]
    loads: frozenset[int]
    pending: Callable[[], Pending]
    on_host: bool
    copies: bool


#: A callable that issues a step to the stream that it is given, with the step's device and handle.
BoundStep = tuple[Callable[[int], None], int, int]


@define(eq=False)
class Bound:
    """A program on given memory, which can be issued any number of times.

    Attributes:
        ready: the program.
        steps: callables that issue its steps.
        times: how often they were issued; negative for some time after ``quick`` was given up.
        quick: callables that take the host less time, once it was issued often; for a program that is captured, its
            steps; else empty.
    """

    ready: ReadyProgram
    steps: tuple[BoundStep, ...]
    times: int = 0
    quick: tuple[BoundStep, ...] = ()
