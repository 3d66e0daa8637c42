"""What the environment of this process forbids: kernels that wait for each other, memory that other devices reach."""

from __future__ import annotations

import os
import re

from tpplan.exec.torch_shims import expandable_segments, is_own_allocator

#: Beginnings of the variables that a tool sets for the program that it runs, and the tool. Not every variable of Nsight
#: Compute's is among them: containers set some of those for people who may call it.
_TOOLS = (
    ("NV_SANITIZER_INJECTION_", "compute-sanitizer"),
    ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "Nsight Compute"),
    ("NV_NSIGHT_INJECTION_", "Nsight Compute"),
)
#: Names a library that the driver loads: of one of these tools, or of one that nobody knows.
_INJECTION = "CUDA_INJECTION64_PATH"
#: Nsight Systems, which lets kernels run as they do without it.
_HARMLESS = "NSYS_PROFILING_SESSION_ID"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*True\b")
_OTHER_BACKEND = re.compile(r"\bbackend\s*:\s*(?!native\b)\w")


def serialised() -> str:
    """Return why kernels may run one after the other, so that none may wait for another; empty if they do not."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}:
        return "CUDA_LAUNCH_BLOCKING is set"
    for start, tool in _TOOLS:
        for name in sorted(os.environ):
            if name.startswith(start):
                return f"{tool} runs kernels one by one ({name} is set)"
    if os.environ.get(_INJECTION) and _HARMLESS not in os.environ:
        return f"{_INJECTION} names a tool that may run kernels one by one"
    return ""


def unreachable() -> str:
    """Return why other devices may not reach into torch's tensors; empty if they may, as into memory of cudaMalloc."""
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR)
    if expandable_segments(default=bool(_EXPANDABLE.search(settings))):
        return "torch allocates expandable segments"
    if not is_own_allocator(default=not _OTHER_BACKEND.search(settings)):
        return "torch allocates memory by another backend than its own"
    return ""
