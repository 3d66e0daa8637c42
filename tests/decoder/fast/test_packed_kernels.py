"""Kernels that multiply by codes: their machine code, and what their source does lane by lane."""

from __future__ import annotations

import pytest
import torch

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.fast.test_skinny import acted
from tests.machine_code import CAPABILITIES, check_code, registers
from tests.packed_cases import FORMS, WARPS, product_of
from tpplan.decoder.fast.launches.launcher import DTYPES, bits_of
from tpplan.decoder.math import rms_norm
from tpplan.decoder.weights.quantised import Float8Matrix, IntMatrix, Quantised
from tpplan.exec.toolchain import kernel_cache

#: Kernels, each with generations of GPUs that it is compiled for: they differ by dtype in little.
KERNELS = [
    ("packed_bf16_4_8", CAPABILITIES[0]),
    ("packed_bf16_4_8", CAPABILITIES[-1]),
    ("packed_f16_4_8", (9, 0)),
    ("packed_bf16_4_16", (9, 0)),
    ("packed_f16_4_16", CAPABILITIES[-1]),
    ("packed_joint_f16_4_8", CAPABILITIES[0]),
    ("packed_joint_f16_4_8", CAPABILITIES[-1]),
    ("packed_bf16_e4m3_8", CAPABILITIES[0]),
    ("packed_bf16_e4m3_16", CAPABILITIES[-1]),
    ("packed_joint_bf16_e4m3_8", (9, 0)),
    ("packed_bf16_8_8", CAPABILITIES[-1]),
    ("packed_joint_f16_8_8", CAPABILITIES[0]),
    ("packed_f16_8_16", (9, 0)),
    ("packed_norm_bf16_4_1", (9, 0)),
    ("packed_norm_bf16_4_2", CAPABILITIES[0]),
    ("packed_norm_f16_4_2", CAPABILITIES[-1]),
]


@pytest.mark.parametrize(("name", "capability"), KERNELS)
def test_they_multiply_codes_as_they_are(name: str, capability: tuple[int, int]) -> None:
    """Codes are read 16 bytes at a time, first before the wait; nothing spills, and registers are enough for warps.

    Of up to eight rows they are copied into shared memory, where products wait for all but the last three steps.
    """
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    check_overlap(name, text, capability)
    dtype, kind, count = name.removeprefix("packed_").removeprefix("joint_").removeprefix("norm_").split("_")
    rows = 8 if "_norm_" in name else int(count)
    multiply = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    # for every word of a step, for each eight rows, one with codes and one with ones, of nibbles twice; of sixteen rows
    # two with codes, as tiles are twice as high; and those of scales
    eights, ones = rows // 8, kind != "e4m3"
    steps = 4 // eights
    products, scales = steps * 4 * (2 if kind == "4" else 1) * eights * (eights + ones), steps * eights
    assert text.count(multiply) == products + (scales if dtype == "bf16" else 0)
    assert text.count("mma.sync") == products + scales
    is_shared = rows == 8 and kind != "8"
    programmatic, more = (
        ("cp.async.cg.shared.global", "cp.async.wait_group 3;")
        if is_shared
        else ("ld.volatile.global.v4.u32", "ld.global.nc.L1::no_allocate.L2::128B.v4.u32")
    )
    assert more in text
    if capability >= kernel_cache.OVERLAPS:
        waits, later = text.index("griddepcontrol.wait"), ["ld.global.v4.u32", "\tld.global.u16", "st.global.u16"]
        if "_norm_" in name:  # weights of the norm come first, too
            later.remove("ld.global.v4.u32")
            assert text[:waits].count("ld.global.v4.u32") == 2
        later += ["ld.volatile.global.u32", "st.volatile.global.u64", "st.global.u32"] if "_joint_" in name else []
        first = text.rindex(programmatic, 0, waits)
        assert first < waits < min(map(text.index, later))
        assert (text.find(programmatic, waits) > 0) == is_shared
    assert registers(check_code(text, capability)) * 32 * WARPS[rows] <= 2**16


@pytest.mark.parametrize(
    "case",
    [
        ("bf16_4_8", 1, 37, 640, 128, torch.float16, 1, 2, 2, 4, 0),
        ("f16_4_8", 2, 9, 1408, 128, torch.float16, 1, 1, 2, 4, 2),
    ],
)
def test_lanes_norm_first(case: _Case) -> None:
    """What the source does lane by lane is the product of rows that torch has normed, with a gate or without."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.packed")
    name, rows, size, width, group, scales, offset, warps, blocks, run, mode = case
    own = product_of(name, rows, size, width, group, scales, offset, mode, 3, plus=False)
    gain = torch.rand(width).add(0.5).to(own.rows.dtype)
    count = 2 * size if mode else size
    normed_RK = rms_norm(own.rows, gain, 1e-5, 0.5)
    exact = (normed_RK.double() @ own.matrix.dense(0, count, torch.float32).double().mT).to(own.out.dtype)
    words = [*_words(own.out[:, :size], own.rows, own.matrix, run, own.plus, mode)]
    words += [gain.data_ptr(), bits_of(1e-5), bits_of(0.5)]
    kernel = getattr(kernels, f"PACKED_NORM_{name.upper().removesuffix('_8')}_{rows}")
    lanes.run(kernel, blocks, 32 * warps, words, [*own.touched, gain], shared=2 * rows * width)
    step = torch.finfo(own.out.dtype).eps
    expected = acted(exact, mode) if mode else exact
    torch.testing.assert_close(own.out[:, :size], expected, atol=8 * step, rtol=8 * step)
    assert (own.out[:, size:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["8", "e4m3"])
def test_every_byte_becomes_what_it_is(kind: str, dtype: torch.dtype) -> None:
    """Exactly, in the order of columns, but for base and factor; what is no number is 480."""
    intrinsics = pytest.importorskip("tests.intrinsics")
    codes = pytest.importorskip("tpplan.decoder.fast.kernels.packed_codes")
    own = getattr(codes, f"{DTYPES[dtype]}_{kind}".upper())
    every = torch.arange(256, dtype=torch.uint8)
    steps = intrinsics.Steps([None])
    run = steps.ended(intrinsics.Tuple(own.pairs(steps, *steps.values, None)))
    found = [int(pair) for word in every.view(torch.int32).numpy().view("uint32") for pair in run(None, word)]
    values = torch.tensor(found).to(torch.int32).view(dtype).double() * own.factor
    expected = every.double() + own.base if kind == "8" else every.view(torch.float8_e4m3fn).double()
    expected[expected.isnan()] = torch.tensor([480.0, -480.0], dtype=torch.float64)[: int(expected.isnan().sum())]
    assert torch.equal(values, expected)


def _words(  # noqa: PLR0917
    y: torch.Tensor, x: torch.Tensor, matrix: Quantised, run: int, plus: tuple[int, int], mode: int
) -> list[int]:
    """Return what a kernel is told."""
    width = x.shape[1]
    if isinstance(matrix, IntMatrix):
        zeros, columns = matrix.zeros, matrix.group
        more = bits_of(float(2 ** (matrix.bits - 1) if zeros is None else matrix.plus))
    else:
        assert isinstance(matrix, Float8Matrix)
        zeros, columns = None, matrix.columns
        more = 31 if matrix.rows >= len(matrix) else matrix.rows.bit_length() - 1
    return [
        y.data_ptr(), 2 * y.stride(0), x.data_ptr(), 2 * x.stride(0), matrix.codes.data_ptr(), matrix.scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(), matrix.scales.shape[1],
        31 if columns >= width else columns.bit_length() - 1, FORMS[matrix.scales.dtype],
        more, run, y.shape[1], width, len(x), *plus, mode,
    ]  # fmt: skip


#: Kernel, rows, columns of the result, columns, those that share a scale, scales, plus, warps, blocks, run, mode.
_Case = tuple[str, int, int, int, int, torch.dtype, int | None, int, int, int, int]


@pytest.mark.parametrize(
    "case",
    [
        ("bf16_4_8", 8, 16, 512, 128, torch.bfloat16, None, 1, 1, 4, 0),  # nothing is left over
        ("bf16_4_8", 3, 37, 640, 128, torch.float16, 1, 2, 2, 2, 0),  # two tiles of a block; a warp's last step is not
        ("f16_4_8", 5, 1, 128, 128, torch.float32, 0, 2, 1, 1, 0),  # a warp has nothing
        ("f16_4_16", 13, 69, 1152, 1152, torch.float16, None, 2, 1, 2, 0),  # one group; three tiles, three rounds
        ("bf16_4_16", 16, 19, 896, 256, torch.bfloat16, 1, 3, 1, 2, 1),
        ("f16_4_8", 7, 9, 1408, 128, torch.float16, 1, 1, 2, 4, 2),
        ("bf16_4_16", 9, 8, 384, 128, torch.float32, 0, 1, 1, 1, 3),
        ("bf16_e4m3_8", 3, 37, 320, 128, torch.float32, 16, 1, 1, 4, 0),  # blocks; three tiles, two rounds of steps
        ("f16_e4m3_8", 8, 21, 192, 64, torch.float16, 1, 2, 2, 2, 1),  # a scale for each row, one half of a word
        ("f16_e4m3_16", 16, 40, 192, 192, torch.bfloat16, 64, 1, 1, 2, 0),  # a single scale, in half a word
        ("bf16_8_8", 5, 19, 320, 64, torch.float16, 1, 1, 1, 4, 0),  # zeros end in the middle of a word
        ("f16_8_16", 11, 33, 192, 64, torch.bfloat16, None, 2, 1, 2, 0),
        ("f16_8_8", 1, 9, 128, 128, torch.float32, 0, 1, 1, 2, 2),
    ],
)
@pytest.mark.parametrize("plus", [False, True])
def test_lanes_agree(case: _Case, plus: bool) -> None:
    """What the source does lane by lane is the product, and reaches for nothing beside the matrices."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.packed")
    name, rows, size, width, group, scales, offset, warps, blocks, run, mode = case
    own = product_of(name, rows, size, width, group, scales, offset, mode, 3, plus=plus)
    y_RN, expected_RN = own.out, own.expected
    words = _words(y_RN[:, :size], own.rows, own.matrix, run, own.plus, mode)
    lanes.run(getattr(kernels, f"PACKED_{name.upper()}"), blocks, 32 * warps, words, own.touched)
    step = torch.finfo(y_RN.dtype).eps
    torch.testing.assert_close(y_RN[:, :size], expected_RN, atol=2 * step, rtol=2 * step)
    assert (y_RN[:, size:] == 9).all()
