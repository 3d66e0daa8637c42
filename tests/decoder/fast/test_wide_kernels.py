"""Kernels that multiply many rows by codes: their machine code, and what their source does lane by lane."""

from __future__ import annotations

import re

import pytest
import torch

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.fast.test_packed_kernels import _words
from tests.machine_code import CAPABILITIES, check_code, in_order, registers
from tests.packed_cases import product_of
from tpplan.decoder.fast.kernels.wide_limits import GROUP_WARPS, WARPS, stage_bytes
from tpplan.decoder.fast.launches.packed import STEPS
from tpplan.decoder.fast.launches.wide import bytes_of
from tpplan.exec.toolchain import kernel_cache

#: Kernels, each with a generation of GPUs that it is compiled for: they differ by dtype in little.
KERNELS = [
    ("wide_bf16_e4m3_48", CAPABILITIES[0]),
    ("wide_bf16_4_32", (9, 0)),
    ("wide_f16_4_64", CAPABILITIES[-1]),
    ("wgmma_bf16_4_64", (9, 0)),
    ("wgmma_f16_4_32", (9, 0)),
]


@pytest.mark.parametrize(("name", "capability"), KERNELS)
def test_codes_are_made_floats_once(name: str, capability: tuple[int, int]) -> None:
    """They are copied 16 bytes at a time, first before the wait; rows only behind it; nothing spills."""
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    check_overlap(name, text, capability)
    way, dtype, kind, count = name.split("_")
    rows, fma = int(count), f"fma.rn.{dtype}x2"
    # of a step, with four matrix rows of 16 bytes of codes, and two of an instruction's for every eight rows
    pairs = 4 * 16 * (8 if kind == "4" else 4) // 8
    assert text.count(fma) == pairs * 2
    if way == "wgmma":  # four warps at once, of rows in shared memory: all of them are settled before sums are used
        assert f".target sm_{capability[0]}{capability[1]}a" in text
        assert text.count(f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{dtype}.{dtype}") == pairs // 4
        last, settled = text.rindex("wgmma.fence"), text.index("wgmma.wait_group.sync.aligned 0;")
        assert last < settled
        sums = {*re.findall(r"%f\d+", text[last:settled])}
        assert len(sums) == rows
        beside = re.sub("wgmma.fence.*", "", text[text.index("wgmma.fence") : settled])
        assert sums.isdisjoint(re.findall(r"%f\d+", beside))
        assert text.index("fence.proxy.async.shared::cta;") < text.index("bar.sync") < text.index("wgmma.mma_async")
    else:
        assert text.count(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32") == pairs // 4 * rows // 8
    assert text.count("cp.async.cg.shared.global.L2::128B") >= 2 * 4  # before the loop, and in it
    assert not re.search(r"ld\.(global\.nc|volatile)", text)  # into registers
    if capability >= kernel_cache.OVERLAPS:
        steps, later = in_order(text), ["p cp.async", "cp.async.wait", "ld.global", "st.global", "atom.global"]
        waits = steps.index("griddepcontrol.wait")
        assert steps.index("cp.async.cg.shared.global.L2::128B") < waits < min(map(steps.index, later))
    warps = (GROUP_WARPS if way == "wgmma" else WARPS)[rows]
    taken = registers(check_code(text, capability)) * 32 * warps
    assert taken <= 2**16
    if way == "wgmma" and warps == 8:  # so that every multiprocessor has one block
        assert 2 * taken > 2**16


#: Kernel, rows, columns of the result, columns, those that share a scale, scales, plus, warps, blocks, mode, what is
#: added.
_Case = tuple[str, int, int, int, int, torch.dtype, int | None, int, int, int, bool]


@pytest.mark.parametrize(
    "case",
    [
        ("bf16_4_32", 17, 34, 384, 128, torch.bfloat16, None, 1, 2, 0, True),  # a tile of each block, one of a pair
        ("bf16_4_32", 20, 66, 256, 128, torch.float16, 1, 1, 4, 0, True),  # a block with parts of two tiles
        ("f16_4_32", 18, 96, 384, 256, torch.float16, 1, 2, 3, 0, False),  # a warp has nothing
        ("bf16_4_64", 64, 18, 384, 384, torch.float32, 0, 1, 4, 1, True),  # parts of gates
        ("f16_4_48", 41, 32, 128, 128, torch.float16, 1, 2, 1, 2, False),
        ("bf16_8_48", 35, 30, 192, 64, torch.bfloat16, 0, 1, 3, 0, True),  # a step of each block
        ("f16_e4m3_32", 19, 14, 192, 64, torch.float32, 16, 1, 2, 3, False),
        ("bf16_e4m3_32", 24, 72, 192, 192, torch.float16, 1, 1, 1, 0, True),  # all tiles of a block
        ("f16_8_32", 17, 30, 320, 64, torch.float16, 3, 1, 5, 0, True),  # parts of five blocks
        ("bf16_e4m3_32", 18, 80, 64, 64, torch.bfloat16, 16, 1, 3, 0, False),  # the last scale is half a word
        ("wgmma_f16_4_48", 41, 140, 128, 128, torch.float16, 1, 8, 2, 2, False),  # gates, of two tiles
        ("wgmma_bf16_8_16", 15, 300, 192, 64, torch.bfloat16, 0, 8, 4, 0, True),  # parts of several blocks
        ("wgmma_f16_e4m3_64", 50, 14, 192, 64, torch.float32, 16, 8, 2, 3, False),
    ],
)
def test_lanes_agree(case: _Case) -> None:
    """What the source does lane by lane is the product, and reaches for nothing beside the matrices."""
    lanes, kernels = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.fast.kernels.wide")
    name, rows, size, width, group, scales, offset, warps, blocks, mode, plus = case
    _, way, name = name.rpartition("wgmma_")
    own = product_of(name, rows, size, width, group, scales, offset, mode, 4, plus=plus)
    y_RN, expected_RN, (_, kind, most) = own.out, own.expected, name.split("_")
    parts = torch.full((bytes_of(blocks, warps, int(most)) // 4,), torch.nan).view(-1, int(most), 32)
    turns = torch.zeros(blocks * warps, dtype=torch.int32)
    told, stages = _words(y_RN[:, :size], own.rows, own.matrix, 0, own.plus, mode), 2 + rows % 2
    words = [*told[:11], parts.data_ptr(), turns.data_ptr(), *told[12:15], stages, *told[15:]]
    shared, touched = stages * stage_bytes(int(most), STEPS[kind], warps), [*own.touched, parts, turns]
    codes = getattr(kernels.packed_codes, name.rpartition("_")[0].upper())
    kernel = kernels._wide(f"{'wgmma' if way else 'wide'}_{name}", codes, int(most) // 8, 8, warps)
    lanes.run(kernel, blocks, 32 * warps, words, touched, shared)
    step = 2 * torch.finfo(y_RN.dtype).eps * expected_RN.abs().max().item()
    torch.testing.assert_close(y_RN[:, :size], expected_RN, atol=step, rtol=0)
    assert (y_RN[:, size:] == 9).all()
    assert not turns.any()
    tiles, steps = -(-len(own.matrix) // (32 * warps)), width // STEPS[kind]
    edges = {block * tiles * steps // blocks for block in range(blocks)} | {tile * steps for tile in range(tiles)}
    whole = sum(not edges & {*range(start + 1, start + steps)} for start in range(0, tiles * steps, steps))
    assert (~parts.isnan()).flatten(1).any(1).sum() == warps * (len(edges) - whole)
