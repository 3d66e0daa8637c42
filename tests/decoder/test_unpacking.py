"""Words of packed codes, however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from tpplan.decoder.weights.convert import unpacked


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (1, 1), (4, 2), (0, 2)])
def test_codes_of_words_that_are_parts(shape: tuple[int, int], dim: int, bits: int) -> None:
    """The same codes are in words of their own and in some of larger tensors, as devices have them, even in one."""
    size, per = torch.Size(shape), 32 // bits
    words = torch.randint(-(2**31), 2**31 - 1, (8, 8), dtype=torch.int32)[2 : 2 + size[0], 3 : 3 + size[1]]
    found = unpacked(words, bits, dim)
    expected = [words >> bits * i & (1 << bits) - 1 for i in range(per)]
    assert torch.equal(found.int(), torch.stack(expected, dim + 1).flatten(dim, dim + 1))
    again = unpacked(words.mT, bits, 1 - dim)
    assert torch.equal(again.mT, found)
