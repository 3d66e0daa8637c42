"""Exchanges straight between tensors on CUDA devices: the parameters of their kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tpplan.exec.cuda.launch import Operands, Work
from tpplan.exec.programs.program import Flag
from tpplan.exec.protocol.direct import SEQUENCES, VECTOR_BYTES, bits, home, longest, operands, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.exec.cuda.counters import Counters
    from tpplan.exec.programs.program import Exchange, Queue


def number(pair: Queue, counters: Counters) -> None:
    """Number the counters by which one device tells another that it may write there, and is told that it has."""
    for flag in (Flag("ready", pair, pair.place), Flag("done", pair)):
        counters.number(home(flag), flag)


def prepare(exchanges: Sequence[Exchange], item: int, counters: Counters) -> list[Work]:
    """Return the work of each device.

    Args:
        exchanges: the exchanges of a program.
        item: bytes per element.
        counters: the context's counters.
    """
    buffers, row_bytes, works = operands(exchanges), longest(exchanges) * item, []
    ends = Operands(buffers, bits(exchanges, item), VECTOR_BYTES)

    def address(flag: Flag) -> int:
        return counters.address(home(flag), flag)

    for exchange in exchanges:
        number = partial(counters.number, exchange.stream.device, "times")
        made = table(exchange, item, buffers, number, address)
        works.append(Work(exchange.stream, SEQUENCES, made, ends, row_bytes))
    return works
