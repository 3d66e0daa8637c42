"""Rows of quantised matrices on a real GPU, to the bit as torch makes them there."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tests.decoder.fast.dense_cases import FLOATS, check, floats, ints, small_floats
from tpplan.decoder.fast.launches.dense import Dequantiser
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.weights.quantised import IntMatrix, Quantised

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", DTYPES)]
SCALES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1024, 4096), (513, 3584), (7, 264), (1, 8), (130, 14336), (61, 28680)]


def on_gpu(matrix: Quantised) -> Quantised:
    """Return a matrix on the first GPU."""
    moved = evolve(matrix, codes=matrix.codes.cuda(), scales=matrix.scales.cuda())
    if isinstance(moved, IntMatrix) and moved.zeros is not None:
        moved = evolve(moved, zeros=moved.zeros.cuda())
    return moved


def check_rows(matrix: Quantised, dtype: torch.dtype) -> None:
    """Make all rows, and some into the middle of longer ones, which stay as they are."""
    kernels, (size, width) = Dequantiser(torch.device("cuda", 0), dtype), matrix.shape
    assert kernels.takes(matrix)
    for start, end in {(0, size), (size // 3, size - size // 3), (size - 1, size)}:
        out_RK = torch.full((end - start + 2, width + 16), 9, device="cuda", dtype=dtype)
        kernels(matrix, start, end, out_RK[1:-1, 8:-8])
        check(out_RK[1:-1, 8:-8], matrix.dense(start, end, dtype))
        out_RK[1:-1, 8:-8] = 9
        assert (out_RK == 9).all()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_numbers(bits: int, shape: tuple[int, int], scales: torch.dtype, dtype: torch.dtype) -> None:
    """With and without zeros, in groups of some columns, or of all."""
    torch.manual_seed(shape[0])
    for group in (32, 128, 88, shape[1]):
        check_rows(on_gpu(ints(bits, shape, group, scales)), dtype)
        check_rows(on_gpu(ints(bits, shape, group, scales, "bytes", plus=1)), dtype)
        if bits == 4:
            check_rows(on_gpu(ints(bits, shape, group, scales, "nibbles", plus=1)), dtype)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FLOATS)
def test_floats(kind: str, shape: tuple[int, int], scales: torch.dtype, dtype: torch.dtype) -> None:
    """With a scale for all, for each row, and for blocks; also what is no number."""
    torch.manual_seed(shape[0])
    for block in (shape, (1, shape[1]), (128, 128), (3, 24)):
        check_rows(on_gpu(floats(kind, shape, block, scales)), dtype)


@pytest.mark.parametrize("shape", [(1024, 2880), (7, 96), (61, 28672)])
def test_floats_of_4_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Also of rows that are apart."""
    torch.manual_seed(shape[0])
    check_rows(on_gpu(small_floats(*shape)), dtype)


def test_kernels_before_and_behind_in_a_graph(dtype: torch.dtype) -> None:
    """Pieces that share their memory with those before are not made before these are used."""
    matrix = on_gpu(evolve(ints(4, (4096, 1024), 128, torch.float16), scales=torch.rand(4096, 8).half() / 100))
    kernels, x_RK = Dequantiser(torch.device("cuda", 0), dtype), torch.randn(64, 1024, device="cuda").to(dtype)
    piece, found = (torch.empty(*shape, device="cuda", dtype=dtype) for shape in ((256, 1024), (64, 4096)))

    def products() -> None:
        for start in range(0, 4096, 256):
            kernels(matrix, start, start + 256, piece)
            torch.mm(x_RK, piece.mT, out=found[:, start : start + 256])

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    expected = x_RK.double() @ matrix.dense(0, 4096, dtype).double().mT
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.testing.assert_close(found.double(), expected, atol=0.03, rtol=0.02)
