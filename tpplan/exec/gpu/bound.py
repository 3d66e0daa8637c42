"""Programs on CUDA devices, ready for all operands of a dtype, and bound to those of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import define, frozen

from tpplan.exec.gathered import Pending
from tpplan.exec.programs.program import Program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tpplan.exec.programs.program import Buffer


class Step(Protocol):
    """A command of a program, ready for all operands of a dtype."""

    def bind(self, operands: Mapping[Buffer, Tensor], rows: int) -> Callable[[int], None]:
        """Return what issues it.

        Args:
            operands: the caller's tensors.
            rows: of each.

        Returns:
            A function of the handle of the stream to issue it to; if it is a default stream, its device is current.
        """


@frozen(eq=False)
class ReadyProgram:
    """A program, ready for all operands of a dtype.

    Attributes:
        program: kept, for it is known by its identity.
        steps: its commands, without what the caller's streams being tpplan's makes needless; of each also the device,
            and a handle for what is not issued to the device's current stream, else 0.
        devices: that it uses.
        loads: those whose second streams it uses.
        pending: returns what waits for the results of the call that was issued last.
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


#: What issues a step to the stream that it is given, with the device and the handle that the step has.
BoundStep = tuple[Callable[[int], None], int, int]


@define(eq=False)
class Bound:
    """A program, ready to be issued as often as wanted, on the same memory.

    Attributes:
        ready: the program.
        steps: what issues its steps.
        times: how often they were issued; less than 0 for some time after they were quick.
        quick: what issues them with less work for the host, if they were issued often; themselves if they are captured.
    """

    ready: ReadyProgram
    steps: tuple[BoundStep, ...]
    times: int = 0
    quick: tuple[BoundStep, ...] = ()
