"""Calls of programs: what a program's commands access, and its worst-case caller before and after it."""

from __future__ import annotations

from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from tpplan.exec.programs.fence import HOST_STREAM, caller
from tpplan.exec.programs.program import HOST, INPUT, OPERANDS, OUTPUT, RESIDUAL, Program, View, flat, reads, writes
from tpplan.exec.programs.region import regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpplan.exec.programs.program import Buffer, Record, Step, Stream, Wait
    from tpplan.exec.programs.region import Region


class Access(NamedTuple):
    """What a command or the caller accesses.

    Attributes:
        stream: the stream that does it; None for what the caller does on the host with a program's results.
        what: the command, or a description of what the caller does.
        reads: regions that it reads.
        writes: regions that it writes.
    """

    stream: Stream | None
    what: Step | Record | Wait | str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


@frozen(eq=False)
class Call:
    """A call of a program, with operands that no other call uses.

    What it accesses is found once, however many timelines it is part of.

    Attributes:
        program: the program to run.
        in_place: whether each device's output may be its input or its residual.
    """

    program: Program
    in_place: bool = False

    @cached_property
    def before(self) -> tuple[Access, ...]:
        """The caller's accesses before the program, each from a new stream of its device."""
        return tuple(
            access
            for device in self._devices
            for access in self._caller("writes", device, OPERANDS, HOST_STREAM if device == HOST else caller(device))
        )

    @cached_property
    def steps(self) -> tuple[Access, ...]:
        """The accesses of the commands, in order of issue; views of slots are in the first one."""
        return tuple(
            Access(step.stream, step, self._regions(reads(step)), self._regions(writes(step)))
            for step in flat(self.program)
        )

    @cached_property
    def after(self) -> tuple[Access, ...]:
        """The caller's accesses after the program."""
        does = "reads and overwrites"
        devices = [device for device in self._devices if device != HOST]
        return (
            *(access for device in devices for access in self._caller(does, device, OPERANDS, caller(device))),
            *self._caller("overwrites", HOST, (INPUT, RESIDUAL), HOST_STREAM),
            *self._caller(does, HOST, (OUTPUT,), None),
        )

    @cached_property
    def _views(self) -> list[View]:
        """The views of operands."""
        steps = flat(self.program)
        return [v for step in steps for v in (*reads(step), *writes(step)) if v.buffer.role in OPERANDS]

    @cached_property
    def _operands(self) -> dict[Buffer, int]:
        """The columns of each operand."""
        operands: dict[Buffer, int] = {}
        for view in self._views:
            operands[view.buffer] = max(view.stop, operands.get(view.buffer, 0))
        return operands

    @cached_property
    def _parts(self) -> int:
        """A number of parts of the operands' rows such that every view covers whole parts."""
        return lcm(*{view.parts for view in self._views})

    @property
    def _devices(self) -> list[int]:
        return sorted({buffer.device for buffer in self._operands})

    def _caller(self, does: str, device: int, roles: tuple[str, ...], stream: Stream | None) -> Iterator[Access]:
        """Yield an access of the caller to all operands of a device in these roles, if there are any."""
        operands = sorted(b for b in self._operands if b.device == device and b.role in roles)
        if operands:
            wholes = self._regions(View(b, 0, self._operands[b]) for b in operands)
            yield Access(stream, f"the caller {does} {', '.join(map(str, operands))}", (), wholes)

    def _regions(self, views: Iterable[View]) -> tuple[Region, ...]:
        """Return the regions of views, including those of possible aliases."""
        found: list[Region] = []
        for view in views:
            found += regions(view, self._parts)
            if self.in_place and view.buffer.role == OUTPUT:
                aliases = (view.buffer._replace(role=role) for role in (INPUT, RESIDUAL))
                may_be = (view._replace(buffer=alias) for alias in aliases if alias in self._operands)
                found += (region._replace(view=view) for alias in may_be for region in regions(alias, self._parts))
        return tuple(found)
