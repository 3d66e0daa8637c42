"""The names of ExLlamaV2's ``device`` module that are about streams.

There, a device context makes a stream for its device. Here, :meth:`tpplan.exllamav2.TPContext.finalize` enters the
streams that are current then, for devices that have none yet. Operations follow the current streams, as all of tpplan:
:func:`set_device_streams` makes them those of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["get_device_stream", "global_streams", "set_device_streams"]

#: The stream of each GPU that has one, by its CUDA index.
global_streams: dict[int, torch.cuda.Stream] = {}


def get_device_stream(index: int) -> torch.cuda.Stream | None:
    """Return the stream of a GPU, None if it has none."""
    return global_streams.get(index)


def set_device_streams() -> None:
    """Make the stream of each GPU its current one; the current device stays."""
    if global_streams:
        with torch.cuda.device(torch.cuda.current_device()):
            for stream in global_streams.values():
                torch.cuda.set_stream(stream)


def enter_streams(places: Iterable[torch.device]) -> None:
    """Enter the current stream of each GPU that has none yet."""
    for place in places:
        if place.type == "cuda" and place.index not in global_streams:
            global_streams[place.index] = torch.cuda.current_stream(place)
