"""The devices that a plan is made for."""

from __future__ import annotations

from attrs import frozen

#: CUDA context and libraries where nobody measured them on the device itself.
DEFAULT_OVERHEAD_BYTES = 512 * 2**20


@frozen(kw_only=True)
class Device:
    """A GPU, or whatever has its memory.

    Attributes:
        name: what people call it, such as ``RTX 4090``.
        budget_bytes: bytes that tpplan may use on it, for everything.
        overhead_bytes: of these, what the driver's context and libraries take once the device is used.
        bandwidth_bytes_per_second: of its memory, 0 if unknown.
        capability: CUDA compute capability such as ``8.9``, empty if unknown.
    """

    name: str
    budget_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    bandwidth_bytes_per_second: int = 0
    capability: str = ""
