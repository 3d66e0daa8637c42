"""What the tests of the checker share: small programs, of which all columns are 8 wide."""

from __future__ import annotations

from tpplan.exec.programs.fence import caller, fence, order, own
from tpplan.exec.programs.ordering import Call, check
from tpplan.exec.programs.program import INPUT, OUTPUT, Buffer, Command, Copy, Event, Program, View


def of(role: str, device: int = 0, start: int = 0, stop: int = 8) -> View:
    """Columns of an operand."""
    return View(Buffer(role, device), start, stop)


def kept(role: str, piece: int = 0, pieces: int = 1, width: int = 8) -> View:
    """A piece of device 0's exchange buffer, or a slot of its ring."""
    return View(Buffer(role, 0, piece, pieces), 0, width, width=width)


def program(*commands: Command, devices: tuple[int, ...] = (0,), results: tuple[Event, ...] = ()) -> Program:
    """Put commands between the callers' streams and tpplan's on some devices."""
    enter = [command for d in devices for command in order("enter", caller(d), own(d))]
    leave = [command for d in devices for command in order("leave", own(d), caller(d))]
    return Program("test", (*enter, *commands, *leave), results)


def fenced(*commands: Command, devices: tuple[int, ...]) -> Program:
    """Put commands between all callers' streams and all of tpplan's on some devices."""
    enter = fence("enter", map(caller, devices), own(devices[0]), map(own, devices))
    leave = fence("leave", map(own, devices), own(devices[0]), map(caller, devices))
    return Program("test", (*enter, *commands, *leave))


def kinds(*programs: Program, in_place: bool = False) -> list[str]:
    """The kinds of what is found in a sequence of programs."""
    return [finding.kind for finding in check([Call(each, in_place) for each in programs])]


MOVE = Copy(own(0), of(INPUT), of(OUTPUT))
