"""Operations on side streams of CUDA devices, concurrent with the work on their current streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from tpplan.exec.aside import Aside
from tpplan.exec.cuda.streams import PRIORITY
from tpplan.exec.toolchain.torch_shims import make_current

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from tpplan.exec.aside import Noting


def streams_aside(places: Iterable[torch.device]) -> tuple[torch.cuda.Stream, ...]:
    """Create a side stream on every device."""
    return tuple(torch.cuda.Stream(place, priority=PRIORITY) for place in places)  # type: ignore[no-untyped-call]


class StreamsAside(Aside):
    """Makes side streams current in its block; they start after the work queued on the current streams."""

    def __init__(self, backend: Noting, streams: Sequence[torch.cuda.Stream]) -> None:
        """Create it closed; the ``with`` statement opens it.

        Args:
            backend: issues programs to the current streams.
            streams: a side stream of every device.
        """
        super().__init__(backend)
        self._streams = streams
        self._before: list[torch.cuda.Stream] = []
        self._done: list[torch.cuda.Event] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._before = [torch.cuda.current_stream(stream.device) for stream in self._streams]
        try:
            for stream, before in zip(self._streams, self._before, strict=True):
                stream.wait_stream(before)
            make_current(self._streams)
        except BaseException:  # such as Ctrl-C: nobody else would end it
            make_current(self._before)
            super().__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        make_current(self._before)
        super().__exit__(kind, error, trace)
        self._done = [stream.record_event() for stream in self._streams]
        if kind:  # after an error the caller may never wait
            self.wait()

    def wait(self) -> None:
        """Make the current streams wait for the work of the block."""
        super().wait()
        for stream, done in zip(self._streams, self._done, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(done)
