"""The names of ExLlamaV2's ``device`` module that are about streams.

There, a device context makes a stream for its device. Here, :meth:`tpplan.exllamav2.TPContext.finalize` does so for
devices that have none yet. As everywhere in tpplan, operations follow the current streams: call
:func:`set_device_streams` before you compute, as ExLlamaV2 does, to make those of this module the current ones.
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


def make_streams(places: Iterable[torch.device]) -> None:
    """Give each GPU that has no stream its current one, or instead of the default stream a new one.

    The default stream's address is 0, as of a device without a stream.
    """
    for place in places:
        if place.type == "cuda" and place.index not in global_streams:
            current = torch.cuda.current_stream(place)
            is_default = current == torch.cuda.default_stream(place)
            global_streams[place.index] = torch.cuda.Stream(place, priority=-1) if is_default else current  # type: ignore[no-untyped-call]
