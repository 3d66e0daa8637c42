"""Kernels for the attention of a decoding step: their machine code, and what their source does lane by lane."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.machine_code import CAPABILITIES
from tpplan.decoder.fast.launches import attention as launches
from tpplan.decoder.fast.launches.attention import Attention, NewTokens, splits_of
from tpplan.decoder.fast.launches.launcher import DTYPES, bits_of
from tpplan.decoder.fast.launches.pointwise import TURN_WORDS
from tpplan.decoder.math import angles
from tpplan.errors import ExecutionError
from tpplan.exec.toolchain.kernel_cache import OVERLAPS

#: Maximum loads of a sink: where a block is alone, and where it is the last one, both of which compilers may repeat.
SINKS = 4
#: Bytes that a thread may have in memory.
MOST_STACK = 48


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *(("bf16_128", each) for each in CAPABILITIES),
        ("f16_80", CAPABILITIES[0]),
        ("bf16_256_capped", (9, 0)),
        ("bf16_128_q8", CAPABILITIES[0]),
        ("f16_96_q8", (9, 0)),
        ("bf16_256_q8_capped", CAPABILITIES[-1]),
        ("f16_128_fp8", CAPABILITIES[-1]),
        ("bf16_256_fp8", CAPABILITIES[0]),
        ("bf16_64_fp8", (9, 0)),
    ],
)
def test_they_multiply_matrices_in_registers(name: str, capability: tuple[int, int]) -> None:
    """Caches of 16 bits are read 16 bytes at a time, and multiplied as they are; those of 8 bits become float16.

    The L2 cache is asked for them before the kernel before has ended. All else is in 32 bits. Two blocks share a
    multiprocessor. What kernels for Hopper keep in registers may take a few bytes elsewhere.
    """
    is_narrow = "q8" in name or "fp8" in name
    kind = "f16" if is_narrow else name.partition("_")[0]
    name, threads = f"attention_{name}", 128 if "256" in name else 256
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    check_overlap(name, text, capability)
    assert ("ld.global.L1::no_allocate.v4.u32" in text) != is_narrow
    assert ("ld.global.L1::no_allocate.v2.u32" in text) == is_narrow
    assert (text.count("ld.global.u16") > SINKS) == ("q8" in name)
    assert ("cp.async.bulk.prefetch.L2.global" in text.partition("griddepcontrol.wait")[0]) == (capability >= OVERLAPS)
    assert "ld.global.nc" not in text  # which may read before a kernel has written
    multiply = "mma.sync.aligned.m16n8k16.row.col.f32."
    assert text.count(f"{multiply}{kind}.{kind}.f32") == text.count("mma.sync") > 0
    log = machine_code.assembled(text, capability)
    stack, registers = (re.search(each, log) for each in (r"(\d+) bytes stack frame", r"Used (\d+) registers"))
    assert stack
    assert int(stack[1]) <= (0 if capability == (9, 0) or is_narrow else MOST_STACK)
    assert registers
    assert 2 * int(registers[1]) * threads <= 2**16


@pytest.mark.parametrize("name", ["ATTENTION", "ATTENTION_F32_128", "ATTENTION_BF16_128_CUT", "ATTENTION_BF16_Q8"])
def test_there_are_no_others(name: str) -> None:
    """Kernels are made by their names, but only those that there are."""
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.attention")
    with pytest.raises(AttributeError, match=name):
        getattr(kernels, name)


def test_each_is_made_once() -> None:
    """Asked for again, for another generation of GPUs, it is the same kernel, whose functions are compiled already."""
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.attention")
    assert kernels.ATTENTION_BF16_128_Q8 is kernels.ATTENTION_BF16_128_Q8


def test_other_devices_and_heads_are_left_to_torch() -> None:
    """The CPU has no kernel, and no GPU has one for float32 or for heads that are no vectors."""
    assert not Attention.takes(torch.device("cpu"), torch.bfloat16, 128)
    gpu = torch.device("cuda", 0)
    assert not Attention.takes(gpu, torch.float32, 128)
    assert not Attention.takes(gpu, torch.float16, 100)
    assert not Attention.takes(gpu, torch.float16, 264)
    assert not Attention.takes(gpu, torch.float16, 128, "fp32")


@pytest.mark.parametrize(("kind", "capability"), [("fp16", (9, 0)), ("q8", (8, 0)), ("fp8", (8, 0))])
def test_gpus_that_have_kernels(kind: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads of 16 bits would spill on old ones."""
    gpu = torch.device("cuda", 0)
    for each in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, each=each: each)
        assert Attention.takes(gpu, torch.float16, 128, kind) == (each >= (8, 0))
        assert Attention.takes(gpu, torch.float16, 256, kind) == (each >= capability)


@pytest.mark.parametrize(
    ("kind", "size", "appends"),
    [("fp16", 16, True), ("fp16", 80, True), ("fp16", 72, False), ("q8", 128, False), ("fp8", 64, False)],
)
def test_new_tokens_that_a_kernel_would_pass_over(
    kind: str, size: int, appends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused, as those in other rows than their queries are; kernels of the same cache and heads take them.

    What a kernel does of an append is in its source: the vectors that it writes to the cache behind those of queries.
    """
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.attention")
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(launches, "Launcher", lambda *_: lambda *words: launched.append(words[2:]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    kernel = Attention(torch.device("cpu"), torch.float16, size, kind=kind)
    assert kernel.appends == appends
    suffix = {"q8": "_Q8", "fp8": "_FP8"}.get(kind, "")
    source = getattr(kernels, f"ATTENTION_F16_{size}{suffix}").function
    closed = dict(zip(source.__code__.co_freevars, (cell.cell_contents for cell in source.__closure__), strict=True))
    assert closed["appends"] == appends
    x_RHK = torch.zeros(2, 6, size, dtype=torch.float16)
    cache = torch.zeros(2, 2, 2, 32, size, dtype=torch.float16)
    new = NewTokens(x_RHK[:, 2:4], x_RHK[:, 4:], range(TURN_WORDS))

    def attend(q_RHK: torch.Tensor, new: NewTokens | None) -> None:
        kernel(q_RHK, cache[0], cache[1], torch.zeros(2, dtype=torch.int64), scale=1.0, new=new)

    attend(x_RHK[:, :2], None)
    if not appends:
        with pytest.raises(ExecutionError, match=f"heads of {size} elements write no new tokens to this kind of cache"):
            attend(x_RHK[:, :2], new)
        assert len(launched) == 1
        return
    attend(x_RHK[:, :2], new)
    assert len(launched) == 2
    for queries, keys in ((x_RHK[:, :2].contiguous(), new.keys), (x_RHK[:, :2], new.keys.contiguous())):
        with pytest.raises(ExecutionError, match="queries, new keys and new values have the strides") as error:
            attend(queries, evolve(new, keys=keys))
        assert f"strides of {size} and 1" in error.value.hint
    assert len(launched) == 2


@pytest.mark.parametrize("length", [1, 100, 4096, 16384, 2**20])
@pytest.mark.parametrize("count", [1, 2, 8, 72, 88, 130, 512, 5000])
def test_blocks_that_share_a_token(count: int, length: int) -> None:
    """They keep the device busy where there is work for them, and what they leave to the last one is bounded."""
    found, tiles = splits_of(count, length, 132), -(-length // 16)
    assert found >= 1
    assert found == 1 or (found - 1) * 4 < tiles
    assert found == 1 or found * count <= 198
    if tiles >= 4 * 132:
        assert found * count > 66


#: Dtype, query heads and KV heads, positions, blocks that share a token, what elements are times what the cache has.
_Case = tuple[torch.dtype, tuple[int, int], list[int], int, float]


@pytest.mark.parametrize("sinks", [[-4.0, 1.0, 80.0], [-600.0, 600.0], []])
@pytest.mark.parametrize(
    "case",
    [
        (torch.bfloat16, (4, 2), [20, 3], 1, 1.0),
        (torch.float16, (9, 1), [60], 2, 1.0),  # in two blocks each, of which the second has one query
        (torch.bfloat16, (2, 1), [79], 3, 256.0),  # as in fp8
        (torch.float16, (2, 1), [100], 2, 1.0),  # of a ring, in which its own place is no longer the last
    ],
)
def test_lanes_agree(case: _Case, sinks: list[float]) -> None:
    """What the source does lane by lane is attention, in which each query's sink takes part, if it has one, once.

    Queries, and the tokens' own keys and values, are there when the kernel before has ended, and not before.
    """
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.attention")
    dtype, (queries, keys), positions, splits, unit = case
    count, size, length, scale, warps = len(positions), 64, 80, 0.125, 2
    torch.manual_seed(1)
    q_RHK = torch.randn(count, queries, size).to(dtype)
    kv_2RHLK = torch.randn(2, count, keys, length, size).div(unit).to(dtype)
    positions_R, sinks_H = torch.tensor(positions), torch.tensor((sinks * queries)[:queries]).to(dtype)
    blocks = keys * -(-queries // keys // 8)
    partial, turns = torch.full((count * blocks * splits, 8, size + 2), math.nan), torch.zeros(8, dtype=torch.int32)
    out_RH = torch.full((count, queries * size), 9).to(dtype)
    reader = evolve(kernels.cache_tiles.plain_reader(size), unit=unit)
    kernel = kernels.attention(f"attention_{DTYPES[dtype]}", size, reader, warps, ahead=True, capped=False)
    words = [
        q_RHK.data_ptr(), 2 * queries * size, *(x.data_ptr() for x in kv_2RHLK), 2 * keys * length * size, 0, 0,
        positions_R.data_ptr(), sinks_H.data_ptr(), out_RH.data_ptr(), 2 * queries * size, partial.data_ptr(),
        turns.data_ptr(), length, queries // keys, bits_of(scale / math.log(2)), 0, 1, *[0] * 10,
    ]  # fmt: skip
    tensors = [q_RHK, kv_2RHLK, positions_R, sinks_H, out_RH, partial, turns]
    places = enumerate(positions_R.remainder(length).tolist())
    own = [kv_2RHLK[:, row, :, place] for row, place in places]
    lanes.run(kernel, (splits, blocks, count), 32 * warps, words, tensors, written=[q_RHK, *own])
    k_RHLK, v_RHLK = kv_2RHLK.double().mul(unit)
    scores_RHGL = torch.unflatten(q_RHK.double(), 1, (keys, -1)) @ k_RHLK.mT * scale
    hidden_RL = torch.arange(length) > positions_R[:, None]
    scores_RHL = scores_RHGL.masked_fill(hidden_RL[:, None, None], -math.inf).flatten(1, 2)
    if sinks:
        scores_RHL = torch.cat((scores_RHL, sinks_H.double()[None, :, None].expand(count, -1, 1)), -1)
    weights_RHGL = torch.unflatten(scores_RHL.softmax(-1)[..., :length], 1, (keys, -1))
    expected_RH = (weights_RHGL @ v_RHLK).reshape(out_RH.shape)
    torch.testing.assert_close(out_RH.double(), expected_RH, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=1e-5)
    assert not turns.any()


#: Dtype, query heads and KV heads, elements of a head and how many of them are turned, positions, places of the cache,
#: blocks that share a token, and warps.
_TurnCase = tuple[torch.dtype, tuple[int, int], tuple[int, int], list[int], int, int, int]


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        (torch.bfloat16, (1, 1), (64, 64), [0], 40, 1, 1),  # in an empty cache
        (torch.float16, (8, 2), (128, 128), [0, 75, 15], 80, 2, 2),
        (torch.bfloat16, (7, 1), (96, 32), [37], 40, 1, 2),  # of which norms come from elsewhere
        (torch.float16, (16, 1), (64, 64), [100, 47, 48], 48, 2, 2),  # of rings, written by two blocks
        (torch.bfloat16, (6, 3), (80, 80), [33, 16], 40, 3, 1),
        (torch.float16, (2, 2), (256, 256), [17], 20, 1, 4),
        (torch.bfloat16, (3, 1), (208, 64), [45], 20, 1, 4),  # whose lanes do not fill a warp
        (torch.bfloat16, (4, 1), (128, 128), [40], 48, 1, 8),
    ],
    ids=str,
)
def test_lanes_turn_and_append(case: _TurnCase, is_normed: bool, sinks: bool) -> None:
    """One kernel leaves in the cache, and returns, what that which turns and one behind it do, to the bit."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.attention")
    turn = pytest.importorskip("tpplan.decoder.fast.kernels.turn")
    dtype, (queries, keys), (size, turned), positions, length, splits, warps = case
    if is_normed and (turned < size or size == 80):
        pytest.skip("no kernel has these norms")
    torch.manual_seed(size)
    count, heads, blocks, item = len(positions), queries + 2 * keys, keys * -(-queries // keys // 8), 2
    raw_RHK = torch.randn(count, heads, size).to(dtype)
    positions_R, sequences_R = torch.tensor(positions), torch.arange(count)
    places_R = positions_R % length
    raw_2RHLK = torch.randn(2, count, keys, length, size).to(dtype)
    hidden_RL = torch.arange(length) > positions_R[:, None]
    raw_2RHLK.masked_fill_(hidden_RL[None, :, None, :, None], math.nan)
    raw_2RHLK[:, sequences_R, :, places_R] = math.nan
    by, norms_2K = angles(*torch.rand(2, count, turned // 2).to(dtype)), torch.randn(2, size).to(dtype)
    sinks_H = torch.randn(queries).to(dtype)
    turning = [
        item * turned, by.data_ptr(), 2 * item * turned, *(x.data_ptr() if is_normed else 0 for x in norms_2K),
        bits_of(0.5), bits_of(1 / size), bits_of(1e-5),
    ]  # fmt: skip
    reader = kernels.cache_tiles.plain_reader(size)
    attention = kernels.attention(f"attention_{DTYPES[dtype]}", size, reader, warps, ahead=True, capped=False)

    def attend(x_RHK: torch.Tensor, kv_2RHLK: torch.Tensor, of_new: list[int]) -> torch.Tensor:
        partial = torch.full((count * blocks * splits, 8, -(-size // 64) * 64 + 2), math.nan)
        turns, out_RH = torch.zeros(count * blocks, dtype=torch.int32), torch.full((count, queries * size), 9).to(dtype)
        words = [
            x_RHK.data_ptr(), item * heads * size, *(x.data_ptr() for x in kv_2RHLK), item * keys * length * size, 0, 0,
            positions_R.data_ptr(), sinks_H.data_ptr() if sinks else 0, out_RH.data_ptr(), item * queries * size,
            partial.data_ptr(), turns.data_ptr(), length, queries // keys, bits_of(0.18), 0, 1, *of_new,
        ]  # fmt: skip
        tensors = [x_RHK, kv_2RHLK, positions_R, sinks_H, out_RH, partial, turns, by, norms_2K]
        lanes.run(attention, (splits, blocks, count), 32 * warps, words, tensors, written=[x_RHK])
        assert not turns.any()
        return out_RH

    x_RHK, kv_2RHLK = raw_RHK.clone(), raw_2RHLK.clone()
    words = [
        x_RHK.data_ptr(), item * heads * size, queries, keys, heads, item * size, *turning,
        *(x.data_ptr() for x in kv_2RHLK), 0, 0, item * keys * length * size, item * length * size,
        sequences_R.data_ptr(), 8, places_R.data_ptr(), 8,
    ]  # fmt: skip
    tensors = [x_RHK, kv_2RHLK, by, norms_2K, sequences_R, places_R]
    kernel, threads = getattr(turn, f"TURN_{DTYPES[dtype].upper()}"), -(-heads * size // 512) * 32
    lanes.run(kernel, (count, 1), threads, words, tensors)
    expected_RH = attend(x_RHK, kv_2RHLK, [0] * 10)
    assert expected_RH.isfinite().all()
    assert not torch.equal(x_RHK[:, :queries], raw_RHK[:, :queries])

    x_RHK, found_2RHLK = raw_RHK.clone(), raw_2RHLK.clone()
    new = [x_RHK[:, queries + some :].data_ptr() for some in (0, keys)]
    found_RH = attend(x_RHK, found_2RHLK, [*new, *turning])
    assert torch.equal(found_RH, expected_RH)
    assert torch.equal(found_2RHLK.view(torch.int16), kv_2RHLK.view(torch.int16))
    assert torch.equal(x_RHK, raw_RHK)
