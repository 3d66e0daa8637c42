"""The driver of the link probe for the GPUs that torch sees."""

from __future__ import annotations

import os
from contextlib import ExitStack
from ctypes import CDLL, create_string_buffer
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpplan.exec.cuda.streams import new_stream
from tpplan.exec.machine.environment import serialised
from tpplan.exec.machine.link_report import Mechanism
from tpplan.exec.machine.probe import COPIER, EXCHANGER, PeersExhaustedError, Started
from tpplan.exec.toolchain import kernel_cache
from tpplan.exec.toolchain.torch_shims import driver_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Files with the GPU driver's version; the first that exists is used. WSL2 has none.
_DRIVER_VERSIONS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/amdgpu/srcversion")

#: The library that tells it elsewhere, and the bytes of its longest answer.
_NVML, _NVML_BYTES = "libnvidia-ml.so.1", 80

#: Settings of torch's allocator; peer access may depend on the kind of memory.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


#: What the driver says where it maps no further GPU.
_EXHAUSTED = "peer mapping resources exhausted"

#: A source, a target, and what the target's GPU reads there, all of equal size.
Move = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TorchDriver:
    """Tests what torch's copies and tpplan's kernels do; implements :class:`tpplan.exec.machine.probe.Driver`."""

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that torch sees."""
        count = torch.cuda.device_count()
        return tuple(str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(count))

    def software(self) -> str:
        """Return driver, torch, kernels, and settings; empty if nothing tells the driver's version."""
        path = next((path for path in map(Path, _DRIVER_VERSIONS) if path.is_file()), None)
        driver = path.read_text().partition("\n")[0] if path else _nvml_version() or driver_version()
        if not driver:
            return ""
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

    def peers(self, a: int, b: int) -> bool:
        """Return whether two GPUs can access each other's memory, according to the driver."""
        return torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)

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
        """Move a part of each source to the same part of its target, and let the target's GPU read it behind an event.

        Each move is on streams of its own.

        Raises:
            MemoryError: a GPU has too little free memory; nothing was moved.
            PeersExhaustedError: the driver maps the memory of no further GPU; nothing was moved.
        """
        for source, target, _ in (move for ends in moves.values() for move in ends):
            self._enable(source.get_device(), target.get_device())
            self._enable(target.get_device(), source.get_device())
        started = [
            (ends, self._start(mechanism, [(source[part], target[part]) for source, target, _ in ends]))
            for mechanism, ends in moves.items()
        ]
        readers = []
        for ends, (streams, _) in started:
            for (_, target, read), stream in zip(ends, streams, strict=True):
                reader = new_stream(target.device)
                reader.wait_stream(stream)
                with torch.cuda.stream(reader):
                    torch.bitwise_or(target, 0, out=read)  # by a kernel: results are read by kernels
                readers.append(reader)
        for reader in readers:
            reader.synchronize()
        for _, (_, finish) in started:
            finish()

    def _enable(self, gpu: int, other: int) -> None:
        """Let a GPU access another's memory, if it can: torch does that when it first copies from the one to the other.

        Raises:
            MemoryError: see :meth:`move`.
            PeersExhaustedError: see :meth:`move`.
        """
        source, target = self.allocate(gpu, 1), self.allocate(other, 1)
        try:
            target.copy_(source)
        except RuntimeError as error:
            if _EXHAUSTED in str(error):
                raise PeersExhaustedError(f"GPU {gpu} maps no further GPU: {_EXHAUSTED}") from error
            raise

    def _start(self, mechanism: Mechanism, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Started:
        if reason := self.lacks(mechanism):
            raise NotImplementedError(f"{mechanism}: {reason}")
        if mechanism == Mechanism.COPY:
            return _start_copies(moves)
        from tpplan.exec.cuda.probe_kernels import start  # noqa: PLC0415 (needs a driver)

        return start(mechanism, moves)


def _start_copies(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Started:
    """Start torch's copies: each makes its target's stream wait for an event behind it."""
    streams = []
    for source, target in moves:
        with ExitStack() as stack:
            ends = [new_stream(end.device) for end in (source, target)]
            for stream in ends:
                stack.enter_context(torch.cuda.stream(stream))
            target.copy_(source, non_blocking=True)
        streams.append(ends)
    return Started([stream for _, stream in streams], streams.clear)


def _nvml_version() -> str:
    """Return the version of NVIDIA's driver according to its own library; empty if that does not tell."""
    try:
        nvml = CDLL(_NVML)
        text = create_string_buffer(_NVML_BYTES)
        if nvml.nvmlInit_v2():
            return ""
        try:
            failed = nvml.nvmlSystemGetDriverVersion(text, _NVML_BYTES)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # there is no such library, or it is another one
        return ""
    return "" if failed or not text.value else f"NVIDIA {text.value.decode(errors='replace')}"
