"""A device that a plan is made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Memory of the CUDA context and libraries in plans and devices files that do not tell it. That is their format, and no
#: estimate: what tpplan plans with is always told.
DEFAULT_OVERHEAD_BYTES = 512 * 2**20


@frozen(kw_only=True)
class Device:
    """A GPU, or another device with a memory budget.

    Attributes:
        name: display name such as ``RTX 4090``.
        budget_bytes: total bytes that tpplan may use on the device.
        overhead_bytes: part of the budget that the CUDA context and libraries take if the device is used.
        bandwidth_bytes_per_second: memory bandwidth, 0 if unknown.
        capability: CUDA compute capability such as ``8.9``, empty if unknown.
        read_bytes_per_second: measured bandwidth of kernels that only read, 0 if it was not measured.
        boundary_ns: measured nanoseconds from one tiny kernel of a CUDA graph to the next, 0 if not measured.
        matrix_flops_per_second: measured rate of products of large matrices in 16 bits, in operations (a multiplication
            and an addition are two) per second, 0 if not measured.
    """

    name: str
    budget_bytes: int
    overhead_bytes: int = DEFAULT_OVERHEAD_BYTES
    bandwidth_bytes_per_second: int = 0
    capability: str = ""
    read_bytes_per_second: int = 0
    boundary_ns: int = 0
    matrix_flops_per_second: int = 0


#: Keys of a device that are measured.
MEASURED = ("read_bytes_per_second", "boundary_ns", "matrix_flops_per_second")

#: Memory of the CUDA context and libraries on devices where it was not measured: as much as on an H200, the most that
#: was (:mod:`tpplan.hardware.catalogue`).
UNMEASURED_OVERHEAD_BYTES = 890 * 2**20


#: More devices than this in a list is a mistake or an attack.
MAX_DEVICES = 4096

#: Devices that a sentence names.
_NAMED = 3

#: What makes bandwidths known.
BANDWIDTHS_HINT = (
    "name GPUs of the catalogue in --gpus, such as RTX4090:20GiB, "
    "or give bandwidth_bytes_per_second in a devices file, whose names are not looked up"
)


def bandwidths_unknown(names: Mapping[int, str]) -> str:
    """Say why no speed is told of devices whose bandwidth nobody knows, by their indices and names."""
    return f"no tokens/s, because the bandwidth of {named(names)} is unknown"


def named(names: Mapping[int, str]) -> str:
    """Write devices by their indices and names, the first of many: ``device 0 (RTX 4090), 1 (RTX 3060)``."""
    return (
        "device " + ", ".join(f"{i} ({name})" for i, name in [*names.items()][:_NAMED]) + ", …" * (len(names) > _NAMED)
    )
