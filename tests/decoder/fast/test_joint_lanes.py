"""Kernels that add up products of several devices: their source, run lane by lane for two of them, and who waits."""

from __future__ import annotations

import pytest
import torch

from tests.packed_cases import dense_of, matrix_of
from tpplan.decoder.fast.launches.launcher import DTYPES, bits_of
from tpplan.decoder.weights.quantised import IntMatrix, Matrix
from tpplan.exec.cuda.channel import adders_on
from tpplan.exec.protocol.channel import (
    ADDERS,
    CALLERS,
    DEVICES,
    MEMORIES,
    MOST_ADDERS,
    MOST_BLOCKS,
    NUMBERS,
    OWN,
    SET,
    SLOT,
)
from tpplan.exec.protocol.words import BLOCKS, COUNTERS, DEADLINE, MOST_WORDS

lanes = pytest.importorskip("tests.lanes")
gemv_kernels = pytest.importorskip("tpplan.decoder.fast.kernels.gemv")
packed_kernels = pytest.importorskip("tpplan.decoder.fast.kernels.packed")
skinny_kernels = pytest.importorskip("tpplan.decoder.fast.kernels.skinny")

#: Kernel, rows, columns of the result, columns of each device's matrix, warps, blocks, number of the sum.
_Case = tuple[str, int, int, tuple[int, int], tuple[int, int], int, int]


def _matrix(name: str, size: int, width: int, dtype: torch.dtype) -> Matrix:
    """Return what a kernel multiplies by."""
    if name.startswith("packed"):
        return matrix_of(name.split("_")[3], size, width, 128, torch.float16, 1)
    return torch.randn(size, width).div(width**0.5).to(dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the last number, as is meant
@pytest.mark.parametrize(
    "case",  # warps are of a team, and teams of a block
    [
        ("skinny_joint_bf16_8", 3, 37, (136, 72), (2, 1), 2, 6),
        ("skinny_joint_f16_8", 8, 21, (64, 8), (1, 1), 1, 2**32 - 1),
        ("packed_joint_bf16_4_8", 5, 37, (640, 128), (2, 1), 2, 6),
        ("packed_joint_f16_4_8", 8, 21, (256, 384), (1, 1), 1, 2**32 - 1),
        ("packed_joint_bf16_e4m3_8", 3, 18, (256, 128), (1, 1), 1, 7),
        ("gemv_joint_bf16_1", 1, 9, (264, 520), (2, 1), 2, 6),
        ("gemv_joint_f16_2", 2, 7, (264, 8), (1, 2), 1, 2**32 - 1),
        ("gemv_joint_bf16_2", 2, 13, (776, 520), (2, 2), 2, 7),
    ],
)
def test_lanes_of_two_devices_agree(case: _Case) -> None:
    """Each sends its part to both, and adds up both and what is there; the next sum has another number on both."""
    name, rows, size, widths, (team, teams), blocks, number = case
    torch.manual_seed(size)
    dtype = {text: each for each, text in DTYPES.items()}[name.split("_")[2]]
    modules = {"gemv": gemv_kernels, "packed": packed_kernels, "skinny": skinny_kernels}
    kernel = getattr(modules[name.partition("_")[0]], name.upper())
    matrices = [(torch.randn(rows, width).to(dtype), _matrix(name, size, width, dtype)) for width in widths]
    parts = [x_RK.float() @ dense_of(matrix).mT for x_RK, matrix in matrices]
    start_RN, elements, parity = torch.randn(rows, size).to(dtype), rows * size + 5, number % 2
    memories = [torch.zeros(2, 2, elements, 2, dtype=torch.int32) for _ in matrices]  # sets, slots
    sent = [memory[parity, :, : rows * size] for memory in memories]
    tag = torch.tensor(number).to(torch.int32)
    sent[1][0, :, 0], sent[1][0, :, 1] = parts[0].flatten().view(torch.int32), tag  # as of the device that runs later
    counters, streams = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(BLOCKS), []  # of failures, alone
    for own in (1, 0):
        to_RN, (x_RK, matrix), width = start_RN.clone(), matrices[own], widths[own]
        numbers = torch.full((MOST_BLOCKS,), tag.item(), dtype=torch.int32)
        words = [0] * MOST_WORDS
        words[DEADLINE], words[COUNTERS], words[NUMBERS] = 60 * 10**9, counters.data_ptr(), numbers.data_ptr()
        words[ADDERS] = 1  # block, before which the others run
        words[DEVICES], words[OWN], words[SLOT], words[SET] = 2, own, 8 * elements, 16 * elements
        words[MEMORIES : MEMORIES + 2] = [memory.data_ptr() for memory in memories]
        to, source = (to_RN.data_ptr(), 2 * size), (x_RK.data_ptr(), 2 * width)
        touched = [x_RK, to_RN, numbers, counters, *memories]
        of_matrix: tuple[int, ...]
        if isinstance(matrix, torch.Tensor):
            held = [matrix]
            of_matrix = (matrix.data_ptr(), 2 * width)
        else:
            zeros = matrix.zeros if isinstance(matrix, IntMatrix) else None
            held = [matrix.codes, matrix.scales, *([] if zeros is None else [zeros])]
            where = 0 if zeros is None else zeros.data_ptr()
            of_matrix = (matrix.codes.data_ptr(), matrix.scales.data_ptr(), where, matrix.scales.shape[1], 7, 1)
            of_matrix = (*of_matrix, 0 if zeros is None else bits_of(1.0), 2)
        told: tuple[int, ...] = (*to, *source, *of_matrix, size, width, rows, *to)
        if name.startswith("gemv"):
            told = (*to, *source, *of_matrix, 4 * width, size, 4, width, rows, *to, 0, team, teams, -(-(2**16) // team))
        words[CALLERS : CALLERS + len(told)] = told
        lanes.run(kernel, blocks, 32 * team * teams, words, [*touched, *held])
        assert (numbers == (number + 1 if number + 1 < 2**32 else 2)).all()
        streams.append(to_RN)
    for sets, slots in zip(memories, sent, strict=True):
        assert (slots[..., 1] == tag).all()
        torch.testing.assert_close(slots[..., 0].contiguous().view(torch.float32), torch.stack(parts).flatten(1))
        assert not sets[1 - parity].any()
        assert not sets[parity, :, rows * size :].any()
    step = torch.finfo(dtype).eps
    for to_RN in streams:
        torch.testing.assert_close(to_RN.float(), start_RN + sum(parts), atol=2 * step, rtol=step)


@pytest.mark.parametrize("processors", [1, 2, 3, 28, 56, 108, 132, 148, 1000])
def test_two_contexts_leave_room_for_what_they_wait_for(processors: int) -> None:
    """Of all multiprocessors, which may have room for a single block each, both together take one fewer at most."""
    assert 1 <= adders_on(processors) <= MOST_ADDERS
    assert processors < 3 or 2 * adders_on(processors) < processors
