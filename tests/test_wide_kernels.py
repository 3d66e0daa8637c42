"""Kernels that multiply many rows by codes: their machine code, and what their source does lane by lane."""

from __future__ import annotations

import pytest
import torch

from tests.packed_cases import matrix_of
from tests.test_kernels import CAPABILITIES, _registers
from tests.test_packed_kernels import _words
from tests.test_skinny import acted
from tpplan.decoder.launcher import DTYPES
from tpplan.decoder.quantised import IntMatrix
from tpplan.exec import kernel_cache

#: Warps of a multiprocessor, by rows.
WARPS = {32: 16, 48: 8, 64: 8}
#: Kernels, each with a generation of GPUs that it is compiled for: they differ by dtype in little.
KERNELS = [
    ("wide_bf16_4_64", CAPABILITIES[0]),
    ("wide_f16_4_64", CAPABILITIES[-1]),
    ("wide_bf16_4_32", (9, 0)),
    ("wide_bf16_e4m3_48", (9, 0)),
]


@pytest.mark.parametrize(("name", "capability"), KERNELS)
def test_codes_are_made_floats_once(name: str, capability: tuple[int, int]) -> None:
    """They are read 16 bytes at a time, first before the wait; rows are copied to shared memory; nothing spills."""
    text = kernel_cache.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    _, dtype, kind, count = name.split("_")
    rows, fma = int(count), f"fma.rn.{dtype}x2"
    # of two steps, with four matrix rows of 16 bytes of codes, and two of an instruction's for every eight rows
    pairs = 2 * 4 * 16 * (8 if kind == "4" else 4) // 8
    assert text.count(fma) == pairs * 2
    assert text.count("mma.sync") == pairs // 4 * rows // 8
    assert text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32") == text.count("mma.sync")
    assert "cp.async.cg.shared.global" in text
    assert "ld.global.nc.L1::no_allocate.v4.u32" in text
    if capability >= kernel_cache.OVERLAPS:
        waits, later = text.index("griddepcontrol.wait"), ["cp.async", "st.global", "atom.global"]
        assert text.rindex("ld.volatile.global.v4.u32") < waits < min(map(text.index, later))
    assert ".f64" not in text
    assert ".local" not in text
    code, log = kernel_cache.assemble(text, capability)
    assert code[:4] == b"\x7fELF"
    assert _registers(log) * 32 * WARPS[rows] <= 2**16
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


#: Kernel, rows, columns of the result, columns, those that share a scale, scales, plus, warps, blocks that share
#: columns, mode.
_Case = tuple[str, int, int, int, int, torch.dtype, int | None, int, int, int]


@pytest.mark.parametrize(
    "case",
    [
        ("bf16_4_32", 17, 34, 256, 128, torch.bfloat16, None, 1, 1, 0),  # two blocks, of which one has a single pair
        ("f16_4_32", 32, 64, 640, 256, torch.float16, 1, 2, 2, 0),  # three steps of one block, two of the other
        ("bf16_4_64", 64, 18, 384, 384, torch.float32, 0, 1, 3, 1),  # a step of each block; two strips, with gates
        ("f16_4_48", 41, 32, 128, 128, torch.float16, 1, 2, 1, 2),
        ("bf16_8_48", 35, 30, 128, 64, torch.bfloat16, 0, 2, 2, 0),  # a warp has nothing
        ("f16_e4m3_32", 19, 14, 192, 64, torch.float32, 16, 1, 1, 3),
        ("bf16_e4m3_32", 24, 40, 128, 128, torch.float16, 1, 1, 1, 0),
    ],
)
@pytest.mark.parametrize("plus", [False, True])
def test_lanes_agree(case: _Case, plus: bool) -> None:
    """What the source does lane by lane is the product, and reaches for nothing beside the matrices."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.wide_kernels")
    name, rows, size, width, group, scales, offset, warps, splits, mode = case
    torch.manual_seed(size)
    floats, kind, most = name.split("_")
    dtype = {text: each for each, text in DTYPES.items()}[floats]
    count = 2 * size if mode else size
    matrix = matrix_of(kind, count, width, group, scales, offset)
    zeros = matrix.zeros if isinstance(matrix, IntMatrix) else None
    x_RK = torch.randn(rows, width + 16).to(dtype)[:, 8:-8]
    plus_RN, y_RN = torch.randn(rows, count).to(dtype), torch.full((rows, size + 4), 9, dtype=dtype)
    tiles = -(-count // (32 * warps))
    parts = torch.full((tiles * warps * splits, int(most), 32), torch.nan)
    turns = torch.zeros(tiles * warps, dtype=torch.int32)
    told = _words(y_RN[:, :size], x_RK, matrix, 0, (plus_RN.data_ptr(), 2 * count) if plus else (0, 0), mode)
    words = [*told[:11], parts.data_ptr(), turns.data_ptr(), *told[12:]]
    touched = [x_RK, matrix.codes, matrix.scales, plus_RN, y_RN, parts, turns, *([] if zeros is None else [zeros])]
    lanes.run(getattr(kernels, f"WIDE_{name.upper()}"), (tiles, splits), 32 * warps, words, touched)
    exact_RN = x_RK.double() @ matrix.dense(0, count, torch.float32).double().mT + (plus_RN if plus else 0)
    expected_RN = acted(exact_RN.to(dtype), mode) if mode else exact_RN.to(dtype)
    step = 2 * torch.finfo(dtype).eps * expected_RN.abs().max().item()
    torch.testing.assert_close(y_RN[:, :size], expected_RN, atol=step, rtol=0)
    assert (y_RN[:, size:] == 9).all()
    assert not turns.any()
    assert parts.isnan().all() == (splits == 1)


@pytest.mark.parametrize("kind", ["4", "8", "e4m3"])
def test_elements_are_rounded_once_if_asked(kind: str) -> None:
    """What single ones are multiplied by is what the matrix itself makes of its codes, whatever their scales are."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.wide_kernels")
    codes, dtype = pytest.importorskip("tpplan.decoder.packed_codes"), torch.bfloat16
    matrix = matrix_of(kind, 32, 128, 128, torch.float32, 1)
    x_RK, y_RN = torch.eye(17, 128, dtype=dtype), torch.empty(17, 32, dtype=dtype)
    told = _words(y_RN, x_RK, matrix, 0, (0, 0), 0)
    zeros = matrix.zeros if isinstance(matrix, IntMatrix) else None
    touched = [x_RK, matrix.codes, matrix.scales, y_RN, *([] if zeros is None else [zeros])]
    kernel = kernels.wide(f"wide_bf16_{kind}_32", getattr(codes, f"BF16_{kind.upper()}"), 4, 16, exact=True)
    lanes.run(kernel, (1, 1), 32, [*told[:11], 0, 0, *told[12:]], touched)
    assert torch.equal(y_RN, matrix.dense(0, 32, dtype)[:, :17].mT)
