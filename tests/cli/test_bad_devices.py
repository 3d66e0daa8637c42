"""Bad devices on the command line: lists, sizes, GPUs and devices files, told with what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_cases import LLAMA_8B, folder, refused  # noqa: F401 (for every test here)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ("20gbit", ["20gbit", "20GiB", "20GB"]),
        ("20q", ["20q", "20GiB", "20GB"]),
        ("24", ["24", "24GiB"]),
        ("RTX3090:24576", ["'24576' has no unit", "hint: write 24576MiB for"]),
        ("-5GiB", ["-5GiB"]),
        ("0GiB", ["0GiB"]),
        ("1e3GiB", ["1e3GiB"]),
        (" ", ["no device"]),
        ("0,1", ["'0' has no unit", "hint: write a number above 0 and a unit, such as 24GiB\n"]),
        ("0x24GiB", ["0 devices"]),
        ("99999999x24GiB", ["99999999"]),
        ("24GiB,,12GiB", ["entry 2"]),
        ("RTX4091", ["RTX4091", "hint: write its memory instead, such as 24GiB, or name it in a devices file"]),
        ("B580-12GB", ["'B580-12GB'", "hint: write its memory instead, such as 12GiB, or name it"]),
        ("L40G", ["hint: write its memory instead, such as 24GiB"]),
        ("RTX3050 Ti", ["hint: write its memory instead"]),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", ["hint: write its memory instead"]),
        ("RTXX 3060", ["hint: did you mean RTX 3060? for a GPU that tpplan does not know, write its memory"]),
        ("RTX409O", ["hint: did you mean RTX 4090? for"]),
        ("2xH10O", ["hint: did you mean H100? for"]),
        ("H2OO", ["hint: did you mean H200? for"]),
        ("RX79OOXTX", ["hint: did you mean RX 7900 XTX? for"]),
        ("RTX5090-48GB", ["hint: did you mean RTX5090:48GiB, a modified card? otherwise", "such as 48GiB, or"]),
        ("4060Ti-20GB", ["hint: did you mean 4060Ti:20GiB, a modified card? otherwise"]),
        ("RTX3090+RTX4070", ["'RTX3090+RTX4070'", "hint: did you mean RTX3090,RTX4070?\n"]),
        ("12GiB,2xRTX3090 4070", ["hint: did you mean 2xRTX3090,4070?\n"]),
        ("RTX4090 20GiB", ["hint: did you mean RTX4090:20GiB?\n"]),
        ("RTX4090 80GiB", ["hint: did you mean RTX4090:80GiB?\n"]),
        ("RTX4090 240GiB", ["hint: did you mean RTX4090,240GiB?\n"]),
        ("24GiB 12GiB", ["hint: did you mean 24GiB,12GiB?\n"]),
        ("24GiB;2x12GiB", ["hint: did you mean 24GiB,2x12GiB?\n"]),
        ("RTX4090 x2", ["hint: did you mean 2xRTX4090?\n"]),
        ("2*24GiB", ["hint: did you mean 2x24GiB?\n"]),
        ("x2RTX3090", ["hint: did you mean 2xRTX3090?\n"]),
        ("RTX4090@20GiB", ["hint: did you mean RTX4090:20GiB?\n"]),
        ("RTX4090:25GiB", ["25GiB", "23.52 GiB that CUDA hands out of the RTX 4090\nhint: write RTX4090 for all"]),
        ("RTX4090:99GiB", ["99GiB", "23.52 GiB"]),
        ("missing.json", ["missing.json"]),
        ("9" * 200 + "GiB", ["99999999"]),
    ],
)
def test_devices(gpus: str, words: list[str]) -> None:
    """Sizes without a clear unit, no devices, unknown GPUs: the error quotes them and says what to write."""
    err = refused("plan", LLAMA_8B, f"--gpus={gpus}", "--context", 4096, "-o", "x.json")
    assert all(word in err for word in words), err


def test_too_small_devices() -> None:
    """65 devices of 1 MiB are an answer, no: with what is missing."""
    err = refused("plan", LLAMA_8B, "--gpus", "65x1MiB", "--context", 4096, "-o", "x.json", code=1)
    assert "65 devices" in err
    assert "65.00 MiB" in err
    assert "… 49 more devices …" in err


def test_a_devices_file_of_another_name() -> None:
    """A file that is there is not taken for a GPU: its name has to end in .json."""
    Path("gpus.txt").write_text('{"format_version": "1.0", "devices": []}', encoding="utf-8")
    Path("gpus").mkdir()
    asked = ("plan", LLAMA_8B, "--gpus")
    assert refused(*asked, "gpus.txt").startswith(
        "error: 'gpus.txt' is a file, not a list of GPUs\nhint: name a devices"
    )
    assert refused(*asked, "gpus").startswith("error: 'gpus' is a directory, not a list of GPUs\nhint: name a devices")


@pytest.mark.parametrize(
    ("gpus", "error", "hint"),
    [
        ("devces.json", "cannot read 'devces.json': No such file or directory", "did you mean devices.json?"),
        ("devces.txt", "'devces.txt' is neither a file nor a list of GPUs", "did you mean devices.json?"),
        ("devices.jsn", "'devices.jsn' is neither a file nor a list of GPUs", "did you mean devices.json?"),
        ("devices", "'devices' is neither a file nor a list of GPUs", "did you mean devices.json?"),
        ("./gpus/one", "'./gpus/one' is neither a file nor a list of GPUs", "did you mean gpus/one.json?"),
        ("gpu/one.json", "cannot read 'gpu/one.json': No such file or directory", "did you mean gpus/one.json?"),
        ("gpu/two", "'gpu/two' is neither a file nor a list of GPUs", "did you mean gpus?"),
        ("a/b", "'a/b' is neither a file nor a list of GPUs", "name a devices file, which ends in .json"),
        ("a.txt", "'a.txt' is neither a file nor a list of GPUs", "name a devices file, which ends in .json"),
        ("devices.json,RTX3060", "'devices.json' is a file, not a GPU", "name a devices file alone, or only GPUs"),
        ("RTX3060,devices.json", "'devices.json' is a file, not a GPU", "name a devices file alone, or only GPUs"),
        ("RTX3060/RTX3070", "tpplan knows no GPU named 'RTX3060/RTX3070'", "did you mean RTX3060,RTX3070?"),
        ("24.GiB", "'24.GiB' is not a memory size", "write a number and a unit"),
        ("other", "tpplan knows no GPU named 'other'", "write its memory"),
    ],
)
def test_a_slip_in_the_name_of_a_devices_file(gpus: str, error: str, hint: str) -> None:
    """What looks like a file or nearly is one is told as such, with the nearest that is there; a GPU stays one."""
    Path("gpus").mkdir()
    for name in ("devices.json", "gpus/one.json", "other.txt"):
        Path(name).write_text("{}", encoding="utf-8")
    assert refused("plan", LLAMA_8B, "--gpus", gpus).startswith(f"error: {error}\nhint: {hint}")
