"""GPUs that people run language models on: memory, bandwidth, compute capability.

Memory is in MiB (2^20 bytes): the capacity that the vendor states, except where the driver shows a program clearly
less than that, which is then what stands here. Those are the data centre cards that keep error correction codes in
the same memory (T4, A10, L40S …: one sixteenth) and the HBM3 cards (an H200 of "141 GB" has 143771 MiB). A probed
device has its driver's exact number. Bandwidth is the peak of the memory in GB/s of 10^9 bytes, as vendors state it,
rounded to a whole number. One half of a card with two GPUs, or one GPU of several on a board, is an entry by itself.

Each group names its source. Numbers that the source gives only as transfer rate and bus width are their product:
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
    """A GPU as it is sold.

    Attributes:
        name: short, without the vendor.
        memory_bytes: that a program can use.
        bandwidth_bytes_per_second: peak, of its memory.
        capability: CUDA compute capability; empty for AMD.
        source: where the numbers are from.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: int
    capability: str
    source: str


@frozen
class Overhead:
    """What a process's driver context and libraries take of a GPU's memory.

    Attributes:
        bytes: how much.
        source: how that is known.
    """

    bytes: int
    source: str


#: While decoders ran on one, two and four, with driver 580, CUDA 13.0 and torch 2.11: 765 to 769 MiB of the driver and
#: libraries, 64 of cuBLAS in torch's memory, and 47 to 60 that torch keeps beyond the peak of what was asked of it.
#: Together these were 878 to 886, rounded up, for a budget has to hold.
_MEASURED = (
    "measured on H200s with decoders, driver 580, torch 2.11: driver and libraries 769 MiB, "
    "cuBLAS 64, kept by torch 47 to 60; at most 886, rounded up"
)
_REPORTED = "estimate: contexts of about 300 MiB are reported, a first matrix product took 98 MiB; rounded up"

#: By compute capability, where the general estimate would be too low.
_OVERHEADS = {
    "9.0": Overhead(890 * MIB, _MEASURED),
    "10.0": Overhead(890 * MIB, f"not measured, taken as an H200's: {_MEASURED}"),
}

# Source, then rows of: name, MiB, GB/s, capability, other names. A name that several rows share is ambiguous: it can
# be told only by the memory. Where form factors of equal memory share a name it means the SXM or workstation one.
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

#: Words that a name may have or not, and everything that is neither letter nor digit.
_OPTIONAL = re.compile(
    "nvidia|geforce|gtx|rtx|amd|radeon|tesla|instinct|generation|blackwell|workstation|edition|[^a-z0-9]+"
)

#: The driver shows a little less or more than a card is sold with; two cards of one name are further apart.
_TOLERANCE = 0.15


def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the catalogue, in its order."""
    return tuple(dict.fromkeys(gpu for found in _index().values() for gpu in found))


def lookup(name: str) -> tuple[Gpu, ...]:
    """Return the GPUs that a name can mean: none, one, or several that differ in memory or form."""
    return _index().get(_key(name), ())


def find(name: str) -> Gpu:
    """Return the GPU of a name, ignoring case, spaces, ``-``, ``_`` and words such as ``NVIDIA``, ``RTX``, ``Radeon``.

    Raises:
        DeviceError: no GPU has this name, with a near one as a hint, or several have.
    """
    found = lookup(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(gpu.name for gpu in found)
        raise DeviceError(f"the GPU name {name[:60]!r} can mean {names}", "write one of them in full")
    from difflib import get_close_matches  # noqa: PLC0415 - only for the message

    near = get_close_matches(_key(name[:60]), list(_index()), n=1)
    other = "write its memory instead, such as 24GiB"
    hint = f"did you mean {_index()[near[0]][0].name}? for a GPU that tpplan does not know, {other}" if near else other
    raise DeviceError(f"tpplan knows no GPU named {name[:60]!r}", hint)


def identify(name: str, memory_bytes: int) -> tuple[Gpu, ...]:
    """Return the GPUs that a driver's name can mean in view of the memory that it shows."""
    return tuple(gpu for gpu in lookup(name) if abs(gpu.memory_bytes - memory_bytes) < _TOLERANCE * gpu.memory_bytes)


def overhead(capability: str) -> Overhead:
    """Return the overhead of a GPU of a compute capability (empty for AMD), and how it is known."""
    return _OVERHEADS.get(capability, Overhead(DEFAULT_OVERHEAD_BYTES, _REPORTED))


@cache
def _index() -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs by every name that they have."""
    index: dict[str, tuple[Gpu, ...]] = {}
    for source, rows in _TABLE.items():
        for name, mib, gigabytes, capability, others in rows:
            gpu = Gpu(name, mib * MIB, gigabytes * 10**9, capability, source)
            for key in dict.fromkeys(map(_key, (name, *others))):
                index[key] = (*index.get(key, ()), gpu)
    return index


def _key(name: str) -> str:
    """Return the part of a name that tells GPUs apart."""
    return _OPTIONAL.sub("", name.casefold())
