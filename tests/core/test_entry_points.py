"""Families and GPUs of other packages: found only where no table has them, and a broken one is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tpplan
from tpplan.hardware import catalogue
from tpplan.models import families

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = Path(__file__).parents[2] / "examples" / "models"
MODULE = """
from attrs import evolve
from tpplan.hardware.catalogue import Gpu, find
from tpplan.models.families import FAMILIES

LLAMA = evolve(FAMILIES["llama"], architectures=("OurForCausalLM",))
CARD = evolve(find("RTX 4090"), name="House 9000", bandwidth_bytes_per_second=10**12)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package beside its metadata, as pip installs it, whose entry points tests write."""
    (tmp_path / "house.py").write_text(MODULE, encoding="utf-8")
    folder = tmp_path / "house-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    monkeypatch.setattr(families, "LANGUAGE_MODELS", dict(families.LANGUAGE_MODELS))
    catalogue._others.cache_clear()
    yield folder / "entry_points.txt"
    sys.modules.pop("house", None)
    catalogue._others.cache_clear()


def config(folder: Path) -> Path:
    """Return the config of Llama-3.1-8B under the name of a house."""
    data = json.loads((MODELS / "Llama-3.1-8B" / "config.json").read_text(encoding="utf-8"))
    path = folder / "config.json"
    path.write_text(json.dumps(data | {"model_type": "our_llama", "architectures": ["OurForCausalLM"]}))
    return path


def test_a_family_and_a_gpu(package: Path, tmp_path: Path) -> None:
    """They are planned as those that they are made of."""
    package.write_text("[tpplan.families]\nour_llama = house:LLAMA\n[tpplan.gpus]\ncard = house:CARD\n")
    model = tpplan.read_model(config(tmp_path))
    assert (model.architecture, model.parameter_count) == ("OurForCausalLM", 8_030_261_248)
    (device,) = tpplan.parse_devices("House9000")
    assert device.bandwidth_bytes_per_second == 10**12
    assert tpplan.plan(model, [device] * 2, cache=tpplan.Cache(tokens=1024)).devices == (device, device)


def test_a_family_of_a_package_is_not_said_to_be_one_of_transformers(package: Path, tmp_path: Path) -> None:
    """Nobody knows which names the class of it reads."""
    package.write_text("[tpplan.families]\nour_llama = house:LLAMA\n")
    path = config(tmp_path)
    data = json.loads(path.read_text())
    data["num_kv_heads"] = data.pop("num_key_value_heads")
    path.write_text(json.dumps(data))
    assert tpplan.read_model(path).notes == ()


def test_tables_come_first(package: Path) -> None:
    """A package that is broken keeps nobody from what tpplan knows itself."""
    package.write_text("[tpplan.families]\nllama = house:NOTHING\n[tpplan.gpus]\ncard = house:NOTHING\n")
    assert tpplan.read_model(MODELS / "Llama-3.1-8B").architecture == "LlamaForCausalLM"
    assert tpplan.parse_devices("RTX4090")[0].name == "RTX 4090"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("house:NOTHING", "'card' of house 1.2 in tpplan.gpus cannot be loaded: AttributeError: "),
        ("elsewhere:CARD", "cannot be loaded: ModuleNotFoundError: No module named 'elsewhere'"),
        ("house:LLAMA", "is of the class Family, expected Gpu"),
    ],
)
def test_a_broken_package_is_named(package: Path, entry: str, words: str) -> None:
    """With what is wrong with it, where the name may be one of its own."""
    package.write_text(f"[tpplan.gpus]\ncard = {entry}\n")
    with pytest.raises(tpplan.DeviceError) as error:
        tpplan.parse_devices("House9000")
    assert words in error.value.message
    assert error.value.hint == "repair or uninstall that package"


def test_a_broken_family_is_named(package: Path, tmp_path: Path) -> None:
    """As a model's error."""
    package.write_text("[tpplan.families]\nour_llama = house:CARD\n")
    with pytest.raises(tpplan.ModelError, match=r"'our_llama' of house 1\.2 in tpplan\.families is of the class Gpu"):
        tpplan.read_model(config(tmp_path))
