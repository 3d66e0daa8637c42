"""Passes of prompts that are full: of as many rows as a plan allows, on CUDA devices one graph for all of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import proxy

import torch

from tpplan.exec.program import HOST

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.decoder.model import Decoder
    from tpplan.decoder.stack import Stack
    from tpplan.exec.graph import Graph

_LOG = logging.getLogger(__name__)


def full_of(decoder: Decoder, cap: float | None, *, graphs: bool | None = None) -> Full | None:
    """Return what reads the full passes of a decoder as a graph, or None where they are read as they are written.

    Several GPUs wait for the one host that issues their work, a single one does not.

    Args:
        decoder: that has its layers and its cache.
        cap: of the scores.
        graphs: whether it shall, where its passes are fixed, see :func:`is_fixed`, and its cache has room for one; on
            several CUDA devices if not given.
    """
    context, length = decoder.context, decoder.length
    places = [device.device for device in context.devices.values()]
    wanted = len(places) > 1 and places[0].type == "cuda" if graphs is None else graphs
    has_room = context.max_rows <= decoder.batch * length
    return Full(decoder) if wanted and has_room and is_fixed(decoder.stack, cap, length) else None


def is_fixed(stack: Stack, cap: float | None, length: int) -> bool:
    """Tell whether full passes differ in numbers in the devices' memory only, whatever prompts have rows in them.

    It is so where all rows of a pass attend at once in every layer: by the flash kernel, in 16 bits without a cap, from
    a cache of 16 bits without a window that is shorter; and where no rows are sent to experts.

    Args:
        stack: the model's layers.
        cap: of the scores.
        length: tokens of a sequence at most.
    """
    heads = [each for layer in stack.heads for each in layer.values()]
    return not stack.has_experts and all(each.attend_at_once(length, cap) for each in heads)


class Full:
    """The full passes of a decoder: the first runs as it is written, the second is captured, and others replay that.

    If capturing fails, a warning is logged, and the decoder reads full passes as they are written from then on.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Make room for the numbers of the rows on every device.

        Args:
            decoder: whose passes; it has to live as long, and its passes have to be fixed, see :func:`is_fixed`.
        """
        self._decoder: Decoder = proxy(decoder)  # which keeps this object
        places = [device.device for device in decoder.context.devices.values()]
        self._numbers = [torch.zeros(decoder.context.max_rows, 4, dtype=torch.int64, device=place) for place in places]
        self._has_run = False
        self._graph: Graph | None = None
        self._xs: tuple[Tensor, ...] = ()

    def run(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the residual stream behind a pass; it is lost when the decoder does anything else.

        Args:
            numbers: in host memory, see :meth:`tpplan.decoder.Decoder.run`.
        """
        self._decoder.context.broadcast(numbers, source=HOST, out=self._numbers)
        if not self._has_run:
            xs = self._decoder.run(self._numbers)
            self._has_run = True
            return xs
        if self._graph is None:
            try:
                self._graph = self._decoder.captured(self._issue)
            except Exception as error:  # noqa: BLE001 (whatever it is: memory, a driver, a library)
                _LOG.warning("a full pass of prompts cannot be captured, none is a graph from now on: %s", error)
                self._decoder.full = None
                return self._decoder.run(self._numbers)
        self._graph.replay()
        return self._xs

    def _issue(self) -> None:
        """Issue a pass: all of it on the devices, without anything that waits."""
        self._xs = self._decoder.run(self._numbers)
