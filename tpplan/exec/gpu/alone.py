"""Which contexts of this process have their GPUs to themselves.

Where two are busy on the same GPUs, no kernel that waits for other devices may let the next take room: what one context
waits for might find none on one GPU, and what the other waits for none on another. A kernel that waits for no other
device may, for it ends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from attrs import define


class Member(Protocol):
    """What works on some GPUs."""

    def tell_alone(self, *, alone: bool) -> None:
        """Take note, before this returns, of whether nobody else works there."""


@define
class _Seat:
    """What is known of a member.

    Attributes:
        places: torch's device for each of its plan's.
        alone: what it was told.
    """

    places: Sequence[torch.device]
    alone: bool = False


_SEATS: WeakKeyDictionary[Member, _Seat] = WeakKeyDictionary()
_TURN = Lock()


def enter(member: Member, places: Sequence[torch.device]) -> None:
    """Tell a new member whether it is alone, and first all that share GPUs with it that they are not.

    If anybody cannot be told, it is no member, and the error is the caller's.

    Args:
        member: that will work there; it takes itself not to be alone.
        places: torch's device for each of its plan's; where two of them are one GPU, it is not.
    """
    with _TURN:
        _SEATS[member] = _Seat(places)
        try:
            _tell()
        except BaseException:
            del _SEATS[member]
            with suppress(Exception):  # those who were told already; the first error says more
                _tell()
            raise


def leave(member: Member) -> None:
    """Tell those who shared GPUs with a member that works no more; of one that never came nobody is told."""
    with _TURN:
        if _SEATS.pop(member, None):
            _tell()


def _tell() -> None:
    """Tell everybody for whom something has changed."""
    used = [place for seat in _SEATS.values() for place in seat.places]
    for member, seat in sorted(_SEATS.items(), key=lambda item: not item[1].alone):
        alone = all(used.count(place) == 1 for place in seat.places)
        if alone != seat.alone:
            member.tell_alone(alone=alone)
            seat.alone = alone
