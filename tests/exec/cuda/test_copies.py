"""Prepared copies: what the driver is asked for moves the same bytes as tensors would, on streams that exist."""

from __future__ import annotations

from random import Random

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import runtime

from tests.exec.cuda.fake_driver import Runtime
from tests.exec.reference import values
from tpplan.errors import ExecutionError, InternalError
from tpplan.exec.cuda import copies
from tpplan.exec.cuda.copies import HostCopy, Transfer
from tpplan.exec.memory.binding import Memory, finder, no_memory, resolve
from tpplan.exec.programs.fence import HOST_STREAM, own
from tpplan.exec.programs.program import EXCHANGE, HOST, INPUT, OUTPUT, SLOTS, STAGE, Buffer, Copy, View

X, OUT = Buffer(INPUT, 0), Buffer(OUTPUT, 1)


def memory() -> Memory:
    """Memory of a context of two devices and the host, with odd room for each."""
    exchange = {device: torch.zeros(4096 + 64 * device, dtype=torch.uint8) for device in (0, 1)}
    rings = {sender: torch.zeros(SLOTS * 2048, dtype=torch.uint8) for sender in (0, 1, HOST)}
    return Memory(exchange, rings, lambda _: torch.zeros(SLOTS, 0, dtype=torch.uint8))


def operand(rows: int, columns: int, pitch: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random elements whose rows are so many apart."""
    return values((rows, pitch), pitch, dtype, Random(seed)).view(-1, pitch)[:rows, :columns]


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
ENDS = {
    "whole to whole": (View(X, 0, 8), View(OUT, 0, 8)),
    "columns to whole": (View(X, 2, 7), View(OUT, 0, 5)),
    "whole to columns": (View(X, 0, 8), View(OUT, 3, 11)),
    "part of the rows": (View(X, 1, 6, 2, 3), View(OUT, 0, 5, 2, 3)),
    "no rows": (View(X, 1, 6, 0, 99), View(OUT, 0, 5, 0, 99)),
    "to the exchange buffer": (View(X, 0, 8, 1, 2), View(Buffer(EXCHANGE, 1, 1, 3), 0, 8, 1, 2, 8)),
    "from its columns": (View(Buffer(EXCHANGE, 0, 2, 3), 1, 4, 0, 2, 6), View(OUT, 2, 5, 0, 2)),
    "to a ring": (View(X, 0, 8, 1, 4), View(Buffer(STAGE, 0, 1, SLOTS), 0, 8, 1, 4, 8)),
    "from the host's ring": (View(Buffer(STAGE, HOST, 1, SLOTS), 3, 6, 1, 2, 9), View(OUT, 0, 3, 1, 2)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("pitches", [(8, 11), (13, 16)])
@pytest.mark.parametrize("name", ENDS)
def test_a_transfer_moves_what_a_tensor_would(
    name: str, pitches: tuple[int, int], rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From and to operands of any pitch, columns and parts of them, and the context's memory; nothing else changes."""
    monkeypatch.setattr(copies, "runtime", Runtime())
    source, target = ENDS[name]
    found, wanted = memory(), memory()
    for mine, other in ((found.exchange, wanted.exchange), (found.rings, wanted.rings)):
        for place in mine:
            other[place].copy_(mine[place].random_(256))
    x = operand(rows, 8, pitches[0], dtype, 1)
    out, right = (operand(rows, 11, pitches[1], dtype, 2) for _ in range(2))
    Transfer(Copy(own(0), source, target), found, dtype).bind({X: x, OUT: out}, rows)(5)
    there = {X: x, OUT: right}
    resolve(target, there, wanted, rows, dtype).copy_(resolve(source, there, wanted, rows, dtype))
    assert torch.equal(_bits(out), _bits(right))
    for mine, other in ((found.exchange, wanted.exchange), (found.rings, wanted.rings)):
        assert all(torch.equal(mine[place], other[place]) for place in mine)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of all rows, those between the columns too."""
    return tensor.as_strided((len(tensor), tensor.stride(0)), tensor.stride()).contiguous().view(torch.uint8)


@pytest.mark.parametrize(("columns", "rows", "sizes"), [(8, 3, [(48, 1)]), (4, 3, [(8, 3)]), (4, 1, [(8, 1)])])
def test_what_lies_together_is_one_piece(
    columns: int, rows: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows, or a single one, are as many bytes in a row; all on the stream that was named."""
    monkeypatch.setattr(copies, "runtime", fake := Runtime())
    x, out = torch.zeros(2, rows, 8, dtype=torch.bfloat16)
    step = Copy(own(0), View(X, 0, columns), View(OUT, 0, columns))
    Transfer(step, no_memory(), x.dtype).bind({X: x, OUT: out}, rows)(77)
    assert fake.copied == [(*size, 77) for size in sizes]


def test_rows_over_each_other_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an expanded tensor, and of windows that move by less than they are wide."""
    monkeypatch.setattr(copies, "runtime", fake := Runtime())
    line = torch.arange(9, dtype=torch.int32)
    for x in (line.expand(3, 9)[:, :4], line.as_strided((3, 4), (2, 1))):
        out = torch.zeros(3, 4, dtype=torch.int32)
        step = Copy(own(0), View(X, 0, 4), View(OUT, 0, 4))
        Transfer(step, no_memory(), x.dtype).bind({X: x, OUT: out}, 3)(0)
        assert torch.equal(out, x)
    assert fake.copied == [(16, 1, 0)] * 6


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.zeros(2, 9)[:, :4], torch.zeros(4).expand(2, 4)])
def test_a_refused_copy_is_an_error(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way it goes, it names its ends and what the driver says; of many rows the first one is the last."""
    monkeypatch.setattr(copies, "runtime", fake := Runtime(runtime.cudaError_t.cudaErrorIllegalAddress))
    step, out = Copy(own(0), View(X, 0, 4), View(OUT, 0, 4)), torch.zeros(2, 4)
    ready = Transfer(step, no_memory(), x.dtype).bind({X: x, OUT: out}, 2)
    with pytest.raises(ExecutionError, match=r"own0: output@1\[0:4\] = input@0\[0:4\] failed: cudaErrorIllegalAddress"):
        ready(0)
    assert len(fake.copied) == 1


def test_a_part_that_has_no_room_is_an_error() -> None:
    """A view says so before anybody writes beyond the context's memory."""
    mine = memory()
    find = finder(View(Buffer(EXCHANGE, 0, 1, 4), 0, 16, width=16), mine, 4)
    assert find({}, 16) == (mine.exchange[0].data_ptr() + 1024, 64, 16)
    with pytest.raises(InternalError, match="takes 1088 bytes, but its place has 1024"):
        find({}, 17)


def test_the_host_copies_at_once() -> None:
    """What the host has copied is there when the next command is issued, whatever its strides."""
    place = memory()
    x = torch.arange(24, dtype=torch.int32).view(4, 6)[:, 1:5]
    source, target = View(Buffer(INPUT, HOST), 1, 4), View(Buffer(STAGE, HOST, 1, SLOTS), 0, 3, width=3)
    HostCopy(Copy(HOST_STREAM, source, target), place, x.dtype).bind({source.buffer: x}, 4)(0)
    assert torch.equal(resolve(target, {}, place, 4, x.dtype), x[:, 1:4])
