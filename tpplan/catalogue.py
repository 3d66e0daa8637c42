"""Catalogue of GPUs that run language models: memory, bandwidth and compute capability.

Memory is in MiB (2^20 bytes). It is the capacity that the vendor states, or the capacity that the driver reports if
that is clearly less: for data centre cards that keep error correction codes in the same memory (T4, A10, L40S …: one
sixteenth) and for HBM3 cards (an H200 of "141 GB" has 143771 MiB). Probed devices have the exact number of their
driver. Bandwidth is the vendor's peak memory bandwidth in GB/s (10^9 bytes), rounded to a whole number. Each GPU of a
card or board with several is an entry of its own.

Each group names its source. If the source gives only transfer rate and bus width, bandwidth is their product:
20 Gbit/s × 320 bit / 8 = 800 GB/s.
"""

from __future__ import annotations

import re
from functools import cache

from attrs import frozen

from tpplan.devices import DEFAULT_OVERHEAD_BYTES
from tpplan.errors import DeviceError

MIB = 2**20


@frozen
class Gpu:
    """A GPU product.

    Attributes:
        name: short name without the vendor.
        memory_bytes: memory that a program can use.
        bandwidth_bytes_per_second: peak memory bandwidth.
        capability: CUDA compute capability; empty for AMD.
        source: source of the numbers.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: int
    capability: str
    source: str


@frozen
class Overhead:
    """GPU memory that a process's driver context and libraries take.

    Attributes:
        bytes: size in bytes.
        source: how the size was determined.
    """

    bytes: int
    source: str


#: Measured with decoders on one, two and four H200s, driver 580, CUDA 13.0 and torch 2.11: 765 to 769 MiB of the driver
#: and libraries, 64 MiB of cuBLAS in torch's memory, and 47 to 60 MiB that torch reserves beyond its peak allocation.
#: The sum was 878 to 886 MiB; it is rounded up, because a budget must not be exceeded.
_MEASURED = (
    "measured on H200s with decoders, driver 580, torch 2.11: driver and libraries 769 MiB, "
    "cuBLAS 64, kept by torch 47 to 60; at most 886, rounded up"
)
_REPORTED = "estimate: contexts of about 300 MiB are reported, a first matrix product took 98 MiB; rounded up"

#: Overheads by compute capability, where the general estimate is too low.
_OVERHEADS = {
    "9.0": Overhead(890 * MIB, _MEASURED),
    "10.0": Overhead(890 * MIB, f"not measured, taken as an H200's: {_MEASURED}"),
}

# Source, then rows of: name, MiB, GB/s, capability, aliases. A name that several rows share is ambiguous; only the
# memory distinguishes them. A name shared by form factors of equal memory means the SXM or workstation one.
_Row = tuple[str, int, int, str, tuple[str, ...]]
_TABLE: dict[str, tuple[_Row, ...]] = {
    "NVIDIA GeForce product pages": (
        ("GTX 1080 Ti", 11264, 484, "6.1", ()),
        ("TITAN RTX", 24576, 672, "7.5", ()),
        ("RTX 2060 6GB", 6144, 336, "7.5", ("RTX 2060",)),
        ("RTX 2060 12GB", 12288, 336, "7.5", ("RTX 2060",)),
        ("RTX 2070", 8192, 448, "7.5", ()),
        ("RTX 2070 SUPER", 8192, 448, "7.5", ()),
        ("RTX 2080", 8192, 448, "7.5", ()),
        ("RTX 2080 SUPER", 8192, 496, "7.5", ()),
        ("RTX 2080 Ti", 11264, 616, "7.5", ()),
        ("RTX 3050", 8192, 224, "8.6", ()),
        ("RTX 3060", 12288, 360, "8.6", ("RTX 3060 12GB",)),
        ("RTX 3060 Ti", 8192, 448, "8.6", ()),
        ("RTX 3070", 8192, 448, "8.6", ()),
        ("RTX 3070 Ti", 8192, 608, "8.6", ()),
        ("RTX 3080 10GB", 10240, 760, "8.6", ("RTX 3080",)),
        ("RTX 3080 12GB", 12288, 912, "8.6", ("RTX 3080",)),
        ("RTX 3080 Ti", 12288, 912, "8.6", ()),
        ("RTX 3090", 24576, 936, "8.6", ()),
        ("RTX 3090 Ti", 24576, 1008, "8.6", ()),
        ("RTX 4060", 8192, 272, "8.9", ()),
        ("RTX 4060 Ti 8GB", 8192, 288, "8.9", ("RTX 4060 Ti",)),
        ("RTX 4060 Ti 16GB", 16384, 288, "8.9", ("RTX 4060 Ti",)),
        ("RTX 4070", 12288, 504, "8.9", ()),
        ("RTX 4070 SUPER", 12288, 504, "8.9", ()),
        ("RTX 4070 Ti", 12288, 504, "8.9", ()),
        ("RTX 4070 Ti SUPER", 16384, 672, "8.9", ()),
        ("RTX 4080", 16384, 717, "8.9", ()),
        ("RTX 4080 SUPER", 16384, 736, "8.9", ()),
        ("RTX 4090", 24576, 1008, "8.9", ()),
        ("RTX 4090 D", 24576, 1008, "8.9", ()),
        ("RTX 5060", 8192, 448, "12.0", ()),
        ("RTX 5060 Ti 8GB", 8192, 448, "12.0", ("RTX 5060 Ti",)),
        ("RTX 5060 Ti 16GB", 16384, 448, "12.0", ("RTX 5060 Ti",)),
        ("RTX 5070", 12288, 672, "12.0", ()),
        ("RTX 5070 Ti", 16384, 896, "12.0", ()),
        ("RTX 5080", 16384, 960, "12.0", ()),
        ("RTX 5090", 32768, 1792, "12.0", ()),
    ),
    "NVIDIA workstation data sheets": (
        ("Quadro RTX 5000", 16384, 448, "7.5", ()),
        ("Quadro RTX 6000", 24576, 672, "7.5", ()),
        ("Quadro RTX 8000", 49152, 672, "7.5", ("RTX 8000",)),
        ("RTX A2000 6GB", 6144, 288, "8.6", ("RTX A2000",)),
        ("RTX A2000 12GB", 12288, 288, "8.6", ("RTX A2000",)),
        ("RTX A4000", 16384, 448, "8.6", ()),
        ("RTX A4500", 20480, 640, "8.6", ()),
        ("RTX A5000", 24576, 768, "8.6", ()),
        ("RTX A5500", 24576, 768, "8.6", ()),
        ("RTX A6000", 49152, 768, "8.6", ()),
        ("RTX 2000 Ada", 16384, 224, "8.9", ()),
        ("RTX 4000 Ada", 20480, 360, "8.9", ()),
        ("RTX 4000 SFF Ada", 20480, 280, "8.9", ()),
        ("RTX 4500 Ada", 24576, 432, "8.9", ()),
        ("RTX 5000 Ada", 32768, 576, "8.9", ()),
        ("RTX 5880 Ada", 49152, 960, "8.9", ()),
        ("RTX 6000 Ada", 49152, 960, "8.9", ("A6000 Ada",)),
        ("RTX PRO 2000 Blackwell", 16384, 288, "12.0", ()),
        ("RTX PRO 4000 Blackwell", 24576, 672, "12.0", ()),
        ("RTX PRO 4500 Blackwell", 32768, 896, "12.0", ()),
        ("RTX PRO 5000 Blackwell", 49152, 1344, "12.0", ()),
        ("RTX PRO 6000 Blackwell", 98304, 1792, "12.0", ()),
        ("RTX PRO 6000 Blackwell Max-Q", 98304, 1792, "12.0", ()),
        ("RTX PRO 6000 Blackwell Server", 98304, 1597, "12.0", ()),
    ),
    "NVIDIA data centre data sheets; memory of cards with codes in it and of HBM3 cards as the driver shows it": (
        ("P40", 24576, 346, "6.1", ()),
        ("P100", 16384, 732, "6.0", ("P100 16GB", "P100-PCIE-16GB", "P100-SXM2-16GB")),
        ("V100 16GB", 16384, 900, "7.0", ("V100", "V100-PCIE-16GB", "V100-SXM2-16GB")),
        ("V100 32GB", 32768, 900, "7.0", ("V100", "V100-PCIE-32GB", "V100-SXM2-32GB")),
        ("T4", 15360, 320, "7.5", ()),
        ("A2", 15356, 200, "8.6", ()),
        ("A10", 23028, 600, "8.6", ()),
        ("A10G", 23028, 600, "8.6", ()),
        ("A16", 15356, 200, "8.6", ()),
        ("A30", 24576, 933, "8.0", ()),
        ("A40", 46068, 696, "8.6", ()),
        ("A100 40GB", 40960, 1555, "8.0", ("A100", "A100-SXM4-40GB", "A100-PCIE-40GB", "A100 40GB PCIe")),
        ("A100 80GB", 81920, 2039, "8.0", ("A100", "A100-SXM4-80GB", "A100 80GB SXM")),
        ("A100 PCIe 80GB", 81920, 1935, "8.0", ("A100 80GB PCIe",)),
        ("L4", 23034, 300, "8.9", ()),
        ("L40", 46068, 864, "8.9", ()),
        ("L40S", 46068, 864, "8.9", ()),
        ("H100", 81559, 3350, "9.0", ("H100 80GB HBM3", "H100 SXM", "H100 SXM5", "H100 80GB")),
        ("H100 PCIe", 81559, 2000, "9.0", ("H100 80GB PCIe",)),
        ("H100 NVL", 95830, 3900, "9.0", ()),
        ("GH200 96GB", 97871, 4000, "9.0", ("GH200", "GH200 480GB")),
        ("GH200 144GB", 147456, 4900, "9.0", ("GH200", "GH200 144G HBM3e")),
        ("H200", 143771, 4800, "9.0", ("H200 SXM",)),
        ("H200 NVL", 143771, 4800, "9.0", ()),
        ("B200", 183359, 7700, "10.0", ()),
        ("GB200", 189471, 8000, "10.0", ()),
    ),
    "AMD Radeon product pages": (
        ("RX 6800", 16384, 512, "", ("RX 6800/6800 XT / 6900 XT",)),
        ("RX 6800 XT", 16384, 512, "", ("RX 6800/6800 XT / 6900 XT",)),
        ("RX 6900 XT", 16384, 512, "", ("RX 6800/6800 XT / 6900 XT",)),
        ("RX 6950 XT", 16384, 576, "", ()),
        ("RX 7600 XT", 16384, 288, "", ()),
        ("RX 7700 XT", 12288, 432, "", ("RX 7700 XT / 7800 XT",)),
        ("RX 7800 XT", 16384, 624, "", ("RX 7700 XT / 7800 XT",)),
        ("RX 7900 GRE", 16384, 576, "", ("RX 7900 XT/7900 XTX/7900 GRE/7900M",)),
        ("RX 7900 XT", 20480, 800, "", ("RX 7900 XT/7900 XTX", "RX 7900 XT/7900 XTX/7900 GRE/7900M")),
        ("RX 7900 XTX", 24576, 960, "", ("RX 7900 XT/7900 XTX", "RX 7900 XT/7900 XTX/7900 GRE/7900M")),
        ("RX 9070", 16384, 640, "", ("RX 9070/9070 XT/9070 GRE",)),
        ("RX 9070 XT", 16384, 640, "", ("RX 9070/9070 XT/9070 GRE",)),
        ("AI PRO R9700", 32768, 640, "", ("R9700",)),
        ("PRO W6800", 32768, 512, "", ("W6800",)),
        ("PRO W7800", 32768, 576, "", ("W7800",)),
        ("PRO W7900", 49152, 864, "", ("W7900",)),
    ),
    "AMD Instinct data sheets; the MI250 and MI250X by graphics compute die": (
        ("MI50 16GB", 16384, 1024, "", ("MI50",)),
        ("MI50 32GB", 32768, 1024, "", ("MI50",)),
        ("MI60", 32768, 1024, "", ()),
        ("MI100", 32768, 1229, "", ()),
        ("MI210", 65536, 1638, "", ()),
        ("MI250", 65536, 1638, "", ("MI250X/MI250",)),
        ("MI250X", 65536, 1638, "", ("MI250X/MI250", "MI200 (MCM) OAM LC MBA HPE C2")),
        ("MI300X", 196608, 5300, "", ("MI300X OAM",)),
        ("MI325X", 262144, 6000, "", ("MI325X OAM",)),
        ("MI355X", 294912, 8000, "", ("MI355X OAM",)),
    ),
}

#: Optional words of a name, and everything that is neither a letter nor a digit.
_OPTIONAL = re.compile(
    "nvidia|geforce|gtx|rtx|amd|radeon|tesla|instinct|generation|blackwell|workstation|edition|[^a-z0-9]+"
)

#: Memory at the end of a name; behind a number of the name, G alone may be a part of it.
_MEMORY = re.compile(r"(?:[^0-9a-z]+|(?=[0-9]+ ?gi?b$))([1-9][0-9]{0,3}) ?gi?b?$", re.IGNORECASE)

#: Relative deviation of the memory that a driver reports; cards that share a name differ by more.
_TOLERANCE = 0.15


def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs, in the order of the catalogue."""
    return tuple(dict.fromkeys(gpu for found in _index().values() for gpu in found))


def lookup(name: str) -> tuple[Gpu, ...]:
    """Return the GPUs that match a name: none, one, or several that differ in memory or form factor."""
    return _index().get(_key(name), ())


def find(name: str) -> Gpu:
    """Find a GPU by name, ignoring case, spaces, ``-``, ``_`` and words such as ``NVIDIA``, ``RTX``, ``Radeon``.

    Raises:
        DeviceError: no GPU has this name (the hint has a similar one), or several have.
    """
    found = lookup(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(gpu.name for gpu in found)
        raise DeviceError(f"the GPU name {name[:60]!r} can mean {names}", "write one of them in full")
    from difflib import get_close_matches  # noqa: PLC0415 - only for the message

    stem, *size = _MEMORY.split(name[:60])
    gibibytes = int(size[0]) if size else 24
    other = f"write its memory instead, such as {gibibytes}GiB"
    hint = other
    key = _key(stem)
    begun = [each for each in _index() if re.match(f"{each}(?![0-9])", key)]  # such as 3060 of a 3060 Laptop
    if near := sorted(begun, key=len)[-1:] or get_close_matches(key, list(_index()), n=1):
        gpu = min(_index()[near[0]], key=lambda gpu: abs(gpu.memory_bytes - gibibytes * 2**30))
        hint = f"did you mean {gpu.name}? for a GPU that tpplan does not know, {other}"
    raise DeviceError(f"tpplan knows no GPU named {name[:60]!r}", hint)


def identify(name: str, memory_bytes: int) -> tuple[Gpu, ...]:
    """Return the GPUs that match the name and memory that a driver reports."""
    return tuple(gpu for gpu in lookup(name) if abs(gpu.memory_bytes - memory_bytes) < _TOLERANCE * gpu.memory_bytes)


def overhead(capability: str) -> Overhead:
    """Return the overhead of GPUs with a compute capability (empty for AMD), and its source."""
    return _OVERHEADS.get(capability, Overhead(DEFAULT_OVERHEAD_BYTES, _REPORTED))


@cache
def _index() -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs by the keys of their names and aliases."""
    index: dict[str, tuple[Gpu, ...]] = {}
    for source, rows in _TABLE.items():
        for name, mib, gigabytes, capability, others in rows:
            gpu = Gpu(name, mib * MIB, gigabytes * 10**9, capability, source)
            for key in dict.fromkeys(map(_key, (name, *others))):
                index[key] = (*index.get(key, ()), gpu)
    return index


def _key(name: str) -> str:
    """Return the part of a name that distinguishes GPUs."""
    return _OPTIONAL.sub("", name.casefold())
