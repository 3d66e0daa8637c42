"""Warm-up before a server's first request: running and capturing passes that the first texts would wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.decoding.sampling import GREEDY, Sampling, samplings_of
from tpplan.decoder.prompts import Prompt, check_sequences
from tpplan.exec.processes.agreement import agree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.decoder.decoder import Decoder
    from tpplan.decoder.prompts import PassShape


def prepare(decoder: Decoder, sequences: int = 1, *, sampling: Sampling = GREEDY) -> None:
    """Warm up a decoder: load all kernels and capture the graphs that it replays.

    This runs passes of prompts of every shape that has a graph, on GPUs also two full passes, and decoding steps of all
    lengths.

    Args:
        decoder: the decoder; its cache is overwritten.
        sequences: number of sequences that decode together; call this again for other numbers.
        sampling: how tokens are chosen; random and greedy sampling have separate graphs.

    Raises:
        RequestError: the plan has no room for this many sequences, or an argument is of another type.
    """

    def check() -> None:
        check_sequences(sequences, decoder.context.plan)
        samplings_of(sampling, sequences)

    agree(
        decoder.context,
        "what to prepare",
        check,
        lambda _: {"sequences": str(sequences), "greedy": str(sampling.is_greedy)},
    )
    decoder.texts.lose("prepare() has run since, in the same cache")
    graphs, most = decoder.prompt_graphs, decoder.context.max_rows
    shapes = [graphs.shapes_of(size) for size in graphs.sizes] if graphs else []
    if (not graphs or most not in graphs.sizes) and on_gpus(decoder):
        decoder.read(_prompts(decoder, 2 * most))  # the second pass attends to tokens of the first
    # First without graphs, then captured: what passes take outside of graphs is given back before these take as much.
    for _ in range(2):
        for alike in reversed(shapes):  # the largest first: others fit in its memory
            for prompts in _prompts_of(decoder, alike):
                decoder.read(prompts)
    decoder.steps(sequences).prepare(sampling)


def on_gpus(decoder: Decoder) -> bool:
    """Return whether the decoder runs on GPUs, which load kernels at the first call; virtual devices do not."""
    return next(iter(decoder.context.devices.values())).device.type == "cuda"


def _prompts_of(decoder: Decoder, shapes: Sequence[PassShape]) -> Iterator[list[Prompt]]:
    """Yield prompts that fill a pass of each of the shapes of a size: of one sequence, or of several if there are."""
    for shape in shapes:
        rows = min(shape.rows, decoder.length)
        if shape.goes_on is None:
            first = rows if decoder.batch == 1 else rows // 2
            others = _prompts(decoder, shape.rows - first, 1)
            yield [*([Prompt([0] * first)] if first else []), *others]
        elif not shape.goes_on:
            yield [Prompt([0] * rows)]
        elif decoder.length > 1:  # behind the first token
            yield [Prompt([0] * min(rows, decoder.length - 1), start=1)]


def _prompts(decoder: Decoder, rows: int, sequence: int = 0) -> list[Prompt]:
    """Return prompts of ``rows`` tokens, of a sequence and those after it, or of as many as the cache has room for."""
    length = decoder.length
    rows = min(rows, (decoder.batch - sequence) * length)
    firsts = range(0, rows, length)
    return [Prompt([0] * min(length, rows - first), i) for i, first in enumerate(firsts, sequence)]
