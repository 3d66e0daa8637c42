"""Random quantised matrices of the kinds that kernels make rows of, and how these are compared."""

from __future__ import annotations

from typing import Final

import torch

from tpplan.decoder.weights.quantised import Float4Matrix, Float8Matrix, IntMatrix

FLOATS: Final = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def scales_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of either sign and very different magnitudes, which 16 bits have not all of."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-18, 12, shape)).to(dtype)


def ints(
    bits: int, shape: tuple[int, int], group: int, scales: torch.dtype, zeros: str = "none", *, plus: int = 0
) -> IntMatrix:
    """Return a matrix of whole numbers.

    Args:
        bits: of each.
        shape: rows and columns.
        group: columns that share a scale.
        scales: the dtype of these.
        zeros: ``none``, or ``bytes``, or ``nibbles``.
        plus: added to zeros.
    """
    (size, width), count = shape, -(-shape[1] // group)
    codes = torch.randint(256, (size, width * bits // 8), dtype=torch.uint8)
    own = torch.randint(2**bits, (size, count), dtype=torch.uint8)
    if zeros == "nibbles":
        flat = torch.cat((own.flatten(), torch.zeros(-own.numel() % 8, dtype=torch.uint8)))
        own = (flat[::2] | flat[1::2] << 4).view(torch.int32)
    return IntMatrix(
        codes=codes.view(torch.int32) if bits == 4 else codes,
        scales=scales_of((size, count), scales),
        zeros=None if zeros == "none" else own,
        plus=plus,
        group=group,
        bits=bits,
    )


def floats(
    kind: str, shape: tuple[int, int], block: tuple[int, int], scales: torch.dtype = torch.float32
) -> Float8Matrix:
    """Return a matrix of floats of 8 bits, some of which are no numbers.

    Args:
        kind: of them.
        shape: rows and columns.
        block: rows and columns that share a scale.
        scales: the dtype of these.
    """
    codes = torch.randint(256, shape, dtype=torch.uint8).view(FLOATS[kind])
    (size, width), (rows, columns) = shape, block
    return Float8Matrix(codes, scales_of((-(-size // rows), -(-width // columns)), scales), rows, columns)


def small_floats(size: int, width: int) -> Float4Matrix:
    """Return a matrix of floats of 4 bits, of whose rows every other one is of another matrix; any scale may be."""
    codes, scales = (torch.randint(256, (2 * size, width // count), dtype=torch.uint8) for count in (2, 32))
    return Float4Matrix(codes[1::2], scales[1::2])


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare all bits; of what is no number there are many."""
    assert found.dtype is expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf))
    assert torch.equal(*(x.masked_fill(x.isnan(), 0).view(torch.int16) for x in (found, expected)))
