"""ExLlamaV3 by TabbyAPI's config.yml, and ExLlamaV2 by Python that is run here with classes that write down calls."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import yaml

from tests.export_cases import NAMES, data_of, made, plan_of
from tpplan.core.plan import CACHE_KINDS, Cache
from tpplan.export.exllama import _CUT_BY_V2, _CUT_BY_V3, _LAYERS_IN_V3, kv_heads_v2
from tpplan.export.export import export
from tpplan.export.facts import Facts
from tpplan.models.families import FAMILIES
from tpplan.models.families.wrappers import WRAPPERS

if TYPE_CHECKING:
    from tpplan.exllamav2 import TPContext

GIB = 2**30


@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_tabbyapi(name: str) -> None:
    """They are YAML of the model's section; the memory is what the plan has on a device without the overhead."""
    data = data_of(name)
    (file,) = export(plan_of(name), "tabbyapi").files
    model = yaml.safe_load(file.text)["model"]
    cuts = data["model"]["architecture"] not in {"DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"}
    split = model.pop("gpu_split")
    for gib, entry in zip(split, data["memory"], strict=True):
        used = entry["weights_bytes"] + entry["cache_bytes"] + entry["workspace_bytes"]
        if cuts:
            assert gib == math.ceil(used / GIB * 100) / 100
        else:  # a limit, not a share
            assert used <= gib * GIB + GIB // 100
            assert gib * GIB <= used + max(entry["free_bytes"], GIB // 100)
    request = data["request"]
    modes = {"fp16": "FP16", "fp8": "8,8", "q8": "8,8", "q6": "6,6", "q4": "4,4"}
    assert model == {
        "model_name": "MODEL",
        "max_seq_len": request["cache"]["tokens"] // request["batch"],
        "cache_size": request["cache"]["tokens"],
        "cache_mode": modes[request["cache"]["kind"]],
        "tensor_parallel": cuts,
        "gpu_split_auto": False,
        "chunk_size": request["max_rows"],
        "max_batch_size": request["batch"],
    }


def test_tokens_are_whole_pages() -> None:
    """TabbyAPI's cache and pieces of prompts are multiples of 256 tokens, and no less than planned."""
    plan = made("Llama-3.1-8B", "2xRTX3060", cache=Cache("q8", 5000), max_rows=300)
    report = export(plan, "exllamav3")
    model = yaml.safe_load(report.files[0].text)["model"]
    assert (model["cache_size"], model["chunk_size"], model["max_seq_len"]) == (5120, 512, 5000)
    assert "the cache has 5120 tokens instead of 5000" in report.differences


class _Recorder:
    """Stands for ``exllamav2``: what a program does with it, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.config: Any = None
        self.module = ModuleType("exllamav2")
        for kind in ("", "_8bit", "_Q4", "_Q6", "_Q8"):
            setattr(self.module, f"ExLlamaV2Cache{kind}", type(f"ExLlamaV2Cache{kind}", (), {}))
        recorder = self

        class ExLlamaV2Config:
            def __init__(self, path: str) -> None:
                recorder.config, self.path = self, path

            def arch_compat_overrides(self) -> None:
                assert not recorder.calls

        class ExLlamaV2:
            def __init__(self, config: object) -> None:
                assert config is recorder.config

            def load_tp(self, **keys: Any) -> None:
                recorder.calls.append(("load_tp", (), keys))

        def cache_tp(model: object, **keys: Any) -> None:
            assert isinstance(model, ExLlamaV2)
            recorder.calls.append(("cache", (), keys))

        for each in (ExLlamaV2Config, ExLlamaV2):
            setattr(self.module, each.__name__, each)
        self.module.ExLlamaV2Cache_TP = cache_tp  # type: ignore[attr-defined]


def _loaded(plan: Any) -> _Recorder:
    """Run the Python of a plan."""
    recorder = _Recorder()
    (file,) = export(plan, "exllamav2").files
    with patch.dict(sys.modules, exllamav2=recorder.module):
        exec(file.text, {})  # noqa: S102 (our own)
    return recorder


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_the_python_of_exllamav2(kind: str) -> None:
    """It loads by the bytes of the plan, in GiB, with the class of the cache that the plan counts."""
    plan = made("Llama-3.1-8B", "RTX4090,RTX3060", cache=Cache(kind, 16384), batch=2, max_rows=1024)
    recorder = _loaded(plan)
    classes = {"fp16": "", "fp8": "_8bit", "q8": "_Q8", "q6": "_Q6", "q4": "_Q4"}
    base = getattr(recorder.module, f"ExLlamaV2Cache{classes[kind]}")
    split = [math.ceil((m.weights_bytes + m.cache_bytes + m.workspace_bytes) / GIB * 100) / 100 for m in plan.memory]
    loading = {"gpu_split": split, "expect_cache_tokens": 16384, "expect_cache_base": base}
    assert recorder.calls == [("load_tp", (), loading), ("cache", (), {"base": base, "max_seq_len": 16384})]
    config = recorder.config
    assert (config.path, config.max_seq_len, config.max_batch_size, config.max_input_len) == ("MODEL", 8192, 2, 1024)


def _context(split: list[float], plan: Any) -> TPContext:
    """Return ExLlamaV2's context for the model of a plan of Llama-3.1-8B, by tpplan's arithmetic of the original."""
    from tests.exllamav2.models import cache, small_model  # noqa: PLC0415 (needs torch)
    from tpplan.exllamav2 import TPContext  # noqa: PLC0415

    model = small_model(
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_key_value_groups=4,
        head_dim=128,
        num_hidden_layers=32,
        max_seq_len=plan.request.sequence_tokens,
    )
    return TPContext(model, split, plan.request.cache.tokens, cache("ExLlamaV2Cache_Q8"), backend="cpu")


@pytest.mark.parametrize("gpus", ["24GiB,12GiB", "20GiB,12GiB,16GiB", "40GiB,8GiB,12GiB"])
@pytest.mark.parametrize("strategy", ["balanced", "exllamav2"])
def test_heads_are_cut_as_told(gpus: str, strategy: str) -> None:
    """ExLlamaV2 cuts KV heads as the report foresees, and as the plan does if that was cut as ExLlamaV2 cuts."""
    plan = made("Llama-3.1-8B", gpus, cache=Cache("q8", 16384), strategy=strategy)
    split = _loaded(plan).calls[0][2]["gpu_split"]
    given = [0] * len(split)
    # The context refuses budgets that are only just full, and heads do not depend on a common factor.
    for device, start, end in _context([gib * 2 for gib in split], plan).kv_split or ():
        given[device] = end - start
    assert tuple(given) == kv_heads_v2(8, Facts(plan))
    bounds = plan.bounds("kv_heads")
    planned = [end - start for start, end in pairwise(bounds)]
    told = [line for line in export(plan, "exllamav2").differences if "KV heads instead of" in line]
    assert bool(told) == (given != planned)
    if strategy == "exllamav2":
        assert not told
        assert split == [float(gib.removesuffix("GiB")) for gib in gpus.split(",")]


def test_an_odd_intermediate_size_is_refused() -> None:
    """ExLlamaV2 cuts in units of 128, and asserts that these are whole."""
    plan = made("Llama-3.1-8B", "2xRTX3060", cache=Cache("q8", 4096))
    from attrs import evolve  # noqa: PLC0415

    splits = tuple(
        evolve(s, size=14400, bounds=(0, 7168, 14400)) if s.axis == "intermediate" else s for s in plan.splits
    )
    report = export(evolve(plan, splits=splits), "exllamav2")
    assert report.reasons == ("the intermediate size 14400 is no multiple of its units of 128",)


def test_architectures_are_those_of_the_families() -> None:
    """No name in the tables is a slip, and none is in two of one engine."""
    known = {name for family in FAMILIES.values() for name in family.architectures}
    known |= {name for wrapper in WRAPPERS.values() for name in wrapper.architectures}
    assert known >= _CUT_BY_V3 | _LAYERS_IN_V3 | _CUT_BY_V2
    assert not _CUT_BY_V3 & _LAYERS_IN_V3
