"""CUDA graphs of prefill passes: each pass is padded to one of a few sizes, with one graph for each size."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from tpplan.decoder.layer.agree import agreed
from tpplan.decoder.prompts import NOBODY, PassShape
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpplan.decoder.forward import Forward
    from tpplan.decoder.layer.stack import Stack
    from tpplan.exec.cuda.graph import Graph

    #: Captures the work that a function issues as a graph, or returns None if it fails. The text names the work.
    Capture = Callable[[Callable[[], None], str], Graph | None]

#: Minimum rows of a graph. With half of them, a pass takes a GPU nearly as long, as it still reads all weights.
_SMALLEST: Final = 128
#: Maximum rows of a graph on a single GPU: larger passes take longer than the host needs to launch them. This does not
#: hold for quantised matrices, whose products are launched in many pieces.
_MOST_ALONE: Final = 512


def graphs_of(forward: Forward, capture: Capture, *, graphs: bool | None = None) -> PrefillGraphs | None:
    """Return the graphs of prefill passes, or None if these run without graphs.

    Args:
        forward: computes the passes.
        capture: captures work as a graph.
        graphs: whether to use graphs if passes are fixed, see :func:`is_fixed`; by default on CUDA devices.
    """
    context, batch, length = forward.context, forward.batch, forward.length
    captures = context.can_capture if graphs is None else graphs
    ahead = len(context.all_devices) == 1 and not any(weights.quantised for weights in forward.weights.values())
    possible = sizes_of(context.max_rows, batch * length, _MOST_ALONE if ahead else None) if captures else []
    fixed = [
        is_fixed(forward.stack, forward.settings.attention_cap, PassShape.of_any(size, batch, length))
        for size in possible
    ]
    sizes = [size for size, is_one in zip(possible, agreed(context, fixed), strict=True) if is_one]
    return PrefillGraphs(forward, capture, sizes) if sizes else None


def is_fixed(stack: Stack, cap: float | None, pass_shape: PassShape) -> bool:
    """Tell whether passes of the same size differ only in values in device memory, whatever their prompts are.

    They do if in every layer all rows of a pass attend in one kernel call, and kernels group the rows by their experts
    if it has any. The former takes the flash kernel: 16-bit activations, scores without a cap, and a 16-bit cache.
    Where the cache only holds a sliding window, it takes memory for a copy of all sequences' windows, see
    :meth:`tpplan.decoder.cache.heads.Heads.attend_at_once`. The latter takes
    :mod:`tpplan.decoder.fast.launches.grouped`, which leaves large passes with large 16-bit experts to torch. Linear
    attention reads prompt by prompt.

    Args:
        stack: the model's layers.
        cap: soft cap of the attention scores.
        pass_shape: shape of any pass of this size.
    """
    if any(stack.linear):
        return False
    heads = [each for layer in stack.heads for each in layer.values()]
    return all(each.attend_at_once(pass_shape, cap) for each in heads) and stack.has_fixed_experts(pass_shape.rows)


def sizes_of(max_rows: int, room: int, most: int | None = None) -> list[int]:
    """Return the rows of each graph, in ascending order: the maximum rows of a pass, half of them, and so on.

    Args:
        max_rows: maximum rows of a pass.
        room: tokens that the cache holds; a size is left out if half of it is enough for them.
        most: maximum rows of a graph, if there is a limit.
    """
    sizes, size = [], max_rows
    while True:
        if (most is None or size <= most) and size // 2 < max(room, _SMALLEST):
            sizes.append(size)
        size //= 2
        if size < _SMALLEST:
            return sizes[::-1]


class PrefillGraphs:
    """Runs prefill passes, each padded to the smallest graph that has room for its rows.

    The first pass of a size runs without a graph, the second is captured, and later ones replay the graph. If capturing
    fails, all later prompts are to run without graphs.

    Attributes:
        sizes: rows of each graph, in ascending order.
        has_failed: whether a pass could not be captured.
    """

    def __init__(self, forward: Forward, capture: Capture, sizes: Sequence[int]) -> None:
        """Allocate the numbers of the rows on every device.

        Args:
            forward: computes the passes, which must have a fixed shape, see :func:`is_fixed`.
            capture: captures work as a graph.
            sizes: rows of each graph, in ascending order.
        """
        self.sizes = tuple(sizes)
        self.has_failed = False
        self._forward = forward
        self._capture = capture
        places = [device.device for device in forward.context.devices.values()]
        self._numbers = [torch.zeros(max(sizes), 4, dtype=torch.int64, device=place) for place in places]
        self._nobody = torch.tensor([NOBODY])
        self._have_run: set[int] = set()
        self._graphs: dict[int, Graph] = {}
        self._xs: dict[int, tuple[Tensor, ...]] = {}

    def run(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Run a pass, and return the residual stream after the last layer, valid until the next pass or step.

        Args:
            numbers: numbers of the rows in host memory, see :meth:`tpplan.decoder.forward.Forward.prefill`.

        Returns:
            The residual stream of the rows, followed by meaningless rows of padding; empty if no graph has room.
        """
        rows = len(numbers)
        size = next((each for each in self.sizes if each >= rows), 0)
        if not size:
            return ()
        filled = torch.cat((numbers, self._nobody.expand(size - rows, -1)))
        self._forward.context.broadcast(filled, source=HOST, out=self._numbers_of(size))
        if size not in self._have_run:
            xs = self._forward.prefill(self._numbers_of(size))
            self._have_run.add(size)
            return xs
        if size not in self._graphs:
            graph = self._capture(partial(self._issue, size), "a pass of prompts")
            if graph is None:
                self.has_failed = True
                return self._forward.prefill(self._numbers_of(size))
            self._graphs[size] = graph
        self._graphs[size].replay()
        return self._xs[size]

    def _numbers_of(self, size: int) -> list[Tensor]:
        """Return the memory on each device for the numbers of ``size`` rows."""
        return [numbers[:size] for numbers in self._numbers]

    def _issue(self, size: int) -> None:
        """Launch a pass on the devices, without waiting."""
        self._xs[size] = self._forward.prefill(self._numbers_of(size))
