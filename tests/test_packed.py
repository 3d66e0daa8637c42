"""Products with matrices of 4-bit codes: the kernels' machine code, what their source does, the words they are told."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.nn import functional

from tests.packed_cases import int_matrix
from tests.pointwise_cases import memory, number
from tests.test_kernels import CAPABILITIES, _registers
from tests.test_skinny import acted
from tpplan.decoder import packed
from tpplan.decoder.few_rows import GATES
from tpplan.decoder.launcher import DTYPES, bits_of
from tpplan.decoder.packed import Packed, shape_of
from tpplan.decoder.quantised import IntMatrix
from tpplan.decoder.settings import ACTIVATIONS
from tpplan.exec import kernel_cache
from tpplan.exec.channel_table import CALLERS, MOST_BLOCKS
from tpplan.exec.exchange_table import MOST_WORDS

PROCESSORS = 132
#: Of a multiprocessor, for up to eight rows and up to sixteen; and of a block.
WARPS, MOST_WARPS = {8: 16, 16: 8}, 8
#: Steps that a warp has on their way, at most.
DEEP = {8: 4, 16: 2}
#: What channels of tests tell kernels.
HEADER = 77
#: Kernels, each with generations of GPUs that it is compiled for: they differ by dtype in little.
KERNELS = [
    *(("packed_bf16_8", each) for each in CAPABILITIES),
    *(("packed_bf16_16", each) for each in CAPABILITIES[:2]),
    ("packed_f16_8", (9, 0)),
    ("packed_f16_16", CAPABILITIES[-1]),
    ("packed_joint_f16_8", CAPABILITIES[0]),
    ("packed_joint_bf16_8", (9, 0)),
    ("packed_joint_f16_8", CAPABILITIES[-1]),
]
SIZES = [
    (1536, 4096),
    (4096, 1024),
    (4096, 3584),
    (4096, 14336),
    (6144, 4096),
    (7168, 4096),
    (28672, 4096),
    (1, 128),
    (48, 896),
    (10560, 640),
]
FORMS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@pytest.mark.parametrize(("name", "capability"), KERNELS)
def test_they_multiply_codes_as_they_are(name: str, capability: tuple[int, int]) -> None:
    """Codes are read 16 bytes at a time, first before the wait; nothing spills, and registers are enough for warps."""
    text = kernel_cache.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    kind, count = name.split("_")[-2:]
    rows = int(count)
    multiply = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    # of every step for eight rows, eight with ones and eight with codes, or with twice as many; and those of scales
    products, scales = (64, 4) if rows == 8 else (2 * 2 * (8 + 16), 2 * 2)
    assert text.count(multiply) == products + (scales if kind == "bf16" else 0)
    assert text.count("mma.sync") == products + scales
    assert "ld.global.nc.L1::no_allocate.v4.u32" in text
    if capability >= kernel_cache.OVERLAPS:
        waits, later = text.index("griddepcontrol.wait"), ["ld.global.v4.u32", "ld.global.u16", "st.global.u16"]
        later += ["ld.volatile.global.u32", "st.volatile.global.u64", "st.global.u32"] if "_joint_" in name else []
        assert text.rindex("ld.volatile.global.v4.u32") < waits < min(map(text.index, later))
    assert ".f64" not in text
    assert ".local" not in text
    code, log = kernel_cache.assemble(text, capability)
    assert code[:4] == b"\x7fELF"
    assert _registers(log) * 32 * WARPS[rows] <= 2**16
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.parametrize("rows", WARPS)
@pytest.mark.parametrize(("size", "width"), SIZES)
def test_all_of_a_matrix_has_warps_at_once(size: int, width: int, rows: int) -> None:
    """No block waits for another to end, none has nothing to do, and none has a warp without steps."""
    blocks, warps, run = shape_of(size, width, PROCESSORS, rows)
    assert 0 < blocks <= min(-(-size // (2 * rows)), MOST_BLOCKS)
    assert blocks * warps <= PROCESSORS * WARPS[rows]
    assert 0 < warps <= MOST_WARPS
    assert 0 < run <= DEEP[rows]
    assert (warps - 1) * run * 128 < width


@pytest.mark.parametrize(
    ("size", "width", "few", "many"),  # blocks and warps for up to eight rows, and for more
    [
        (6144, 4096, (384, 4), (192, 4)), (4096, 4096, (256, 8), (128, 8)), (28672, 4096, (528, 4), (132, 8)),
        (4096, 14336, (256, 7), (128, 8)), (1536, 4096, (96, 8), (48, 8)), (4096, 1024, (256, 4), (128, 4)),
        (7168, 4096, (448, 4), (224, 4)), (4096, 3584, (256, 7), (128, 7)),
    ],
)  # fmt: skip
def test_blocks_are_as_many_as_were_fastest(size: int, width: int, few: tuple[int, int], many: tuple[int, int]) -> None:
    """On a GPU of so many multiprocessors; none of up to eight rows needs the room of a whole one, as it may wait."""
    assert shape_of(size, width, PROCESSORS, 8)[:2] == few
    assert shape_of(size, width, PROCESSORS, 9)[:2] == many


def _words(  # noqa: PLR0917
    y: torch.Tensor, x: torch.Tensor, matrix: IntMatrix, run: int, plus: tuple[int, int], mode: int
) -> list[int]:
    """Return what a kernel is told."""
    zeros, width = matrix.zeros, x.shape[1]
    return [
        y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0), matrix.codes.data_ptr(), matrix.scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(), matrix.scales.shape[1],
        31 if matrix.group >= width else matrix.group.bit_length() - 1, FORMS[matrix.scales.dtype],
        bits_of(8.0 if zeros is None else float(matrix.plus)), run, y.shape[1], width, len(x), *plus, mode,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "case",  # kernel, rows, columns of the result, columns, group, scales, plus, warps, blocks, run, mode
    [
        ("bf16_8", 8, 16, 512, 128, torch.bfloat16, None, 1, 1, 4, 0),  # nothing is left over
        ("bf16_8", 3, 37, 640, 128, torch.float16, 1, 2, 2, 2, 0),  # two tiles of a block; a warp's last step is not
        ("f16_8", 5, 1, 128, 128, torch.float32, 0, 2, 1, 1, 0),  # a warp has nothing
        (
            "f16_16",
            13,
            69,
            1152,
            1152,
            torch.float16,
            None,
            2,
            1,
            2,
            0,
        ),  # one group; three tiles, three rounds of steps
        ("bf16_16", 16, 19, 896, 256, torch.bfloat16, 1, 3, 1, 2, 1),
        ("f16_8", 7, 9, 1408, 128, torch.float16, 1, 1, 2, 4, 2),
        ("bf16_16", 9, 8, 384, 128, torch.float32, 0, 1, 1, 1, 3),
    ],
)
@pytest.mark.parametrize("plus", [False, True])
def test_lanes_agree(
    case: tuple[str, int, int, int, int, torch.dtype, int | None, int, int, int, int], plus: bool
) -> None:
    """What the source does lane by lane is the product, and reaches for nothing beside the matrices."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.packed_kernels")
    name, rows, size, width, group, scales, offset, warps, blocks, run, mode = case
    torch.manual_seed(size)
    dtype = {text: each for each, text in DTYPES.items()}[name.split("_", maxsplit=1)[0]]
    count = 2 * size if mode else size
    matrix = int_matrix(count, width, group, scales, offset)
    x_RK = torch.randn(rows, width + 16).to(dtype)[:, 8:-8]
    plus_RN, y_RN = torch.randn(rows, count).to(dtype), torch.full((rows, size + 3), 9, dtype=dtype)
    words = _words(y_RN[:, :size], x_RK, matrix, run, (plus_RN.data_ptr(), 2 * count) if plus else (0, 0), mode)
    touched = [x_RK, matrix.codes, matrix.scales, plus_RN, y_RN, *([] if matrix.zeros is None else [matrix.zeros])]
    lanes.run(getattr(kernels, f"PACKED_{name.upper()}"), blocks, 32 * warps, words, touched)
    exact_RN = x_RK.double() @ matrix.dense(0, count, torch.float32).double().mT + (plus_RN if plus else 0)
    expected_RN = acted(exact_RN.to(dtype), mode) if mode else exact_RN.to(dtype)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(y_RN[:, :size], expected_RN, atol=2 * step, rtol=2 * step)
    assert (y_RN[:, size:] == 9).all()


class FakeLauncher:
    """Does what a kernel does, by its words."""

    def __init__(self, name: str, place: torch.device, *, is_array: bool = False) -> None:
        """Take any device."""
        family, *joint, dtype, count = name.split("_")
        assert family == "packed"
        assert joint == (["joint"] if is_array else [])
        assert place.type == "cuda"
        self._is_joint = is_array
        self._most, self._dtype = int(count), {text: each for each, text in DTYPES.items()}[dtype]

    def __call__(self, blocks: int, threads: int, *words: int) -> None:
        """Do it, of what is joint by a device alone."""
        if self._is_joint:
            assert words[0] == HEADER
            assert len(words) == MOST_WORDS
            words = (*words[CALLERS : CALLERS + 17], 0)
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, zero, run, size, width, rows = words[:15]
        plus, plus_pitch, mode = words[15:]
        assert self._most - 8 < rows <= self._most
        assert 0 < threads <= 32 * MOST_WARPS
        assert not threads % 32
        assert 0 < run <= DEEP[self._most]
        count = 2 * size if mode else size
        assert 0 < blocks <= -(-count // (2 * self._most))
        dtype = {each: kind for kind, each in FORMS.items()}[form]
        matrix = IntMatrix(
            memory(codes, (count, width // 8), (width // 2, 4), torch.int32),
            memory(scales, (count, groups), (dtype.itemsize * groups, dtype.itemsize), dtype),
            memory(zeros, (-(-count * groups // 8),), (4,), torch.int32) if zeros else None,
            int(number(zero)), min(1 << bits, width), 4,
        )  # fmt: skip
        assert zeros or number(zero) == 8
        rows_RK = memory(x, (rows, width), (x_pitch, 2), self._dtype)
        found = rows_RK.float() @ matrix.dense(0, count, torch.float32).mT
        if plus:
            found += memory(plus, (rows, count), (plus_pitch, 2), self._dtype)
        found = found.to(self._dtype)
        memory(y, (rows, size), (y_pitch, 2), self._dtype).copy_(acted(found, mode) if mode else found)


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Packed:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr(packed, "Launcher", FakeLauncher)
    found = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return Packed(torch.device("cuda", 0), request.param, joint=True)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 35, 64])
def test_words(kernels: Packed, rows: int) -> None:
    """Products, with a bias, a sum or a gate, are told to a kernel of so many rows, whatever scales and zeros are."""
    torch.manual_seed(rows)
    dtype = kernels._dtype
    header, tail = [HEADER] * CALLERS, [HEADER] * (MOST_WORDS - CALLERS - 17)
    channel: Any = SimpleNamespace(words=lambda device, own: [*header, *own, *tail] if device == 0 else [])
    for scales, plus, group in product(FORMS, [None, 0, 1], [128, 384]):
        x_RK, bias_N = torch.randn(rows, 392).to(dtype)[:, :384], torch.randn(26).to(dtype)
        matrix = int_matrix(26, 384, group, scales, plus)
        dense_NK = matrix.dense(0, 26, torch.float32)

        def check(found: torch.Tensor, expected: torch.Tensor) -> None:
            torch.testing.assert_close(found.float(), expected.float(), atol=0.03, rtol=0.02)

        exact = x_RK.float() @ dense_NK.mT
        check(kernels.linear(x_RK, matrix), exact)
        check(kernels.linear(x_RK, matrix, bias_N), exact + bias_N)
        to_RN = torch.randn(rows, 30).to(dtype)[:, 2:28]
        expected = to_RN.float() + exact
        kernels.add(to_RN, x_RK, matrix)
        check(to_RN, expected)
        if kernels.adds_up(x_RK, matrix):
            expected = to_RN.float() + exact
            kernels.joint(to_RN, x_RK, matrix, channel, 0)
            check(to_RN, expected)
        for name, act in ACTIVATIONS.items():
            if name in GATES:
                gate, up = functional.linear(x_RK.float(), dense_NK, bias_N.float()).chunk(2, dim=-1)
                check(kernels.gated(x_RK, matrix, name, bias_N), act(gate.clone()) * up)


def test_what_is_not_taken(kernels: Packed) -> None:
    """Many rows, other matrices and dtypes, small groups and steps that are not whole are left to others."""
    dtype = kernels._dtype
    x_RK, matrix = torch.randn(16, 512).to(dtype), int_matrix(24, 512, 128, torch.float16, 1)
    assert kernels.takes(x_RK, matrix)
    assert kernels.takes(x_RK, matrix, gated=True)
    assert kernels.takes(x_RK, matrix.part(16, 24))
    assert kernels.takes(x_RK, int_matrix(24, 512, 256, torch.float32, None))
    assert kernels.takes(x_RK, int_matrix(24, 512, 512, torch.float32, None))
    assert kernels.takes(x_RK[:, :384], int_matrix(24, 384, 384, torch.float32, None))
    assert not kernels.takes(x_RK[:0], matrix)
    assert not kernels.takes(torch.randn(65, 512).to(dtype), matrix)
    assert not kernels.takes(x_RK.float(), matrix)
    assert not kernels.takes(x_RK[:, ::2], int_matrix(24, 256, 128, torch.float16, 1))
    assert not kernels.takes(x_RK, torch.randn(24, 512).to(dtype))
    assert not kernels.takes(x_RK, int_matrix(25, 512, 128, torch.float16, 1), gated=True)
    assert not kernels.takes(x_RK, int_matrix(24, 512, 64, torch.float16, 1))
    assert not kernels.takes(x_RK, int_matrix(24, 512, 384, torch.float16, 1))
    assert not kernels.takes(x_RK[:, :320], int_matrix(24, 320, 320, torch.float16, 1))
    assert kernels.takes(x_RK, evolve(matrix, columns=torch.zeros(512, dtype=torch.int32)))
    assert not kernels.takes(x_RK, evolve(matrix, codes=torch.zeros(24, 512, dtype=torch.uint8), bits=8))
    assert not kernels.takes(x_RK[:, :128], int_matrix(24, 128, 128, torch.float16, None).part(1, 24))
    assert kernels.takes(x_RK[:, :128], odd := int_matrix(25, 128, 128, torch.float16, 1))
    assert not kernels.takes(x_RK[:, :128], evolve(odd, scales=odd.scales.clone()))  # read in pairs
    assert kernels.takes(x_RK[:, :128], evolve(odd, scales=odd.scales.float()))
    assert not kernels.takes(x_RK, evolve(matrix, scales=matrix.scales.T.contiguous().T))
    assert not kernels.takes(x_RK, evolve(matrix, zeros=torch.zeros(24, 4, dtype=torch.uint8)))
    assert kernels.adds_up(x_RK[:8], matrix)
    assert not kernels.adds_up(x_RK[:9], matrix)
