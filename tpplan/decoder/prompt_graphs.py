"""Passes of prompts as graphs: each is filled up to one of a few numbers of rows, with one graph for all of so many."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import proxy

import torch

from tpplan.decoder.prompts import NOBODY
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.decoder.model import Decoder
    from tpplan.decoder.stack import Stack
    from tpplan.exec.gpu.graph import Graph

#: No graph is of half as many rows: they would take GPUs nearly as long, since these read all weights for any number.
_SMALLEST: Final = 128
#: Rows of a graph on a single GPU: of larger passes the host issues all work before they end. It does not where
#: matrices are quantised, each of which is many pieces.
_MOST_ALONE: Final = 512


def graphs_of(decoder: Decoder, cap: float | None, *, graphs: bool | None = None) -> PromptGraphs | None:
    """Return what reads the prompts of a decoder by graphs, or None where they are read as they are written.

    Args:
        decoder: that has its layers and its cache.
        cap: of the scores.
        graphs: whether it shall, where its passes are fixed, see :func:`is_fixed`; on CUDA devices if not given.
    """
    context, length = decoder.context, decoder.length
    places = [device.device for device in context.devices.values()]
    wanted = places[0].type == "cuda" if graphs is None else graphs
    if not wanted or not is_fixed(decoder.stack, cap, length):
        return None
    ahead = len(places) == 1 and not any(weights.quantised for weights in decoder.weights.values())
    return PromptGraphs(decoder, sizes_of(context.max_rows, decoder.batch * length, _MOST_ALONE if ahead else None))


def is_fixed(stack: Stack, cap: float | None, length: int) -> bool:
    """Tell whether passes of as many rows differ in numbers in the devices' memory only, whatever prompts these are of.

    It is so where all rows of a pass attend at once in every layer: by the flash kernel, in 16 bits without a cap, from
    a cache of 16 bits without a window that is shorter; and where no rows are sent to experts.

    Args:
        stack: the model's layers.
        cap: of the scores.
        length: tokens of a sequence at most.
    """
    heads = [each for layer in stack.heads for each in layer.values()]
    return not stack.has_experts and all(each.attend_at_once(length, cap) for each in heads)


def sizes_of(max_rows: int, room: int, most: int | None = None) -> list[int]:
    """Return the rows of each graph, in ascending order: as many as a plan allows, half of them, and so on.

    Args:
        max_rows: of a pass.
        room: tokens that the cache holds: where half as many rows are enough for all, there is no graph of more.
        most: rows of a graph, if there is a limit.
    """
    sizes, size = [], max_rows
    while True:
        if (most is None or size <= most) and size // 2 < max(room, _SMALLEST):
            sizes.append(size)
        size //= 2
        if size < _SMALLEST:
            return sizes[::-1]


class PromptGraphs:
    """What reads passes of prompts by the smallest graph that has room for their rows; others are rows of nobody.

    The first pass of a size runs as it is written, the second is captured, and others replay that. If capturing fails,
    a warning is logged, and the decoder reads all prompts as they are written from then on.

    Attributes:
        sizes: rows of each graph, in ascending order.
    """

    def __init__(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        """Make room for the numbers of the rows on every device.

        Args:
            decoder: whose passes; it has to live as long, and its passes have to be fixed, see :func:`is_fixed`.
            sizes: rows of each graph, in ascending order.
        """
        self.sizes = tuple(sizes)
        self._decoder: Decoder = proxy(decoder)  # which keeps this object
        places = [device.device for device in decoder.context.devices.values()]
        self._numbers = [torch.zeros(max(sizes), 4, dtype=torch.int64, device=place) for place in places]
        self._nobody = torch.tensor([NOBODY])
        self._have_run: set[int] = set()
        self._graphs: dict[int, Graph] = {}
        self._xs: dict[int, tuple[Tensor, ...]] = {}

    def run(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the residual stream behind a pass, of more rows; it is lost when the decoder does anything else.

        Args:
            numbers: in host memory, see :meth:`tpplan.decoder.Decoder.run`.

        Returns:
            Of the pass's rows and of nobody's behind them, whose values mean nothing; nothing if no graph has room.
        """
        rows = len(numbers)
        size = next((each for each in self.sizes if each >= rows), 0)
        if not size:
            return ()
        filled = torch.cat((numbers, self._nobody.expand(size - rows, -1)))
        self._decoder.context.broadcast(filled, source=HOST, out=self._numbers_of(size))
        if size not in self._have_run:
            xs = self._decoder.run(self._numbers_of(size))
            self._have_run.add(size)
            return xs
        if size not in self._graphs:
            graph = self._decoder.captured(partial(self._issue, size), "a pass of prompts")
            if graph is None:
                self._decoder.prompt_graphs = None
                return self._decoder.run(self._numbers_of(size))
            self._graphs[size] = graph
        self._graphs[size].replay()
        return self._xs[size]

    def _numbers_of(self, size: int) -> list[Tensor]:
        """Return where the numbers of so many rows are on each device."""
        return [numbers[:size] for numbers in self._numbers]

    def _issue(self, size: int) -> None:
        """Issue a pass: all of it on the devices, without anything that waits."""
        self._xs[size] = self._decoder.run(self._numbers_of(size))
