"""Exchanges straight between tensors on CUDA devices: what their kernels are told."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tpplan.exec.binding import pitch
from tpplan.exec.launch import Work
from tpplan.exec.straight_table import SEQUENCES, VECTOR_BYTES, bits, home, longest, operands, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.exec.counters import Counters
    from tpplan.exec.program import Buffer, Exchange, Flag


def prepare(exchanges: Sequence[Exchange], item: int, counters: Counters) -> list[Work]:
    """Return what each device does.

    Args:
        exchanges: of a program.
        item: bytes per element.
        counters: of the context.
    """
    buffers, row_bytes, works = operands(exchanges), longest(exchanges) * item, []
    header = partial(_operands, buffers, bits(exchanges, item))

    def address(flag: Flag) -> int:
        return counters.address(home(flag), flag)

    for exchange in exchanges:
        number = partial(counters.number, exchange.stream.device, "times")
        made = table(exchange, item, buffers, number, address)
        works.append(Work(exchange.stream, SEQUENCES, made, header, row_bytes))
    return works


def _operands(buffers: tuple[Buffer, ...], bits: int, operands: Mapping[Buffer, Tensor]) -> list[int]:
    """Return the largest piece to which everything is aligned, then address and pitch of each matrix."""
    words, every = [0], bits | VECTOR_BYTES
    for buffer in buffers:
        matrix = operands.get(buffer)
        address, step = (0, 0) if matrix is None else (matrix.data_ptr(), pitch(matrix))
        every |= address | step
        words += [address, step]
    words[0] = every & -every
    return words
