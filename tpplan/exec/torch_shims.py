"""What tpplan takes from the inside of torch: small, fast, and the same in torch 2.6 to 2.14."""

from __future__ import annotations

import torch


def stream_handle(device: int) -> int:
    """Return the address of a CUDA device's current stream; 0 for its default one."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    return handle


def switch_device(device: int) -> int:
    """Make a CUDA device current, and return the one that was."""
    before: int = torch._C._cuda_exchangeDevice(device)  # noqa: SLF001
    return before


def is_own_allocator(*, default: bool) -> bool:
    """Tell whether CUDA memory comes from torch's own allocator; ``default`` as long as CUDA is not initialised."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return default
    return torch.cuda.get_allocator_backend() == "native"


def expandable_segments(*, default: bool) -> bool:
    """Tell whether torch maps CUDA memory piece by piece; ``default`` where it cannot be asked."""
    if not torch.cuda.is_initialized() or not is_own_allocator(default=True):  # type: ignore[no-untyped-call]
        return default
    settings = torch.cuda.memory._snapshot()["allocator_settings"]  # noqa: SLF001
    return bool(settings.get("expandable_segments", default))
