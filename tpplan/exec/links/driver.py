"""The driver of the link probe for the GPUs that torch sees."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpplan.exec.environment import serialised
from tpplan.exec.gpu import kernel_cache
from tpplan.exec.links.report import Mechanism

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Files with the GPU driver's version; the first that exists is used.
_DRIVER_VERSIONS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/amdgpu/srcversion")

#: Settings of torch's allocator; peer access may depend on the kind of memory.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

#: The kernels of :mod:`tpplan.exec.links.moves`: a sum of one is a copy.
COPIER, EXCHANGER = "sum_f32", "slot_move"

#: A source and a target of equal size.
Move = tuple[torch.Tensor, torch.Tensor]


class TorchDriver:
    """Tests what torch's copies and tpplan's kernels do; implements :class:`tpplan.exec.links.probe.Driver`."""

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that torch sees."""
        count = torch.cuda.device_count()
        return tuple(str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(count))

    def software(self) -> str:
        """Return driver, torch, kernels, and settings; empty if no file tells the driver's version."""
        path = next((path for path in map(Path, _DRIVER_VERSIONS) if path.is_file()), None)
        if path is None:
            return ""
        driver = path.read_text().partition("\n")[0]
        settings = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
        return "; ".join((driver, f"torch {torch.__version__}", f"kernels {kernel_cache.digest()}", *settings))

    def prepare(self) -> None:
        """Compile the kernels, which takes seconds."""
        if not kernel_cache.lacks():
            found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
            kernel_cache.prepare([(name, each) for name in (COPIER, EXCHANGER) for each in sorted(found)])

    def lacks(self, mechanism: Mechanism) -> str:
        """Return why a mechanism cannot be tested: kernels need a compiler, and for flags two of them at once."""
        waits = serialised() if mechanism == Mechanism.FLAG else ""
        return "" if mechanism == Mechanism.COPY else kernel_cache.lacks() or waits

    def allocate(self, gpu: int, size: int) -> torch.Tensor:
        """Return ``size`` bytes of a GPU's memory.

        Raises:
            MemoryError: the GPU has too little free memory.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", gpu))
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"GPU {gpu} has no {size} bytes left") from error

    def write(self, buffer: torch.Tensor, data: memoryview) -> None:
        """Fill the first bytes of a buffer from the host."""
        buffer[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
        torch.cuda.synchronize(buffer.device)

    def read(self, buffer: torch.Tensor, size: int) -> bytes:
        """Return the first bytes of a buffer."""
        data = bytearray(size)
        torch.frombuffer(data, dtype=torch.uint8).copy_(buffer[:size])
        return bytes(data)

    def move(self, moves: Mapping[Mechanism, Sequence[Move]], part: slice) -> None:
        """Move a part of each source to the same part of its target, each move on streams of its own."""
        waits = []
        for mechanism, ends in moves.items():
            parts = [(source[part], target[part]) for source, target in ends]
            waits.append(self._start(mechanism, parts))
        for wait in waits:
            wait()

    def _start(self, mechanism: Mechanism, moves: Sequence[Move]) -> Callable[[], None]:
        """Start moves and return a function that waits for their completion."""
        if reason := self.lacks(mechanism):
            raise NotImplementedError(f"{mechanism}: {reason}")
        if mechanism == Mechanism.COPY:
            return _start_copies(moves)
        from tpplan.exec.links.moves import start  # noqa: PLC0415 (needs a driver)

        return start(mechanism, moves)


def _start_copies(moves: Sequence[Move]) -> Callable[[], None]:
    streams = [[_stream(end) for end in move] for move in moves]  # at both, as torch makes either end wait
    for (source, target), ends in zip(moves, streams, strict=True):
        with ExitStack() as stack:
            for stream in ends:
                stack.enter_context(torch.cuda.stream(stream))
            target.copy_(source, non_blocking=True)

    def wait() -> None:
        for stream in (stream for ends in streams for stream in ends):
            stream.synchronize()

    return wait


def _stream(end: torch.Tensor) -> torch.cuda.Stream:
    return torch.cuda.Stream(end.device)  # type: ignore[no-untyped-call]
