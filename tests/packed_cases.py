"""Matrices of codes for tests of the kernels that multiply by them; products are about as large as what is multiplied.

Scales and zeros end where their memory does; those of 4-bit codes fill whole words, which kernels read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from tests.decoder.fast.test_skinny import acted
from tests.gate_cases import rounded_gate
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.weights.quantised import Float8Matrix, IntMatrix, Quantised

if TYPE_CHECKING:
    from tpplan.decoder.weights.quantised import Matrix
    from tpplan.decoder.weights.row_kernels import RowKernels

#: What kernels call the dtypes of scales.
FORMS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Warps of a multiprocessor, for up to eight rows and up to sixteen.
WARPS = {8: 16, 16: 8}


def dense_of(matrix: Matrix) -> torch.Tensor:
    """Return a matrix of whatever in float32."""
    return matrix.float() if isinstance(matrix, torch.Tensor) else matrix.dense(0, len(matrix), torch.float32)


def int_matrix(  # noqa: PLR0917
    size: int, width: int, group: int, dtype: torch.dtype, plus: int | None, device: str = "cpu", *, bits: int = 4
) -> IntMatrix:
    """Return a random matrix of whole numbers.

    Args:
        size: rows.
        width: columns.
        group: columns that share a scale.
        dtype: of scales.
        plus: is added to stored zeros; None if there are none.
        device: where it is.
        bits: of a code, 4 or 8.
    """
    groups = -(-width // group)
    scales = _scales((size, groups), width**0.5 * 2 ** (bits - 1), dtype, device)
    codes = _words(size, width * bits // 32, device=device)
    if bits == 8:
        zeros = None if plus is None else torch.randint(256, (size, groups), dtype=torch.uint8, device=device)
        return IntMatrix(codes.view(torch.uint8), scales, zeros, plus or 0, group, bits)
    words = scales.new_empty(-(-scales.nbytes // 4) * 4 // dtype.itemsize)
    words[: scales.numel()] = scales.view(-1)
    zeros = None if plus is None else _words(-(-size * groups // 8), device=device)
    return IntMatrix(codes, words[: scales.numel()].view(size, groups), zeros, plus or 0, group, bits)


def float_matrix(
    size: int, width: int, block: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> Float8Matrix:
    """Return a random matrix of floats of 8 bits: of all that are numbers, most of which are small.

    Args:
        size: rows.
        width: columns.
        block: rows and columns that share a scale.
        dtype: of scales.
        device: where it is.
    """
    codes = torch.randn(size, width, device=device).mul_(4).to(torch.float8_e4m3fn).view(torch.uint8)
    some = torch.arange(256, dtype=torch.uint8, device=device)
    some = some[some & 127 < 0x68][: codes.numel()]  # not the largest, beside which others would be nothing
    codes.view(-1)[: len(some)] = some
    height, columns = block
    scales = _scales((-(-size // height), -(-width // columns)), width**0.5 * 4, dtype, device)
    return Float8Matrix(codes.view(torch.float8_e4m3fn), scales, height, columns)


def matrix_of(  # noqa: PLR0917
    kind: str, size: int, width: int, group: int, dtype: torch.dtype, plus: int | None, device: str = "cpu"
) -> Quantised:
    """Return a random matrix of a kind of codes, of :data:`tpplan.decoder.fast.launches.packed.STEPS`.

    Args:
        kind: of them.
        size: rows.
        width: columns.
        group: columns that share a scale.
        dtype: of scales.
        plus: is added to stored zeros, None if there are none; of floats the rows that share a scale, None if one does.
        device: where it is.
    """
    if kind == "e4m3":
        return float_matrix(size, width, (plus or 1, group), dtype, device)
    return int_matrix(size, width, group, dtype, plus, device, bits=int(kind))


@frozen
class Product:
    """What a kernel is run on lane by lane, and what has to come of it.

    Attributes:
        matrix: of codes.
        rows: ``[R, K]``, which are parts of longer ones.
        plus: what is added: an address and the bytes of a row, both 0 if nothing is.
        out: where the result goes, ``[R, N]`` with columns behind it that stay 9.
        expected: the result, ``[R, N]``.
        touched: what the kernel may read and write.
    """

    matrix: Quantised
    rows: torch.Tensor
    plus: tuple[int, int]
    out: torch.Tensor
    expected: torch.Tensor
    touched: list[torch.Tensor]


def product_of(  # noqa: PLR0917
    name: str, rows: int, size: int, width: int, group: int, scales: torch.dtype, more: int | None, mode: int,
    behind: int, *, plus: bool,
) -> Product:  # fmt: skip
    """Draw one; see :func:`matrix_of`.

    Args:
        name: of the kernel, which begins with the dtype of rows and the kind of codes.
        rows: that are multiplied.
        size: columns of the result.
        width: columns of the matrix.
        group: columns that share a scale.
        scales: their dtype.
        more: what is added to stored zeros, or rows that share a scale too.
        mode: 0, or the activation of a gate, whose matrix has twice as many rows.
        behind: columns behind the result.
        plus: whether something is added.
    """
    torch.manual_seed(size)
    floats, kind, _ = name.split("_")
    dtype = {text: each for each, text in DTYPES.items()}[floats]
    count = 2 * size if mode else size
    matrix = matrix_of(kind, count, width, group, scales, more)
    zeros = matrix.zeros if isinstance(matrix, IntMatrix) else None
    x_RK = torch.randn(rows, width + 16).to(dtype)[:, 8:-8]
    plus_RN, y_RN = torch.randn(rows, count).to(dtype), torch.full((rows, size + behind), 9, dtype=dtype)
    exact_RN = x_RK.double() @ matrix.dense(0, count, torch.float32).double().mT + (plus_RN if plus else 0)
    expected_RN = acted(exact_RN.to(dtype), mode) if mode else exact_RN.to(dtype)
    touched = [x_RK, matrix.codes, matrix.scales, plus_RN, y_RN, *([] if zeros is None else [zeros])]
    added = (plus_RN.data_ptr(), 2 * count) if plus else (0, 0)
    return Product(matrix, x_RK, added, y_RN, expected_RN, touched)


def gates_of(  # noqa: PLR0917
    kernels: RowKernels[Quantised], size: int, width: int, kind: str, rows: int, name: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what kernels of a GPU make of a matrix and its gate, and what torch does, where all is rounded as there.

    Args:
        kernels: of the first GPU.
        size: rows of the matrix.
        width: columns.
        kind: of codes.
        rows: that it is multiplied by.
        name: of the activation.
        dtype: of the rows.
    """
    torch.manual_seed(size + rows)
    matrix = matrix_of(kind, size, width, 128, torch.float16, 1, device="cuda")
    x_RK, bias_N = torch.randn(rows, width, device="cuda").to(dtype), torch.randn(size, device="cuda").to(dtype)
    exact = (x_RK.double() @ matrix.dense(0, size, torch.float32).double().mT).float() + bias_N
    gate, up = exact.to(dtype).chunk(2, dim=-1)
    return kernels.gated(x_RK, matrix, name, bias_N), rounded_gate(name, gate, up)


def _scales(shape: tuple[int, int], by: float, dtype: torch.dtype, device: str) -> torch.Tensor:
    return ((torch.rand(shape, device=device) + 0.5) / by).to(dtype)


def _words(*shape: int, device: str) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)
