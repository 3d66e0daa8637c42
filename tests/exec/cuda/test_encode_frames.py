"""Tables of frame kernels: where everything is, and what no frame kernel does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from tests.exec.program_cases import CASES, OPERATIONS
from tpplan.core.workspace import FRAME_BYTES, FRAME_FLAG_BYTES, FRAME_SLOT_BYTES, FRAME_SLOTS
from tpplan.errors import InternalError
from tpplan.exec.cuda.encode_frames import Place, table
from tpplan.exec.cuda.encode_slots import queues
from tpplan.exec.programs.lower import Route, lower
from tpplan.exec.programs.operation import scatter
from tpplan.exec.programs.program import Exchange
from tpplan.exec.protocol.frames import (
    BLOCKS,
    COLUMN,
    COUNT,
    FILLED,
    FIRST_QUEUE,
    LINES_BYTES,
    LOCAL_COLUMN,
    LOCAL_TO,
    LOCAL_WIDTH,
    LONGEST,
    MOVE_WORDS,
    MOVES,
    MOVES_AT,
    QUEUE_WORDS,
    QUEUES,
    SHARE_SKIP,
    SHARE_WIDTH,
    SHARED,
    SOURCES,
    SOURCES_AT,
    STRIDE,
    WIDTH,
)
from tpplan.exec.protocol.words import OWN, RESIDUE

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Operation
    from tpplan.exec.programs.program import Queue

#: Blocks that share a slot.
SHARERS = 16


def _exchanges(name: str, *, shared: bool = False) -> list[Exchange]:
    """Return the kernels of an operation in frames."""
    return _kernels(OPERATIONS[name], shared=shared)


def _kernels(operation: Operation, *, shared: bool = False) -> list[Exchange]:
    way = Route("host", framed=True, shared=shared)
    return [c for c in lower(operation, way).commands if isinstance(c, Exchange)]


def _places(exchange: Exchange) -> dict[Queue, Place]:
    """Return places that tell queues apart: 1,000 for each, and a number for each receiver."""
    device = exchange.stream.device
    found = {}
    for i, queue in enumerate(queues(exchange)):
        readers = queue.receivers if queue.sender == device else (device,)
        known = tuple(1000 * i + 70 + r for r in readers) if queue.sender == device else ()
        found[queue] = Place(1000 * i + 1, 1000 * i + 2, 1000 * i + 3, tuple(1000 * i + 50 + r for r in readers), known)
    return found


def _words(exchange: Exchange, item: int = 2) -> list[int]:
    made = table(exchange, item, _places(exchange), SHARERS, FRAME_SLOT_BYTES)
    return [0] * FILLED + made.words


def _rows(words: list[int], at: int, count: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(words[at + size * i : at + size * (i + 1)]) for i in range(count)]


def test_every_receiver_of_a_message_has_an_entry() -> None:
    """The sender waits for the flags of each; each finds the message, and what of it is its own."""
    first, second, third = _exchanges("scatter")  # of 5, 4 and 31 columns, the first of which stay
    words = _words(first)
    assert (words[FILLED], words[QUEUES], words[MOVES]) == (2, 2, 0)
    assert (words[COLUMN], words[WIDTH], words[LONGEST]) == (10, 70, 70)
    assert (words[LOCAL_COLUMN], words[LOCAL_WIDTH], words[LOCAL_TO]) == (0, 10, 0)
    assert _rows(words, FIRST_QUEUE, 2, QUEUE_WORDS) == [(2, 1, 3, 51, 71, 70), (2, 1, 3, 52, 72, 70)]
    for exchange, device, taken in ((second, 1, (0, 0, 8)), (third, 2, (0, 8, 62))):
        words = _words(exchange)
        assert (words[FILLED], words[QUEUES], words[MOVES]) == (0, 1, 1)
        assert (words[WIDTH], words[LOCAL_WIDTH], words[LONGEST]) == (0, 0, 70)
        assert _rows(words, FIRST_QUEUE, 1, QUEUE_WORDS) == [(2, 1, 3, 50 + device, 0, 70)]
        assert _rows(words, words[MOVES_AT], 1, MOVE_WORDS) == [(0, *taken)]


@pytest.mark.parametrize("name", ["scatter", "allgather", "all_reduce of five"])
def test_frames_are_as_slots_are_cut(name: str) -> None:
    """A kernel is told by how many blocks a slot is shared, how large it is, and how many there are."""
    for exchange in _exchanges(name):
        words = _words(exchange)
        assert (words[BLOCKS], words[STRIDE], words[COUNT]) == (SHARERS, FRAME_SLOT_BYTES, FRAME_SLOTS)


def test_what_stays_counts_where_it_is_the_longest() -> None:
    """Of 39 columns the sender keeps 31: it goes on until these are copied, but others until they have its message."""
    first, *others = _kernels(scatter(0, ((0, 0, 31), (1, 31, 35), (2, 35, 39))))
    words = _words(first)
    assert (words[WIDTH], words[LOCAL_WIDTH], words[LONGEST]) == (16, 62, 62)
    assert [_words(exchange)[LONGEST] for exchange in others] == [16, 16]


def test_sums_are_in_the_order_of_the_givers() -> None:
    """The same on all devices, or they would not be equal to the bit; the residual comes last."""
    for own, exchange in enumerate(_exchanges("all_reduce with residual")):
        words = _words(exchange)
        sources = words[words[SOURCES_AT] : words[SOURCES_AT] + words[SOURCES]]
        first = words[FILLED]  # entries of what is read follow
        others = [first, first + 1]
        assert sources == [*others[:own], OWN, *others[own:], RESIDUE]
        assert words[WIDTH] == words[LONGEST] == words[SHARE_WIDTH] == 80
        assert words[SHARED] == words[SHARE_SKIP] == words[MOVES] == 0


def test_totals_lie_where_they_belong_in_a_row() -> None:
    """Every device adds up its share of 16, 16 and 8 columns, sends it by the same queue, and takes those of others."""
    shares = [(0, 32), (32, 32), (64, 16)]
    for own, exchange in enumerate(_exchanges("all_reduce with residual", shared=True)):
        words = _words(exchange)
        assert (words[SHARED], (words[SHARE_SKIP], words[SHARE_WIDTH])) == (1, shares[own])
        assert (words[WIDTH], words[FILLED], words[QUEUES], words[SOURCES]) == (80, 2, 4, 4)
        moves = _rows(words, words[MOVES_AT], words[MOVES], MOVE_WORDS)
        order = [other for other in (*range(own + 1, 3), *range(own)) if other != own]
        assert [move[1:] for move in moves] == [(shares[d][0], *shares[d]) for d in order]
        assert {move[0] for move in moves} == {2, 3}  # the queues that the sources have, too
        assert {s for s in words[words[SOURCES_AT] : words[SOURCES_AT] + 4] if s < OWN} == {2, 3}


@pytest.mark.parametrize("name", [name for name in OPERATIONS if f"{name}, host-frames of 1 parts" in CASES])
def test_alignment_covers_all_that_is_touched(name: str) -> None:
    """The bits of a table are those of every start and width on either side."""
    for exchange in _exchanges(name):
        made, doubled = (table(exchange, i, _places(exchange), SHARERS, FRAME_SLOT_BYTES) for i in (1, 2))
        assert doubled.bits == 2 * made.bits
        steps = [(getattr(s, "source", None), getattr(s, "target", None)) for s in exchange.steps]
        views = [view for pair in steps for view in pair if view]
        assert all(v.start | v.stop - v.start | made.bits == made.bits for v in views)
        assert made.longest >= max((v.stop - v.start for v in views), default=0)


def test_flags_have_room() -> None:
    """A line for each frame of a slot, for the sender and seven receivers; slots are a power of two."""
    assert 8 * LINES_BYTES <= FRAME_FLAG_BYTES
    assert FRAME_SLOT_BYTES % FRAME_BYTES == 0
    assert 2**32 % FRAME_SLOTS == 0


def test_what_no_kernel_knows_is_refused() -> None:
    """A second message, a second copy within the device, and flags of other kernels."""
    exchange = _exchanges("allgather")[0]
    places = _places(exchange)
    sent, within = (
        next(s for s in exchange.steps if str(s).startswith(what)) for what in ("own0: slot", "own0: output@0")
    )
    again = evolve(exchange, steps=(*exchange.steps, sent))
    with pytest.raises(InternalError, match="sends anything but one message, first"):
        table(again, 2, places, SHARERS, FRAME_SLOT_BYTES)
    with pytest.raises(InternalError, match="copies twice within its device"):
        table(evolve(exchange, steps=(within, *exchange.steps)), 2, places, SHARERS, FRAME_SLOT_BYTES)
    direct = next(c for c in CASES["allgather, peer-1 parts"].program.commands if isinstance(c, Exchange))
    with pytest.raises(InternalError, match="no frame kernel for"):
        table(direct, 2, {}, SHARERS, FRAME_SLOT_BYTES)
