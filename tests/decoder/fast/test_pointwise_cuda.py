"""Pointwise kernels on a real GPU: what torch computes in several kernels, rounded where torch rounds."""

from __future__ import annotations

import pytest
import torch

from tests.gate_cases import rounded_gate
from tpplan.decoder.cache.store import Store
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.pointwise import GATES, Places, Pointwise
from tpplan.decoder.math import angles, merge_parts, rms_norm, rotate, stack_heads
from tpplan.decoder.prompts import NO_TOKEN

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
EPS = 1e-5


def kernels(dtype: torch.dtype, activation: str = "silu", kind: str = "fp16", offset: float = 0.0) -> Pointwise:
    """Return those of the first GPU."""
    return Pointwise(torch.device("cuda", 0), dtype, activation, kind, eps=EPS, offset=offset)


def steps_between(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how many numbers of 16 bits lie between."""
    ordered = []
    for each in (found, expected):
        bits = each.contiguous().view(torch.int16).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (ordered[0] - ordered[1]).abs()


def check(found: torch.Tensor, expected: torch.Tensor, steps: int = 1) -> None:
    """Compare numbers of 16 bits: nearly all are equal, others a few steps apart."""
    between = steps_between(found, expected)
    assert between.max() <= steps
    assert (between > 0).float().mean() < 0.01


@pytest.mark.parametrize("columns", [8, 520, 4096, 12288, 17408])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_norms(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Times weights, and weights plus 1, into memory of their own, in place, and added to what is there."""
    torch.manual_seed(columns)
    x = (3 * torch.randn(rows, columns, device="cuda")).to(dtype)
    weight, others = torch.randn(columns, device="cuda").to(dtype), torch.randn_like(x)
    for offset in (0.0, 1.0):
        run = kernels(dtype, offset=offset)
        found = run.norm(x, weight)
        assert found is not None
        check(found, rms_norm(x, weight, EPS, offset))
        written, summed = x.clone(), others.clone()
        assert run.norm(written, weight, written) is written
        assert torch.equal(written, found)
        assert run.norm(x, weight, summed, added=True) is summed
        assert torch.equal(summed, others + found)


def test_norms_of_some_columns(dtype: torch.dtype) -> None:
    """Rows may be parts of longer ones."""
    x, weight = torch.randn(5, 512, device="cuda").to(dtype), torch.randn(256, device="cuda").to(dtype)
    found = kernels(dtype).norm(x[:, 128:384], weight)
    assert found is not None
    check(found, rms_norm(x[:, 128:384], weight, EPS))


@pytest.mark.parametrize("name", GATES)
def test_gates_of_every_number(name: str, dtype: torch.dtype) -> None:
    """The activation is that of torch for each number that there is."""
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    gate = every[: len(every) // 8 * 8].clone()[None]
    expected = rounded_gate(name, gate, torch.ones_like(gate))
    assert kernels(dtype, name).gate(gate, torch.ones_like(gate))
    check(gate, expected)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 14336), (3, 3584), (5, 8), (33, 776)])
def test_gates(rows: int, columns: int, name: str, dtype: torch.dtype) -> None:
    """Of two matrices side by side; the second stays."""
    both = (4 * torch.randn(rows, 2 * columns, device="cuda")).to(dtype)
    expected = both.clone()
    gate, up = expected.chunk(2, dim=-1)
    gate.copy_(rounded_gate(name, gate, up))
    assert kernels(dtype, name).gate(*both.chunk(2, dim=-1))
    check(both, expected, 2)
    assert torch.equal(both[:, columns:], up)


@pytest.mark.parametrize("normed", ["", "normed", "normed, weights plus 1"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 32, 8, 128, 128),
        (3, 8, 2, 128, 128),
        (7, 5, 3, 64, 64),
        (5, 4, 4, 80, 80),
        (9, 6, 2, 96, 32),
        (300, 3, 1, 256, 256),
    ],
    ids=str,
)
def test_turns(shape: tuple[int, int, int, int, int], normed: str, dtype: torch.dtype) -> None:
    """Heads are turned to the bit; keys and values go to the places of their rows, and nothing else changes."""
    rows, queries, keys, width, turned = shape
    torch.manual_seed(rows)
    angle = 6 * torch.rand(rows, turned // 2, device="cuda")
    by = angles(angle.sin().to(dtype), angle.cos().to(dtype))
    x = torch.randn(rows, queries + 2 * keys, width, device="cuda").to(dtype)
    norms = tuple(torch.randn(2, width, device="cuda").to(dtype)) if normed else ()
    offset = 1.0 if "plus" in normed else 0.0
    found = x.clone()
    if not kernels(dtype, offset=offset).norm_and_rope(found, (queries, keys), by, norms):
        assert normed
        assert turned < width or width == 80
        return
    expected = x.clone()
    for weight, some in zip(norms, (expected[:, :queries], expected[:, queries : queries + keys]), strict=False):
        some.copy_(rms_norm(some, weight, EPS, offset))
    rotate(expected[:, : queries + keys], by)
    if normed:  # a step of a large half shows as some of a small sum
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
        assert (found != expected).float().mean() < 0.01
    else:
        assert torch.equal(found, expected)

    sequences, places = torch.arange(rows, device="cuda") % 6, torch.randperm(rows, device="cuda")
    numbers = torch.stack((sequences, places, places), dim=1)
    k_RHK, v_RHK = found[:, queries : queries + keys], found[:, queries + keys :]
    for kind in ("fp16", "fp8", "q8") if width != 80 else ("fp16", "fp8"):
        stores = [Store(kind, (6, keys, rows, width), dtype, x.device) for _ in range(2)]
        again = x.clone()
        to = Places(*stores[0].as_rows(), numbers[:, 0], numbers[:, 1], stores[0].scales)
        assert kernels(dtype, kind=kind, offset=offset).norm_and_rope(again, (queries, keys), by, norms, to)
        assert torch.equal(again, found)
        stores[1].write(sequences, slice(None), places, stack_heads(k_RHK, v_RHK))
        for part, right in zip(stores[0]._parts, stores[1]._parts, strict=True):
            assert torch.equal(part, right)


@pytest.mark.parametrize("kind", ["fp8", "q8"])
def test_caches_round_every_number(kind: str, dtype: torch.dtype) -> None:
    """Kernels write what torch writes of each number that there is, in groups of any size, and of zeros."""
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    every = torch.cat((every[every.isfinite()], torch.zeros(64, device="cuda", dtype=dtype)))
    mixed = every[torch.randperm(len(every), device="cuda")]
    values = torch.cat([each[: len(each) // 64 * 64] for each in (every, mixed)]).view(-1, 64)
    x = torch.stack((torch.zeros_like(values), torch.zeros_like(values), values), dim=1)
    by = angles(*torch.zeros(2, len(x), 32, device="cuda", dtype=dtype))
    stores = [Store(kind, (1, 1, len(x), 64), dtype, x.device) for _ in range(2)]
    sequences, places = torch.zeros(len(x), dtype=torch.int64, device="cuda"), torch.arange(len(x), device="cuda")
    assert kernels(dtype, kind=kind).norm_and_rope(
        x, (1, 1), by, (), Places(*stores[0].as_rows(), sequences, places, stores[0].scales)
    )
    stores[1].write(sequences, slice(None), places, stack_heads(x[:, 1:2], x[:, 2:]))
    for part, right in zip(stores[0]._parts, stores[1]._parts, strict=True):
        assert torch.equal(part, right)


def test_rows_of_nobody_are_not_written(dtype: torch.dtype) -> None:
    """Rows below 0 are turned, and nothing of them goes to a cache, nor before or behind it."""
    torch.manual_seed(2)
    x = torch.randn(7, 4, 64, device="cuda").to(dtype)
    by = angles(*torch.rand(2, 7, 32, device="cuda").to(dtype))
    memory = torch.full((2, 5, 6, 1, 64), torch.nan, dtype=dtype, device="cuda")  # of three sequences, and around them
    keys, values = memory[:, 1:4].flatten(1, 2)
    sequences = torch.tensor([2, -1, 0, -1, 1, -(2**31), -1], device="cuda")
    places = torch.tensor([3, 0, 5, 2, 4, 0, 1], device="cuda")
    found = x.clone()
    assert kernels(dtype).norm_and_rope(found, (2, 1), by, to=Places(keys, values, 6, sequences, places))
    rotate(x[:, :3], by)
    assert torch.equal(found, x)
    expected = torch.full_like(memory, torch.nan)
    for row in (0, 2, 4):
        expected[:, 1 + sequences[row], places[row], 0] = x[row, 2:]
    assert torch.equal(memory.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("shape", [(1, 2, 8), (3, 5, 64), (2048, 32, 128), (700, 7, 80), (9, 4, 256)], ids=str)
def test_merging_parts(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Attention over two parts becomes that over both, in the memory of the first; nothing else changes."""
    rows, heads, width = shape
    torch.manual_seed(rows)
    memory = torch.randn(2, 1, rows, heads + 1, width, device="cuda").to(dtype)
    out, new = memory[:, :, :, :heads].transpose(2, 3)
    sums = 5 * torch.randn(2, 1, heads, rows, device="cuda")
    before, expected = memory.clone(), out.clone()
    right = merge_parts(expected, sums[0], new, sums[1])
    found = kernels(dtype).merge(out, sums[0], new, sums[1])
    assert found is not None
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=torch.finfo(dtype).eps)  # sums may be of other signs
    assert (out != expected).float().mean() < 0.01
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    assert torch.equal(memory[1], before[1])
    assert torch.equal(memory[0, :, :, heads:], before[0, :, :, heads:])


@pytest.mark.parametrize("parts", [1, 3, 32])
@pytest.mark.parametrize("columns", [8, 264, 4096, 32064, 128256])
def test_the_largest_of_each_row(columns: int, parts: int, dtype: torch.dtype) -> None:
    """Wherever it is, also among equal ones, where the first counts, and where all others are minus infinity."""
    torch.manual_seed(columns)
    x = torch.randn(5, columns + 8, device="cuda").to(dtype)[:, :columns]
    at = torch.tensor([0, columns - 1, columns // 2, columns // 3, 5], device="cuda")
    x[range(5), at] = 9
    x[2, columns // 2 :] = 9
    x[3, : columns // 3] = x[3, columns // 3 + 1 :] = -torch.inf
    x[4] = -torch.inf
    found = kernels(dtype).argmax(x, 1000, 2, 4, parts)
    assert found is not None
    others = torch.arange(4 * parts, device="cuda") // parts != 2
    assert not found.view(5, -1, 2)[:, others].any()
    chosen = torch.zeros(5, dtype=torch.int64, device="cuda")
    assert kernels(dtype).next_tokens(found[:, 4 * parts : 6 * parts], chosen)
    assert chosen.tolist() == [1000, 1000 + columns - 1, 1000 + columns // 2, 1000 + columns // 3, NO_TOKEN]
    assert found[:4, 4 * parts : 6 * parts : 2].amax(1).tolist() == [9] * 4
    x[1, columns // 2] = torch.nan
    found = kernels(dtype).argmax(x, 0, 0, 1, parts)
    assert found is not None
    (at,) = found[1, ::2].isnan().nonzero()
    assert found[1, 2 * int(at) + 1] == columns // 2


@pytest.mark.parametrize("pairs", [1, 3, 40])
def test_the_next_tokens(pairs: int, dtype: torch.dtype) -> None:
    """As torch chooses on the CPU: also among equal ones, and where the largest logit is not finite."""
    torch.manual_seed(pairs)
    logits = torch.randn(6, pairs)
    logits[0, 0], logits[1, -1], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    logits[3], logits[4] = 2, -torch.inf
    tokens, positions = torch.arange(pairs) * 3000, torch.tensor([0, 7, 2**32 - 1, 1, 2, 3])
    found = torch.stack((logits, tokens.expand(6, -1)), dim=-1).flatten(1)
    chosen, at = torch.zeros(6, dtype=torch.int64, device="cuda"), positions.cuda()
    assert kernels(dtype).next_tokens(found.cuda(), chosen, at)
    best, place = logits.max(-1)
    assert chosen.tolist() == tokens[place].where(best.isfinite(), NO_TOKEN).tolist()
    assert at.tolist() == (positions + 1).tolist()
    assert kernels(dtype).next_tokens(found.cuda()[5:], chosen[:1])
    assert chosen[0] == tokens[place[5]]
    assert at.tolist() == (positions + 1).tolist()


@pytest.mark.parametrize("pairs", [8, 32, 64, 700])
def test_angles(pairs: int, dtype: torch.dtype) -> None:
    """Bit for bit as torch makes them, of a half of wider tables."""
    tables = torch.randn(2, 99, 2 * pairs, device="cuda").to(dtype)
    positions = torch.tensor([[3, 1], [98, 1], [0, 1]], device="cuda")[:, 0]
    for some in (slice(pairs), slice(pairs, None)):
        sines, cosines = tables[..., some]
        found = kernels(dtype).angles(sines, cosines, positions)
        assert found is not None
        assert torch.equal(found, angles(sines[positions], cosines[positions]))


@pytest.mark.parametrize("columns", [8, 264, 4096])
def test_embeddings(columns: int, dtype: torch.dtype) -> None:
    """Of the tokens in the table; zeros for all others."""
    table = torch.randn(9, columns + 8, device="cuda").to(dtype)[:, :columns]
    tokens = torch.tensor([[100, 1], [108, 2], [99, 3], [109, 4], [NO_TOKEN, 5], [103, 6]], device="cuda")
    expected = torch.zeros(6, columns, device="cuda", dtype=dtype)
    expected[0], expected[1], expected[5] = table[0], table[8], table[3]
    found = kernels(dtype).embed(tokens[:, 0], table, 100)
    assert found is not None
    assert torch.equal(found, expected)
