"""Products of many rows with matrices of codes: which are taken, who has a part of one, and the words of kernels."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from torch.nn import functional

from tests.decoder.fast.test_packed import PROCESSORS, SIZES
from tests.decoder.fast.test_packed import FakeLauncher as FewLauncher
from tests.packed_cases import FORMS, float_matrix, int_matrix, matrix_of
from tpplan.decoder.fast.kernels.wide_limits import FEWEST, GROUP_FEWEST, GROUP_WARPS, WARPS, stage_bytes
from tpplan.decoder.fast.launches import packed, wide
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.packed import STEPS
from tpplan.decoder.fast.launches.wide import QuantisedGemm, bytes_of, names_of, paired_of, shape_of, stages_of
from tpplan.decoder.model.gates import ACTIVATIONS
from tpplan.decoder.weights.row_kernels import GATES

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes of shared memory: of a block at most, and of a multiprocessor; of small GPUs and of large ones.
SMALL, LIMITS = (99 << 10, 100 << 10), (227 << 10, 228 << 10)
#: Rows of a kernel that there is a smaller one for.
FEWER = {16: 8, 32: 16, 48: 32, 64: 48}


#: Of all kernels: rows, the warps that a multiprocessor has registers for, and the fewest of a block.
KERNELS = [
    *((most, warps, FEWEST[most]) for most, warps in WARPS.items()),
    *((most, warps, GROUP_FEWEST) for most, warps in GROUP_WARPS.items()),
]


@pytest.mark.parametrize("paired", [0, 6, 8])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size", "width"), SIZES)
def test_blocks_share_all_of_a_matrix(size: int, width: int, kernel: tuple[int, int, int], paired: int) -> None:
    """None has nothing to do, all have registers at once, and what they leave has room and is soon added up."""
    (most, registers, fewest), strips, steps = kernel, -(-size // 32), width // 128
    blocks, warps = shape_of(strips, steps, PROCESSORS, registers, fewest, paired)
    assert warps >= fewest
    assert not (warps % 4 and fewest % 4 == 0)
    tiles = -(-strips // warps)
    assert 0 < blocks <= tiles * min(steps, 16)
    assert 0 < blocks * warps <= PROCESSORS * registers
    assert blocks <= PROCESSORS or warps <= paired
    assert bytes_of(blocks, warps, most) <= 19 * 2**20


@pytest.mark.parametrize(
    ("size", "width", "shapes"),
    [
        (6144, 4096, [(256, 6), (256, 6), (132, 8)]),
        (4096, 4096, [(128, 8)] * 3),
        (28672, 4096, [(264, 8), (264, 6), (132, 8)]),
        (4096, 14336, [(264, 6), (264, 6), (128, 8)]),
        (4096, 2048, [(128, 8)] * 3),
        (768, 4096, [(48, 8)] * 3),
    ],
)
def test_matrices_are_shared_evenly(size: int, width: int, shapes: list[tuple[int, int]]) -> None:
    """As is fastest on a GPU of so many multiprocessors, of which none has much more than its part if all have any."""
    strips, steps = size // 32, width // 128
    assert [shape_of(strips, steps, PROCESSORS, warps, FEWEST[most], 8) for most, warps in WARPS.items()] == shapes
    for blocks, warps in shapes:
        busiest = -(-blocks // PROCESSORS) * warps * -(-(-(-strips // warps) * steps) // blocks)
        assert busiest <= 1.11 * strips * steps / min(blocks, PROCESSORS)


@pytest.mark.parametrize("limits", [SMALL, LIMITS])
@pytest.mark.parametrize("step", STEPS.values())
@pytest.mark.parametrize("most", WARPS)
def test_steps_fit_in_shared_memory(most: int, step: int, limits: tuple[int, int]) -> None:
    """Three of blocks that a multiprocessor has at once, where there is so much, and never fewer than two."""
    paired = paired_of(most, step, 6, limits)
    assert paired in {0, 6, 8}
    assert paired_of(most, step, 8, limits) == (8 if paired == 8 else 0)
    for warps, together in ((8, 1), *([(paired, 2)] if paired and WARPS[most] > 8 else [])):
        stage = stage_bytes(most, step, warps)
        stages = stages_of(stage, together, limits)
        assert stages == 3 or (limits is SMALL and stages == 2)
        assert stages * stage <= limits[0]
        assert together * (stages * stage + 1024) <= limits[1]


def test_two_blocks_have_room() -> None:
    """Of as many warps as there are registers for on large GPUs, of fewer or none on small ones."""
    assert [paired_of(most, 128, 6, LIMITS) for most in WARPS] == [8, 8, 8]
    assert [paired_of(most, 128, 6, SMALL) for most in WARPS] == [6, 0, 0]
    assert [paired_of(most, 64, 6, SMALL) for most in WARPS] == [8, 8, 6]


class FakeLauncher:
    """Does what a kernel does, by its words, as kernels of few rows do."""

    def __init__(self, name: str, place: torch.device, *, most_shared: int) -> None:
        """Take any device."""
        self._most_shared = most_shared
        family, dtype, self._kind, count = name.split("_")
        self._most, self._fewest = int(count), GROUP_FEWEST if family == "wgmma" else FEWEST[int(count)]
        self._few = {most: FewLauncher(f"packed_{dtype}_{self._kind}_{most}", place) for most in (8, 16)}

    def __call__(self, blocks: int, threads: int, *words: int, shared: int) -> None:
        """Do it."""
        y, y_pitch, x, x_pitch, *matrix, parts, turns, size, width, rows, stages, plus, pitch, mode = words
        tiles = -(-(2 * size if mode else size) // threads)  # as a thread has a matrix row
        assert FEWER[self._most] < rows <= self._most
        assert 0 < blocks <= tiles * width // STEPS[self._kind]
        assert not threads % 32
        assert threads // 32 >= self._fewest
        assert stages in {2, 3}
        assert shared == stages * stage_bytes(self._most, STEPS[self._kind], threads // 32) <= self._most_shared
        assert not parts % 16
        assert not turns % 4
        assert not size % 2
        assert not any(word % 4 for word in (y, y_pitch, plus, pitch))
        for start in range(0, rows, 16):
            some = min(16, rows - start)
            few = self._few[8 if some <= 8 else 16]
            to, at, more = y + start * y_pitch, x + start * x_pitch, plus + start * pitch
            few(1, 32, to, y_pitch, at, x_pitch, *matrix, 1, size, width, some, more, pitch, mode)


def _without_place(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda size, **told: make(size, dtype=told["dtype"])


@pytest.fixture(params=zip(DTYPES, [(8, 0), (9, 0)], strict=True), ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> QuantisedGemm:
    """Return kernels of a device that is not there."""
    dtype, capability = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(wide, "Launcher", FakeLauncher)
    monkeypatch.setattr(wide, "_SMALL", 0)
    told = dict(zip(("shared_memory_per_block_optin", "shared_memory_per_multiprocessor"), LIMITS, strict=True))
    found = SimpleNamespace(
        multi_processor_count=PROCESSORS, **(told if dtype is torch.float16 or capability == (9, 0) else {})
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", _without_place(torch.zeros))
        return QuantisedGemm(torch.device("cuda", 0), dtype, ["e5m2", *STEPS])


@pytest.mark.parametrize("rows", [9, 16, 17, 32, 33, 48, 64])
def test_words(kernels: QuantisedGemm, rows: int) -> None:
    """Products, with a bias, a sum or a gate, are told to a kernel of so many rows."""
    if rows < kernels.fewest_rows:
        assert not kernels.takes(torch.randn(rows, 512).to(kernels._dtype), int_matrix(24, 512, 128, torch.float16, 1))
        return
    torch.manual_seed(rows)
    dtype = kernels._dtype
    for kind, scales, plus, group in product(STEPS, FORMS, [None, 1], [128, 384]):
        x_RK, bias_N = torch.randn(rows, 392).to(dtype)[:, :384], torch.randn(28).to(dtype)
        matrix = matrix_of(kind, 28, 384, group, scales, plus)
        dense_NK = matrix.dense(0, 28, torch.float32)

        def check(found: torch.Tensor, expected: torch.Tensor) -> None:
            torch.testing.assert_close(found.float(), expected.float(), atol=0.03, rtol=0.02)

        assert kernels.takes(x_RK, matrix, gated=True) == (scales is torch.float16 or dtype is not torch.float16)
        exact = x_RK.float() @ dense_NK.mT
        check(kernels.linear(x_RK, matrix), exact)
        check(kernels.linear(x_RK, matrix, bias_N), exact + bias_N)
        to_RN = torch.randn(rows, 32).to(dtype)
        before = to_RN.clone()
        kernels.add(to_RN[:, 2:30], x_RK, matrix)
        check(to_RN[:, 2:30], before[:, 2:30] + exact)
        assert torch.equal(to_RN[:, :2], before[:, :2])
        for name, act in ACTIVATIONS.items():
            if name in GATES:
                gate, up = functional.linear(x_RK.float(), dense_NK, bias_N.float()).chunk(2, dim=-1)
                check(kernels.gated(x_RK, matrix, name, bias_N), act(gate.clone()) * up)


@pytest.mark.parametrize(("rows", "who"), [(16, "few"), (17, "many"), (64, "many"), (65, "torch")])
def test_who_takes_rows(kernels: QuantisedGemm, rows: int, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of codes that all can read: kernels of few rows, those of more, or torch."""
    monkeypatch.setattr(packed, "Launcher", lambda *_, **__: None)
    place = SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    few = packed.QuantisedSkinnyGemm(torch.device("cuda", 0), kernels._dtype, [*STEPS])
    x_RK, matrix = torch.randn(rows, 512).to(kernels._dtype), int_matrix(24, 512, 128, torch.float16, 1)
    assert few.takes(x_RK, matrix) == (who == "few")
    assert kernels.takes(x_RK, matrix) == (who == "many" or kernels.fewest_rows <= rows <= 16)


def test_elements_are_in_pairs(kernels: QuantisedGemm) -> None:
    """A bias or rows of which kernels cannot read and write two elements at once are refused."""
    dtype = kernels._dtype
    x_RK, matrix = torch.randn(17, 128).to(dtype), int_matrix(24, 128, 128, torch.float16, 1)
    for to_RN in (torch.randn(17, 28).to(dtype)[:, 1:25], torch.randn(17, 25).to(dtype)[:, :24]):
        with pytest.raises(ValueError, match="multiples of 4"):
            kernels.add(to_RN, x_RK, matrix)
    with pytest.raises(ValueError, match="multiples of 4"):
        kernels.linear(x_RK, matrix, torch.randn(25).to(dtype)[1:])


def test_what_is_not_taken(kernels: QuantisedGemm) -> None:
    """Few rows and very many, odd numbers of columns of the result, and what kernels of few rows do not take."""
    dtype = kernels._dtype
    x_RK, matrix = torch.randn(64, 512).to(dtype), int_matrix(24, 512, 128, torch.float16, 1)
    assert kernels.takes(x_RK, matrix)
    assert kernels.takes(x_RK[:17], matrix, gated=True)
    assert not kernels.takes(x_RK[: kernels.fewest_rows - 1], matrix)
    assert not kernels.takes(torch.randn(65, 512).to(dtype), matrix)
    assert not kernels.takes(x_RK.float(), matrix)
    assert not kernels.takes(x_RK, torch.randn(24, 512).to(dtype))
    assert not kernels.takes(x_RK, int_matrix(25, 512, 128, torch.float16, 1))
    assert kernels.takes(x_RK, int_matrix(26, 512, 128, torch.float16, 1))
    assert not kernels.takes(x_RK, int_matrix(26, 512, 128, torch.float16, 1), gated=True)
    assert not kernels.takes(x_RK, int_matrix(24, 512, 64, torch.float16, 1))
    bytewise = int_matrix(24, 512, 128, torch.float16, 1, bits=8)
    assert kernels.takes(x_RK, bytewise)
    within = torch.zeros(97, dtype=torch.float16)[1:].view(24, 4)
    assert not kernels.takes(x_RK, evolve(bytewise, scales=within))  # they begin within a word
    rounded = dtype is torch.float16  # to which scales of other dtypes may be too small
    assert kernels.takes(x_RK, float_matrix(24, 512, (16, 128), torch.float32)) != rounded
    assert not kernels.takes(x_RK, float_matrix(24, 512, (12, 128), torch.float32))


def test_few_rows_of_small_matrices_are_left_to_others(kernels: QuantisedGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose kernels are as fast by them."""
    monkeypatch.setattr(wide, "_SMALL", 24 * 512)
    x_RK = torch.randn(17, 512).to(kernels._dtype)
    small, large = (int_matrix(size, 512, 128, torch.float16, 1) for size in (24, 26))
    assert not kernels.takes(x_RK[:16], small)
    assert kernels.takes(x_RK[:16], large) == (kernels.fewest_rows <= 16)
    assert kernels.takes(x_RK, small)


def test_names_by_generation() -> None:
    """Only 9.0 has instructions of four warps, which for 17 to 32 rows pay with codes of 4 bits."""
    by_warp = [f"wide_f16_{{}}_{rows}" for rows in (32, 48, 64)]
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for kind in STEPS:
            in_groups = [f"wgmma_f16_{{}}_{rows}" for rows in (16, 32, 48, 64)]
            if kind != "4":
                in_groups[1] = by_warp[0]
            expected = in_groups if capability == (9, 0) else by_warp
            assert names_of(torch.float16, [kind, "e5m2"], capability) == [name.format(kind) for name in expected]
