"""Tables of sines and cosines are written in parts, to the bit as at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.exec.rope.cases import LLAMA, LLAMA3, LONGROPE, YARN, Json
from tests.exec.rope.reference import same
from tests.watching import Watching
from tpplan.errors import ExecutionError
from tpplan.exec.rope import tables
from tpplan.exec.rope.scaling import Default
from tpplan.exec.rope.tables import Rope

if TYPE_CHECKING:
    from torch import Tensor


def test_no_positions() -> None:
    """Tables for no positions are empty, and fewer are refused."""
    rope = Rope.from_config(LLAMA)
    assert [table.shape for table in rope.tables(0)] == [(0, 64), (0, 64)]
    with pytest.raises(ExecutionError, match="-1 positions"):
        rope.tables(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_fill(dtype: torch.dtype, style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables written in parts into strided slices are those made at once, cast; nothing around them is touched."""
    rope = Rope(10000.0, 30, Default(), style)
    whole = rope.tables(1001)
    arena = torch.full((2, 1003, 90), -7.0, dtype=dtype)
    outs = arena[:, 1:-1, 5:65:2]
    monkeypatch.setattr(tables, "_CHUNK", 30 * 13 + 7)  # 1001 = 77 × 13
    rope.fill(outs[0], outs[1])
    assert torch.equal(outs[0], whole[0].to(dtype))
    assert torch.equal(outs[1], whole[1].to(dtype))
    outs.fill_(-7.0)
    assert bool((arena == -7.0).all())


class Largest(Watching):
    """Notes how many elements the largest tensor has that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returns, unless that is one of the tables."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_fill_needs_little_memory() -> None:
    """Whatever the length of the tables, no float32 tensor of more than 2^20 elements is made."""
    sin, cos = (torch.empty(100_000, 64, dtype=torch.bfloat16) for _ in range(2))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        Rope.from_config(LLAMA).fill(sin, cos)
    assert 0 < largest.elements <= 2**20


def test_sines_do_not_depend_on_neighbours() -> None:
    """Each sine and cosine is the same alone, in a row and in a table: what makes parts as good as the whole."""
    sin, cos = Rope.from_config(LLAMA).tables(131072)
    angles = torch.arange(131072)[:, None].float() * Rope.from_config(LLAMA).scaling.frequencies(10000.0, 64, 131072)
    shuffled = torch.randperm(angles.numel(), generator=torch.Generator().manual_seed(1))
    for table, function in ((sin, torch.sin), (cos, torch.cos)):
        flat = table[:, :32].reshape(-1)
        assert same(flat[shuffled], function(angles.reshape(-1)[shuffled]))
        for start in range(0, 4_000_000, 99_991):
            assert same(flat[start : start + 7], function(angles.reshape(-1)[start : start + 7]))


def test_defaults_of_torch_do_not_matter() -> None:
    """A caller's default dtype and device leave the tables as they are."""
    scalings: list[Json] = [{"rope_type": "dynamic", "factor": 3.0}, YARN, LLAMA3, LONGROPE, {"rope_type": "default"}]
    for scaling in scalings:
        rope = Rope.from_config({**LLAMA, "rope_scaling": scaling})
        before = rope.tables(300)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                after = rope.tables(300)
        finally:
            torch.set_default_dtype(torch.float32)
        assert same(before[0], after[0]), scaling
        assert same(before[1], after[1]), scaling


@pytest.mark.parametrize(
    ("sin", "cos", "words"),
    [
        (torch.zeros(4, 62), torch.zeros(4, 62), "sin is torch.float32 of shape \\[4, 62\\]"),
        (torch.zeros(4, 64), torch.zeros(4 * 64), "cos is torch.float32 of shape \\[256\\]"),
        (torch.zeros(4, 64), torch.zeros(4, 64, dtype=torch.int32), "cos is torch.int32"),
        (torch.zeros(4, 64), torch.zeros(5, 64), "sin has 4 positions and cos 5"),
    ],
)
def test_fill_refuses(sin: Tensor, cos: Tensor, words: str) -> None:
    """Tensors of another shape or dtype are refused before anything is written."""
    with pytest.raises(ExecutionError, match=words):
        Rope.from_config(LLAMA).fill(sin, cos)
    assert not sin.any()
    assert not cos.any()
