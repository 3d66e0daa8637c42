"""What is issued to second streams of CUDA devices, beside what their current ones do meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from tpplan.exec.aside import Aside
from tpplan.exec.gpu.streams import PRIORITY
from tpplan.exec.torch_shims import make_current

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from tpplan.exec.aside import Noting


def streams_aside(places: Iterable[torch.device]) -> tuple[torch.cuda.Stream, ...]:
    """Return a second stream of every device."""
    return tuple(torch.cuda.Stream(place, priority=PRIORITY) for place in places)  # type: ignore[no-untyped-call]


class StreamsAside(Aside):
    """Makes second streams current in the block; they begin behind what the current ones hold."""

    def __init__(self, backend: Noting, streams: Sequence[torch.cuda.Stream]) -> None:
        """Begin and end with the block.

        Args:
            backend: issues programs to the current streams.
            streams: a second one of every device.
        """
        super().__init__(backend)
        self._streams = streams
        self._before: list[torch.cuda.Stream] = []
        self._done: list[torch.cuda.Event] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._before = [torch.cuda.current_stream(stream.device) for stream in self._streams]
        for stream, before in zip(self._streams, self._before, strict=True):
            stream.wait_stream(before)
        make_current(self._streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        make_current(self._before)
        self._done = [stream.record_event() for stream in self._streams]
        if kind:  # nobody may be left who would
            self.wait()

    def wait(self) -> None:
        """Let the current streams go on behind what the block has issued."""
        super().wait()
        for stream, done in zip(self._streams, self._done, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(done)
