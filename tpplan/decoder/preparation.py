"""What a server does before its first request: run and capture what the first texts would wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.prompts import Prompt
from tpplan.decoder.sampling import Sampling
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from tpplan.decoder.model import Decoder

_GREEDY = Sampling()


def prepare(decoder: Decoder, sequences: int = 1, *, sampling: Sampling = _GREEDY) -> None:
    """Run a decoder's passes before any text does: with all kernels loaded, and with the graphs that it replays.

    These are the passes of prompts of every size, where they are graphs, on GPUs a full one, and the
    steps of all lengths.

    Args:
        decoder: whose cache is overwritten.
        sequences: how many decode together in these steps; call it again for other numbers.
        sampling: how their tokens are chosen; drawn and likeliest ones have graphs of their own.

    Raises:
        RequestError: the plan has no room for as many sequences.
    """
    if not 1 <= sequences <= decoder.batch:
        what = f"steps of {sequences} sequences, the plan has room for {decoder.batch} at a time"
        raise RequestError(what, "plan with a larger --batch" if sequences > 0 else "prepare for one or more")
    decoder.generations += 1  # whatever goes on has lost its cache
    graphs, most = decoder.prompt_graphs, decoder.context.max_rows
    sizes = graphs.sizes if graphs else ()
    if most not in sizes and _on_gpus(decoder):
        decoder.read(_prompts(decoder, most))
    for size in reversed(sizes):  # the largest first: others fit in its memory
        for _ in range(2):  # as it is written, and captured
            decoder.read(_prompts(decoder, size))
    decoder.steps(sequences).prepare(sampling)


def _on_gpus(decoder: Decoder) -> bool:
    """Tell whether something is loaded with the first call: virtual devices would only be slow."""
    return next(iter(decoder.context.devices.values())).device.type == "cuda"


def _prompts(decoder: Decoder, rows: int) -> list[Prompt]:
    """Return prompts that make a pass of so many rows, or of as many as there is room for."""
    length = decoder.length
    rows = min(rows, decoder.batch * length)
    firsts = range(0, rows, length)
    return [Prompt([0] * min(length, rows - first), sequence) for sequence, first in enumerate(firsts)]
