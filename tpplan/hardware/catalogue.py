"""Catalogue of GPUs that run language models: memory, bandwidth and compute capability.

Memory is in MiB (2^20 bytes), in two columns. The first is the capacity in the name: what the vendor states, or what
the driver shows in all if that is clearly less (data centre cards that keep error correction codes in the same memory
(T4, A10, L40S …: one sixteenth), and HBM3 cards: an H200 of "141 GB" has 143771 MiB). The second is what a program is
handed out: the total of ``cudaMemGetInfo`` or ``hipMemGetInfo``. NVIDIA's driver keeps 350 to 650 MiB of a GPU for
itself, more with newer versions; the column has the least that public logs of Linux machines show: torch's "GPU 0 has a
total capacity of …", llama.cpp's "VRAM: … MiB" and YOLO's "CUDA:0 (name, … MiB)", such as pytorch/torchchat#1341 (RTX
4090: 23.52 GiB) and ollama/ollama#9415 (RTX 5090: 32117 MiB). Where none was found, it is 0, and an estimate takes its
place that is below all that were found: :func:`_estimate`.

Bandwidth is the vendor's peak memory bandwidth in GB/s (10^9 bytes), rounded to a whole number. Each GPU of a card or
board with several is an entry of its own. Each group names the source of names, capacities and bandwidths. If the
source gives only transfer rate and bus width, bandwidth is their product: 20 Gbit/s × 320 bit / 8 = 800 GB/s.
"""

from __future__ import annotations

import re
from functools import cache

from attrs import frozen

from tpplan.core.device import UNMEASURED_OVERHEAD_BYTES
from tpplan.core.entry_points import added
from tpplan.errors import DeviceError

MIB = 2**20
#: Entry points of packages with GPUs of their own, each an instance of :class:`Gpu`.
ENTRY_POINTS = "tpplan.gpus"


@frozen
class Gpu:
    """A GPU product.

    Attributes:
        name: short name without the vendor.
        nominal_bytes: capacity in the name, or the driver's total if that is clearly less.
        memory_bytes: memory that a program is handed out, the most that a plan may use; of GPUs that share the
            system's memory without the system's part.
        measured: whether logs show that memory; otherwise it is estimated.
        unified: whether the GPU shares the system's memory.
        bandwidth_bytes_per_second: peak memory bandwidth.
        capability: CUDA compute capability; empty for AMD.
        source: source of name, capacity and bandwidth.
    """

    name: str
    nominal_bytes: int
    memory_bytes: int
    measured: bool
    unified: bool
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
#: The sum was 878 to 886 MiB (885 on an H100); it is rounded up, because a budget must not be exceeded.
_MEASURED = (
    "measured on H200s with decoders, driver 580, torch 2.11: driver and libraries 769 MiB, "
    "cuBLAS 64, kept by torch 47 to 60; at most 886, rounded up"
)

#: Overheads by compute capability, where they were measured.
_OVERHEADS = {"9.0": Overhead(890 * MIB, _MEASURED)}

#: Of every other GPU, AMD's included. Older ones may well take less: contexts of 300 MiB are reported.
_UNMEASURED = Overhead(UNMEASURED_OVERHEAD_BYTES, f"not measured, taken as an H200's: {_MEASURED}")

# Source, then rows of: name, MiB in the name, MiB handed out or 0, GB/s, capability, aliases. A name that several rows
# share is ambiguous; only the memory distinguishes them. A name shared by form factors of equal memory means the SXM or
# workstation one.
_Row = tuple[str, int, int, int, str, tuple[str, ...]]
_TABLE: dict[str, tuple[_Row, ...]] = {
    "NVIDIA GeForce product pages": (
        ("GTX 1060 6GB", 6144, 6063, 192, "6.1", ("GTX 1060",)),
        ("GTX 1070", 8192, 0, 256, "6.1", ()),
        ("GTX 1070 Ti", 8192, 0, 256, "6.1", ()),
        ("GTX 1080", 8192, 8098, 320, "6.1", ()),
        ("GTX 1080 Ti", 11264, 11172, 484, "6.1", ()),
        ("TITAN Xp", 12288, 0, 548, "6.1", ()),
        ("TITAN V", 12288, 0, 653, "7.0", ()),
        ("GTX 1650", 4096, 3712, 128, "7.5", ()),
        ("GTX 1660", 6144, 0, 192, "7.5", ()),
        ("GTX 1660 SUPER", 6144, 0, 336, "7.5", ()),
        ("GTX 1660 Ti", 6144, 5747, 288, "7.5", ()),
        ("TITAN RTX", 24576, 0, 672, "7.5", ()),
        ("RTX 2060 6GB", 6144, 5918, 336, "7.5", ("RTX 2060",)),
        ("RTX 2060 12GB", 12288, 11833, 336, "7.5", ("RTX 2060",)),
        ("RTX 2060 SUPER", 8192, 0, 448, "7.5", ()),
        ("RTX 2070", 8192, 0, 448, "7.5", ()),
        ("RTX 2070 SUPER", 8192, 0, 448, "7.5", ()),
        ("RTX 2080", 8192, 0, 448, "7.5", ()),
        ("RTX 2080 SUPER", 8192, 0, 496, "7.5", ()),
        ("RTX 2080 Ti", 11264, 10817, 616, "7.5", ()),
        ("RTX 3050", 8192, 0, 224, "8.6", ()),
        ("RTX 3050 6GB", 6144, 0, 168, "8.6", ()),
        ("RTX 3060", 12288, 11906, 360, "8.6", ()),
        ("RTX 3060 8GB", 8192, 0, 240, "8.6", ()),
        ("RTX 3060 Ti", 8192, 7833, 448, "8.6", ()),
        ("RTX 3070", 8192, 7819, 448, "8.6", ()),
        ("RTX 3070 Ti", 8192, 7840, 608, "8.6", ()),
        ("RTX 3080 10GB", 10240, 0, 760, "8.6", ("RTX 3080",)),
        ("RTX 3080 12GB", 12288, 0, 912, "8.6", ("RTX 3080",)),
        ("RTX 3080 Ti", 12288, 11910, 912, "8.6", ()),
        ("RTX 3090", 24576, 24123, 936, "8.6", ()),
        ("RTX 3090 Ti", 24576, 24112, 1008, "8.6", ()),
        ("RTX 4060", 8192, 7807, 272, "8.9", ()),
        ("RTX 4060 Ti 8GB", 8192, 0, 288, "8.9", ("RTX 4060 Ti",)),
        ("RTX 4060 Ti 16GB", 16384, 0, 288, "8.9", ("RTX 4060 Ti",)),
        ("RTX 4070", 12288, 11866, 504, "8.9", ()),
        ("RTX 4070 SUPER", 12288, 0, 504, "8.9", ()),
        ("RTX 4070 Ti", 12288, 0, 504, "8.9", ()),
        ("RTX 4070 Ti SUPER", 16384, 0, 672, "8.9", ()),
        ("RTX 4080", 16384, 0, 717, "8.9", ()),
        ("RTX 4080 SUPER", 16384, 15937, 736, "8.9", ()),
        ("RTX 4090", 24576, 24080, 1008, "8.9", ()),
        ("RTX 4090 D", 24576, 0, 1008, "8.9", ()),
        ("RTX 5050", 8192, 0, 320, "12.0", ()),
        ("RTX 5060", 8192, 7707, 448, "12.0", ()),
        ("RTX 5060 Ti 8GB", 8192, 0, 448, "12.0", ("RTX 5060 Ti",)),
        ("RTX 5060 Ti 16GB", 16384, 15816, 448, "12.0", ("RTX 5060 Ti",)),
        ("RTX 5070", 12288, 0, 672, "12.0", ()),
        ("RTX 5070 Ti", 16384, 15808, 896, "12.0", ()),
        ("RTX 5080", 16384, 15840, 960, "12.0", ()),
        ("RTX 5090", 32768, 32109, 1792, "12.0", ()),
        ("RTX 5090 D", 32768, 0, 1792, "12.0", ()),
    ),
    "NVIDIA workstation data sheets": (
        ("Quadro RTX 5000", 16384, 15927, 448, "7.5", ()),
        ("Quadro RTX 6000", 24576, 0, 672, "7.5", ()),
        ("Quadro RTX 8000", 49152, 48380, 672, "7.5", ("RTX 8000",)),
        ("RTX A2000 6GB", 6144, 0, 288, "8.6", ("RTX A2000",)),
        ("RTX A2000 12GB", 12288, 0, 288, "8.6", ("RTX A2000",)),
        ("RTX A4000", 16384, 15979, 448, "8.6", ()),
        ("RTX A4500", 20480, 0, 640, "8.6", ()),
        ("RTX A5000", 24576, 0, 768, "8.6", ()),
        ("RTX A5500", 24576, 0, 768, "8.6", ()),
        ("RTX A6000", 49152, 48532, 768, "8.6", ()),
        ("RTX 2000 Ada", 16384, 0, 224, "8.9", ()),
        ("RTX 4000 Ada", 20480, 0, 360, "8.9", ()),
        ("RTX 4000 SFF Ada", 20480, 0, 280, "8.9", ()),
        ("RTX 4500 Ada", 24576, 0, 432, "8.9", ()),
        ("RTX 5000 Ada", 32768, 0, 576, "8.9", ()),
        ("RTX 5880 Ada", 49152, 0, 960, "8.9", ()),
        ("RTX 6000 Ada", 49152, 48520, 960, "8.9", ("A6000 Ada",)),
        ("RTX PRO 2000 Blackwell", 16384, 0, 288, "12.0", ()),
        ("RTX PRO 4000 Blackwell", 24576, 0, 672, "12.0", ()),
        ("RTX PRO 4500 Blackwell", 32768, 0, 896, "12.0", ()),
        ("RTX PRO 5000 Blackwell 48GB", 49152, 0, 1344, "12.0", ("RTX PRO 5000 Blackwell",)),
        ("RTX PRO 5000 Blackwell 72GB", 73728, 0, 1344, "12.0", ("RTX PRO 5000 Blackwell",)),
        ("RTX PRO 6000 Blackwell", 98304, 97247, 1792, "12.0", ()),
        ("RTX PRO 6000 Blackwell Max-Q", 98304, 97247, 1792, "12.0", ()),
        ("RTX PRO 6000 Blackwell Server", 98304, 0, 1597, "12.0", ()),
    ),
    "NVIDIA data centre data sheets; capacity of cards with codes in it and of HBM3 cards as the driver shows it": (
        ("P4", 8192, 0, 192, "6.1", ()),
        ("P40", 24576, 0, 346, "6.1", ()),
        ("P100", 16384, 16269, 732, "6.0", ("P100-PCIE-16GB", "P100-SXM2-16GB")),
        ("V100 16GB", 16384, 16143, 900, "7.0", ("V100", "V100-PCIE-16GB", "V100-SXM2-16GB")),
        ("V100 32GB", 32768, 32494, 900, "7.0", ("V100", "V100-PCIE-32GB", "V100-SXM2-32GB")),
        ("V100S 32GB", 32768, 0, 1134, "7.0", ("V100S", "V100S-PCIE-32GB")),
        ("T4", 15360, 14904, 320, "7.5", ()),
        ("A2", 15356, 0, 200, "8.6", ()),
        ("A10", 23028, 0, 600, "8.6", ()),
        ("A10G", 23028, 0, 600, "8.6", ()),
        ("A16", 15356, 0, 200, "8.6", ()),
        ("A30", 24576, 24164, 933, "8.0", ()),
        ("A40", 46068, 0, 696, "8.6", ()),
        ("A100 40GB", 40960, 40320, 1555, "8.0", ("A100", "A100-SXM4-40GB", "A100-PCIE-40GB", "A100 40GB PCIe")),
        ("A100 80GB", 81920, 81044, 2039, "8.0", ("A100", "A100-SXM4-80GB", "A100 80GB SXM")),
        ("A100 PCIe 80GB", 81920, 81044, 1935, "8.0", ("A100 80GB PCIe",)),
        ("A800 80GB", 81920, 0, 2039, "8.0", ("A800", "A800-SXM4-80GB")),
        ("L4", 23034, 22553, 300, "8.9", ()),
        ("L20", 46068, 45457, 864, "8.9", ()),
        ("L40", 46068, 0, 864, "8.9", ()),
        ("L40S", 46068, 45450, 864, "8.9", ()),
        ("H20", 97871, 0, 4000, "9.0", ("H20 96GB",)),
        ("H20-3e", 143771, 0, 4800, "9.0", ("H20 141GB",)),
        ("H100", 81559, 80993, 3350, "9.0", ("H100 80GB HBM3", "H100 SXM", "H100 SXM5")),
        ("H100 PCIe", 81559, 0, 2000, "9.0", ("H100 80GB PCIe",)),
        ("H100 NVL", 95830, 95227, 3900, "9.0", ()),
        ("H800", 81559, 0, 3350, "9.0", ("H800 SXM",)),
        ("GH200 96GB", 97871, 0, 4000, "9.0", ("GH200", "GH200 480GB")),
        ("GH200 144GB", 147456, 0, 4900, "9.0", ("GH200", "GH200 144G HBM3e")),
        ("H200", 143771, 143068, 4800, "9.0", ("H200 SXM",)),
        ("H200 NVL", 143771, 0, 4800, "9.0", ()),
        ("B200", 183359, 182625, 7700, "10.0", ()),
        ("GB200", 189471, 0, 8000, "10.0", ()),
        ("B300", 275040, 274109, 8000, "10.3", ("B300 SXM6", "B300 SXM6 AC")),
    ),
    "AMD Radeon product pages": (
        ("RX 6700 XT", 12288, 12272, 384, "", ()),
        ("RX 6750 XT", 12288, 0, 432, "", ()),
        ("RX 6800", 16384, 16368, 512, "", ("RX 6800/6800 XT / 6900 XT",)),
        ("RX 6800 XT", 16384, 0, 512, "", ("RX 6800/6800 XT / 6900 XT",)),
        ("RX 6900 XT", 16384, 0, 512, "", ("RX 6800/6800 XT / 6900 XT",)),
        ("RX 6950 XT", 16384, 0, 576, "", ()),
        ("RX 7600", 8192, 0, 288, "", ()),
        ("RX 7600 XT", 16384, 0, 288, "", ()),
        ("RX 7700 XT", 12288, 0, 432, "", ("RX 7700 XT / 7800 XT",)),
        ("RX 7800 XT", 16384, 0, 624, "", ("RX 7700 XT / 7800 XT",)),
        ("RX 7900 GRE", 16384, 0, 576, "", ("RX 7900 XT/7900 XTX/7900 GRE/7900M",)),
        ("RX 7900 XT", 20480, 20464, 800, "", ("RX 7900 XT/7900 XTX", "RX 7900 XT/7900 XTX/7900 GRE/7900M")),
        ("RX 7900 XTX", 24576, 24560, 960, "", ("RX 7900 XT/7900 XTX", "RX 7900 XT/7900 XTX/7900 GRE/7900M")),
        ("RX 9060 XT 8GB", 8192, 0, 320, "", ("RX 9060 XT",)),
        ("RX 9060 XT 16GB", 16384, 0, 320, "", ("RX 9060 XT",)),
        ("RX 9070 GRE", 12288, 0, 432, "", ("RX 9070/9070 XT/9070 GRE",)),
        ("RX 9070", 16384, 0, 640, "", ("RX 9070/9070 XT/9070 GRE",)),
        ("RX 9070 XT", 16384, 0, 640, "", ("RX 9070/9070 XT/9070 GRE",)),
        ("AI PRO R9700", 32768, 32624, 640, "", ("R9700",)),
        ("Radeon VII", 16384, 0, 1024, "", ()),
        ("PRO VII", 16384, 16368, 1024, "", ()),
        ("PRO V620", 32768, 30704, 512, "", ("V620",)),
        ("PRO W6800", 32768, 0, 512, "", ("W6800",)),
        ("PRO W7700", 16384, 0, 576, "", ("W7700",)),
        ("PRO W7800 32GB", 32768, 0, 576, "", ("PRO W7800", "W7800 32GB", "W7800")),
        ("PRO W7800 48GB", 49152, 0, 864, "", ("PRO W7800", "W7800 48GB", "W7800")),
        ("PRO W7900", 49152, 0, 864, "", ("W7900",)),
    ),
    "AMD Instinct data sheets; the MI250 and MI250X by graphics compute die": (
        ("MI50 16GB", 16384, 16368, 1024, "", ("MI50", "MI60 / MI50")),
        ("MI50 32GB", 32768, 32069, 1024, "", ("MI50",)),
        ("MI60", 32768, 0, 1024, "", ("MI60 / MI50",)),
        ("MI100", 32768, 0, 1229, "", ()),
        ("MI210", 65536, 65520, 1638, "", ()),
        ("MI250", 65536, 0, 1638, "", ("MI250X/MI250",)),
        ("MI250X", 65536, 0, 1638, "", ("MI250X/MI250", "MI200 (MCM) OAM LC MBA HPE C2")),
        ("MI300A", 131072, 0, 5300, "", ()),
        ("MI300X", 196608, 196288, 5300, "", ("MI300X OAM", "MI300X VF")),
        ("MI308X", 196608, 0, 5300, "", ("MI308X OAM",)),
        ("MI325X", 262144, 0, 6000, "", ("MI325X OAM",)),
        ("MI350X", 294912, 0, 8000, "", ("MI350X OAM",)),
        ("MI355X", 294912, 0, 8000, "", ("MI355X OAM",)),
    ),
}

#: GPUs that share the system's memory, likewise. A Strix Halo has what its owner sets; 96 GiB of its 128 is the most
#: that its firmware sets aside.
_UNIFIED: dict[str, tuple[_Row, ...]] = {
    "NVIDIA product pages of DGX Spark and Jetson; memory as CUDA shows it": (
        ("GB10", 131072, 122035, 273, "12.1", ("DGX Spark",)),
        ("Jetson AGX Thor", 131072, 125748, 273, "11.0", ("Thor", "AGX Thor", "Jetson Thor", "Jetson T5000")),
        ("Jetson AGX Orin 32GB", 32768, 0, 205, "8.7", ("Orin", "AGX Orin", "Jetson Orin", "Jetson AGX Orin")),
        ("Jetson AGX Orin 64GB", 65536, 62827, 205, "8.7", ("Orin", "AGX Orin", "Jetson Orin", "Jetson AGX Orin")),
    ),
    "AMD Ryzen product pages": (
        ("Strix Halo", 98304, 98304, 256, "", ("Radeon 8060S", "8060S Graphics", "Ryzen AI Max+ 395", "AI Max+ 395")),
    ),
}

#: Optional words of a name, and everything that is neither a letter nor a digit. The marks (TM) and (R) are in names
#: that drivers tell.
_OPTIONAL = re.compile(  # a TITAN RTX is another GPU than a TITAN
    r"nvidia|geforce|gtx|(?<!titan)(?<!titan[^a-z0-9])rtx|rx|amd|radeon|tesla|instinct|generation|blackwell"
    r"|workstation|edition|\(tm\)|\(r\)|[^a-z0-9]+"
)

#: Optional words that no two GPUs share with different numbers: they stay for telling slips of spelling.
_VENDORS = re.compile(r"nvidia|geforce|amd|radeon|tesla|instinct|generation|workstation|edition|[^a-z0-9]+")

#: Memory at the end of a name: 16GB, 16 GiB, -16G. Behind a letter alone a number is the name's: L40G.
_MEMORY = re.compile(
    r"(?P<stem>.*(?:[0-9].*[^0-9]|[^\W0-9].*[^a-z0-9]))(?P<size>[1-9][0-9]{0,3}) ?gi?b?", re.IGNORECASE | re.DOTALL
)

#: Relative deviation of the memory that a driver reports; cards that share a name differ by more.
_TOLERANCE = 0.15

#: How much more memory a modified card may have than the one whose name it bears (an RTX 4090 of 96 GB has four times
#: as much), and what is still no modification, but the vendor's number: 48 GiB of an L40S, whose driver shows 45.
MOST_MODIFIED = 4
_UNMODIFIED = 1.1

#: Characters of a name; in longer ones nobody looks for memory.
_LONGEST = 100

#: Letters of a word that may have a slip; in a shorter one, another letter is another GPU (H100 and A100).
_SLIP = 4
_PREFIX = 2


def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs, in the order of the catalogue."""
    return tuple(dict.fromkeys(gpu for found in _index().values() for gpu in found))


def lookup(name: str) -> tuple[Gpu, ...]:
    """Return the GPUs that match a name: none, one, or several that differ in memory or form factor.

    The memory may stand behind the name of any GPU, in GB, GiB or G, if it is that GPU's.
    """
    if found := _index().get(_key(name)):
        return found
    if found := tuple(gpu for gpu in _others() if _key(gpu.name) == _key(name)):
        return found
    stem, gibibytes = split(name)
    if not gibibytes:
        return ()
    if found := _index().get(_key(f"{stem} {gibibytes}GB")):
        return found
    size = gibibytes * 2**30  # an L40S of 48 GB shows 45 GiB
    return tuple(gpu for gpu in _index().get(_key(stem), ()) if size / _UNMODIFIED < gpu.nominal_bytes <= size)


def find(name: str) -> Gpu:
    """Find a GPU by name, ignoring case, spaces, ``-``, ``_`` and words such as ``NVIDIA``, ``RTX``, ``Radeon``.

    Raises:
        DeviceError: no GPU has this name (the hint has one that differs by a slip of spelling), or several have.
    """
    found = lookup(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(gpu.name for gpu in found)
        raise DeviceError(f"the GPU name {name[:60]!r} can mean {names}", "write one of them in full")
    stem, gibibytes = split(name[:60])
    size = f"{gibibytes}GiB" if gibibytes else ""
    hint = f"write its memory instead, such as {size or '24GiB'}, or name it in a devices file with its bandwidth"
    if size and modified(stem, gibibytes * 2**30):
        hint = f"did you mean {stem.strip(' -_')}:{size}, a modified card? otherwise {hint}"
    elif near := _near(stem):
        hint = f"did you mean {near}? for a GPU that tpplan does not know, {hint}"
    raise DeviceError(f"tpplan knows no GPU named {name[:60]!r}", hint)


def split(name: str) -> tuple[str, int]:
    """Return a name without the memory at its end, and that memory in GiB; 0 if there is none."""
    match = _MEMORY.fullmatch(name) if len(name) <= _LONGEST else None
    return (match["stem"], int(match["size"])) if match else (name, 0)


def modified(name: str, budget_bytes: int) -> Gpu | None:
    """Return the GPU of a name that has less memory than a budget, so that the card must have been given more.

    Of several with that name it is the one whose memory was multiplied, else the smallest. None if a GPU of that name
    has the memory, or none would with four times as much.
    """
    found = lookup(name)
    fitting = [
        gpu
        for gpu in found
        if gpu.nominal_bytes * (1 if gpu.unified else _UNMODIFIED) < budget_bytes <= gpu.nominal_bytes * MOST_MODIFIED
    ]
    if not fitting or len(fitting) < len(found):
        return None
    return min(fitting, key=lambda gpu: (budget_bytes % gpu.nominal_bytes != 0, gpu.nominal_bytes))


def identify(name: str, memory_bytes: int) -> tuple[Gpu, ...]:
    """Return the GPUs that match the name and memory that a driver reports.

    Of a GPU that shares the system's memory the driver reports what its owner set, so the name alone tells it.
    """
    found = lookup(name)
    if len(found) == 1 and found[0].unified:
        return found
    return tuple(gpu for gpu in found if abs(gpu.nominal_bytes - memory_bytes) < _TOLERANCE * gpu.nominal_bytes)


def overhead(capability: str) -> Overhead:
    """Return the overhead of GPUs with a compute capability (empty for AMD), and its source."""
    return _OVERHEADS.get(capability, _UNMEASURED)


def system_share(total_bytes: int) -> int:
    """Return what a GPU that shares the system's memory leaves to the system: 2 %, at least 2 GiB."""
    return max(2 * 2**30, total_bytes // 50)


@cache
def _others() -> tuple[Gpu, ...]:
    """Return the GPUs of other packages."""
    return tuple(added(ENTRY_POINTS, Gpu, DeviceError))


@cache
def _index() -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs by the keys of their names and aliases."""
    index: dict[str, tuple[Gpu, ...]] = {}
    for table in (_TABLE, _UNIFIED):
        for source, rows in table.items():
            for name, nominal, known, gigabytes, capability, others in rows:
                memory = (known or _estimate(nominal, capability)) * MIB
                unified = table is _UNIFIED
                gpu = Gpu(
                    name=name,
                    nominal_bytes=nominal * MIB,
                    memory_bytes=memory - system_share(memory) if unified else memory,
                    measured=bool(known),
                    unified=unified,
                    bandwidth_bytes_per_second=gigabytes * 10**9,
                    capability=capability,
                    source=source,
                )
                for key in dict.fromkeys(map(_key, (name, *others))):
                    index[key] = (*index.get(key, ()), gpu)
    return index


def _estimate(nominal_mib: int, capability: str) -> int:
    """Return MiB that a program is handed out of a GPU of which no log was found: 2 % less than the nominal.

    NVIDIA's driver keeps at least 350 to 650 MiB however small the GPU is, so it is 640 MiB less at least.
    """
    return nominal_mib - max(nominal_mib // 50, 640 if capability else 0)


def _key(name: str) -> str:
    """Return the part of a name that distinguishes GPUs."""
    return _OPTIONAL.sub("", name.casefold())


def _near(name: str) -> str:
    """Return the GPU whose name differs by one slip of spelling, in digits by two swapped; empty if there is none."""
    zeros = re.sub("o+(?=[0-9])|(?<=[0-9])o+", lambda match: "0" * len(match[0]), name, flags=re.IGNORECASE)
    if zeros != name and (found := lookup(zeros)):
        return found[0].name
    meant = _parts(name)
    for gpu in gpus():
        digits, prefix, rest = _parts(gpu.name)
        if digits != meant[0] or not digits:
            continue
        if rest == meant[2] and len(meant[1]) >= _PREFIX and _one_slip(prefix, meant[1]):
            return gpu.name
        if prefix in {meant[1], f"rtx{meant[1]}"} and len(meant[2]) >= _SLIP and _one_slip(rest, meant[2]):
            return gpu.name
    number = " ".join(meant[0])
    for gpu in gpus():  # another digit is another GPU, perhaps one of tomorrow
        digits, prefix, rest = _parts(gpu.name)
        other, is_named = " ".join(digits), prefix in {meant[1], f"rtx{meant[1]}"} and rest == meant[2]
        if is_named and sorted(other) == sorted(number) and _one_slip(other, number):
            return gpu.name
    return ""


def _parts(name: str) -> tuple[tuple[str, ...], str, str]:
    """Return the numbers of a name, the letters before the first of them, and the other letters."""
    word = _VENDORS.sub("", name.casefold())
    prefix, *rest = re.split("[0-9]+", word)
    return tuple(re.findall("[0-9]+", word)), prefix, "".join(rest)


def _one_slip(a: str, b: str) -> bool:
    """Tell whether one letter added, left out, replaced, or swapped with the next makes one text of the other."""
    if a == b or abs(len(a) - len(b)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])
