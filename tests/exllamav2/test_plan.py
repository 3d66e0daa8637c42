"""What ``tpplan.exllamav2`` plans: the original's splits, cut for cut, or an error with numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tpplan
from tests.exllamav2.models import KINDS, SHAPES, cache, finalized, named, shapes, size_of, small_model
from tpplan.errors import ModelError, RequestError, TpplanError
from tpplan.exllamav2 import BROADCAST_ID, BROADCAST_KV, BROADCAST_Q, BROADCAST_VC, TPContext
from tpplan.planfile.verify import problems
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.ledger import cache_bytes

CASES = json.loads(Path(__file__).parents[1].joinpath("data", "exllamav2_splits.json").read_text())


def _recorded(case: dict[str, Any]) -> TPContext:
    """What the original was given, with next to no weights but attention's."""
    given = case["input"]
    layers = given["layers"]
    modules = [named("ExLlamaV2Attention", given["attention_bytes_per_layer"]), named("ExLlamaV2MLP", 2**20)] * layers
    model = small_model(
        [*modules, named("ExLlamaV2Linear", 2**20)],
        hidden_size=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        vocab_size=given["vocab_size"],
        num_attention_heads=given["q_heads"],
        num_key_value_heads=given["kv_heads"],
        num_key_value_groups=given["q_heads"] // given["kv_heads"],
        head_dim=given["head_dim"],
        num_hidden_layers=layers,
        max_seq_len=given["max_seq_len"],
        max_batch_size=given["max_batch_size"],
    )
    name = "ExLlamaV2Cache" + ("" if given["cache"] == "fp16" else f"_{given['cache'].replace('q', 'Q')}")
    return TPContext(model, given["gpu_split_gb"], given["expect_cache_tokens"], cache(name))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_recorded_splits(case: dict[str, Any]) -> None:
    """Each recording of the original gives the same five splits."""
    expected = case["output"]
    tp = _recorded(case)
    found = {"kv": tp.kv_split, "id": tp.id_split, "vc": tp.vc_split, "rs": tp.rs_split, "q": tp.q_split}
    assert {key: [list(part) for part in split or ()] for key, split in found.items()} == {
        key: expected[key] for key in found
    }
    assert tp.all_devices() == tp.all_devs == expected["all_devices"]
    assert (tp.device, tp.num_devices) == (tp.all_devs[0], tp.all_devs[-1] + 1)
    assert not problems(tp.plan)


@shapes
def test_the_plan_is_valid_and_can_be_saved(gpu_split: tuple[float, ...], keys: dict[str, Any], tmp_path: Path) -> None:
    """``tp.plan`` obeys every rule, survives a file, and its splits are the context's."""
    tp = TPContext(small_model(**keys), gpu_split, backend="cpu")
    assert not problems(tp.plan)
    tp.plan.save(tmp_path / "plan.json")
    assert tpplan.load(tmp_path / "plan.json") == tp.plan
    assert (tp.plan.request.strategy, tp.plan.request.layout) == ("exllamav2", "gather")
    used = [i for i, budget in enumerate(gpu_split) if budget]
    for split, axis in zip((tp.kv_split, tp.q_split, tp.rs_split), ("kv_heads", "q_heads", "residual"), strict=True):
        assert split == [(used[part.device], part.start, part.end) for part in tp.plan.slices(axis)]
    assert tp.all_devs == used
    assert [tp.plan.devices[i].budget_bytes for i in range(len(used))] == [gpu_split[i] * 2**30 for i in used]


def test_the_shapes_are_what_they_are_called() -> None:
    """The cases above have devices without heads, and one with nothing but residual columns."""
    tp = TPContext(small_model(**SHAPES["a GPU without heads"][1]), SHAPES["a GPU without heads"][0])
    assert (tp.get_devs(BROADCAST_KV), tp.get_devs(BROADCAST_Q)) == ([0, 1], [0, 1])
    assert tp.get_devs(BROADCAST_ID) == [0, 1, 2, 3]
    tp = TPContext(small_model(**SHAPES["a GPU with residual columns only"][1]), (8.0, 1.0))
    assert [tp.get_devs(kind) for kind in KINDS.values()] == [[0], [0], [0], [0, 1], [0]]
    assert tp.all_devs == [0, 1]
    tp = TPContext(small_model(vocab_size=4001), (2.0, 1.0))
    assert size_of(tp, BROADCAST_VC) == 4032


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (None, "fp16"),
        (cache("ExLlamaV2Cache"), "fp16"),
        (cache("ExLlamaV2Cache_8bit"), "fp8"),
        (cache("ExLlamaV2Cache_Q8"), "q8"),
        (cache("ExLlamaV2Cache_Q6"), "q6"),
        (cache("ExLlamaV2Cache_Q4"), "q4"),
        (cache("ExLlamaV2Cache_TP"), "fp16"),
        (cache("ExLlamaV2Cache_Q4_TP"), "q4"),
        (type("Mine", (cache("ExLlamaV2Cache_Q6"),), {}), "q6"),
    ],
)
def test_caches_are_known_by_name(base: type | None, kind: str) -> None:
    """A cache class, or one that is derived from it, is counted with its bits; None is half precision."""
    tp = TPContext(small_model(), [1.0, 1.0], 1000, base)
    assert (tp.plan.request.cache.kind, tp.plan.request.cache.tokens) == (kind, 1000)
    assert sum(entry.cache_bytes for entry in tp.plan.memory) == cache_bytes(2 * 8 * 32 * 2 * 1000, kind)


@pytest.mark.parametrize(("tokens", "batch"), [(0, 2), (100, 1), (256, 1), (600, 2), (5000, 19), (100_000, 40)])
def test_cache_tokens(tokens: int, batch: int) -> None:
    """0 tokens stand for the longest context of the largest batch; so many make room for that many sequences."""
    request = TPContext(small_model(), [2.0], tokens).plan.request
    assert (request.cache.tokens, request.batch) == (tokens or 2 * 256, batch)


def test_weights_are_those_of_the_modules() -> None:
    """The ledger has the bytes that the modules tell, to the byte; without modules, those of 16 bits."""
    sizes = {
        "ExLlamaV2Attention": (1_000_003, 999_999),
        "ExLlamaV2MLP": (2_000_001, 7),
        "ExLlamaV2Linear": (3_000_001,),
    }
    modules = [named(name, size) for name, parts in sizes.items() for size in parts]
    norms = 2 * 512 * 5
    for known, expected in (
        (modules, sum(map(sum, sizes.values()))),
        ([], 2 * (512 * 32 * 48 + 3 * 512 * 2048) * 2 + 512 * 4096 * 2),
    ):
        (entry,) = TPContext(small_model(known), [1.0]).plan.memory
        assert entry.weights_bytes == expected + norms


def test_weights_lie_where_the_splits_put_them() -> None:
    """Each matrix is cut by its outputs: a device holds so many rows of 16 bits of each, for every layer."""
    hidden = 1024
    tp = TPContext(small_model(hidden_size=hidden, num_key_value_heads=3), [2.0, 1.3])
    assert all(len(tp.get_split(kind)) == 2 for kind in range(5))
    for device, entry in enumerate(tp.plan.memory):
        kv, ids, vc, rs, q = (tp.get_split(kind)[device] for kind in range(5))
        rows = [(2 * kv[2] - 2 * kv[1] + q[2] - q[1]) * 32 * hidden, (rs[2] - rs[1]) * 6 * 32]
        rows += [2 * (ids[2] - ids[1]) * hidden, (rs[2] - rs[1]) * 2048, 2 * hidden]
        assert entry.weights_bytes == 2 * (2 * sum(rows) + (vc[2] - vc[1]) * hidden + hidden)
        assert entry.cache_bytes == 2 * 2 * (kv[2] - kv[1]) * 2 * 32 * 512


def test_define_split_again() -> None:
    """``define_split`` replaces plan and splits, and what was finalized is unloaded; a refused one changes nothing."""
    tp = finalized((1.0, 1.0))
    with pytest.raises(InfeasibleError):
        tp.define_split([0.25, 0.25], 0, None)
    assert tp.kv_split == [(0, 0, 4), (1, 4, 8)]
    assert tp.ext_tp_context
    tp.define_split([1.0, 3.0], 0, None)
    assert tp.kv_split == [(0, 0, 2), (1, 2, 8)]
    assert tp.context is None


def test_over_budget_is_an_error_with_numbers() -> None:
    """A model that does not fit is refused with the bytes that are missing; the original returned a plan."""
    with pytest.raises(InfeasibleError, match=r"device 0 \(GPU 0\) would lack [0-9.]+ MiB") as caught:
        TPContext(small_model(), [0.5, 0.5])
    assert all(shortfall.missing_bytes > 0 for shortfall in caught.value.shortfalls)


def test_attention_that_fills_every_gpu_is_an_error() -> None:
    """Where the original divided by zero, the error names the bytes too."""
    with pytest.raises(InfeasibleError):
        TPContext(small_model(max_seq_len=2**20), [0.5, 0.5])


def test_lists_are_the_stored_ones() -> None:
    """``get_split`` and ``get_devs`` return the attributes, also where somebody has assigned another list."""
    tp = TPContext(small_model(), [1.0, 0.0, 1.0])
    splits = (tp.kv_split, tp.id_split, tp.vc_split, tp.rs_split, tp.q_split)
    devs = (tp.kv_split_devs, tp.id_split_devs, tp.vc_split_devs, tp.rs_split_devs, tp.q_split_devs)
    for kind, (split, devices) in enumerate(zip(splits, devs, strict=True)):
        assert tp.get_split(kind) is split
        assert tp.get_devs(kind) is devices
        assert devices == [device for device, _, _ in split or ()] == [0, 2]
    tp.id_split, tp.id_split_devs = [(2, 0, 2048)], [2]
    assert (tp.get_split(BROADCAST_ID), tp.get_devs(BROADCAST_ID)) == ([(2, 0, 2048)], [2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": {"hidden_size": None}}, ModelError, "no hidden_size"),
        ({"model": {"num_key_value_heads": [8, 0]}}, ModelError, r"num_key_value_heads is \[8, 0\]"),
        ({"model": {"intermediate_size": 2048.0}}, ModelError, "intermediate_size is 2048.0"),
        ({"model": {"vocab_size": 0}}, ModelError, "vocab_size is 0"),
        ({"model": {"num_key_value_groups": None, "num_attention_heads": 12}}, ModelError, "12 query heads"),
        (
            {"model": {"arch": SimpleNamespace(lm=SimpleNamespace(supports_tp=False))}},
            ModelError,
            "no tensor parallelism",
        ),
        ({"model": {"modules": [named("ExLlamaV2MLP", 5)]}}, ModelError, "has 1 of ExLlamaV2MLP, expected 2"),
        ({"gpu_split": []}, RequestError, r"gpu_split is \[\], which has 0 devices\nhint: pass gpu_split, such as"),
        ({"gpu_split": [0, 0.0]}, RequestError, "0 devices\nhint: pass gpu_split"),
        ({"gpu_split": [1.0, -1.0]}, RequestError, r"gpu_split\[1\] is -1.0"),
        ({"gpu_split": [math.nan]}, RequestError, r"gpu_split\[0\] is nan"),
        ({"gpu_split": [math.inf]}, RequestError, r"gpu_split\[0\] is inf"),
        ({"gpu_split": ["24", 1.5]}, RequestError, r"gpu_split\[0\] is '24', of the type str\n"),
        ({"gpu_split": 24.0}, RequestError, "gpu_split is 24.0"),
        ({"expect_cache_tokens": -1}, RequestError, "expect_cache_tokens is -1"),
        ({"expect_cache_tokens": 1.5}, RequestError, "expect_cache_tokens is 1.5"),
        ({"expect_cache_base": int}, RequestError, "is int, which is no cache"),
        ({"scratch_bytes": -1}, RequestError, "scratch_bytes -1"),
        ({"scratch_bytes": 2.5}, RequestError, "scratch_bytes 2.5"),
        ({"scratch_bytes": 2**60}, RequestError, f"scratch_bytes {2**60}"),
        ({"scratch_bytes": 2**47}, RequestError, rf"scratch_bytes {2**47} is that of \d+ rows, expected at most"),
        ({"model": {"max_input_len": 2**20, "max_batch_size": 17}}, ModelError, "is more than 16777216 rows"),
        ({"gpu_split": [1e300]}, RequestError, r"gpu_split\[0\] is 1e\+300"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[TpplanError], message: str) -> None:
    """What cannot be planned is refused with the name of what is wrong, never by a traceback."""
    keys = dict(change)
    model = small_model(**keys.pop("model", {}))
    with pytest.raises(error, match=message):
        TPContext(model, **({"gpu_split": [1.0, 1.0]} | keys))


@pytest.mark.parametrize("model", [None, "models/llama", SimpleNamespace(config=None)])
def test_no_config(model: Any) -> None:
    """What is no model is refused by what it lacks."""
    with pytest.raises(ModelError, match="the model has no config"):
        TPContext(model, [1.0, 1.0])


def test_wrong_backend() -> None:
    """An unknown backend is refused when it is needed."""
    tp = TPContext(small_model(), [1.0], backend="tpu")
    with pytest.raises(RequestError, match="unknown backend 'tpu'"):
        tp.finalize()
    assert tp.ext_tp_context is None
