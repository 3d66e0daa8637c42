"""Matrices of codes for tests of the kernels that multiply by them."""

from __future__ import annotations

import torch

from tpplan.decoder.quantised import IntMatrix


def int_matrix(  # noqa: PLR0917
    size: int, width: int, group: int, dtype: torch.dtype, plus: int | None, device: str = "cpu"
) -> IntMatrix:
    """Return a random matrix of 4-bit codes whose products are about as large as what is multiplied.

    Args:
        size: rows.
        width: columns.
        group: columns that share a scale.
        dtype: of scales.
        plus: is added to stored zeros; None if there are none.
        device: where it is.
    """
    groups = -(-width // group)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)

    room = torch.empty(size * groups + 32, dtype=dtype, device=device)  # of whole words
    scales = room[: size * groups].view(size, groups)
    scales.copy_((torch.rand(size, groups, device=device) + 0.5) / width**0.5 / 8)
    zeros = None if plus is None else words(-(-size * groups // 8))
    return IntMatrix(words(size, width // 8), scales, zeros, plus or 0, group, 4)
