"""Pointwise kernels compile for every generation of GPUs without one, and become the machine code that they should."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.machine_code import CAPABILITIES, check_code
from tpplan.decoder.fast.launches import pointwise
from tpplan.decoder.fast.launches.launcher import DTYPES, bits_of
from tpplan.decoder.fast.launches.pointwise import GATES, Pointwise
from tpplan.decoder.math import angles, best_tokens, rms_norm, rotate
from tpplan.decoder.prompts import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("what", ["norm", "best", "merge", *GATES.values()])
def test_they_move_vectors_and_spill_nothing(what: str, dtype: str) -> None:
    """Loads and stores are of 16 bytes and coherent, all that is computed is in 32 bits, and stays in registers."""
    name = f"pointwise_{what}_{dtype}"
    for capability in CAPABILITIES:
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert "ld.global.v4.u32" in text
        assert ("st.global.v4.u32" in text, "st.global.v2.u32" in text) == (what != "best", what == "best")
        assert "ld.global.nc" not in text
        check_code(text, capability)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 1, 128), (1, 33, 72), (4, 9, 8)], ids=str)
def test_lanes_merge(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the source does lane by lane, as it is launched, is the sum of both by weights, rounded once."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.pointwise")
    torch.manual_seed(shape[1])
    count, rows, width = shape
    memory = torch.full((2, rows, count + 2, width), 9.0).to(dtype)
    out, new = memory[:, None, :, :count].transpose(2, 3).copy_(torch.randn(2, 1, count, rows, width))
    sums = 5 * torch.randn(2, 1, count, rows)
    sums[1, ..., 0] = sums[0, ..., 0] - 200
    made = [memory, sums]

    def empty_like(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.full_like(x, torch.nan))
        return made[-1]

    def launcher(name: str, _: torch.device) -> Callable[..., None]:
        return lambda blocks, threads, *words: lanes.run(getattr(kernels, name.upper()), blocks, threads, words, made)

    monkeypatch.setattr(pointwise, "Launcher", launcher)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    weights = sums.double().softmax(0)[..., None]
    expected = (weights * torch.stack((out, new)).double()).sum(0)
    before = out.clone(), new.clone()
    found = Pointwise(torch.device("cpu"), dtype, "silu", eps=1e-5).merge(out, sums[0], new, sums[1])
    assert found is not None
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(out[:, :, 0], before[0][:, :, 0])
    assert torch.equal(new, before[1])
    assert (memory[:, :, count:] == 9).all()
    torch.testing.assert_close(found.double(), sums.double().logsumexp(0), atol=1e-5, rtol=1e-6)


@pytest.fixture
def lane_by_lane(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Pointwise, list[torch.Tensor]]]:
    """Return what returns kernels that may touch some tensors, and those that they allocate, full of NaN."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.pointwise")

    def run_on(*touched: torch.Tensor) -> tuple[Pointwise, list[torch.Tensor]]:
        made: list[torch.Tensor] = []

        def empty(*shape: int, **options: Any) -> torch.Tensor:
            made.append(torch.full(shape, torch.nan, **options))
            return made[-1]

        def launcher(name: str, _: torch.device) -> Callable[..., None]:
            def run(blocks: int | tuple[int, int, int], threads: int, *words: int) -> None:
                lanes.run(getattr(kernels, name.upper()), blocks, threads, words, [*touched, *made])

            return run

        monkeypatch.setattr(pointwise, "Launcher", launcher)
        run = Pointwise(torch.device("cpu"), torch.bfloat16, "silu", eps=1e-5)
        monkeypatch.setattr(torch, "empty", empty)
        return run, made

    return run_on


@pytest.mark.parametrize("columns", [8, 264, 2056])
def test_lanes_embed(columns: int, lane_by_lane: Callable[..., tuple[Pointwise, list[torch.Tensor]]]) -> None:
    """What the source does lane by lane, as it is launched: rows of the table, and zeros for tokens beside it."""
    table = torch.randn(4, columns + 8).bfloat16()
    tokens = torch.tensor([[100, 1], [103, 2], [99, 3], [104, 4], [NO_TOKEN, 5], [101, 6]])
    expected = torch.zeros(6, columns).bfloat16()
    expected[0], expected[1], expected[5] = table[0, :columns], table[3, :columns], table[1, :columns]

    run, made = lane_by_lane(table, tokens)
    found = run.embed(tokens[:, 0], table[:, :columns], 100)
    assert found is made[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pairs", [2, 64, 70])
def test_lanes_find_angles(pairs: int, lane_by_lane: Callable[..., tuple[Pointwise, list[torch.Tensor]]]) -> None:
    """What the source does lane by lane, as it is launched, is what torch does, of the half of wider tables."""
    tables = torch.randn(2, 9, 2 * pairs).bfloat16()
    tables[0, 3, 1] = 0
    positions = torch.tensor([[3, 1], [8, 1], [0, 1], [5, 1], [8, 1]])

    run, made = lane_by_lane(tables, positions)
    for some in (slice(pairs), slice(pairs, None)):
        sines, cosines = tables[..., some]
        found = run.angles(sines, cosines, positions[:, 0])
        assert found is made[-1]
        expected = angles(sines[positions[:, 0]], cosines[positions[:, 0]])
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    positions[1, 0], positions[2, 0] = 9, 2**40
    found = run.angles(sines, cosines, positions[:, 0])
    assert found is not None
    assert (found[1:3] == found[4]).all()
    assert run.angles(sines[:, :1], cosines[:, :1], positions[:, 0]) is None


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("columns", [8, 264, 9000])
def test_lanes_find_the_largest(
    columns: int, parts: int, lane_by_lane: Callable[..., tuple[Pointwise, list[torch.Tensor]]]
) -> None:
    """What the source does lane by lane, as it is launched: of every part, which together are the row."""
    torch.manual_seed(columns)
    x = torch.randn(5, columns).bfloat16()
    x[0, columns - 1], x[1, 0], x[2, columns // 2 :], x[3] = 9, 9, 9, -torch.inf
    x[4, columns // 3] = torch.nan

    run, made = lane_by_lane(x)
    found = run.argmax(x, 1000, 1, 3, parts)
    assert found is made[0]
    assert found.shape == (5, 6 * parts)
    own = found.view(5, 3, parts, 2)
    assert not own[:, 0].any()
    assert not own[:, 2].any()
    right = [1000 + columns - 1, 1000, 1000 + columns // 2, NO_TOKEN, NO_TOKEN]
    assert best_tokens(own[:, 1].flatten(1)).tolist() == right


#: Pairs of logits and tokens, and the token that they tell: largest, equal, and not finite ones.
NEXT = [
    ([-3.0, -2.0, -9.0], [7, 40, 91], 40),
    ([5.0, 5.0, 5.0], [12, 33, 64], 12),
    ([5.0, 1.0, 5.0], [64, 3, 12], 12),
    ([-torch.inf, -1.0, -torch.inf], [0, 128_255, 1], 128_255),
    ([-torch.inf] * 3, [1, 2, 3], NO_TOKEN),
    ([1.0, torch.inf, 2.0], [1, 2, 3], NO_TOKEN),
    ([torch.nan, 5.0, torch.inf], [1, 2, 3], NO_TOKEN),
    ([9.0, 1.0, torch.nan], [1, 2, 3], NO_TOKEN),
]


@pytest.mark.parametrize("has_positions", [True, False])
@pytest.mark.parametrize("copies", [1, 20])
def test_lanes_choose_tokens(copies: int, has_positions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the source does lane by lane, as it is launched, is what torch does, also with more pairs than lanes."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.pointwise")
    logits, numbers, expected = (torch.tensor(each) for each in zip(*NEXT, strict=True))
    pairs = torch.stack((logits, numbers), dim=-1).repeat(1, copies, 1)
    found = torch.full((len(NEXT), 6 * copies + 2), 99.0)  # rows of a wider matrix
    found[:, : 6 * copies] = pairs.flatten(1)
    tokens, positions = torch.full((len(NEXT) + 1,), 5), torch.tensor([2**32 - 1, *range(len(NEXT))])
    after = positions.clone()
    after[:-1] += has_positions

    def launcher(name: str, _: torch.device) -> Callable[..., None]:
        def run(blocks: int, threads: int, *words: int) -> None:
            touched = [found, tokens, positions]
            lanes.run(getattr(kernels, name.upper()), blocks, threads, words, touched, written=touched[:1])

        return run

    monkeypatch.setattr(pointwise, "Launcher", launcher)
    run = Pointwise(torch.device("cpu"), torch.bfloat16, "silu", eps=1e-5).next_tokens
    some = found[:, : 6 * copies]
    assert run(some, tokens[:-1], positions[:-1] if has_positions else None)
    assert tokens.tolist() == [*expected.tolist(), 5]
    assert best_tokens(some).tolist() == expected.tolist()
    assert torch.equal(positions, after)


@pytest.mark.parametrize("name", ["pointwise_next", "pointwise_embed", "pointwise_angles"])
def test_tokens_are_loaded_whole(name: str) -> None:
    """In 64 bits; embeddings are copied in 128, and nothing is spilled."""
    for capability in CAPABILITIES:
        text = machine_code.ptx(name, capability)
        check_overlap(name, text, capability)
        assert "ld.global.v2.u32" in text
        assert ("ld.global.v4.u32" in text, "st.global.v4.u32" in text) == (name == "pointwise_embed",) * 2
        check_code(text, capability)


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        ("turn_bf16", CAPABILITIES),
        ("turn_bf16_q8", CAPABILITIES),
        ("turn_f16_q8", CAPABILITIES[:1]),
        ("turn_f16_fp8", CAPABILITIES),
        ("turn_bf16_fp8", CAPABILITIES[-1:]),
    ],
)
def test_turns_write_caches(name: str, capabilities: tuple[tuple[int, int], ...]) -> None:
    """In 16 bits as they are; in 8 bits 8 elements at a time, and a scale beside 32 of them."""
    for capability in capabilities:
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert "ld.global.v4.u32" in text
        assert "ld.global.nc" not in text
        for store, is_there in (
            ("st.global.v4.u32", True),
            ("st.global.v2.u32", name.endswith("8")),
            ("st.global.u16", name.endswith("q8")),
            ("bar.sync", name.endswith("q8")),
        ):
            assert (store in text) == is_there
        check_code(text, capability)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("size", "turned", "dtype"), [(64, 64, torch.bfloat16), (80, 32, torch.float16)])
def test_lanes_turn_heads(size: int, turned: int, dtype: torch.dtype, is_normed: bool) -> None:
    """As torch does, to the bit without norms, when the kernel before has ended, which writes them; and in caches."""
    lanes, turn = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.turn")
    if is_normed and turned < size:
        return
    torch.manual_seed(size)
    (queries, keys), rows, length = (3, 2), 3, 5
    x_RHK = torch.randn(rows, queries + 2 * keys, size).to(dtype)
    by = angles(*torch.rand(2, rows, turned // 2).to(dtype))
    norms_2K = torch.randn(2, size).to(dtype)
    kv_2BHLK = torch.full((2, rows, keys, length, size), 9.0).to(dtype)
    sequences_R, places_R = torch.tensor([2, -1, 0]), torch.tensor([4, 1, 0])
    expected_RHK, expected = x_RHK.clone(), kv_2BHLK.clone()
    if is_normed:
        for weight, some in zip(
            norms_2K, torch.split_with_sizes(expected_RHK[:, :-keys], [queries, keys], dim=1), strict=True
        ):
            some.copy_(rms_norm(some, weight, 1e-5, 0.5))
    rotate(expected_RHK[:, : queries + keys], by)
    kernel, touched = getattr(turn, f"TURN_{DTYPES[dtype].upper()}"), [x_RHK, by, norms_2K, kv_2BHLK]
    for row in range(rows):
        words = [
            x_RHK[row].data_ptr(), 0, queries, keys, queries + 2 * keys, 2 * size, 2 * turned, by[row].data_ptr(), 0,
            *(x.data_ptr() if is_normed else 0 for x in norms_2K), bits_of(0.5), bits_of(1 / size), bits_of(1e-5),
            *(x.data_ptr() for x in kv_2BHLK), 0, 0, 2 * keys * length * size, 2 * length * size,
            sequences_R[row].data_ptr(), 0, places_R[row].data_ptr(), 0,
        ]  # fmt: skip
        lanes.run(kernel, (1, 1), 64, words, [*touched, sequences_R, places_R], written=[x_RHK[row]])
    if is_normed:
        torch.testing.assert_close(x_RHK, expected_RHK, atol=0.05, rtol=0.02)
    else:
        assert torch.equal(x_RHK, expected_RHK)
    for row in (0, 2):
        expected[:, sequences_R[row], :, places_R[row]] = torch.unflatten(x_RHK[row, queries:], 0, (2, keys))
    assert torch.equal(kv_2BHLK, expected)


@pytest.mark.parametrize("name", ["TURN", "TURN_F32", "TURN_BF16_Q4"])
def test_there_are_no_others(name: str) -> None:
    """Kernels are made by their names, but only those that there are."""
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.turn")
    with pytest.raises(AttributeError, match=name):
        getattr(kernels, name)


def test_each_is_made_once() -> None:
    """Asked for again, for another generation of GPUs, it is the same kernel, whose functions are compiled already."""
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.turn")
    assert kernels.TURN_BF16_Q8 is kernels.TURN_BF16_Q8
