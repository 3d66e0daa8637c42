"""Where the rows of a pass are beside the tokens of rings, and what these have after it."""

from __future__ import annotations

from random import Random

import pytest
import torch
from attrs import evolve

from tpplan.decoder.cache.layer import LayerCache
from tpplan.decoder.layer.attention import Group, Ring
from tpplan.decoder.prompts import NOBODY, PassShape


@pytest.mark.parametrize("seed", range(20))
def test_rows_beside_the_tokens_of_rings(seed: int) -> None:
    """Each sequence's latest tokens are before its rows, which then are in the ring, whatever is written last.

    Sequences have any tokens before and any rows, or none; others are not written, nor is padding.
    """
    random = Random(seed)
    batch, length, padding = random.randint(1, 5), random.randint(1, 7), random.randint(0, 5)
    starts = [random.randint(0, 3 * length) for _ in range(batch)]
    read = {i: random.randint(1, 3 * length) for i in random.sample(range(batch), random.randint(1, batch))}

    def stored(ends: list[int]) -> torch.Tensor:
        """Return what rings have of sequences with so many tokens."""
        found = torch.full((batch, 2, length, 4), torch.nan)
        for sequence, end in enumerate(ends):
            for position in range(max(0, end - length), end):
                found[sequence, :, position % length] = 100 * sequence + position
        return found

    cache = LayerCache("fp32", (batch, 2, length, 4), torch.float32, torch.device("cpu"), length)
    for half in cache.halves:
        half.copy_(stored(starts))
    numbers = [
        (starts[sequence] + row, sequence, before)
        for before, (sequence, count) in enumerate(read.items())
        for row in range(count)
    ] + [NOBODY[1:4]] * padding
    positions, sequences, before = torch.tensor(numbers).T
    pass_shape = PassShape.of_any(len(numbers), batch if padding else len(read), 6 * length)
    ring = Ring.of(Group.of(positions, sequences, before, pass_shape, is_filled=padding > 0), length)

    new = (100 * sequences + positions)[:, None, None].expand(-1, 4, 4).float()
    k_THK, v_THK = ring.read(cache, slice(1, 2), (new[:, :2], new[:, 2:]))
    ends = [start + read.get(sequence, 0) for sequence, start in enumerate(starts)]
    for i, sequence in enumerate(read):
        some = slice(int(ring.starts[i]), int(ring.starts[i] + ring.counts[i]))
        tokens = torch.arange(max(0, starts[sequence] - length), ends[sequence])
        for found in (k_THK[some], v_THK[some]):
            torch.testing.assert_close(found, (100.0 * sequence + tokens)[:, None, None].expand(-1, 1, 4))
    for order in (torch.arange(len(numbers)), torch.arange(len(numbers)).flip(0)):
        sequences_R, places_R = (x[order] for x in ring.targets)
        evolve(ring, rows_to_write=ring.rows_to_write[order], targets=(sequences_R, places_R)).write(cache, new)
        for half in cache.halves:
            torch.testing.assert_close(half, stored(ends), equal_nan=True)
