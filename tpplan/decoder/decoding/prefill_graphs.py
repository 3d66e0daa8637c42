"""CUDA graphs of prefill passes: each pass is padded to one of a few sizes, with a graph or three for each size.

Large passes of one sequence have graphs of their own, where attention is faster: one for the first rows of a sequence,
and one for rows behind others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from tpplan.core.axes import Axis
from tpplan.decoder.layer.agree import agreed
from tpplan.decoder.prompts import NOBODY, PassShape
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpplan.decoder.forward import Forward
    from tpplan.decoder.layer.stack import Stack
    from tpplan.decoder.prompts import PromptSlice
    from tpplan.exec.cuda.graph import Graph

    #: Captures the work that a function issues as a graph, or returns None if it fails. The text names the work.
    Capture = Callable[[Callable[[], None], str], Graph | None]

#: Minimum rows of a graph. With half of them, a pass takes a GPU nearly as long, as it still reads all weights.
_SMALLEST: Final = 128
#: Maximum rows of a graph on a single GPU: larger passes take longer than the host needs to launch them. This does not
#: hold for quantised matrices, whose products are launched in many pieces.
_MOST_ON_ONE_GPU: Final = 512
#: Minimum rows of graphs for one sequence. On H200, 1,024 rows of 16 heads attend in 20 µs instead of 38 a layer, 2,048
#: in 53 instead of 104, and behind 2,048 others in 170 instead of 200.
_LEAST_OF_ONE: Final = 1024
#: Numbers of a row that its results depend on: its token and its position.
_OF_ROW: Final = 2


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
    possible = sizes_of(context.max_rows, batch * length, _MOST_ON_ONE_GPU if ahead else None) if captures else []
    fixed = [
        is_fixed(forward.stack, forward.settings.attention_cap, PassShape.of_any(size, batch, length))
        for size in possible
    ]
    sizes: list[int] = []
    for size, is_one in zip(possible, agreed(context, fixed), strict=True):
        least = sizes[-1] + 1 if sizes else 1  # rows that are no padding: fewer take a smaller graph
        if is_one and least > forward.first_half(size):
            sizes.append(size)
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

    Large passes of one sequence have graphs of their own, see :meth:`tpplan.decoder.layer.stack.Stack.attends_alone`.
    The first pass of a shape runs without a graph, the second is captured, and later ones replay the graph. If
    capturing fails, all later prompts are to run without graphs.

    Attributes:
        sizes: rows of each graph, in ascending order.
        has_failed: whether a pass could not be captured.
    """

    def __init__(self, forward: Forward, capture: Capture, sizes: Sequence[int]) -> None:
        """Allocate the numbers and the results of the rows on every device.

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
        self._numbers = [torch.zeros(max(sizes), len(NOBODY), dtype=torch.int64, device=place) for place in places]
        self._nobody = torch.tensor([NOBODY])
        self._most = min(forward.batch, max(sizes))  # prompts that end in a pass
        shape = self._most, forward.context.plan.split(Axis.RESIDUAL).size
        self._last = [torch.empty(shape, dtype=forward.context.dtype, device=place) for place in places]
        of_one = PassShape.of_one(max(sizes), forward.length, goes_on=True)
        (self._has_alone,) = agreed(forward.context, [forward.stack.attends_alone(of_one)])
        self._have_run: set[PassShape] = set()
        self._graphs: dict[PassShape, Graph] = {}

    def run(self, numbers: Tensor, prompt_slices: Sequence[PromptSlice]) -> tuple[Tensor, ...]:
        """Run a pass, and return the residual stream after the last layer, of the last row of each prompt that ends.

        Args:
            numbers: :func:`tpplan.decoder.forward.numbers_of` the rows.
            prompt_slices: slices of prompts that make up all rows.

        Returns:
            The rows on each device, ``[prompts, D]``; an empty tuple if no graph has room.
        """
        rows = len(numbers)
        size = next((each for each in self.sizes if each >= rows), 0)
        if not size:
            return ()
        shape = self._shape_of(size, prompt_slices)
        nobody = self._nobody
        if shape.goes_on is not None:  # padding like the last row is as finite
            nobody = torch.cat((numbers[-1:, :_OF_ROW], nobody[:, _OF_ROW:]), dim=1)
        filled = torch.cat((numbers, nobody.expand(size - rows, -1)))
        self._forward.context.broadcast(filled, source=HOST, out=self._numbers_of(size))
        count = sum(each.count for each in prompt_slices if each.is_last)
        if shape not in self._have_run:
            last = self._last_rows(shape)
            self._have_run.add(shape)
            return tuple(x_RD[:count] for x_RD in last)
        if shape not in self._graphs:
            if shape.goes_on is not None:
                self._last_rows(shape)  # cuDNN makes plans for each thread, and not while a graph is captured
            graph = self._capture(partial(self._issue, shape), "a pass of prompts")
            if graph is None:
                self.has_failed = True
                return tuple(x_RD[:count] for x_RD in self._last_rows(shape))
            self._graphs[shape] = graph
        self._graphs[shape].replay()
        return tuple(x_RD[:count].clone() for x_RD in self._last)

    def shapes_of(self, size: int) -> list[PassShape]:
        """Return the shapes that passes of at most ``size`` rows can have, those of one sequence first."""
        batch, length = self._forward.batch, self._forward.length
        has_alone = self._has_alone and size >= _LEAST_OF_ONE
        shapes = [PassShape.of_one(size, length, goes_on=goes_on) for goes_on in (False, True)] if has_alone else []
        return shapes if shapes and batch == 1 else [*shapes, PassShape.of_any(size, batch, length)]

    def _shape_of(self, size: int, prompt_slices: Sequence[PromptSlice]) -> PassShape:
        """Return the shape of the graph of a pass of at most ``size`` rows."""
        first, *others = prompt_slices
        goes_on = None if others or first.count > 1 else first.start > 0
        *_, anything = shapes = self.shapes_of(size)
        return next((shape for shape in shapes if shape.goes_on == goes_on), anything)

    def _numbers_of(self, size: int) -> list[Tensor]:
        """Return the memory on each device for the numbers of ``size`` rows."""
        return [numbers[:size] for numbers in self._numbers]

    def _last_rows(self, shape: PassShape) -> list[Tensor]:
        """Run a pass without a graph, and return as many last rows of prompts as there can be."""
        numbers = self._numbers_of(shape.rows)
        xs = self._forward.prefill(numbers, pass_shape=shape)
        return [x_RD.index_select(0, each[: self._most, -1]) for x_RD, each in zip(xs, numbers, strict=True)]

    def _issue(self, shape: PassShape) -> None:
        """Launch a pass on the devices, without waiting. Its result is where those of all graphs are."""
        for to_RD, last_RD in zip(self._last, self._last_rows(shape), strict=True):
            to_RD[: len(last_RD)].copy_(last_RD)
