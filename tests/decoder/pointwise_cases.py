"""What stands for launches of pointwise kernels on the CPU: it finds everything by the words that a kernel is told."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.decoder.fused_cases import FakeExperts, FakeGemv, FakeGrouped, FakeSkinny
from tpplan.decoder.cache.store import Store
from tpplan.decoder.fast import fused
from tpplan.decoder.fast.launches import pointwise
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.pointwise import GATES
from tpplan.decoder.math import merge_parts, rms_norm, rotate
from tpplan.decoder.model.gates import gated
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def memory(address: int, shape: Sequence[int], pitches: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what is at an address, with so many bytes from one element of a dimension to the next."""
    size = dtype.itemsize
    assert not any(pitch % size for pitch in pitches)
    span = sum((count - 1) * pitch for count, pitch in zip(shape, pitches, strict=True)) + size
    items = torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=dtype)
    return items.as_strided(shape, [pitch // size for pitch in pitches])


def number(bits: int) -> float:
    """Return the float32 of some bits."""
    found: float = unpack("f", pack("I", bits))[0]
    return found


class FakeLauncher:
    """Does what a kernel does, and counts.

    Attributes:
        calls: of all launchers, by kernel.
    """

    calls: Counter[str] = Counter()  # noqa: RUF012 (of all, as said)

    def __init__(self, name: str, place: torch.device) -> None:
        """Take any device."""
        assert isinstance(place, torch.device)
        found = re.fullmatch(r"(?:pointwise_)?(\w+?)(?:_(bf16|f16)_?(\w*))?", name)
        assert found
        self._name, self._kind = found[1], found[3] or "fp16"
        self._dtype = _DTYPES.get(found[2], torch.float32)
        act = {kernel: key for key, kernel in GATES.items()}.get(self._name)
        self._run = self._gate if act else getattr(self, f"_{self._name}")
        self._act: Any = act

    def __call__(self, blocks: int | tuple[int, int, int], threads: int, *words: int) -> None:
        """Do it."""
        rows, parts, depth = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        assert rows > 0
        assert depth == 1
        assert threads % 32 == 0
        assert threads <= 1024
        self.calls[self._name] += 1
        self.run(rows, threads, *words, parts=parts)

    def run(self, rows: int, threads: int, *words: int, parts: int = 1) -> None:
        """Do it by so many threads for each part of a row, uncounted."""
        self._block = threads
        self._run(rows, parts * threads, *words)

    def _embed(self, rows: int, threads: int, *words: int) -> None:
        tokens, pitch, start, count, table, table_pitch, out, width = words
        assert not any(word % 16 for word in (table, table_pitch, out, width))
        assert width <= 16 * threads < width + 16 * self._block
        dtype = torch.int16  # bits of any 16
        found, every = (
            memory(each, (many, width // 2), (step, 2), dtype)
            for each, many, step in ((out, rows, width), (table, count, table_pitch))
        )
        for to, token in zip(found, memory(tokens, (rows,), (pitch,), torch.int64).tolist(), strict=True):
            to.copy_(every[token - start] if start <= token < start + count else torch.zeros_like(to))

    def _norm(self, rows: int, threads: int, *words: int) -> None:
        x, x_pitch, out, out_pitch, weight, offset, width, inverse, eps, is_added = words
        assert 16 * threads >= width or threads > 512
        dtype, columns = self._dtype, width // 2
        assert not any(word % 16 for word in (x, x_pitch, out, out_pitch, weight, width))
        assert number(inverse) == pytest.approx(1 / columns)
        weights = memory(weight, (columns,), (2,), dtype)
        found = rms_norm(memory(x, (rows, columns), (x_pitch, 2), dtype), weights, number(eps), number(offset))
        to = memory(out, (rows, columns), (out_pitch, 2), dtype)
        to.copy_(to + found if is_added else found)

    def _gate(self, rows: int, threads: int, *words: int) -> None:
        gate, gate_pitch, up, up_pitch, out, out_pitch, width = words
        assert not any(word % 16 for word in words)
        assert 16 * threads >= width
        matrices = (gate, gate_pitch), (up, up_pitch), (out, out_pitch)
        gates, ups, to = (memory(start, (rows, width // 2), (pitch, 2), self._dtype) for start, pitch in matrices)
        to.copy_(gated(self._act, gates.clone(), ups))

    def _best(self, rows: int, threads: int, *words: int) -> None:
        x, pitch, width, start, out, out_pitch, place, places = words
        parts = threads // self._block
        assert not any(word % 16 for word in (x, pitch, width))
        assert threads * 16 <= width + 16 * 32 * parts
        values, numbers = memory(x, (rows, width // 2), (pitch, 2), self._dtype).max(-1)
        found = memory(out, (rows, places, parts, 2), (out_pitch, 8 * parts, 8, 4), torch.float32).zero_()
        found[:, place, :, 0], found[:, place, :, 1] = values[:, None], (numbers + start)[:, None]

    def _angles(self, rows: int, threads: int, *words: int) -> None:
        positions, stride, last, sines, cosines, pitch, out, width = words
        assert threads <= 256
        at = memory(positions, (rows,), (stride,), torch.int64).clamp(0, last)
        dtype = torch.int16  # bits of any 16
        sin, cos = (memory(each, (last + 1, width // 2), (pitch, 2), dtype)[at] for each in (sines, cosines))
        memory(out, (rows, 2 * width), (4 * width, 2), dtype).copy_(torch.cat((cos, sin, sin ^ -(2**15), cos), 1))

    def _next(self, rows: int, threads: int, *words: int) -> None:
        found, pitch, pairs, tokens, positions, missing = words
        assert threads == 32
        assert not any(word % 8 for word in (found, pitch, tokens, positions))
        logits, numbers = memory(found, (rows, pairs, 2), (pitch, 8, 4), torch.float32).unbind(-1)
        best_R1 = logits.max(-1, keepdim=True)[0]
        chosen = numbers.where(logits == best_R1, torch.inf).min(-1)[0]  # the smallest of equal ones
        chosen = chosen.where(best_R1[:, 0].isfinite(), missing - 2**64)
        memory(tokens, (rows,), (8,), torch.int64).copy_(chosen)
        if positions:
            memory(positions, (rows,), (8,), torch.int64).add_(1)

    def _merge(self, rows: int, threads: int, *words: int) -> None:
        out, out_pitch, other, other_pitch, row_width, width, *sums, sums_pitch = words
        assert not any(word % 16 for word in words[:6])
        assert row_width <= 16 * threads < row_width + 16 * self._block
        shape, of_sums = (1, row_width // width, rows, width // 2), (1, row_width // width, rows)
        to, new = (
            memory(start, shape, (row_width, width, pitch, 2), self._dtype)
            for start, pitch in ((out, out_pitch), (other, other_pitch))
        )
        own, others, found = (memory(each, of_sums, (sums_pitch, sums_pitch, 4), torch.float32) for each in sums)
        found.copy_(merge_parts(to, own, new, others))

    def _turn(self, rows: int, threads: int, *words: int) -> None:
        x, pitch, queries, keys, heads, width, turned, angles, angle_pitch, *rest = words
        query_norm, key_norm, more, inverse, eps, to_keys, to_values, *scales, of_sequence, of_head = rest[:11]
        assert not any(word % 16 for word in (x, pitch, width, angles, angle_pitch, query_norm, key_norm))
        assert not width % 32
        assert not turned % 32
        lanes, parts = width // 32, threads // self._block
        assert self._block // lanes * parts >= heads > self._block // lanes * (parts - 1)  # which are whole in blocks
        dtype, count = self._dtype, width // 2
        assert number(inverse) == pytest.approx(1 / count)
        rows_RHK = memory(x, (rows, heads, count), (pitch, width, 2), dtype)
        for weight, start, end in ((query_norm, 0, queries), (key_norm, queries, queries + keys)):
            if weight:
                assert turned == width
                some = rows_RHK[:, start:end]
                some.copy_(rms_norm(some, memory(weight, (count,), (2,), dtype), number(eps), number(more)))
        by = memory(angles, (rows, 1, 2, 2, turned // 4), (angle_pitch, angle_pitch, turned, turned // 2, 2), dtype)
        rotate(rows_RHK[:, : queries + keys], by)
        assert heads == queries + keys * (2 if to_keys else 1)
        if not to_keys:
            return
        sequences, sequences_step, places, places_step = rest[11:]
        sequence_R = memory(sequences, (rows,), (sequences_step,), torch.int64)
        place_R = memory(places, (rows,), (places_step,), torch.int64)
        where = [*zip(sequence_R.tolist(), place_R.tolist(), strict=True)]
        encode = Store(self._kind, (1, 1, 1, count), dtype, torch.device("cpu"))._coded[0][0].encode
        for starts, first in (((to_keys, scales[0]), queries), ((to_values, scales[1]), queries + keys)):
            encoded = encode(rows_RHK[:, first : first + keys])
            size = encoded[0][0, 0].nbytes  # of a row of the cache, whose scales are apart in the same way
            for start, part_RHK in zip(starts, encoded, strict=False):
                of_row, item = part_RHK[0, 0].nbytes, part_RHK.element_size()
                pitches = of_head // size * of_row, item
                for part_HK, (sequence, place) in zip(part_RHK, where, strict=True):
                    if sequence >= 0:
                        to = start + (sequence * of_sequence // size + place) * of_row
                        memory(to, part_HK.shape, pitches, part_HK.dtype).copy_(part_HK)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let decoders of 16 bits compute on CPUs as on CUDA devices, and return how often each kernel is launched."""
    monkeypatch.setattr(pointwise, "Launcher", FakeLauncher)
    monkeypatch.setattr(fused, "Gemv", FakeGemv)
    monkeypatch.setattr(fused, "SkinnyGemm", FakeSkinny)
    monkeypatch.setattr(fused, "ExpertGemv", FakeExperts)
    monkeypatch.setattr(fused, "GroupedGemm", FakeGrouped)
    monkeypatch.setattr(kernel_cache, "prepare", list)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fused, "has_kernels", lambda _, dtype: dtype in DTYPES)
    monkeypatch.setattr(FakeLauncher, "calls", Counter())
    return FakeLauncher.calls
