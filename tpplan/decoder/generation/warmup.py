"""Warm-up before a server's first request: running and capturing passes that the first texts would wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.prompts import Prompt
from tpplan.errors import RequestError
from tpplan.exec.processes.agreement import agree

if TYPE_CHECKING:
    from tpplan.decoder.decoder import Decoder

_GREEDY = Sampling()


def prepare(decoder: Decoder, sequences: int = 1, *, sampling: Sampling = _GREEDY) -> None:
    """Warm up a decoder: load all kernels and capture the graphs that it replays.

    This runs passes of prompts of every size that has a graph, on GPUs also two full passes, and decoding steps of all
    lengths.

    Args:
        decoder: the decoder; its cache is overwritten.
        sequences: number of sequences that decode together; call this again for other numbers.
        sampling: how tokens are chosen; random and greedy sampling have separate graphs.

    Raises:
        RequestError: the plan has no room for this many sequences.
    """
    steps = {"sequences": str(sequences), "greedy": str(sampling.is_greedy)}
    agree(decoder.context, "what to prepare", lambda: _check(sequences, decoder.batch), lambda _: steps)
    decoder.generations += 1  # a running generation has lost its cache
    graphs, most = decoder.prompt_graphs, decoder.context.max_rows
    sizes = graphs.sizes if graphs else ()
    if most not in sizes and on_gpus(decoder):
        decoder.read(_prompts(decoder, 2 * most))  # the second pass attends to tokens of the first
    for size in reversed(sizes):  # the largest first: others fit in its memory
        for _ in range(2):  # once without a graph, once captured
            decoder.read(_prompts(decoder, size))
    decoder.steps(sequences).prepare(sampling)


def _check(sequences: int, batch: int) -> None:
    """Check that a plan has room for sequences that decode together.

    Raises:
        RequestError: it has not.
    """
    if not 1 <= sequences <= batch:
        what = f"steps of {sequences} sequences, the plan has room for {batch} at a time"
        raise RequestError(what, "plan with a larger --batch" if sequences > 0 else "prepare for one or more")


def on_gpus(decoder: Decoder) -> bool:
    """Return whether the decoder runs on GPUs, which load kernels at the first call; virtual devices do not."""
    return next(iter(decoder.context.devices.values())).device.type == "cuda"


def _prompts(decoder: Decoder, rows: int) -> list[Prompt]:
    """Return prompts of ``rows`` tokens in all, or of as many as the cache has room for."""
    length = decoder.length
    rows = min(rows, decoder.batch * length)
    firsts = range(0, rows, length)
    return [Prompt([0] * min(length, rows - first), sequence) for sequence, first in enumerate(firsts)]
