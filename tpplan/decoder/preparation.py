"""What a server does before its first request: run and capture what the first texts would wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.prompts import Prompt
from tpplan.decoder.sampling import Sampling

if TYPE_CHECKING:
    from tpplan.decoder.model import Decoder

_GREEDY = Sampling()


def prepare(decoder: Decoder, sequences: int = 1, *, sampling: Sampling = _GREEDY) -> None:
    """Run a decoder's passes before any text does: with all kernels loaded, and with the graphs that it replays.

    These are the passes of prompts of every size, where they are graphs, and the steps of all lengths.

    Args:
        decoder: whose cache is overwritten.
        sequences: how many decode together in these steps; call it again for other numbers.
        sampling: how their tokens are chosen; drawn and likeliest ones have graphs of their own.

    Raises:
        RequestError: the plan has no room for as many sequences.
    """
    decoder.generations += 1  # whatever goes on has lost its cache
    steps = decoder.steps(sequences)
    graphs = decoder.prompt_graphs
    for size in reversed(graphs.sizes if graphs else ()):  # the largest first: others fit in its memory
        for _ in range(2):  # as it is written, and captured
            decoder.read(_prompts(decoder, size))
    steps.prepare(sampling)


def _prompts(decoder: Decoder, rows: int) -> list[Prompt]:
    """Return prompts that make a pass of so many rows, or of as many as there is room for."""
    length = decoder.length
    rows = min(rows, decoder.batch * length)
    firsts = range(0, rows, length)
    return [Prompt([0] * min(length, rows - first), sequence) for sequence, first in enumerate(firsts)]
