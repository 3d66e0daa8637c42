"""Measured speeds in devices files: which GPU they are of, and what planning makes of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from tests.hardware.probe_cases import nvidia_said
from tpplan.core.speed import GpuSpeed, LinkSpeed, MeasuredSpeeds
from tpplan.errors import DeviceError
from tpplan.files.codec import unstructure
from tpplan.hardware import file as devices_file
from tpplan.hardware import probe
from tpplan.hardware.spec import links_of, parse_devices
from tpplan.render.devices import devices as view

if TYPE_CHECKING:
    from pathlib import Path


def speed(uuid: str, gigabytes: int) -> GpuSpeed:
    """A GPU's speeds, all told by one number."""
    return GpuSpeed(
        uuid=uuid,
        read_bytes_per_second=gigabytes * 10**9,
        copy_bytes_per_second=gigabytes * 10**9 - 1,
        boundary_ns=gigabytes,
        matrix_flops_per_second=gigabytes * 10**11,
    )


def measured() -> MeasuredSpeeds:
    """What torch says of the two GPUs of a report, in the other order, and without the start of their UUIDs."""
    first, second = (gpu.uuid.removeprefix("GPU-") for gpu in nvidia_said("nvidia_uneven").devices)
    link = LinkSpeed(first=0, second=1, latency_ns=4321, bytes_per_second=25 * 10**9)
    return MeasuredSpeeds((speed(second, 940), speed(first, 330)), (link,))


def test_gpus_are_told_apart_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by torch's order; the file has what was measured, and planning reads it."""
    report = probe.with_speeds(nvidia_said("nvidia_uneven"), measured())
    assert [gpu.name for gpu in report.devices] == ["RTX 3060", "RTX 4090"]
    assert [gpu.read_bytes_per_second for gpu in report.devices] == [330 * 10**9, 940 * 10**9]
    made = probe.devices_file(report)
    assert made.format_version == "1.1"
    assert devices_file.loads(devices_file.dumps(made)) == made
    monkeypatch.chdir(tmp_path)
    devices_file.save(made, "devices.json")
    devices = parse_devices("devices.json")
    assert [(d.read_bytes_per_second, d.boundary_ns) for d in devices] == [(330 * 10**9, 330), (940 * 10**9, 940)]
    assert links_of("devices.json") == (LinkSpeed(first=0, second=1, latency_ns=4321, bytes_per_second=25 * 10**9),)
    assert links_of("2xRTX3060") == ()


def test_a_measured_link_of_which_the_driver_says_nothing(tmp_path: Path) -> None:
    """Its kind is unknown, on the screen and in the file, which planning reads."""
    report = probe.with_speeds(evolve(nvidia_said("nvidia_uneven"), links=()), measured())
    assert [link.kind for link in report.links] == ["unknown"]
    text = "\n".join("".join(part for part, _ in each) for each in view(unstructure(report)))
    assert "0–1  unknown link, peer access unknown, sums 4.3 µs and 25 GB/s" in text
    devices_file.save(probe.devices_file(report), tmp_path / "devices.json")
    assert links_of(str(tmp_path / "devices.json"))[0].latency_ns == 4321


def test_without_measuring_a_file_is_as_before() -> None:
    """It has no key more, and its version stays."""
    text = devices_file.dumps(probe.devices_file(nvidia_said("nvidia_uneven")))
    assert json.loads(text)["format_version"] == "1.0"
    assert "boundary_ns" not in text
    assert "latency_ns" not in text


def test_a_gpu_that_torch_does_not_see() -> None:
    """The error names the device."""
    with pytest.raises(DeviceError, match=r"torch does not see device 1 \(RTX 4090\)"):
        probe.with_speeds(nvidia_said("nvidia_uneven"), evolve(measured(), gpus=measured().gpus[1:]))


def test_the_screen_shows_what_was_measured() -> None:
    """Bandwidths, boundaries, products and links, by device."""
    report = probe.with_speeds(nvidia_said("nvidia_uneven"), measured())
    text = "\n".join("".join(part for part, _ in each) for each in view(unstructure(report)))
    assert "330 GB/s" in text
    assert "0.94 µs" in text
    assert "94 TFLOP/s" in text
    assert "sums 4.3 µs and 25 GB/s" in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("read_bytes_per_second", -1, "devices[0].read_bytes_per_second: is -1, expected 0 to"),
        ("boundary_ns", 2**63, "devices[0].boundary_ns: is 9223372036854775808"),
    ],
)
def test_numbers_out_of_range(key: str, value: int, words: str) -> None:
    """They are refused by name."""
    report = probe.with_speeds(nvidia_said("nvidia_uneven"), measured())
    data = json.loads(devices_file.dumps(probe.devices_file(report)))
    data["devices"][0][key] = value
    with pytest.raises(DeviceError) as caught:
        devices_file.loads(json.dumps(data))
    assert words in str(caught.value)
