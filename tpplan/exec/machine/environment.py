"""Restrictions from the environment: on kernels that wait for each other, on peer copies, and on peer access."""

from __future__ import annotations

import os
import re

from tpplan.exec.toolchain.torch_shims import expandable_segments, is_own_allocator

#: Prefixes of the variables that a tool sets for its target program, with the tool. Some of Nsight Compute's variables
#: are missing: containers set them even if the tool is not running.
_TOOLS = (
    ("NV_SANITIZER_INJECTION_", "compute-sanitizer"),
    ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "Nsight Compute"),
    ("NV_NSIGHT_INJECTION_", "Nsight Compute"),
)
#: Names a library that the driver loads, from one of these tools or an unknown one.
_INJECTION = "CUDA_INJECTION64_PATH"
#: Set by Nsight Systems, which does not serialise kernels.
_HARMLESS = "NSYS_PROFILING_SESSION_ID"
#: ExLlama's variable, for machines whose driver promises peer access that does not work.
_NO_PEER_COPY = "EXLLAMA_NO_P2P_COPY"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*True\b")
_OTHER_BACKEND = re.compile(r"\bbackend\s*:\s*(?!native\b)\w")


def serialised() -> str:
    """Return why kernels may be serialised, so that none may wait for another; empty if they run concurrently."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}:
        return "CUDA_LAUNCH_BLOCKING is set"
    for start, tool in _TOOLS:
        for name in sorted(os.environ):
            if name.startswith(start):
                return f"{tool} runs kernels one by one ({name} is set)"
    if os.environ.get(_INJECTION) and _HARMLESS not in os.environ:
        return f"{_INJECTION} names a tool that may run kernels one by one"
    return ""


def no_peer_copies() -> str:
    """Return why GPUs may not read or write each other's memory; empty if the environment allows it."""
    return f"{_NO_PEER_COPY} is set" if os.environ.get(_NO_PEER_COPY, "0") not in {"", "0"} else ""


def unreachable() -> str:
    """Return why other devices cannot access torch's tensors; empty if they can, as with cudaMalloc memory."""
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR)
    if expandable_segments(default=bool(_EXPANDABLE.search(settings))):
        return "torch allocates expandable segments"
    if not is_own_allocator(default=not _OTHER_BACKEND.search(settings)):
        return "torch allocates memory by another backend than its own"
    return ""
