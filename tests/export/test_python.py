"""The Python for Accelerate and transformers is run here, with a ``from_pretrained`` that writes down what it gets."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.export_cases import ALIKE, EVEN, NAMES, ROOT, data_of, made, plan_of
from tests.family_models import INCOMPLETE_DEFAULTS, NOT_IN_TRANSFORMERS, SAME, hub_config, meta_model
from tests.later import transformers
from tpplan.core.plan import Cache
from tpplan.export.accelerate import family_of, modules
from tpplan.export.export import export
from tpplan.models.families import FAMILIES
from tpplan.models.families.wrappers import WRAPPERS

if TYPE_CHECKING:
    import tpplan

MIB = 2**20


def _loaded(plan: tpplan.SplitPlan, engine: str, auto: str = "AutoModelForCausalLM") -> dict[str, Any]:
    """Return what the Python of a plan asks of transformers."""
    calls: list[tuple[str, dict[str, Any]]] = []
    (file,) = export(plan, engine).files
    with patch.object(
        getattr(transformers, auto), "from_pretrained", lambda path, **keys: calls.append((path, keys)), create=True
    ):
        exec(file.text, {})  # noqa: S102 (our own)
    ((path, keys),) = calls
    assert path == "MODEL"
    assert str(keys.pop("dtype")) == f"torch.{plan.model.dtype}"
    return keys


@pytest.fixture(scope="module", params=sorted({name.partition("/")[0] for name in NAMES}))
def model(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """Return an example model without its weights."""
    config = transformers.AutoConfig.from_pretrained(ROOT / "examples/models" / request.param)
    return request.param, meta_model(config)


def test_maps_cover_the_examples(model: tuple[str, Any]) -> None:
    """Every tensor of the model is under exactly one key of each map, and every key is a module of it."""
    folder, found = model
    names = {name for name, _ in found.named_modules()}
    for name in NAMES:
        if name.startswith(f"{folder}/"):
            device_map = _loaded(plan_of(name), "accelerate")["device_map"]
            assert names >= device_map.keys()
            for tensor, _ in found.named_parameters():
                assert sum(tensor.startswith(f"{key}.") for key in device_map) == 1


def test_accelerate_takes_the_maps(model: tuple[str, Any]) -> None:
    """Accelerate says that each map covers the model, and that all its modules are there."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[test]'")
    from accelerate.utils import check_device_map  # noqa: PLC0415

    folder, found = model
    for name in NAMES:
        if name.startswith(f"{folder}/"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                check_device_map(found, _loaded(plan_of(name), "accelerate")["device_map"])


@pytest.mark.parametrize(
    "model_type", sorted(FAMILIES.keys() - NOT_IN_TRANSFORMERS - {"bailing_hybrid", "nemotron_h", "step3p5", "zamba2"})
)
def test_modules_of_the_families(model_type: str) -> None:
    """What is outside the layers of transformers' model is what the map names, of every family."""
    keys = {"model_type": model_type} | INCOMPLETE_DEFAULTS.get(model_type, {})
    found = meta_model(hub_config(keys | {"model_type": SAME.get(model_type, model_type)}))
    family = FAMILIES[model_type]
    layers = re.compile(re.escape(f"{family.root}{family.layers}").replace(re.escape("{layer}"), "[0-9]+"))
    for architecture in family.architectures:
        assert (family_of(architecture) or family).layers == family.layers
        named = modules(architecture, family)
        assert {name for name, _ in found.named_modules()} >= {*named}
        for tensor, _ in found.named_parameters():
            assert bool(layers.match(tensor)) != any(tensor.startswith(f"{name}.") for name in named), tensor
        for buffer, _ in found.named_buffers():
            if "rotary" in buffer and not layers.match(buffer):
                assert any(buffer.startswith(f"{name}.") for name in named), buffer


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_memory(name: str) -> None:
    """Layers are in order, each device has room for its own with a cache of 16 bits, and the map has no other."""
    data = data_of(name)
    keys = _loaded(plan_of(name), "accelerate")
    layers = data["model"]["layers"]
    owners = [keys["device_map"][f"model.layers.{i}"] for i in range(layers)]
    assert owners == sorted(owners)
    rest = {device for key, device in keys["device_map"].items() if "layers" not in key}
    (home,) = rest
    sizes = {split["axis"]: split["size"] for split in data["splits"]}
    outside = 2 * sizes["vocab"] * sizes["residual"] * 2
    bits = 32 / {"fp16": 32, "fp8": 16, "q8": 17, "q6": 13, "q4": 9}[data["request"]["cache"]["kind"]]
    held = sum(entry["weights_bytes"] + entry["cache_bytes"] * bits for entry in data["memory"]) - outside
    shares = [entry["weights_bytes"] + entry["cache_bytes"] for entry in data["memory"]]
    assert len(keys["max_memory"]) == len(data["memory"])
    for i, entry in enumerate(data["memory"]):
        room = entry["weights_bytes"] + entry["cache_bytes"] + entry["free_bytes"]
        own = outside * (i == home)
        assert owners.count(i) * held / layers + own <= room
        weights = room - entry["cache_bytes"] * bits
        assert int(keys["max_memory"][i].removesuffix("MiB")) in {max(0, int(weights // MIB) - d) for d in (0, 1)}
        wanted = max(0, shares[i] - own) * layers / (sum(shares) - outside)
        full = (owners.count(i) + 1) * held / layers + own > room
        assert owners.count(i) > wanted - 1 or full


def test_max_memory_is_enough_for_accelerate(model: tuple[str, Any]) -> None:
    """Accelerate reads the numbers as written and puts a 16-bit model on the GPUs by them, and on nothing else."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[test]'")
    from accelerate.utils import get_max_memory, infer_auto_device_map  # noqa: PLC0415

    folder, found = model
    name = {"Llama-3.1-8B": "RTX4090+RTX3060", "Llama-3.1-70B": "4xA100-80GB", "Qwen2.5-7B": "RTX4090+RTX3060",
            "Mixtral-8x7B": "2xA100-80GB"}.get(folder)  # fmt: skip
    if name:  # the others' weights have fewer bits, which a model without weights does not show
        memory = _loaded(plan_of(f"{folder}/{name}"), "accelerate")["max_memory"]
        read = get_max_memory(dict(memory))
        assert read == {i: int(size.removesuffix("MiB")) * MIB for i, size in memory.items()}
        blocks = found._no_split_modules
        inferred = infer_auto_device_map(found, read, no_split_module_classes=list(blocks), dtype="bfloat16")
        assert {*inferred.values()} <= {*memory}


def test_models_with_a_vision_tower_get_a_map_of_accelerates_own() -> None:
    """The modules of a wrapper are not in the tables, so Accelerate maps them by the memory."""
    import attrs  # noqa: PLC0415

    plan = made("Llama-3.1-8B", "RTX4090,RTX3060", cache=Cache("q8", 4096))
    wrapped = attrs.evolve(plan, model=attrs.evolve(plan.model, architecture=WRAPPERS["llava"].architectures[0]))
    keys = _loaded(wrapped, "accelerate", "AutoModelForImageTextToText")
    assert keys["device_map"] == "auto"
    assert keys["max_memory"] == _loaded(plan, "accelerate")["max_memory"]


@pytest.mark.parametrize("name", sorted(name for name in EVEN | ALIKE if not name.startswith(("Deep", "gpt"))))
def test_transformers(name: str) -> None:
    """A process for each device, and transformers' own plan; its sizes divide in transformers' own config."""
    plan = plan_of(name)
    count = len(data_of(name)["devices"])
    assert export(plan, "transformers").argv == ("torchrun", "--nproc-per-node", str(count), "load.py")
    keys = _loaded(plan, "transformers")
    config = keys.pop("distributed_config")
    assert not keys
    assert (config.tp_size, config.tp_plan) == (count, "auto")
    sizes = transformers.AutoConfig.from_pretrained(ROOT / "examples/models" / name.partition("/")[0])
    assert (
        sizes.num_attention_heads % count == sizes.num_key_value_heads % count == sizes.intermediate_size % count == 0
    )
