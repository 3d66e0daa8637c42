"""Products of up to sixteen rows: the kernels' machine code, what their source does, and the words they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.pointwise_cases import memory
from tests.machine_code import CAPABILITIES, check_code, registers
from tpplan.decoder.fast.launches import skinny
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.skinny import SkinnyGemm, shape_of
from tpplan.decoder.model.gates import ACTIVATIONS
from tpplan.decoder.weights.row_kernels import GATES
from tpplan.exec.protocol.channel import CALLERS, MOST_BLOCKS
from tpplan.exec.protocol.words import MOST_WORDS
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Callable

#: Kernels, each with generations of GPUs that it is compiled for: they differ by dtype in little.
KERNELS = [
    *(("skinny_bf16_16", each) for each in CAPABILITIES),
    ("skinny_bf16_8", CAPABILITIES[0]),
    ("skinny_f16_8", (9, 0)),
    ("skinny_f16_16", CAPABILITIES[-1]),
    ("skinny_joint_bf16_8", (9, 0)),
    ("skinny_joint_f16_8", CAPABILITIES[-1]),
]
SIZES = [(1536, 4096), (4096, 1024), (4096, 3584), (28672, 4096), (4096, 14336), (1, 8), (9, 2304), (33, 896), (5, 520)]
PROCESSORS = 132
#: What channels of tests tell kernels.
HEADER = 77


@pytest.mark.parametrize(("name", "capability"), KERNELS)
def test_they_multiply_vectors_as_they_are(name: str, capability: tuple[int, int]) -> None:
    """Loads are of 16 bytes, the first of them before the wait; nothing spills, and registers are enough for blocks."""
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    check_overlap(name, text, capability)
    kind = name.split("_")[-2]
    multiply = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    assert text.count(multiply) == text.count("mma.sync") == (16 if name.endswith("_16") else 8)
    assert "ld.global.nc.L1::no_allocate.L2::128B.v4.u32" in text
    asked = text.rindex("ld.volatile.global.v4.u32")
    later = ["ld.global.v4.u32", "ld.global.u16", "st.global.u16"]
    later += ["ld.volatile.global.u32", "st.volatile.global.u64", "st.global.u32"] if "_joint_" in name else []
    if capability >= kernel_cache.OVERLAPS:
        waits = text.index("griddepcontrol.wait")
        assert asked < waits < min(map(text.index, later))
    assert registers(check_code(text, capability)) * 32 * 16 <= 2**16


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize(("size", "width"), SIZES)
def test_all_of_a_matrix_has_warps_at_once(size: int, width: int, rows: int) -> None:
    """No block waits for another to end, none has nothing to do, and none has a warp without columns."""
    tiles = -(-size // 16)
    blocks, warps = shape_of(tiles, width, PROCESSORS, rows)
    assert blocks <= min(tiles, MOST_BLOCKS)
    assert blocks * warps <= PROCESSORS * 16
    assert (warps - 1) * 64 < width
    assert blocks == tiles or blocks * warps >= PROCESSORS * 12


@pytest.mark.parametrize(
    ("tiles", "width", "rows", "warps"),
    [
        (256, 4096, 8, 8), (256, 3584, 8, 7), (256, 14336, 8, 8), (256, 1024, 8, 8), (256, 512, 8, 4),
        (256, 4736, 8, 8), (96, 4096, 8, 16), (96, 3584, 8, 14), (96, 1024, 8, 8), (1000, 8, 8, 1),
        (448, 4096, 4, 8), (448, 4096, 5, 4), (448, 3584, 16, 4), (448, 640, 16, 3),
    ],
)  # fmt: skip
def test_warps_have_even_steps(tiles: int, width: int, rows: int, warps: int) -> None:
    """Warps have two steps of 64 columns at a time, and as few as possible behind the last column."""
    assert shape_of(tiles, width, PROCESSORS, rows)[1] == warps


@pytest.mark.parametrize(("size", "width"), SIZES)
def test_blocks_that_wait_leave_room(size: int, width: int) -> None:
    """They take half a multiprocessor at most, so that those of other contexts, which send, find room beside them."""
    for rows in (3, 16):
        blocks, warps = shape_of(-(-size // 16), width, PROCESSORS, rows, joint=True)
        assert warps <= 8
        assert blocks * warps <= PROCESSORS * 16


def acted(products_RN: torch.Tensor, mode: int) -> torch.Tensor:
    """Return what becomes of products that are not rounded yet."""
    gate, up = products_RN.chunk(2, dim=-1)
    return ACTIVATIONS[{each: name for name, each in GATES.items()}[mode]](gate.clone()) * up


@pytest.mark.parametrize(
    "case",  # kernel, rows, columns of the result, columns of the matrix, warps, blocks, mode
    [
        ("bf16_8", 8, 16, 64, 1, 1, 0),  # nothing is left over
        ("bf16_8", 3, 37, 136, 2, 2, 0),  # two tiles of a block, then one of the other; a warp's second step is cut
        ("f16_8", 5, 1, 8, 2, 1, 0),  # a warp has nothing
        ("f16_16", 11, 53, 264, 2, 1, 0),  # four tiles, two steps and one
        ("bf16_16", 16, 19, 392, 3, 1, 1),
        ("f16_8", 7, 9, 72, 1, 2, 2),
        ("bf16_16", 9, 8, 128, 1, 1, 3),
    ],
)
@pytest.mark.parametrize("plus", [False, True])
def test_lanes_agree(case: tuple[str, int, int, int, int, int, int], plus: bool) -> None:
    """What the source does lane by lane is the product, and reaches for nothing beside the matrices."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.skinny")
    name, rows, size, width, warps, blocks, mode = case
    torch.manual_seed(size)
    dtype = {text: each for each, text in DTYPES.items()}[name.split("_", maxsplit=1)[0]]
    count = 2 * size if mode else size
    x_RK = torch.randn(rows, width + 16).to(dtype)[:, 8:-8]
    weight_NK = (torch.randn(count, width) / width**0.5).to(dtype)
    plus_RN, y_RN = torch.randn(rows, count).to(dtype), torch.full((rows, size + 3), 9, dtype=dtype)
    added = (plus_RN.data_ptr(), 2 * count) if plus else (0, 0)
    words = (
        y_RN.data_ptr(), 2 * (size + 3), x_RK.data_ptr(), 2 * (width + 16), weight_NK.data_ptr(), 2 * width,
        size, width, rows, *added, mode,
    )  # fmt: skip
    kernel = getattr(kernels, f"SKINNY_{name.upper()}")
    lanes.run(kernel, blocks, 32 * warps, words, (x_RK, weight_NK, plus_RN, y_RN))
    exact_RN = x_RK.float() @ weight_NK.float().mT + (plus_RN if plus else 0)
    expected_RN = acted(exact_RN.to(dtype), mode) if mode else exact_RN.to(dtype)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(y_RN[:, :size], expected_RN, atol=4 * step, rtol=4 * step)
    assert (y_RN[:, size:] == 9).all()


class FakeLauncher:
    """Does what a kernel does, by its words."""

    def __init__(self, name: str, place: torch.device, *, is_array: bool = False) -> None:
        """Take any device."""
        family, *joint, dtype, count = name.split("_")
        assert family == "skinny"
        assert joint == (["joint"] if is_array else [])
        assert place.type == "cuda"
        self._is_joint = is_array
        self._most, self._dtype = int(count), {text: each for each, text in DTYPES.items()}[dtype]

    def __call__(self, blocks: int, threads: int, *words: int) -> None:
        """Do it, of what is joint by a device alone."""
        if self._is_joint:
            assert words[0] == HEADER
            assert len(words) == MOST_WORDS
            words = (*words[CALLERS : CALLERS + 11], 0)
        y, y_pitch, x, x_pitch, weight, pitch, size, width, rows, plus, plus_pitch, mode = words
        assert self._most - 8 < rows <= self._most
        assert 0 < threads <= 512
        assert not threads % 32
        count = 2 * size if mode else size
        assert 0 < blocks <= -(-count // 16)
        rows_RK = memory(x, (rows, width), (x_pitch, 2), self._dtype)
        found = rows_RK.float() @ memory(weight, (count, width), (pitch, 2), self._dtype).float().mT
        if plus:
            found += memory(plus, (rows, count), (plus_pitch, 2), self._dtype)
        found = found.to(self._dtype)
        memory(y, (rows, size), (y_pitch, 2), self._dtype).copy_(acted(found, mode) if mode else found)


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SkinnyGemm:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr(skinny, "Launcher", FakeLauncher)
    found = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return SkinnyGemm(torch.device("cuda", 0), request.param, joint=True)


@pytest.fixture
def some(kernels: SkinnyGemm) -> Callable[..., torch.Tensor]:
    """Return what makes numbers in the dtype of kernels."""
    return lambda *shape: torch.randn(shape).to(kernels._dtype)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
def test_words(kernels: SkinnyGemm, some: Callable[..., torch.Tensor], rows: int) -> None:
    """Products, with a bias, a sum or a gate, are told to a kernel of so many rows."""
    torch.manual_seed(rows)
    x_RK, weight_NK, bias_N = some(rows, 80)[:, :72], some(26, 72), some(26)

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)

    assert kernels.adds_up(x_RK, weight_NK) == (rows <= skinny.MOST_JOINT)
    check(kernels.linear(x_RK, weight_NK), functional.linear(x_RK, weight_NK))
    check(kernels.linear(x_RK, weight_NK, bias_N), functional.linear(x_RK, weight_NK, bias_N))
    to_RN = some(rows, 30)[:, 2:28]
    expected = to_RN.addmm(x_RK, weight_NK.mT)
    if rows <= skinny.MOST_JOINT:
        header, tail = [HEADER] * CALLERS, [HEADER] * (MOST_WORDS - CALLERS - 11)
        channel = SimpleNamespace(words=lambda device, own: [*header, *own, *tail] if device == 0 else [])
        kernels.joint(joint_RN := to_RN.clone(), x_RK, weight_NK, channel, 0)  # type: ignore[arg-type]
        check(joint_RN, expected)
    kernels.add(to_RN, x_RK, weight_NK)
    check(to_RN, expected)
    for name, act in ACTIVATIONS.items():
        if name in GATES:
            gate, up = functional.linear(x_RK, weight_NK, bias_N).chunk(2, dim=-1)
            check(kernels.gated(x_RK, weight_NK, name, bias_N), act(gate.clone()) * up)


def test_what_is_not_taken(kernels: SkinnyGemm, some: Callable[..., torch.Tensor]) -> None:
    """Many rows, and other dtypes and strides, are left to torch; halves of a matrix are alike."""
    x_RK, weight_NK = some(8, 4096), some(8, 4096)
    assert kernels.takes(x_RK, weight_NK)
    assert kernels.adds_up(x_RK, weight_NK)
    assert not kernels.adds_up(some(9, 4096), weight_NK)
    assert not kernels.takes(some(17, 4096), some(1536, 4096))
    assert not kernels.takes(x_RK[:0], weight_NK)
    assert not kernels.takes(x_RK, weight_NK[:0])
    assert not kernels.takes(x_RK.float(), weight_NK)
    assert not kernels.takes(x_RK, weight_NK.float())
    assert kernels.takes(x_RK, weight_NK[:1])
    assert not kernels.takes(x_RK, weight_NK[:7], gated=True)
    assert not kernels.takes(x_RK[:, :12], weight_NK[:, :12])
    assert not kernels.takes(x_RK[:, 1:9], weight_NK[:, :8])
    assert not kernels.takes(x_RK[:, :2048], weight_NK[:, ::2])


@pytest.mark.parametrize(
    ("size", "width", "gated", "most"),  # most rows
    [
        (1536, 4096, False, 8),
        (3072, 4096, False, 16),
        (6144, 4096, False, 0),  # a tile and a half for each block
        (4096, 1024, False, 8),
        (4096, 4096, False, 16),
        (4096, 7168, False, 16),
        (4096, 14336, False, 0),
        (7168, 4096, False, 0),
        (7168, 4096, True, 16),
        (14336, 4096, True, 0),
    ],
)
def test_torch_multiplies_by_large_matrices(kernels: SkinnyGemm, size: int, width: int, gated: bool, most: int) -> None:
    """And by small ones, if rows are many: as it was measured on a GPU of so many multiprocessors."""
    weight_NK = torch.empty(size, width, dtype=kernels._dtype)
    x_RK = torch.empty(16, width, dtype=kernels._dtype)
    taken = [rows for rows in range(1, 17) if kernels.takes(x_RK[:rows], weight_NK, gated=gated)]
    assert taken == [*range(1, most + 1)]
