"""llama.cpp: its arithmetic in single precision, repeated from its source, gives what the report says."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.export_cases import NAMES, data_of, made, options_of, plan_of
from tpplan.core.plan import Cache
from tpplan.export.export import export
from tpplan.export.facts import Facts
from tpplan.export.llamacpp import LAYERS_ONLY, UNKNOWN, rotated_heads
from tpplan.models.families import FAMILIES
from tpplan.models.families.wrappers import WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 2**20


def _layers(split: Sequence[int], layers: int) -> list[int]:
    """``load_tensors``: the device of a layer is the first whose end is beyond the layer's part, in floats."""
    ends = np.cumsum(np.array(split, np.float32), dtype=np.float32)
    ends /= ends[-1]
    return [bisect_right(ends.tolist(), float(np.float32(layer) / np.float32(layers + 1))) for layer in range(layers)]


def _heads(split: Sequence[int], heads: int, width: int, rotation: int) -> list[int]:
    """``llama_meta_device_get_split_state`` for the cache of a layer: elements, in whole heads, rotated."""
    count = len(split)
    scan = list(accumulate(np.float32(split[(j + rotation) % count]) for j in range(count)))
    ends = [0]
    for j in range(count - 1):
        high = int(np.float32(heads * width) * scan[j] / scan[-1])
        ends.append(high - high % width)
    parts = [0] * count
    for j, (start, end) in enumerate(pairwise([*ends, heads * width])):
        parts[(j + rotation) % count] = (end - start) // width
    return parts


TENSOR = [name for name in NAMES if not name.startswith("DeepSeek")]


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_mode(name: str) -> None:
    """The ratio is that of weights and cache in MiB, or 1 for all; other values are those of the request."""
    data, options = data_of(name), options_of(plan_of(name), "llama.cpp")
    held = [entry["weights_bytes"] + entry["cache_bytes"] for entry in data["memory"]]
    split = [int(part) for part in options["--tensor-split"].split(",")]
    if len({round(size / MIB) for size in held}) == 1:
        assert split == [1] * len(held)
    else:
        assert split == [round(size / MIB) for size in held]
    request = data["request"]
    kinds = {"fp16": "f16", "fp8": "q8_0", "q8": "q8_0", "q6": "q5_1", "q4": "q4_0"}
    assert options["--split-mode"] == "tensor"
    assert options["--cache-type-k"] == options["--cache-type-v"] == kinds[request["cache"]["kind"]]
    assert int(options["--ctx-size"]) == request["cache"]["tokens"]
    assert int(options["--parallel"]) == request["batch"]
    assert int(options["--ubatch-size"]) == int(options["--batch-size"]) == request["max_rows"]
    assert "--kv-unified" not in options
    assert "--swa-full" not in options


@pytest.mark.parametrize("name", TENSOR)
def test_heads_in_tensor_mode(name: str) -> None:
    """KV heads are rounded as its floats round them, in each layer of a turn."""
    split = [int(part) for part in options_of(plan_of(name), "llama.cpp")["--tensor-split"].split(",")]
    (heads, _), *_ = Facts(plan_of(name)).kv_heads()
    width = next(s["width"] for s in data_of(name)["splits"] if s["axis"] == "kv_heads")
    expected = [_heads(split, heads, width, layer) for layer in range(len(split))]
    assert [*map(list, rotated_heads(heads, split))] == expected
    told = [line for line in export(plan_of(name), "llama.cpp").differences if "rounds KV heads" in line]
    assert all(str(tuple(parts)) in told[0] for parts in expected if told)


@pytest.mark.parametrize("name", NAMES)
def test_layer_mode(name: str) -> None:
    """Each device gets as many layers as the report says, near its share of the plan, and within its budget."""
    data = data_of(name)
    report = export(plan_of(name), "llama.cpp-layer")
    split = [int(part) for part in options_of(plan_of(name), "llama.cpp-layer")["--tensor-split"].split(",")]
    owners = _layers(split, data["model"]["layers"])
    counts = [owners.count(i) for i in range(len(split))]
    assert counts == [*split[:-1], split[-1] - 1]
    assert owners == sorted(owners)
    words = [f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} of {data['model']['layers']} layers"]
    assert any(words[0] in line for line in report.differences)
    sizes = {s["axis"]: s["size"] for s in data["splits"]}
    output = sizes["vocab"] * sizes["residual"] * 2
    weights = sum(entry["weights_bytes"] for entry in data["memory"]) - 2 * output
    kinds = {"fp16": 32, "fp8": 16, "q8": 17, "q6": 13, "q4": 9}
    kind = kinds[data["request"]["cache"]["kind"]]
    cache = sum(entry["cache_bytes"] for entry in data["memory"]) * {16: 17, 13: 12}.get(kind, kind) / kind
    layer = (weights + cache) / data["model"]["layers"]
    for i, entry in enumerate(data["memory"]):
        room = entry["weights_bytes"] + entry["cache_bytes"] + entry["free_bytes"]
        assert counts[i] * layer + output * (i == len(counts) - 1) <= room


def test_one_device_is_not_split() -> None:
    """There is no ratio, and both modes are the mode for one device."""
    plan = made("Llama-3.1-8B", "RTX4090", cache=Cache("q8", 16384))
    for engine in ("llama.cpp", "llama.cpp-layer"):
        options = options_of(plan, engine)
        assert options["--split-mode"] == "none"
        assert "--tensor-split" not in options


def test_a_pool_of_tokens_is_shared() -> None:
    """A plan whose sequences share the cache gets a unified one, with the longest sequence as each slot's limit."""
    plan = made("Llama-3.1-8B", "2xRTX3060", cache=Cache("q8", 20000), batch=4, context=8192)
    options = options_of(plan, "llama.cpp")
    assert options["--kv-unified"] == ""
    assert options["--kv-unified-per-slot"] == "8192"
    assert options["--ctx-size"] == "20224"  # 79 × 256
    assert "the cache has 20224 tokens instead of 20000, in multiples of 256" in export(plan, "llama.cpp").differences


def test_full_windows_are_asked_for() -> None:
    """A plan that counts sliding windows whole makes llama.cpp keep them whole."""
    plan = made("gpt-oss-20b", "2xRTX4060Ti-16GB", cache=Cache("fp16", 32768), full_window=True)
    assert options_of(plan, "llama.cpp")["--swa-full"] == ""


def test_too_many_devices() -> None:
    """Its parser refuses 16 ratios."""
    assert export(made("Llama-3.1-8B", "15x8GiB", cache=Cache("fp16", 4096)), "llama.cpp").possible
    report = export(made("Llama-3.1-8B", "16x8GiB", cache=Cache("fp16", 4096)), "llama.cpp")
    assert report.reasons == ("--tensor-split takes at most 15 devices, and the plan has 16",)


def test_architectures_are_those_of_the_families() -> None:
    """No name in the tables is a slip."""
    known = {name for family in FAMILIES.values() for name in family.architectures}
    known |= {name for wrapper in WRAPPERS.values() for name in wrapper.architectures}
    assert known >= UNKNOWN | LAYERS_ONLY
