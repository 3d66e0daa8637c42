"""Devices as people name them, the catalogue, and the devices file."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_cases import spec as llama
from tpplan import plan
from tpplan.core.device import DEFAULT_OVERHEAD_BYTES, MAX_DEVICES, UNMEASURED_OVERHEAD_BYTES, Device
from tpplan.core.plan import Cache
from tpplan.errors import DeviceError
from tpplan.hardware import catalogue
from tpplan.hardware import file as devices_file
from tpplan.hardware.file import DevicesFile, FileDevice, Link, LinkKind, LinkPath, PeerAccess
from tpplan.hardware.spec import parse_devices, spec_of

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
MIB = 2**20
RTX_3060 = Device(
    name="RTX 3060",
    budget_bytes=11906 * MIB,
    overhead_bytes=UNMEASURED_OVERHEAD_BYTES,
    bandwidth_bytes_per_second=360 * 10**9,
    capability="8.6",
)


def test_sizes_stand_for_gpus_that_have_as_much_memory() -> None:
    """A list of counts and sizes gives one device per GPU, in order, with the overhead of what was not measured."""
    big, small = (
        Device(name=f"{name} GPU", budget_bytes=size, overhead_bytes=UNMEASURED_OVERHEAD_BYTES)
        for name, size in (("24GiB", 24 * GIB), ("12.5 GB", 12_500_000_000))
    )
    assert parse_devices(" 2x24GiB , 12.5 GB ") == (big, big, small)
    assert [d.budget_bytes for d in parse_devices("1MiB,20gb,20 gib")] == [2**20, 20 * 10**9, 20 * GIB]


def test_a_letter_alone_is_a_binary_unit_and_a_note_says_so() -> None:
    """20G is 20 GiB, as cards are sold; who means powers of ten reads how to write them."""
    notes: list[str] = []
    assert parse_devices("2x24g,RTX3090:20G", notes.append) == parse_devices("2x24GiB,RTX3090:20GiB")
    assert notes == [
        "24g is taken as 24GiB; write 24GB for powers of ten",
        "20G is taken as 20GiB; write 20GB for powers of ten",
    ]


def test_catalogue_gpus_bring_memory_bandwidth_capability_and_overhead() -> None:
    """A GPU's name gives its catalogue entry; a budget after a colon replaces its memory only."""
    devices = parse_devices("2xRTX4090,RTX3060,H100:72GiB")
    assert [d.name for d in devices] == ["RTX 4090", "RTX 4090", "RTX 3060", "H100"]
    assert devices[2] == RTX_3060
    assert devices[3] == Device(
        name="H100",
        budget_bytes=72 * GIB,
        overhead_bytes=890 * 2**20,
        bandwidth_bytes_per_second=3350 * 10**9,
        capability="9.0",
    )


@pytest.mark.parametrize(
    "name",
    [
        "rtx3060",
        "RTX 3060",
        "rtx-3060",
        "RTX_3060",
        "NVIDIA GeForce RTX 3060",
        "geforce rtx 3060",
        "3060",
        "RTX 3060 12GB",
        "RTX3060-12G",
        "RTX 3060 12 GiB",
    ],
)
def test_names_are_read_as_people_write_them(name: str) -> None:
    """Case, blanks, hyphens, underscores and the vendor's words make no difference."""
    assert parse_devices(f"1x{name}") == (RTX_3060,)


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        ("RTX4060Ti16G|rtx 4060 ti 16gb|4060Ti-16GB|NVIDIA GeForce RTX 4060 Ti 16G", "RTX 4060 Ti 16GB"),
        ("A100-80G|A100 80GB|a100_80gib", "A100 80GB"),
        ("H100|H100-80G|H100 SXM 80GB|H100_80GB_HBM3", "H100"),
        ("H100-PCIe|h100pcie|NVIDIA H100 PCIe", "H100 PCIe"),
        ("H100 NVL|H100-NVL-94GB", "H100 NVL"),
        ("H20|NVIDIA H20|H20-96G", "H20"),
        ("H200|H200 141GB", "H200"),
        ("L40S|L40S-48G|L40S 45GB", "L40S"),
        ("A10G|A10G-24GB", "A10G"),
        ("GTX1070|1070 8G|GeForce GTX 1070", "GTX 1070"),
        ("7900XTX|RX7900XTX|Radeon RX 7900 XTX 24GB", "RX 7900 XTX"),
        ("9070 XT", "RX 9070 XT"),
        ("GB10|DGX Spark|NVIDIA GB10", "GB10"),
        ("NVIDIA Thor|Jetson Thor", "Jetson AGX Thor"),
        ("AMD Radeon(TM) 8060S Graphics|StrixHalo|Ryzen AI Max+ 395", "Strix Halo"),
        ("TITAN RTX|titan-rtx", "TITAN RTX"),
    ],
)
def test_every_way_of_writing_a_name_is_that_gpu(names: str, gpu: str) -> None:
    """Memory behind a name may be in GB, GiB or G; no GPU is taken for another of nearly the same name."""
    for name in names.split("|"):
        assert [d.name for d in parse_devices(f"{name},2x{name}")] == [gpu] * 3


@pytest.mark.parametrize(
    "name",
    [
        *("B580", "RTX4091", "RTX 4100", "RTX 3050 Ti", "RTX 4090 Laptop GPU", "L40G", "H30", "MI300B", "TITAN", "T40"),
        *("RTX 2090", "RX 7950 XTX", "RTX 4080 Ti", "A1000", "RTX3090Ti20"),
    ],
)
def test_other_gpus_are_not_guessed(name: str) -> None:
    """Another digit, or a letter of few, is another GPU: the hint says how to go on, and names none."""
    with pytest.raises(DeviceError, match=f"tpplan knows no GPU named '{name}'") as raised:
        parse_devices(name)
    assert raised.value.hint.startswith("write its memory instead, such as 24GiB, or name it in a devices file")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RTZ 4090", "RTX 4090"),
        ("RTX 4900", "RTX 4090"),
        ("2xRTX3900", "RTX 3090"),
        ("RTXX3060", "RTX 3060"),
        ("RTX 4070 Supr", "RTX 4070 SUPER"),
        ("RTX 4070 SUPRE", "RTX 4070 SUPER"),
        ("Qadro RTX 8000", "Quadro RTX 8000"),
    ],
)
def test_a_slip_of_spelling_is_pointed_out(name: str, meant: str) -> None:
    """A letter too many, too few, wrong or swapped, or two swapped digits, are told with the GPU that was meant."""
    with pytest.raises(DeviceError) as raised:
        parse_devices(name)
    assert raised.value.hint.startswith(f"did you mean {meant}? ")


@pytest.mark.parametrize(
    ("spec", "name", "nominal"),
    [
        ("RTX3080:20GiB", "RTX 3080 10GB", "10.00 GiB"),
        ("RTX3080:24GiB", "RTX 3080 12GB", "12.00 GiB"),
        ("RTX4090:48GiB", "RTX 4090", "24.00 GiB"),
        ("2080Ti:22GiB", "RTX 2080 Ti", "11.00 GiB"),
        ("RTX4090:96GiB", "RTX 4090", "24.00 GiB"),
    ],
)
def test_modified_cards(spec: str, name: str, nominal: str) -> None:
    """A card that was given more memory keeps its name's bandwidth and capability; a note says how it is taken."""
    notes: list[str] = []
    (device,) = parse_devices(spec, notes.append)
    budget = spec.partition(":")[2]
    assert notes == [f"{budget} is more than the {nominal} of the {name}: taken as a modified card"]
    known = catalogue.find(name)
    assert device == Device(
        name=name,
        budget_bytes=int(budget.removesuffix("GiB")) * GIB,
        overhead_bytes=UNMEASURED_OVERHEAD_BYTES,
        bandwidth_bytes_per_second=known.bandwidth_bytes_per_second,
        capability=known.capability,
    )
    assert parse_devices(spec_of([device, device])) == (device, device)


def test_memory_behind_the_name_of_a_card_that_has_less_leads_to_the_modified_card() -> None:
    """RTX4090-48GB is no card of the catalogue; the hint has a list that is read as the modified one."""
    for name in ("RTX4090-48GB", "4090 48G", "RTX4060Ti-20GB"):
        with pytest.raises(DeviceError) as raised:
            catalogue.find(name)
        assert parse_devices(raised.value.hint.removeprefix("did you mean ").partition(",")[0])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "no device was named"),
        (",", "entry 1 of ',' is empty"),
        ("24GiB,,8GiB", "entry 2 of '24GiB,,8GiB' is empty"),
        ("24GiB,", "entry 2 of '24GiB,' is empty"),
        ("2x", "names no GPU"),
        (":8GiB", "names no GPU"),
        ("0xRTX4090", "'0xRTX4090' asks for 0 devices, expected 1 to 4096"),
        ("0x24GiB", "'0x24GiB' asks for 0 devices, expected 1 to 4096"),
        ("4097x1GiB", "asks for 4097 devices, expected 1 to 4096"),
        ("4000x1GiB,97x1GiB", "4097 devices are more than 4096"),
        ("9" * 5000 + "x1GiB", "expected 1 to 4096"),
        ("1GiB," * 30_000, "a list of devices of 150000 characters is beyond 100000"),
        ("-1x24GiB", "tpplan knows no GPU named '-1x24GiB'"),
        ("24", "memory size '24' has no unit"),
        ("20q", "memory size '20q' has the unknown unit 'q'"),
        ("20qb", "hint: write 20GiB for 20·2^30 bytes or 20GB for 20·10^9 bytes"),
        ("0GiB", "memory size '0GiB' is 0 bytes, outside 1 byte to 1 PiB"),
        ("RTX3060:20q", "memory size '20q' has the unknown unit 'q'"),
        ("RTX3060:", "'RTX3060:' has no memory after the colon"),
        ("RTX3060:13GiB", "a budget of 13GiB is more than the 11.63 GiB that CUDA hands out of the RTX 3060"),
        ("RTX3060:13GiB", "hint: write RTX3060 for all of that, or 13GiB alone for a GPU that is not the catalogue's"),
        ("RTX3060:49GiB", "a budget of 49GiB is more than the 11.63 GiB"),
        ("H100:80GiB", "a budget of 80GiB is more than the 79.09 GiB that CUDA hands out of the H100"),
        ("RX7900XTX:25GiB", "a budget of 25GiB is more than the 23.98 GiB that ROCm hands out of the RX 7900 XTX"),
        ("zzzz", "tpplan knows no GPU named 'zzzz'\nhint: write its memory instead, such as 24GiB"),
        ("24GiB,Auto", "auto stands for all GPUs of this machine"),
        ("24GiB:20GiB", "tpplan knows no GPU named '24GiB'"),
        ("RTX3080", "the GPU name 'RTX3080' can mean RTX 3080 10GB or RTX 3080 12GB"),
        ("A100:40GiB", "can mean A100 40GB or A100 80GB"),
    ],
)
def test_what_has_no_meaning_is_explained(spec: str, words: str) -> None:
    """Every mistake is a DeviceError with the offending part, the numbers, and what to write instead."""
    with pytest.raises(DeviceError) as raised:
        parse_devices(spec)
    assert words in str(raised.value)
    assert raised.value.hint
    assert len(str(raised.value)) < 400


def test_a_directory_is_no_devices_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is called one, and the hint names a file in it; one with the name of a GPU hides no GPU."""
    monkeypatch.chdir(tmp_path)
    for name in ("machines", "RTX3060"):
        (tmp_path / name).mkdir()
    with pytest.raises(DeviceError, match=r"'machines' is a directory, .*\nhint: name a devices file, which"):
        parse_devices("machines")
    assert parse_devices("RTX3060") == (RTX_3060,)


def test_as_many_devices_as_allowed() -> None:
    """The limit itself is allowed."""
    assert len(parse_devices(f"{MAX_DEVICES - 1}x1MiB,RTX3060")) == MAX_DEVICES


_PARTS = st.sampled_from(
    ["2", "x", " ", ",", ":", "24GiB", "RTX", "3060", "rtx 4090", "H100", ".", "auto ", ".json", "\0"]
)


@given(st.one_of(st.text(max_size=40), st.lists(_PARTS, max_size=8).map("".join)))
def test_any_text_gives_devices_or_a_device_error(spec: str) -> None:
    """No text crashes the parser, and what it accepts is within every limit."""
    if spec.strip().casefold() == "auto":
        return
    try:
        devices = parse_devices(spec)
    except DeviceError:
        return
    assert 0 < len(devices) <= MAX_DEVICES
    assert all(d.budget_bytes > 0 and d.name.strip() for d in devices)


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(catalogue.gpus())), min_size=1, max_size=5))
def test_every_catalogue_name_is_read_back(entries: list[tuple[int, catalogue.Gpu]]) -> None:
    """The names that tpplan writes are names that it reads, as often and in the order given."""
    devices = parse_devices(",".join(f"{count}x{gpu.name}" for count, gpu in entries))
    assert [d.name for d in devices] == [gpu.name for count, gpu in entries for _ in range(count)]
    assert [d.budget_bytes for d in devices] == [gpu.memory_bytes for count, gpu in entries for _ in range(count)]


def test_catalogue_is_broad_and_plausible() -> None:
    """Over 150 GPUs of both vendors, each once, have memory and bandwidth that GPUs have, and a source."""
    gpus = catalogue.gpus()
    assert len(gpus) > 150
    assert max(Counter(gpu.name for gpu in gpus).values()) == 1
    for gpu in gpus:
        assert 3 * GIB <= gpu.memory_bytes <= gpu.nominal_bytes <= 288 * GIB
        assert 128 * 10**9 <= gpu.bandwidth_bytes_per_second <= 8000 * 10**9
        assert ("AMD" in gpu.source) == (not gpu.capability)
    assert sum(not gpu.capability for gpu in gpus) > 20


# MiB that CUDA gave: the least in public logs, in GiB as torch rounds them, in MiB as llama.cpp prints them.
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("RTX 3090", 24124),
        ("RTX 3060", 11909),
        ("RTX 2080 Ti", 10817),
        ("RTX 5060", 7707),
        ("RTX 5090", 32154),
        ("RTX 4090", 24210),
        ("RTX PRO 6000", 97252),
        ("RTX 5060 Ti 16GB", 15816),
        ("RTX 4060 Ti 16GB", 16069),
        ("T4", 14.56 * 1024),
        ("L4", 22.03 * 1024),
        ("A10", 22731),
        ("A10G", 22.18 * 1024),
        ("L40S", 44.39 * 1024),
        ("A40", 44.34 * 1024),
        ("A6000", 47.40 * 1024),
        ("A100 40GB", 39.38 * 1024),
        ("A100 80GB", 79.15 * 1024),
        ("H100", 79.10 * 1024),
        ("H200", 139.72 * 1024),
        ("B200", 178.35 * 1024),
        ("B300", 267.69 * 1024),
        ("V100 16GB", 15.77 * 1024),
        ("V100 32GB", 32494),
        ("MI300X", 191.98 * 1024),
        ("RX 7900 XTX", 24560),
    ],
)
def test_a_name_means_what_a_program_is_handed_out(name: str, most: float) -> None:
    """No name promises more memory than programs on that GPU were seen to get, nor much less."""
    assert 0.965 * most <= catalogue.find(name).memory_bytes / MIB <= most + 1


def test_memory_of_gpus_that_nobody_was_seen_to_use_is_estimated_low() -> None:
    """It is 2 % less than the nominal at least; by the same rule no measured GPU would have got noticeably more."""
    gpus = [gpu for gpu in catalogue.gpus() if not gpu.unified]
    assert sum(gpu.measured for gpu in gpus) > 50
    for gpu in gpus:
        least = 640 * MIB if gpu.capability else 0
        estimate = gpu.nominal_bytes - max(gpu.nominal_bytes // 50, least)
        assert gpu.memory_bytes < gpu.nominal_bytes
        if gpu.capability and gpu.measured:
            assert estimate <= gpu.memory_bytes * 1.001
        elif not gpu.measured:
            assert gpu.memory_bytes == pytest.approx(estimate, abs=MIB)


def test_gpus_that_share_the_memory_of_the_system_leave_it_a_part() -> None:
    """2 % and 2 GiB at least of what the runtime shows; a budget may take what their names promise."""
    assert {gpu.name for gpu in catalogue.gpus() if gpu.unified} >= {"GB10", "Jetson AGX Thor", "Strix Halo"}
    assert catalogue.system_share(8 * GIB) == 2 * GIB
    assert catalogue.find("GB10").memory_bytes == pytest.approx(0.98 * 122035 * MIB, abs=MIB)
    assert parse_devices("GB10:119GiB")[0].budget_bytes == 119 * GIB
    assert parse_devices("StrixHalo:120GiB")[0].bandwidth_bytes_per_second == 256 * 10**9


def test_overheads_are_what_was_found_and_devices_files_take_their_sources() -> None:
    """On H200s 886 MiB at most, and no less where nobody measured; what says so fits into a devices file."""
    for capability in {gpu.capability for gpu in catalogue.gpus()}:
        known = catalogue.overhead(capability)
        assert known.bytes >= 886 * 2**20
        assert ("not measured" in known.source) == (capability != "9.0")
        gpu = attrs.evolve(_file().devices[0], overhead_bytes=known.bytes, overhead_source=known.source)
        file = _file(devices=(gpu,), links=())
        assert devices_file.loads(devices_file.dumps(file)) == file


# Transfer rate per pin in Gbit/s and bus width, from the memory descriptions: an independent way to the number.
@pytest.mark.parametrize(
    ("name", "rate", "width"),
    [
        ("GTX 1070", 8, 256),
        ("GTX 1080", 10, 256),
        ("GTX 1080 Ti", 11, 352),
        ("GTX 1650", 8, 128),
        ("GTX 1660 Ti", 12, 192),
        ("RTX 3060 8GB", 15, 128),
        ("RTX 5050", 20, 128),
        ("RX 6700 XT", 16, 192),
        ("RX 9060 XT 16GB", 20, 128),
        ("W7800 48GB", 18, 384),
        ("GB10", 8.533, 256),
        ("Jetson Thor", 8.533, 256),
        ("AGX Orin 64GB", 6.4, 256),
        ("Strix Halo", 8, 256),
        ("RTX 2080 Ti", 14, 352),
        ("RTX 3060", 15, 192),
        ("RTX 3080 10GB", 19, 320),
        ("RTX 3080 12GB", 19, 384),
        ("RTX 3090", 19.5, 384),
        ("RTX 3090 Ti", 21, 384),
        ("RTX 4060 Ti 16GB", 18, 128),
        ("RTX 4070 Ti SUPER", 21, 256),
        ("RTX 4080", 22.4, 256),
        ("RTX 4080 SUPER", 23, 256),
        ("RTX 4090", 21, 384),
        ("RTX 5060 Ti 16GB", 28, 128),
        ("RTX 5070", 28, 192),
        ("RTX 5080", 30, 256),
        ("RTX 5090", 28, 512),
        ("RTX A4000", 14, 256),
        ("RTX A6000", 16, 384),
        ("RTX 6000 Ada", 20, 384),
        ("RTX PRO 6000", 28, 512),
        ("T4", 10, 256),
        ("L4", 12.5, 192),
        ("L40S", 18, 384),
        ("A40", 14.5, 384),
        ("A10", 12.5, 384),
        ("A100 40GB", 2.43, 5120),
        ("H200", 6.4, 6016),
        ("B200", 7.992, 7680),
        ("RX 6800 XT", 16, 256),
        ("RX 6950 XT", 18, 256),
        ("RX 7800 XT", 19.5, 256),
        ("RX 7900 XT", 20, 320),
        ("RX 7900 XTX", 20, 384),
        ("RX 9070 XT", 20, 256),
        ("W7900", 18, 384),
        ("MI100", 2.4, 4096),
        ("MI210", 3.2, 4096),
        ("MI60", 2, 4096),
    ],
)
def test_bandwidth_is_rate_times_width(name: str, rate: float, width: int) -> None:
    """A GPU's bandwidth is what its memory's transfer rate and bus width give, within 0.5 %."""
    assert catalogue.find(name).bandwidth_bytes_per_second == pytest.approx(rate * 1e9 * width / 8, rel=5e-3)


def _file(**changes: Any) -> DevicesFile:
    gpu = FileDevice(
        name="RTX 3060",
        memory_bytes=12 * GIB,
        budget_bytes=11 * GIB,
        overhead_bytes=400 * 2**20,
        overhead_source="measured here",
        bandwidth_bytes_per_second=360 * 10**9,
        capability="8.6",
    )
    link = Link(first=0, second=1, kind=LinkKind.PCIE, path=LinkPath.HOST_BRIDGE, peer_access=PeerAccess.NO)
    return attrs.evolve(DevicesFile(devices=(gpu, attrs.evolve(gpu, name="RTX 4090")), links=(link,)), **changes)


def test_devices_file_names_what_the_planner_gets(tmp_path: Path) -> None:
    """A saved file is read back equal, and a path that ends in .json stands for its devices with their budgets."""
    path = tmp_path / "devices.JSON"
    devices_file.save(_file(), path)
    assert devices_file.load(path) == _file()
    wanted = attrs.evolve(RTX_3060, budget_bytes=11 * GIB, overhead_bytes=400 * 2**20)
    assert parse_devices(f" {path} ") == (wanted, attrs.evolve(wanted, name="RTX 4090"))


def test_a_devices_file_by_hand_needs_no_overhead() -> None:
    """Left out it is what the format says, so that files of earlier releases mean the same; it stays left out."""
    gpu = {"name": "RTX 3060", "memory_bytes": 12 * GIB, "budget_bytes": 11 * GIB}
    text = json.dumps({"format_version": "1.0", "devices": [gpu]})
    (device,) = devices_file.loads(text).to_devices()
    assert device == Device(name="RTX 3060", budget_bytes=11 * GIB)
    assert device.overhead_bytes == DEFAULT_OVERHEAD_BYTES
    assert "overhead" not in devices_file.dumps(devices_file.loads(text))


def test_devices_whose_overhead_a_file_leaves_out_are_told(tmp_path: Path) -> None:
    """In one note, with what may be written instead; none where every device has one, be it as large or nothing."""
    path, told = tmp_path / "box.json", list[str]()
    gpu = {"memory_bytes": 12 * GIB, "budget_bytes": 11 * GIB}
    given = [gpu | {"overhead_bytes": overhead} for overhead in (DEFAULT_OVERHEAD_BYTES, 0)]
    for more in ([], [gpu, gpu]):
        gpus = [{"name": name, **one} for name, one in zip("ABCD", [*given, *more], strict=False)]
        path.write_text(json.dumps({"format_version": "1.0", "devices": gpus}))
        assert parse_devices(str(path), told.append)[0].overhead_bytes == DEFAULT_OVERHEAD_BYTES
    (note,) = told
    assert note.startswith(f"{path} has no overhead_bytes of device 2 (C), 3 (D): ")
    assert note.endswith(f'; write "overhead_bytes": {UNMEASURED_OVERHEAD_BYTES}, or what they take')


def test_a_devices_file_names_cards_of_one_s_own() -> None:
    """A GPU of any name is planned for by bandwidth too, if the file tells it; a modified card is one of them."""
    gpu = {
        "name": "Arc B580",
        "memory_bytes": 12 * GIB,
        "budget_bytes": 11 * GIB,
        "overhead_bytes": 890 * MIB,
        "bandwidth_bytes_per_second": 456 * 10**9,
    }
    text = json.dumps({"format_version": "1.0", "devices": [gpu, gpu | {"name": "RTX 4090 48GB", "capability": "8.9"}]})
    devices = devices_file.loads(text).to_devices()
    assert [(d.name, d.capability) for d in devices] == [("Arc B580", ""), ("RTX 4090 48GB", "8.9")]
    planned = plan(llama(), devices, cache=Cache(tokens=4096), strategy="latency")
    assert [d.bandwidth_bytes_per_second for d in planned.devices] == [456 * 10**9] * 2


def test_devices_file_is_canonical() -> None:
    """Keys are in the order of the fields, a link is a line, and the end is a newline."""
    lines = devices_file.dumps(_file()).splitlines()
    assert lines[1:3] == ['  "$schema": "urn:tpplan:devices-file:1",', '  "format_version": "1.0",']
    assert '    {"first": 0, "second": 1, "kind": "pcie", "path": "host_bridge", "peer_access": "no"}' in lines
    assert devices_file.dumps(_file()).endswith("}\n")


def test_devices_file_may_name_its_schema() -> None:
    """Who writes a devices file by hand need not name its schema; another one's is refused."""
    text = devices_file.dumps(_file())
    assert devices_file.loads(text.replace('  "$schema": "urn:tpplan:devices-file:1",\n', "")) == _file()
    with pytest.raises(DeviceError, match=r'\$schema: expected "urn:tpplan:devices-file:1", got "urn:tpplan:fit'):
        devices_file.loads(text.replace("devices-file:1", "fit-report:1"))


def _edited(path: tuple[str | int, ...], value: object) -> str:
    data = json.loads(devices_file.dumps(_file()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format_version",), "2.0", "format_version: is '2.0', this tpplan reads 1.0 and 1.1"),
        (("devices",), [], "devices: has 0 devices, expected 1 to 4096"),
        (("devices", 0, "name"), " ", "devices[0].name: is empty"),
        (("devices", 0, "name"), "a\u202eb", "devices[0].name: has the invisible character U+202E at position 1"),
        (("devices", 0, "name"), "n" * 201, "devices[0].name: has 201 characters, the most is 200"),
        (
            ("devices", 1, "budget_bytes"),
            13 * GIB,
            "devices[1].budget_bytes: is 13958643712, expected 1 to 12884901888",
        ),
        (("devices", 1, "budget_bytes"), 0, "devices[1].budget_bytes: is 0, expected 1 to"),
        (("devices", 0, "memory_bytes"), 12.0, "devices[0].memory_bytes: expected a whole number"),
        (("devices", 0, "memory_bytes"), True, "devices[0].memory_bytes: expected a whole number"),
        (("devices", 0, "overhead_bytes"), -1, "devices[0].overhead_bytes: is -1, expected 0 to"),
        (("devices", 0, "bandwidth_bytes_per_second"), 2**63, "bandwidth_bytes_per_second: is 9223372036854775808"),
        (("devices", 0, "capability"), "8", "devices[0].capability: is '8', expected such as '8.9'"),
        (("devices", 0, "uuid"), "GPU-1", "uuid"),
        (("links", 0, "second"), 2, "links[0]: joins 0 and 2, expected two of 2 devices"),
        (("links", 0, "first"), 1, "links[0]: joins 1 and 1, expected two of 2 devices"),
        (("links", 0, "kind"), "rope", 'expected nvlink, xgmi, pcie or unknown, got "rope"'),
        (("host",), "me", 'top level: has the unknown key "host"; known are format_version, devices, '),
        (("devices", 0, "budget_byte"), 1, 'devices[0]: has the unknown key "budget_byte"; did you mean budget_bytes?'),
        (("devices", 0, "bandwidth"), 1, '"bandwidth"; did you mean bandwidth_bytes_per_second?'),
        (("devices", 0, "budgetBytes"), 1, "did you mean budget_bytes?"),
        (("links", 0, "peer-access"), "no", 'links[0]: has the unknown key "peer-access"; did you mean peer_access?'),
    ],
)
def test_devices_file_is_read_strictly(path: tuple[str | int, ...], value: object, words: str) -> None:
    """Wrong values, types and keys are refused, each with its place in the file."""
    with pytest.raises(DeviceError) as raised:
        devices_file.loads(_edited(path, value))
    assert words in str(raised.value)
    assert "hint: " in str(raised.value)


def test_devices_file_with_a_link_twice_is_refused() -> None:
    """A pair of devices has one link at most."""
    text = _edited(("links",), [{"first": 0, "second": 1, "kind": "pcie"}] * 2)
    with pytest.raises(DeviceError, match="joins 0 and 1 for the second time"):
        devices_file.loads(text)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"[1]", b'{"devices": ', b"[" * 100_000, b"{}"])
def test_unreadable_devices_files_are_device_errors(tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty, binary, truncated, deep or foreign file gives a DeviceError that names it."""
    path = tmp_path / "gpus.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DeviceError, match=r"gpus\.json") as caught:
        parse_devices(str(path))
    if content in {b"", b"\xff\xfe", b"{}"}:
        assert caught.value.hint.endswith("make it again with tpplan devices -o")


def test_a_directory_named_like_a_devices_file(tmp_path: Path) -> None:
    """The hint is on devices files, not on plans, of which several may be named."""
    (tmp_path / "gpus.json").mkdir()
    with pytest.raises(DeviceError, match=r"gpus\.json.*: Is a directory") as caught:
        parse_devices(str(tmp_path / "gpus.json"))
    assert caught.value.hint == "name a devices file in it"


def test_the_number_on_the_box_is_all_that_programs_get() -> None:
    """Of a card's nominal memory the driver keeps some: naming it means the rest, and a note says so."""
    notes: list[str] = []
    assert parse_devices("RTX3090:24GiB", notes.append) == parse_devices("RTX3090")
    assert notes == ["24GiB of the RTX 3090 is taken as the 23.56 GiB that programs get of it"]
