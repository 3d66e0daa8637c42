"""Devices as people name them, the catalogue, and the devices file."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpplan import catalogue, devices_file
from tpplan.devices import DEFAULT_OVERHEAD_BYTES, MAX_DEVICES, Device, parse_devices
from tpplan.devices_file import DevicesFile, FileDevice, Link, LinkKind, LinkPath, PeerAccess
from tpplan.errors import DeviceError

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
RTX_3060 = Device(name="RTX 3060", budget_bytes=12 * GIB, bandwidth_bytes_per_second=360 * 10**9, capability="8.6")


def test_sizes_stand_for_gpus_that_have_as_much_memory() -> None:
    """A list of counts and sizes gives one device per GPU, in order, with the general overhead."""
    big, small = (
        Device(name="24GiB GPU", budget_bytes=24 * GIB),
        Device(name="12.5 GB GPU", budget_bytes=12_500_000_000),
    )
    assert parse_devices(" 2x24GiB , 12.5 GB ") == (big, big, small)
    assert big.overhead_bytes == DEFAULT_OVERHEAD_BYTES
    assert parse_devices("1MiB") == (Device(name="1MiB GPU", budget_bytes=2**20),)


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
    ],
)
def test_names_are_read_as_people_write_them(name: str) -> None:
    """Case, blanks, hyphens, underscores and the vendor's words make no difference."""
    assert parse_devices(f"1x{name}") == (RTX_3060,)


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
        ("20g", "memory size '20g' has the unknown unit 'g'"),
        ("20gb", "hint: write 20GiB for 20·2^30 bytes or 20GB for 20·10^9 bytes"),
        ("0GiB", "memory size '0GiB' is 0 bytes, outside 1 byte to 1 PiB"),
        ("RTX3060:20g", "memory size '20g' has the unknown unit 'g'"),
        ("RTX3060:", "'RTX3060:' has no memory after the colon"),
        ("RTX3060:13GiB", "a budget of 13GiB is more than the 12.00 GiB (12884901888 bytes) of the RTX 3060"),
        ("RTX 4900", "tpplan knows no GPU named 'RTX 4900'\nhint: did you mean RTX 4090?"),
        ("zzzz", "tpplan knows no GPU named 'zzzz'\nhint: write its memory instead, such as 24GiB"),
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
    """Over 100 GPUs of both vendors, each once, have memory and bandwidth that GPUs have, and a source."""
    gpus = catalogue.gpus()
    assert len(gpus) > 100
    assert max(Counter(gpu.name for gpu in gpus).values()) == 1
    for gpu in gpus:
        assert 6 * GIB <= gpu.memory_bytes <= 288 * GIB
        assert 190 * 10**9 <= gpu.bandwidth_bytes_per_second <= 8000 * 10**9
        assert ("AMD" in gpu.source) == (not gpu.capability)
    assert sum(not gpu.capability for gpu in gpus) > 20


def test_overheads_are_what_was_found_and_devices_files_take_their_sources() -> None:
    """On H200s 886 MiB at most; what says so fits into a devices file of each generation of GPUs."""
    assert catalogue.overhead("9.0").bytes >= 886 * 2**20
    for capability in {gpu.capability for gpu in catalogue.gpus()}:
        known = catalogue.overhead(capability)
        gpu = attrs.evolve(_file().devices[0], overhead_bytes=known.bytes, overhead_source=known.source)
        file = _file(devices=(gpu,), links=())
        assert devices_file.loads(devices_file.dumps(file)) == file


# Transfer rate per pin in Gbit/s and bus width, from the memory descriptions: an independent way to the number.
@pytest.mark.parametrize(
    ("name", "rate", "width"),
    [
        ("GTX 1080 Ti", 11, 352),
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
    """Left out it is what a plan takes where nobody measured it, and such a file is canonical, too."""
    gpu = {"name": "RTX 3060", "memory_bytes": 12 * GIB, "budget_bytes": 11 * GIB}
    text = json.dumps({"format_version": "1.0", "devices": [gpu]})
    (device,) = devices_file.loads(text).to_devices()
    assert device == Device(name="RTX 3060", budget_bytes=11 * GIB)
    assert device.overhead_bytes == DEFAULT_OVERHEAD_BYTES
    assert "overhead" not in devices_file.dumps(devices_file.loads(text))


def test_devices_file_is_canonical() -> None:
    """Keys are in the order of the fields, a link is a line, and the end is a newline."""
    lines = devices_file.dumps(_file()).splitlines()
    assert lines[1] == '  "format_version": "1.0",'
    assert '    {"first": 0, "second": 1, "kind": "pcie", "path": "host_bridge", "peer_access": "no"}' in lines
    assert devices_file.dumps(_file()).endswith("}\n")


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
        (("format_version",), "2.0", "format_version: is '2.0', this tpplan reads 1.0"),
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
        (("links", 0, "kind"), "rope", 'expected nvlink, xgmi or pcie, got "rope"'),
        (("host",), "me", "host"),
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
    with pytest.raises(DeviceError, match=r"gpus\.json"):
        parse_devices(str(path))
