"""Any sequence of calls on an arena, next to a model that only adds up sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.examples import examples
from tests.exec.memory.arena_cases import DTYPES, arena, offset, raw
from tpplan.core.workspace import align
from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    import torch


class ArenaMachine(RuleBasedStateMachine):
    """Any sequence of calls, next to a model that only adds up sizes.

    Every tensor that is still somebody's is filled with a pattern of its own: were two of them to overlap, the later
    would spoil the earlier.
    """

    @initialize(blocks=st.integers(0, 40))
    def make(self, blocks: int) -> None:
        """An arena, and the model of it."""
        self.arena = arena(64 * blocks)
        self.kept: list[torch.Tensor] = []
        self.slices: list[torch.Tensor] = []
        self.patterns: dict[int, int] = {}

    def room(self, *holders: list[torch.Tensor]) -> int:
        """What these tensors leave of the arena."""
        return self.arena.size_bytes - sum(align(t.numel() * t.itemsize) for held in holders for t in held)

    def own(self, holder: list[torch.Tensor], tensor: torch.Tensor) -> None:
        """Remember a tensor and fill it."""
        holder.append(tensor)
        pattern = (len(self.patterns) + 1) % 251
        self.patterns[id(tensor)] = pattern
        raw(tensor).fill_(pattern)

    @rule(size=st.integers(0, 400))
    def keep(self, size: int) -> None:
        """Only in front of all slices, and only if there is room."""
        taken = any(t.numel() for t in self.slices)
        if taken or size > self.room(self.kept):
            with pytest.raises(ExecutionError):
                self.arena.keep(size)
        else:
            self.own(self.kept, self.arena.keep(size))

    @rule(rows=st.integers(0, 9), columns=st.integers(0, 40), dtype=st.sampled_from(DTYPES))
    def slice(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """If there is room, to the byte."""
        if rows * columns * dtype.itemsize > self.room(self.kept, self.slices):
            with pytest.raises(ExecutionError):
                self.arena.slice(rows, columns, dtype)
        else:
            tensor = self.arena.slice(rows, columns, dtype)
            assert (tensor.shape, tensor.dtype) == ((rows, columns), dtype)
            self.own(self.slices, tensor)

    @rule()
    def begin(self) -> None:
        """All slices are free again."""
        self.arena.begin()
        self.slices.clear()

    @rule(size=st.integers(0, 3000))
    def reserve(self, size: int) -> None:
        """Refused if even with no slices there is less."""
        if size > self.room(self.kept):
            with pytest.raises(ExecutionError):
                self.arena.reserve(size)
        else:
            self.arena.reserve(size)

    @invariant()
    def nobody_s_bytes_are_touched(self) -> None:
        """Everything lies inside, aligned, with its own bytes; what is free is what the model says."""
        assert self.arena.free_bytes == self.room(self.kept, self.slices)
        for tensor in (*self.kept, *self.slices):
            start = offset(self.arena, tensor) if tensor.numel() else 0
            assert start % 64 == 0
            assert 0 <= start <= start + tensor.numel() * tensor.itemsize <= self.arena.size_bytes
            assert (raw(tensor) == self.patterns[id(tensor)]).all()


ArenaMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=20)
TestArenaMachine = ArenaMachine.TestCase
