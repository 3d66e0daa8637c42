"""Plans of more devices than there are GPUs: several on each GPU, everything of one on a stream of its own.

Kernels of devices that share a GPU wait for each other there, so that their streams must not share a queue of the
hardware: ``CUDA_DEVICE_MAX_CONNECTIONS=32`` has to be set before CUDA is used. So this is a program:
``python -m tests.exec.cuda.shared_gpus --devices 4 --gpus 1``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from cuda.bindings import runtime

from benchmarks.reliability.operations import plan_for
from benchmarks.reliability.stress import Stress
from tpplan.exec.build import build
from tpplan.exec.cuda.backend import CudaDevices
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.tools.selftest import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.exec import TPContext
    from tpplan.exec.cuda.launch import Bound
    from tpplan.exec.handles import Pending
    from tpplan.exec.memory.binding import Memory

#: Operations between two looks at what was wrong, and bytes of the largest tensor.
_AT_ONCE, _LARGEST = 500, 4 * 2**20


class SharedDevices(CudaDevices):
    """Devices whose caller works on the same streams as they do: one for each."""

    def __init__(
        self, memory: Memory, places: Mapping[int, torch.device], streams: Sequence[torch.cuda.Stream], transport: str
    ) -> None:
        """Take the streams of all devices of the plan."""
        self._own = streams
        super().__init__(memory, places, transport=transport, timeout=10.0)

    def _handle(self, device: int) -> int:
        """Return the device's own stream."""
        return self._own[device].cuda_stream


class FencedDevices(SharedDevices):
    """Devices whose caller works on the GPU's current stream: it and theirs wait for each other at every operation."""

    def issue(self, bound: Bound) -> Pending:
        """Issue a program between what the current streams hold and what they will."""
        for stream in self._own:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            return super().issue(bound)
        finally:
            for stream in self._own:
                torch.cuda.current_stream(stream.device).wait_stream(stream)


def new_stream(place: torch.device) -> torch.cuda.Stream:
    """Return a stream that nobody else gets, which torch's are not: it hands out the same ones in turn."""
    with torch.cuda.device(place):
        error, handle = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"no stream on {place}: {error.name}")
    return torch.cuda.ExternalStream(int(handle), place)  # type: ignore[no-untyped-call]


def context(
    plan: SplitPlan, streams: Sequence[torch.cuda.Stream], transport: str, kind: type[SharedDevices]
) -> TPContext:
    """Compile a plan for devices that share GPUs, each of which has one of the streams."""
    places = [stream.device for stream in streams]
    used = {i: places[i] for i, memory in enumerate(plan.memory) if memory.used_bytes}
    return build(
        plan,
        places,
        lambda memory: kind(memory, used, streams, transport),
        transport=transport,
        max_rows=plan.request.max_rows,
        dtype=getattr(torch, plan.model.dtype),
    )


def stressed(plan: SplitPlan, streams: Sequence[torch.cuda.Stream], transport: str, operations: int) -> list[str]:
    """Return what was wrong of random operations that follow each other on these streams alone, some of them late."""
    faults: list[str] = []
    with context(plan, streams, transport, SharedDevices) as ctx:
        stress = Stress(ctx, 1, largest=_LARGEST, delays=True, streams=dict(enumerate(streams)))
        for first in range(0, operations, _AT_ONCE):
            for _ in range(min(_AT_ONCE, operations - first)):
                stress.issue(stress.task())
            faults += stress.faults()
    return faults


def main() -> None:
    """Run the self-test and random operations by every transport; exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=3, help="of the plan (default 3)")
    parser.add_argument("--gpus", type=int, default=1, help="that they share (default 1)")
    parser.add_argument("--transport", choices=TRANSPORTS, default="", help="one instead of all three")
    parser.add_argument("--operations", type=int, default=3000, help="random ones by each transport (default 3000)")
    wanted = parser.parse_args()
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "32":
        parser.error("set CUDA_DEVICE_MAX_CONNECTIONS=32, or streams wait for others of their GPU")
    ways = (wanted.transport,) if wanted.transport else TRANSPORTS
    plan = plan_for(wanted.devices)
    streams = [new_stream(torch.device("cuda", i % wanted.gpus)) for i in range(wanted.devices)]
    with patch.object(run, "_captured", lambda *_: []):  # the current stream of a GPU is captured once at a time
        report = run.selftest(plan, lambda way: context(plan, streams, way, FencedDevices), ways)
    print(f"self-test: {report.checks} checks, {report.wrong} wrong", flush=True)  # noqa: T201
    problems = [str(fault) for fault in report.faults] + [refusal.message for refusal in report.refused]
    for way in ways:
        faults = stressed(plan, streams, way, wanted.operations)
        print(f"{way}: {wanted.operations} random operations, {len(faults)} wrong", flush=True)  # noqa: T201
        problems += faults
    print("\n".join(problems[:20]))  # noqa: T201
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
