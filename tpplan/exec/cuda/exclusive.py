"""Contexts of this process on the same GPUs: in which order they issue kernels, and which have theirs to themselves.

If two contexts share GPUs, no kernel that waits for other devices may let the next kernel begin: on one GPU there might
be no room left for the kernel that one context waits for, and on another GPU none for that of the other. A kernel that
waits for no other device may, as it ends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import RLock
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from attrs import define


class Member(Protocol):
    """A user of some GPUs."""

    def tell_exclusive(self, *, exclusive: bool) -> None:
        """Note whether there is no other user; what is issued after the return knows."""


@define
class _Seat:
    """The state of a member.

    Attributes:
        places: torch device for each device of its plan in use.
        exclusive: what it was told last.
    """

    places: Sequence[torch.device]
    exclusive: bool = False


_SEATS: WeakKeyDictionary[Member, _Seat] = WeakKeyDictionary()
#: Held while kernels that exchange data are issued: one program of one context at a time, so that kernels of two
#: contexts are in the same order on all devices. Only a ``with`` statement takes it: its own methods are in C, where no
#: interrupt comes between taking the lock and noting that it has to be released.
ISSUING = RLock()
#: Reentrant, as a signal handler may close a context while one of the same thread enters or leaves.
_TURN = RLock()


def enter(member: Member, places: Sequence[torch.device]) -> None:
    """Add a member: first tell those that share GPUs with it that they are not alone, then tell it whether it is.

    If one of them raises an error, it is not added, and the error is raised again.

    Args:
        member: the new member, which assumes that it is not alone.
        places: torch device for each device of its plan in use; if two of them are the same, it is not alone.
    """
    with _TURN:
        _SEATS[member] = _Seat(places)
        try:
            _tell()
        except BaseException:
            del _SEATS[member]
            with suppress(Exception):  # tells those who were told already; the first error says more
                _tell()
            raise


def leave(member: Member) -> None:
    """Remove a member, and tell those that shared GPUs with it; do nothing if it was never added."""
    with _TURN:
        if _SEATS.pop(member, None):
            _tell()


def _tell() -> None:
    """Tell all members for which something has changed, first those that are no longer alone."""
    used = [place for seat in _SEATS.values() for place in seat.places]
    for member, seat in sorted(_SEATS.items(), key=lambda item: not item[1].exclusive):
        exclusive = all(used.count(place) == 1 for place in seat.places)
        if exclusive != seat.exclusive and member in _SEATS:  # a signal handler may have closed it meanwhile
            member.tell_exclusive(exclusive=exclusive)
            seat.exclusive = exclusive
