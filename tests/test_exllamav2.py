"""``tpplan.exllamav2`` does what the original documents, byte for byte, and where that was wrong it is right."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tpplan.devices import Device
from tpplan.errors import DeviceError, ExecutionError, ModelError, RequestError, TpplanError
from tpplan.exec import compiler
from tpplan.exec.adversary import Adversary
from tpplan.exllamav2 import (
    BROADCAST_ID,
    BROADCAST_KV,
    BROADCAST_Q,
    BROADCAST_RS,
    BROADCAST_VC,
    TPContext,
    compat,
    pairwise,
    safe_move_tensor,
    splits,
    tensor_p,
    test_gpu_peer_copy,
)
from tpplan.infeasible import InfeasibleError
from tpplan.memory import cache_bytes
from tpplan.verify import problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CASES = json.loads(Path(__file__).with_name("data").joinpath("exllamav2_splits.json").read_text())
KINDS = {"kv": BROADCAST_KV, "id": BROADCAST_ID, "vc": BROADCAST_VC, "rs": BROADCAST_RS, "q": BROADCAST_Q}
HALF = torch.half


def _cache(name: str) -> type:
    """A cache class of ExLlamaV2, which is not installed here."""
    return type(name, (), {})


def _named(name: str, size: int) -> Any:
    """A module of ExLlamaV2 with weights of ``size`` bytes."""
    return type(name, (), {"weight_footprint": lambda _: size})()


def _model(modules: Sequence[object] = (), **keys: Any) -> Any:
    """A model of ExLlamaV2, as far as TPContext looks at it; small unless the keys say otherwise."""
    config: dict[str, Any] = {
        "arch": SimpleNamespace(lm=SimpleNamespace(supports_tp=True)),
        "hidden_size": 512,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_key_value_groups": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "max_seq_len": 256,
        "max_batch_size": 2,
        "max_input_len": 20,
        "max_output_len": None,
        "rotary_embedding_base": 10000.0,
    }
    return SimpleNamespace(config=SimpleNamespace(**(config | keys)), modules=list(modules))


def _finalized(gpu_split: Sequence[float] = (2.0, 1.0, 1.5), scratch_bytes: int = 0, **keys: Any) -> TPContext:
    tp = TPContext(_model(**keys), list(gpu_split), backend="cpu", scratch_bytes=scratch_bytes)
    tp.finalize()
    return tp


#: 256 columns of intermediate for 512 of hidden: the smaller share of the former is none, that of the latter is some.
LOPSIDED: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 256, "vocab_size": 1024}
SHAPES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "one GPU": ((2.0,), {}),
    "even": ((1.0, 1.0), {}),
    "uneven": ((2.0, 1.0, 1.5), {}),
    "a GPU without heads": ((1.0, 1.0, 1.0, 1.0), {"num_key_value_heads": 2, "num_key_value_groups": 8}),
    "a GPU that is left alone": ((1.5, 0.0, 1.0), {}),
    "a GPU with residual columns only": (
        (8.0, 1.0),
        {**LOPSIDED, "num_key_value_heads": 1, "num_key_value_groups": 16},
    ),
    "sizes that are no multiples": ((2.0, 1.0), {"intermediate_size": 1856, "vocab_size": 4001, "hidden_size": 720}),
}
shapes = pytest.mark.parametrize(("gpu_split", "keys"), SHAPES.values(), ids=SHAPES)


def _noise(seed: int, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _parts(tp: TPContext, whole: Tensor, kind: int, dim: int = 1) -> list[Tensor]:
    """The columns of each device, in memory of their own, as a device has them."""
    return [whole[..., a * dim : b * dim].clone() for _, a, b in tp.get_split(kind)]


def _size(tp: TPContext, kind: int) -> int:
    return tp.get_split(kind)[-1][2]


# The splits


def _recorded(case: dict[str, Any]) -> TPContext:
    """What the original was given, with next to no weights but attention's."""
    given = case["input"]
    layers = given["layers"]
    modules = [_named("ExLlamaV2Attention", given["attention_bytes_per_layer"]), _named("ExLlamaV2MLP", 2**20)] * layers
    model = _model(
        [*modules, _named("ExLlamaV2Linear", 2**20)],
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
    return TPContext(model, given["gpu_split_gb"], given["expect_cache_tokens"], _cache(name))


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
    tp = TPContext(_model(**keys), gpu_split, backend="cpu")
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
    tp = TPContext(_model(**SHAPES["a GPU without heads"][1]), SHAPES["a GPU without heads"][0])
    assert (tp.get_devs(BROADCAST_KV), tp.get_devs(BROADCAST_Q)) == ([0, 1], [0, 1])
    assert tp.get_devs(BROADCAST_ID) == [0, 1, 2, 3]
    tp = TPContext(_model(**SHAPES["a GPU with residual columns only"][1]), (8.0, 1.0))
    assert [tp.get_devs(kind) for kind in KINDS.values()] == [[0], [0], [0], [0, 1], [0]]
    assert tp.all_devs == [0, 1]
    tp = TPContext(_model(vocab_size=4001), (2.0, 1.0))
    assert _size(tp, BROADCAST_VC) == 4032


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (None, "fp16"),
        (_cache("ExLlamaV2Cache"), "fp16"),
        (_cache("ExLlamaV2Cache_8bit"), "fp8"),
        (_cache("ExLlamaV2Cache_Q8"), "q8"),
        (_cache("ExLlamaV2Cache_Q6"), "q6"),
        (_cache("ExLlamaV2Cache_Q4"), "q4"),
        (_cache("ExLlamaV2Cache_TP"), "fp16"),
        (_cache("ExLlamaV2Cache_Q4_TP"), "q4"),
        (type("Mine", (_cache("ExLlamaV2Cache_Q6"),), {}), "q6"),
    ],
)
def test_caches_are_known_by_name(base: type | None, kind: str) -> None:
    """A cache class, or one that is derived from it, is counted with its bits; None is half precision."""
    tp = TPContext(_model(), [1.0, 1.0], 1000, base)
    assert (tp.plan.request.cache.kind, tp.plan.request.cache.tokens) == (kind, 1000)
    assert sum(entry.cache_bytes for entry in tp.plan.memory) == cache_bytes(2 * 8 * 32 * 2 * 1000, kind)


@pytest.mark.parametrize(("tokens", "batch"), [(0, 2), (100, 1), (256, 1), (600, 2), (5000, 19), (100_000, 40)])
def test_cache_tokens(tokens: int, batch: int) -> None:
    """0 tokens stand for the longest context of the largest batch; so many make room for that many sequences."""
    request = TPContext(_model(), [1.0], tokens).plan.request
    assert (request.cache.tokens, request.batch) == (tokens or 2 * 256, batch)


def test_weights_are_those_of_the_modules() -> None:
    """The ledger has the bytes that the modules tell, to the byte; without modules, those of 16 bits."""
    sizes = {
        "ExLlamaV2Attention": (1_000_003, 999_999),
        "ExLlamaV2MLP": (2_000_001, 7),
        "ExLlamaV2Linear": (3_000_001,),
    }
    modules = [_named(name, size) for name, parts in sizes.items() for size in parts]
    norms = 2 * 512 * 5
    for known, expected in (
        (modules, sum(map(sum, sizes.values()))),
        ([], 2 * (512 * 32 * 48 + 3 * 512 * 2048) * 2 + 512 * 4096 * 2),
    ):
        (entry,) = TPContext(_model(known), [1.0]).plan.memory
        assert entry.weights_bytes == expected + norms


def test_weights_lie_where_the_splits_put_them() -> None:
    """Each matrix is cut by its outputs: a device holds so many rows of 16 bits of each, for every layer."""
    hidden = 1024
    tp = TPContext(_model(hidden_size=hidden, num_key_value_heads=3), [2.0, 1.3])
    assert all(len(tp.get_split(kind)) == 2 for kind in range(5))
    for device, entry in enumerate(tp.plan.memory):
        kv, ids, vc, rs, q = (tp.get_split(kind)[device] for kind in range(5))
        rows = [(2 * kv[2] - 2 * kv[1] + q[2] - q[1]) * 32 * hidden, (rs[2] - rs[1]) * 6 * 32]
        rows += [2 * (ids[2] - ids[1]) * hidden, (rs[2] - rs[1]) * 2048, 2 * hidden]
        assert entry.weights_bytes == 2 * (2 * sum(rows) + (vc[2] - vc[1]) * hidden + hidden)
        assert entry.cache_bytes == 2 * 2 * (kv[2] - kv[1]) * 2 * 32 * 512


def test_define_split_again() -> None:
    """``define_split`` replaces plan and splits, and what was finalized is unloaded; a refused one changes nothing."""
    tp = _finalized((1.0, 1.0))
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
        TPContext(_model(), [0.5, 0.5])
    assert all(shortfall.missing_bytes > 0 for shortfall in caught.value.shortfalls)


def test_attention_that_fills_every_gpu_is_an_error() -> None:
    """Where the original divided by zero, the error names the bytes too."""
    with pytest.raises(InfeasibleError):
        TPContext(_model(max_seq_len=2**20), [0.5, 0.5])


def test_no_gpu_split_asks_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None takes the GPUs of the machine with what is free on them; without any, the error says what to pass."""
    here = (Device(name="RTX 3090", budget_bytes=3 * 2**30), Device(name="RTX 3060", budget_bytes=2**30))
    monkeypatch.setattr(splits, "parse_devices", lambda spec, _tell: {"auto": here}[spec])
    tp = TPContext(_model(), None)
    assert (tp.plan.devices, tp.kv_split) == (here, [(0, 0, 6), (1, 6, 8)])

    def none(_spec: str, _tell: object) -> None:
        raise DeviceError("no GPU driver answers", "name them")

    monkeypatch.setattr(splits, "parse_devices", none)
    with pytest.raises(DeviceError, match=r"no GPU driver answers\nhint: pass gpu_split"):
        TPContext(_model(), None)


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
        ({"model": {"modules": [_named("ExLlamaV2MLP", 5)]}}, ModelError, "has 1 of ExLlamaV2MLP, expected 2"),
        ({"gpu_split": []}, RequestError, "0 devices"),
        ({"gpu_split": [0, 0.0]}, RequestError, "0 devices"),
        ({"gpu_split": [1.0, -1.0]}, RequestError, r"gpu_split\[1\] is -1.0"),
        ({"gpu_split": [math.nan]}, RequestError, r"gpu_split\[0\] is nan"),
        ({"gpu_split": [math.inf]}, RequestError, r"gpu_split\[0\] is inf"),
        ({"gpu_split": ["24"]}, RequestError, r"gpu_split\[0\] is 24"),
        ({"gpu_split": 24.0}, RequestError, "gpu_split is 24.0"),
        ({"expect_cache_tokens": -1}, RequestError, "expect_cache_tokens is -1"),
        ({"expect_cache_tokens": 1.5}, RequestError, "expect_cache_tokens is 1.5"),
        ({"expect_cache_base": int}, RequestError, "is int, which is no cache"),
        ({"scratch_bytes": -1}, RequestError, "scratch_bytes -1"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[TpplanError], message: str) -> None:
    """What cannot be planned is refused with the name of what is wrong, never by a traceback."""
    keys = dict(change)
    model = _model(**keys.pop("model", {}))
    with pytest.raises(error, match=message):
        TPContext(model, **({"gpu_split": [1.0, 1.0]} | keys))


def test_wrong_backend() -> None:
    """An unknown backend is refused when it is needed."""
    tp = TPContext(_model(), [1.0], backend="tpu")
    with pytest.raises(RequestError, match="unknown backend 'tpu'"):
        tp.finalize()
    assert tp.ext_tp_context is None


# The usage examples of the original's documentation

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_groups": 4,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "max_seq_len": 8192,
    "max_batch_size": 1,
    "max_input_len": 2048,
}


def test_usage_examples(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The examples of the original's documentation run as they stand, on virtual devices, with a warning about that."""
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has the GPUs of the example")
    model = _model(**LLAMA)
    # Create TP context: 20 GB on GPU 0, 20 GB on GPU 1
    tp_context = TPContext(model, gpu_split=[20.0, 20.0])

    # Inspect the KV head split
    for dev, a, b in tp_context.kv_split or ():
        print(f"GPU {dev}: KV heads [{a}:{b}]")  # noqa: T201

    # Finalize (allocates pinned buffers and native handle)
    tp_context.finalize()
    assert capsys.readouterr().out == "GPU 0: KV heads [0:4]\nGPU 1: KV heads [4:8]\n"
    assert "2 GPUs planned for, 0 here" in caplog.text

    # Suppose hidden_states is on GPU 0 after layernorm
    hidden_states = torch.randn(1, 128, 4096, dtype=torch.half)

    # Broadcast to all devices in the intermediate-dimension split
    split_tensors = tp_context.broadcast(
        buffer=0, input_tensor=hidden_states.view(-1, hidden_states.shape[-1]), broadcast_type=BROADCAST_ID
    )
    # split_tensors is a list with one tensor per GPU
    assert isinstance(split_tensors, list)
    assert [torch.equal(tensor, hidden_states[0]) for tensor in split_tensors] == [True, True]

    # After each GPU computes its portion of the MLP output:
    whole = _noise(0, 128, 14336)
    partial_outputs = _parts(tp_context, whole, BROADCAST_ID)
    gathered = tp_context.gather(
        buffer=1,
        inputs=partial_outputs,  # list of tensors, one per device
        broadcast_type=BROADCAST_ID,
    )
    # gathered is a CPU tensor with the full concatenated result
    assert torch.equal(gathered, torch.cat(partial_outputs, dim=1))
    assert gathered.device.type == "cpu"
    tp_context.unload()


def test_usage_examples_of_compat() -> None:
    """A tensor, and a tuple of them, moved to where they are: the same tensors. ``pairwise`` is the library's."""
    tensor_cpu = torch.randn(4, 4)
    assert safe_move_tensor(tensor_cpu, "cpu") is tensor_cpu
    weight, bias = safe_move_tensor((tensor_cpu, tensor_cpu[0]), torch.device("cpu"), non_blocking=True)
    assert torch.equal(weight, tensor_cpu)
    assert torch.equal(bias, tensor_cpu[0])
    assert list(pairwise("abc")) == [("a", "b"), ("b", "c")]
    assert (compat.safe_move_tensor, tensor_p.TPContext) == (safe_move_tensor, TPContext)
    with pytest.raises(DeviceError, match="'cpu' is no GPU"):
        test_gpu_peer_copy(torch.device("cpu"), torch.device("cpu"))


# The layers' patterns


def _attention(tp: TPContext, hidden: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """The calls of an attention layer in the original (``forward_tp_old``), and what they should give."""
    rows = hidden.shape[0]
    residual = tp.broadcast(0, hidden, BROADCAST_KV, dim=dim)
    whole = _noise(1, rows, heads * dim)
    outputs = tp.allgather(1, _parts(tp, whole, BROADCAST_Q, dim), BROADCAST_Q, BROADCAST_Q, dim=dim)
    assert all(torch.equal(output, whole) for output in outputs)
    projected = [output[:, a * dim : b * dim] * 2 for output, (_, a, b) in zip(outputs, tp.q_split or (), strict=True)]
    tp.add_residual(projected, residual, BROADCAST_Q, dim=dim)
    return tp.gather(0, projected, BROADCAST_Q, dim=dim), whole * 2 + hidden


def _mlp(tp: TPContext, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The calls of an MLP in the original (``forward_tp_old``), with the residual where it is added."""
    rows, width = hidden.shape[0], _size(tp, BROADCAST_ID)
    whole = _noise(2, rows, width)
    residual = tp.broadcast(0, hidden, BROADCAST_RS)
    outputs = tp.allgather(1, _parts(tp, whole, BROADCAST_ID), BROADCAST_ID, BROADCAST_RS)
    assert all(torch.equal(output, whole) for output in outputs)
    down = _parts(tp, hidden * 3, BROADCAST_RS)
    tp.add_residual(down, residual, BROADCAST_RS)
    return tp.gather(0, down, BROADCAST_RS), hidden * 3 + hidden


@shapes
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_layers(gpu_split: tuple[float, ...], keys: dict[str, Any], rows: int) -> None:
    """Attention, MLP and output matrix, call by call as in the original, are exact on every kind of split."""
    tp = _finalized(gpu_split, **({"head_dim": 32} | keys))
    hidden = _noise(3, rows, _size(tp, BROADCAST_RS))
    if _size(tp, BROADCAST_Q) * 32 == hidden.shape[1]:
        got, expected = _attention(tp, hidden, _size(tp, BROADCAST_Q), 32)
        assert torch.equal(got, expected)
    got, expected = _mlp(tp, hidden)
    assert torch.equal(got, expected)
    logits = _noise(4, rows, _size(tp, BROADCAST_VC), dtype=torch.float32)
    assert torch.equal(tp.gather(1, _parts(tp, logits, BROADCAST_VC), BROADCAST_VC), logits)
    tp.unload()


@given(data=st.data())
@settings(max_examples=40)
def test_any_split_any_order(data: st.DataObject) -> None:
    """Whatever the budgets, heads and rows, and whichever operations follow each other, every byte is right."""
    budgets = data.draw(st.lists(st.sampled_from((0.0, 0.75, 1.0, 1.5, 3.0)), min_size=1, max_size=5).filter(any))
    kv, groups = data.draw(st.sampled_from((1, 3, 4, 8))), data.draw(st.sampled_from((1, 2)))
    tp = _finalized(
        budgets,
        num_key_value_heads=kv,
        num_key_value_groups=groups,
        hidden_size=32 * data.draw(st.integers(8, 24)),
        intermediate_size=128 * data.draw(st.integers(2, 9)),
        vocab_size=data.draw(st.integers(600, 3000)),
    )
    for seed in range(data.draw(st.integers(1, 6))):
        kind, other, buffer = (data.draw(st.sampled_from(options)) for options in (range(5), range(5), (0, 1)))
        dim = 32 if kind in {BROADCAST_KV, BROADCAST_Q} else 1
        dtype = data.draw(st.sampled_from((torch.half, torch.float32, torch.bfloat16)))
        whole = _noise(seed, data.draw(st.integers(0, 40)), _size(tp, kind) * dim, dtype=dtype)
        parts = _parts(tp, whole, kind, dim)
        assert torch.equal(tp.gather(buffer, parts, kind, dim), whole)
        outputs = tp.allgather(buffer, parts, kind, other, dim)
        assert [torch.equal(output, whole) for output in outputs] == [True] * len(tp.get_devs(other))
        copies = tp.broadcast(buffer, whole, other, dim)
        assert [torch.equal(copy, whole) for copy in copies] == [True] * len(tp.get_devs(other))
        sources = tp.broadcast(buffer, whole.neg(), kind)
        tp.add_residual(parts, sources, kind, dim)
        assert all(not part.any() for part in parts)
    tp.unload()


@pytest.mark.parametrize("transport", ["peer", "host", "events"])
@pytest.mark.parametrize("seed", range(4))
def test_layers_under_an_adversary(transport: str, seed: int) -> None:
    """The patterns are exact, too, where everything that may happen late does."""
    tp = TPContext(_model(), [2.0, 1.0, 1.5], backend="cpu")
    tp.finalize()
    places, random = [torch.device("cpu")] * 3, Random(seed)
    adverse = lambda memory: Adversary(memory, random)  # noqa: E731
    assert tp.context is not None
    tp.context.close()
    tp.context = compiler.build(tp.plan, places, adverse, transport=transport, max_rows=40, dtype=HALF)
    wholes = [_noise(i, 5, 2048) for i in range(4)]
    results = [tp.allgather(1, _parts(tp, whole, BROADCAST_ID), BROADCAST_ID, BROADCAST_RS) for whole in wholes]
    copies = [tp.broadcast(0, whole, BROADCAST_KV) for whole in wholes]
    gathered = [tp.gather(0, _parts(tp, whole, BROADCAST_ID), BROADCAST_ID) for whole in wholes]
    assert all(map(torch.equal, gathered, wholes))
    tp.wait_streams()
    for whole, *lists in zip(wholes, results, copies, strict=True):
        assert all(torch.equal(tensor, whole) for tensors in lists for tensor in tensors)
    tp.unload()


# What was wrong in the original


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_every_size_of_element(dtype: torch.dtype) -> None:
    """Elements of 1, 2, 4 and 8 bytes arrive whole; the original counted 2 bytes for each."""
    tp = _finalized()
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 2048)).to(dtype)
    assert all(torch.equal(copy, whole) for copy in tp.broadcast(0, whole, BROADCAST_KV))
    parts = _parts(tp, whole, BROADCAST_ID)
    assert all(torch.equal(x, whole) for x in tp.allgather(1, parts, BROADCAST_ID, BROADCAST_Q))
    assert torch.equal(tp.gather(0, parts, BROADCAST_ID), whole)


def test_shapes_of_other_inputs() -> None:
    """Tensors of one and of three dimensions, wide and strided ones are broadcast as they are (block tables, masks)."""
    tp = _finalized()
    for x in (torch.arange(7, dtype=torch.int32), _noise(0, 2, 3, 512), _noise(1, 1, 20000), _noise(2, 512, 9).t()):
        assert all(torch.equal(copy, x) for copy in tp.broadcast(0, x, BROADCAST_ID))


def test_gathered_results_do_not_change() -> None:
    """A gathered tensor is complete and stays what it is; the pinned buffer has a copy of the latest."""
    tp = _finalized()
    wholes = [_noise(i, 6, 2048) for i in range(3)]
    results = [tp.gather(1, _parts(tp, whole, BROADCAST_ID), BROADCAST_ID) for whole in wholes]
    assert all(map(torch.equal, results, wholes))
    assert torch.equal(tp.get_pinned(1, 2, 3, 2048).view(6, 2048), wholes[-1])
    views = _parts(tp, tp.get_pinned(1, 1, 6, 2048)[0], BROADCAST_ID)
    assert torch.equal(tp.gather(1, views, BROADCAST_ID), wholes[-1])


def test_a_result_larger_than_the_buffer() -> None:
    """A gather beyond the pinned buffer is whole; the original wrote past the end."""
    tp = _finalized(max_output_len=1)
    assert tp.pinned_temp is not None
    logits = _noise(0, 40, 4096, dtype=torch.float32)
    assert logits.nbytes > tp.pinned_temp[0].nbytes
    before = tp.pinned_temp[0].fill_(1).clone()
    assert torch.equal(tp.gather(0, _parts(tp, logits, BROADCAST_VC), BROADCAST_VC), logits)
    assert torch.equal(tp.pinned_temp[0], before)


def test_operands_may_be_overwritten_at_once() -> None:
    """What is done to an input after the call does not reach the results, also back to back on one buffer."""
    tp = _finalized()
    results = []
    for i in range(4):
        whole = _noise(i, 4, 2048)
        parts = _parts(tp, whole, BROADCAST_ID)
        results.append((whole.clone(), tp.allgather(0, parts, BROADCAST_ID, BROADCAST_ID), tp.broadcast(0, whole, 0)))
        for tensor in (whole, *parts):
            tensor.fill_(math.nan)
    for whole, *lists in results:
        assert all(torch.equal(tensor, whole) for tensors in lists for tensor in tensors)


def test_all_reduce() -> None:
    """Every device gets its own residual plus the sum over all, added in float32 and rounded once."""
    tp = _finalized((1.0, 1.0, 1.0))
    tensors = [_noise(i, 5, 512) for i in range(3)]
    residual = _noise(9, 5, 512)
    residuals = [residual.clone() for _ in tensors]
    expected = (sum(tensor.float() for tensor in tensors) + residual.float()).half()
    kept = [tensor.clone() for tensor in tensors]
    tp.all_reduce(0, tensors, residuals)
    assert all(torch.equal(each, expected) for each in residuals)
    assert all(map(torch.equal, tensors, kept))


def test_allgather_into_another_split() -> None:
    """The result is as wide as the gathered axis, not as the one whose devices get it."""
    tp = _finalized()
    whole = _noise(0, 3, 8 * 32)
    results = tp.allgather(0, _parts(tp, whole, BROADCAST_KV, 32), BROADCAST_KV, BROADCAST_ID, dim=32)
    assert [torch.equal(result, whole) for result in results] == [True] * 3


# Scratch, pinned memory, tables


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


@shapes
@pytest.mark.parametrize("layer", ["attention", "mlp"])
def test_the_scratch_of_a_layer(gpu_split: tuple[float, ...], keys: dict[str, Any], layer: str) -> None:
    """The slices of the original's layers, all rows at once, fit on every device, apart and after what is reserved."""
    tp = _finalized(gpu_split, 1_000_000, **keys)
    rows, dim = 40, tp.model.config.head_dim
    for _ in range(2):
        tp.begin_scratch_alloc_tp()
        tp.reserve_scratch([1_000_000 if device in tp.all_devs else 0 for device in range(tp.num_devices)])
        full = [(BROADCAST_RS, 1), (BROADCAST_RS, 1), (BROADCAST_Q, dim) if layer == "attention" else (BROADCAST_ID, 1)]
        part = [(BROADCAST_ID, 1), (BROADCAST_ID, 1)]
        if layer == "attention":
            part = [(BROADCAST_Q, dim), (BROADCAST_KV, dim), (BROADCAST_KV, dim)]
        part.append((BROADCAST_RS, 1))
        slices = [tp.get_scratch_slice_tp_bc(rows, HALF, kind, dim=times) for kind, times in full]
        slices += [tp.get_scratch_slice_tp(rows, HALF, kind, dim=times) for kind, times in part]
    for (kind, times), tensors in zip(full, slices, strict=False):
        assert [tuple(t.shape) for t in tensors] == [(rows, _size(tp, kind) * times)] * len(tp.get_devs(kind))
    for (kind, times), tensors in zip(part, slices[len(full) :], strict=True):
        assert [tuple(t.shape) for t in tensors] == [(rows, (b - a) * times) for _, a, b in tp.get_split(kind)]
    everything = [tensor for tensors in slices for tensor in tensors]
    assert all(tensor.dtype == HALF and tensor.data_ptr() % 64 == 0 for tensor in everything)
    assert not any(_overlap(a, b) for a, b in combinations(everything, 2))
    tp.unload()


def test_scratch_is_handed_out_again() -> None:
    """After ``begin_scratch_alloc_tp`` the same memory comes again; slices of float32 are float32."""
    tp = _finalized()
    first = tp.get_scratch_slice_tp(4, torch.float32, BROADCAST_ID)
    second = tp.get_scratch_slice_tp(4, torch.float32, BROADCAST_ID)
    assert {tensor.dtype for tensor in first} == {torch.float32}
    tp.begin_scratch_alloc_tp()
    again = tp.get_scratch_slice_tp(4, torch.float32, BROADCAST_ID)
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(first, again, strict=True)] == [True] * 3
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(second, again, strict=True))


def test_reserved_scratch_is_set_aside() -> None:
    """A slice does not touch reserved bytes; more than there is, and a GPU that is not in use, are errors."""
    tp = _finalized((1.0, 0.0, 1.0))
    (start, _) = tp.get_scratch_slice_tp(1, HALF, BROADCAST_ID)
    tp.begin_scratch_alloc_tp()
    tp.reserve_scratch([1000, 0, 0])
    first, _ = tp.get_scratch_slice_tp(1, HALF, BROADCAST_ID)
    assert first.data_ptr() - start.data_ptr() == 1024
    with pytest.raises(ExecutionError, match=r"device 0 \(GPU 0\): 1000000000 bytes asked for"):
        tp.reserve_scratch([10**9, 0, 0])
    with pytest.raises(ExecutionError, match=r"device 1 is not in use\nhint: devices in use: \[0, 2\]"):
        tp.reserve_scratch([0, 1, 0])


def test_too_much_scratch_is_an_error() -> None:
    """Running out of scratch says how much there is; the original's ``narrow`` failed without numbers."""
    tp = _finalized()
    with pytest.raises(ExecutionError, match=r"bytes asked for, [0-9]+ free of [0-9]+ of scratch"):
        tp.get_scratch_slice_tp_bc(10**6, HALF, BROADCAST_RS)


def test_pinned_buffers() -> None:
    """The buffers have the original's size and are two; ``get_pinned`` is a view, ``copy_pinned`` a copy in one."""
    tp = _finalized()
    assert tp.pinned_temp is not None
    assert [buffer.shape for buffer in tp.pinned_temp] == [(40 * 4096,)] * 2
    assert {buffer.dtype for buffer in tp.pinned_temp} == {HALF}
    given = _noise(0, 2, 3, 512)
    assert torch.equal(tp.copy_pinned(1, given), given)
    view = tp.get_pinned(1, 2, 3, 512)
    assert torch.equal(view, given)
    assert view.data_ptr() == tp.pinned_temp[1].data_ptr()
    assert not _overlap(*tp.pinned_temp)
    odd = torch.arange(9, dtype=torch.int64)[::2]
    assert torch.equal(tp.copy_pinned(0, odd), odd)
    assert torch.equal(tp.get_pinned(1, 2, 3, 512), given)


@pytest.mark.parametrize("shape", [(1, 40, 5000), (-1, 1, 1)])
def test_pinned_views_stay_inside(shape: tuple[int, int, int]) -> None:
    """A view beyond the buffer is an error with its size."""
    with pytest.raises(ExecutionError, match="a host buffer of 327680 bytes has no room"):
        _finalized().get_pinned(0, *shape)


class RopeStyle(IntEnum):
    """The original's."""

    NONE = 0
    GPTJ = 1
    NEOX = 2


def _arch(style: RopeStyle) -> Any:
    return SimpleNamespace(lm=SimpleNamespace(supports_tp=True, rope_style=style))


def _llama3(f: Tensor) -> Tensor:
    """Frequencies stretched 8 times for waves longer than 64 positions, not at all for those under 16."""
    smooth = (64 / (2 * math.pi / f) - 1) / 3
    blended = ((1 - smooth) / 8 + smooth) * f
    return torch.where(smooth > 1, f, torch.where(smooth < 0, f / 8, blended))


F = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
LONG = [1.0 + i / 4 for i in range(16)]
ROPES: dict[str, tuple[dict[str, Any], Tensor, float]] = {
    "default": ({}, F, 1),
    "base": ({"rotary_embedding_base": 500000.0}, 1 / 500000.0 ** (torch.arange(0, 32, 2) / 32), 1),
    "linear": ({"scale_pos_emb": 4.0}, F / 4, 1),
    "alpha": ({"scale_alpha_value": 2.5}, 1 / (10000.0 * 2.5 ** (32 / 30)) ** (torch.arange(0, 32, 2) / 32), 1),
    "llama3": (
        {
            "alt_rope_method": "llama3",
            "l3_rope_factor": 8.0,
            "l3_rope_low_freq_factor": 1.0,
            "l3_rope_high_freq_factor": 4.0,
            "l3_rope_original_max_position_embeddings": 64,
        },
        _llama3(F),
        1,
    ),
    "llama3, compressed": (
        {
            "alt_rope_method": "llama3",
            "l3_rope_factor": 8.0,
            "l3_rope_low_freq_factor": 1.0,
            "l3_rope_high_freq_factor": 4.0,
            "l3_rope_original_max_position_embeddings": 64,
            "scale_pos_emb": 2.0,
        },
        _llama3(F) / 2,
        1,
    ),
    "su, long": (
        {
            "alt_rope_method": "su",
            "scale_long_factor": LONG,
            "scale_short_factor": [1.0] * 16,
            "original_max_seq_len": 64,
        },
        F / torch.tensor(LONG),
        math.sqrt(1 + math.log(4) / math.log(64)),
    ),
    "su, short": (
        {
            "alt_rope_method": "su",
            "scale_long_factor": [1.0] * 16,
            "scale_short_factor": LONG,
            "original_max_seq_len": 256,
        },
        F / torch.tensor(LONG),
        1,
    ),
    "yarn, within the context": (
        {"alt_rope_method": "yarn", "yarn_rope_factor": 4.0, "yarn_rope_original_max_position_embeddings": 256},
        F,
        1,
    ),
}


@pytest.mark.parametrize("style", [RopeStyle.NEOX, RopeStyle.GPTJ])
@pytest.mark.parametrize(("keys", "frequencies", "attention"), ROPES.values(), ids=ROPES)
def test_sin_cos(keys: dict[str, Any], frequencies: Tensor, attention: float, style: RopeStyle) -> None:
    """The tables equal sines and cosines computed here, on each device with KV heads, for every position."""
    gpu_split, shape = SHAPES["a GPU without heads"]
    tp = _finalized(gpu_split, **shape, **keys, arch=_arch(style))
    angles = torch.arange(256)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1) if style == RopeStyle.NEOX else angles.repeat_interleave(2, -1)
    sin, cos = tp.get_sin_cos()
    assert (tp.sin, tp.cos) == (sin, cos)
    assert len(sin) == len(cos) == 4
    assert sin[2:] == cos[2:] == [None, None]
    for tables, expected in ((sin, angles.sin()), (cos, angles.cos())):
        for table in tables[:2]:
            assert table is not None
            assert table.dtype == HALF
            assert table.shape == (1, 1, 256, 32)
            torch.testing.assert_close(table[0, 0].float(), expected * attention, atol=6e-4, rtol=1e-3)
    assert tp.get_sin_cos()[0][0] is sin[0]


def test_yarn_stretches_by_the_trained_context() -> None:
    """YaRN's ramp lies where the trained context puts it, as in the paper; the original took the new context."""
    tp = _finalized((1.0,), alt_rope_method="yarn", yarn_rope_factor=4.0, yarn_rope_original_max_position_embeddings=64)
    sin, cos = tp.get_sin_cos()
    assert sin[0] is not None
    assert cos[0] is not None
    first, last = (32 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1))
    first, last = max(math.floor(first), 0), math.ceil(last)
    ramp = ((torch.arange(16) - first) / (last - first)).clamp(0, 1)
    angles = torch.arange(256)[:, None] * (F / 4 * ramp + F * (1 - ramp))
    attention = 0.1 * math.log(4) + 1
    torch.testing.assert_close(sin[0][0, 0, :, :16].float(), angles.sin() * attention, atol=6e-4, rtol=1e-3)
    torch.testing.assert_close(cos[0][0, 0, :, 16:].float(), angles.cos() * attention, atol=6e-4, rtol=1e-3)


@pytest.mark.parametrize(("tokens", "positions"), [(0, 256), (100, 100), (256, 256), (300, 256), (5000, 256)])
def test_tables_are_as_long_as_a_sequence_can_be(tokens: int, positions: int) -> None:
    """The tables reach the longest context, or as far as the cache does."""
    tp = TPContext(_model(), [1.0], tokens, backend="cpu")
    tp.finalize()
    sin, _ = tp.get_sin_cos()
    assert sin[0] is not None
    assert sin[0].shape == (1, 1, positions, 32)


def test_no_rope() -> None:
    """A model without RoPE has no tables."""
    assert _finalized((1.0, 1.0), arch=_arch(RopeStyle.NONE)).get_sin_cos() == ([None, None], [None, None])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"alt_rope_method": "mrope"}, "alt_rope_method is 'mrope'"),
        ({"alt_rope_method": "llama3"}, "has no l3_rope_factor"),
        (
            {"alt_rope_method": "su", "scale_long_factor": [1.0], "scale_short_factor": [], "original_max_seq_len": 64},
            "has 1 numbers, expected 16",
        ),
        ({"rotary_embedding_base": "large"}, "rotary_embedding_base is large"),
        ({"arch": SimpleNamespace(lm=SimpleNamespace(rope_style="SPIRAL"))}, "rope_style is 'spiral'"),
    ],
)
def test_bad_rope(keys: dict[str, Any], message: str) -> None:
    """A RoPE that cannot be made is refused, each time it is asked for."""
    tp = _finalized((1.0,), **keys)
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            tp.get_sin_cos()


# The life of a context


def _calls(tp: TPContext) -> dict[str, Any]:
    """Every call that needs a finalized context, with arguments that are right."""
    x, parts = _noise(0, 2, 512), _parts(tp, _noise(0, 2, 512), BROADCAST_RS)
    return {
        "broadcast": lambda: tp.broadcast(0, x, BROADCAST_KV),
        "gather": lambda: tp.gather(0, parts, BROADCAST_RS),
        "allgather": lambda: tp.allgather(0, parts, BROADCAST_RS, BROADCAST_RS),
        "add_residual": lambda: tp.add_residual(parts, [x, x], BROADCAST_RS),
        "all_reduce": lambda: tp.all_reduce(0, [x] * 2, [x.clone(), x.clone()]),
        "wait_streams": tp.wait_streams,
        "get_sin_cos": tp.get_sin_cos,
        "get_pinned": lambda: tp.get_pinned(0, 1, 1, 1),
        "copy_pinned": lambda: tp.copy_pinned(0, x),
        "begin_scratch_alloc_tp": tp.begin_scratch_alloc_tp,
        "get_scratch_slice_tp": lambda: tp.get_scratch_slice_tp(1, HALF, BROADCAST_KV),
        "get_scratch_slice_tp_bc": lambda: tp.get_scratch_slice_tp_bc(1, HALF, BROADCAST_KV),
        "reserve_scratch": lambda: tp.reserve_scratch([64, 64]),
    }


def test_life() -> None:
    """Before ``finalize`` and after ``unload``, splits can be read and every other call is an error that says why."""
    tp = TPContext(_model(), [1.0, 1.0], backend="cpu")
    for _ in range(2):
        assert (tp.ext_tp_context, tp.pinned_temp, tp.sin, tp.cos) == (None, None, None, None)
        assert tp.get_split(BROADCAST_KV) == [(0, 0, 4), (1, 4, 8)]
        assert tp.get_devs(BROADCAST_Q) == tp.all_devices() == [0, 1]
        for call in _calls(tp).values():
            with pytest.raises(ExecutionError, match=r"not finalized, or unloaded\nhint: call finalize\(\) first"):
                call()
        tp.finalize()
        assert tp.ext_tp_context
        for call in _calls(tp).values():
            call()
        contexts = [tp.context]
        tp.finalize()
        contexts.append(tp.context)
        for _ in range(2):
            tp.unload()
        for context in contexts:
            assert context is not None
            with pytest.raises(ExecutionError, match="the context is closed"):
                context.synchronize()


def test_numbers_of_buffers_and_types() -> None:
    """Buffers are 0 and 1, types 0 to 4; others are errors, not the memory behind the last."""
    tp = _finalized()
    x = _noise(0, 2, 512)
    for buffer in (-1, 2):
        for call in (
            lambda b: tp.broadcast(b, x, 0),
            lambda b: tp.get_pinned(b, 1, 1, 1),
            lambda b: tp.copy_pinned(b, x),
        ):
            with pytest.raises(ExecutionError, match=f"there is no host buffer {buffer}"):
                call(buffer)
    for kind in (-1, 5):
        for ask in (tp.get_split, tp.get_devs, lambda k: tp.broadcast(0, x, k)):
            with pytest.raises(RequestError, match=f"unknown broadcast type {kind}"):
                ask(kind)


def test_wrong_operands_change_nothing() -> None:
    """Too few parts, wrong widths and mixed dtypes are refused before anything is written."""
    tp = _finalized()
    parts = _parts(tp, _noise(0, 2, 2048), BROADCAST_ID)
    assert tp.pinned_temp is not None
    tp.pinned_temp[0].fill_(7)
    for wrong in (parts[:-1], [*parts[:-1], parts[-1][:, 1:]], [parts[0].float(), *parts[1:]], parts[::-1]):
        for call in (lambda p: tp.gather(0, p, BROADCAST_ID), lambda p: tp.allgather(0, p, BROADCAST_ID, BROADCAST_KV)):
            with pytest.raises(ExecutionError):
                call(wrong)
    assert (tp.pinned_temp[0] == 7).all()


def test_importing_tpplan_stays_light(tmp_path: Path) -> None:
    """``import tpplan`` brings neither torch nor this module; ``import tpplan.exllamav2`` does without exllamav2."""
    code = "import sys, tpplan; print('torch' in sys.modules, 'tpplan.exllamav2' in sys.modules)"
    code += "; import tpplan.exllamav2; print('torch' in sys.modules, 'exllamav2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False False\nTrue False\n"), done.stderr
