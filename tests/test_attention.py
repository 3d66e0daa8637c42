"""Kernels for the attention of a decoding step compile for every generation of GPUs without one."""

from __future__ import annotations

import re

import pytest
import torch

from tests.test_kernels import CAPABILITIES
from tpplan.decoder.attention import Attention, splits_of
from tpplan.exec import kernel_cache

#: Bytes that a thread may have in memory.
MOST_STACK = 48


@pytest.mark.parametrize(
    ("name", "capability"),
    [*(("bf16_128", each) for each in CAPABILITIES), ("f16_80", CAPABILITIES[0]), ("bf16_256_capped", (9, 0))],
)
def test_they_multiply_matrices_in_registers(name: str, capability: tuple[int, int]) -> None:
    """Caches are read 16 bytes at a time, and multiplied as they are; all else is in 32 bits.

    Two blocks share a multiprocessor. What kernels for Hopper keep in registers may take a few bytes elsewhere.
    """
    kind = name.partition("_")[0]
    name, threads = f"attention_{name}", 128 if "256" in name else 256
    text = kernel_cache.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    assert "ld.global.L1::no_allocate.v4.u32" in text
    assert "ld.global.nc" not in text  # which may read before a kernel has written
    multiply = "mma.sync.aligned.m16n8k16.row.col.f32."
    assert text.count(f"{multiply}{kind}.{kind}.f32") == text.count("mma.sync") > 0
    assert ".f64" not in text
    assert ".local" not in text
    code, log = kernel_cache.assemble(text, capability)
    assert code[:4] == b"\x7fELF"
    stack, registers = (re.search(each, log) for each in (r"(\d+) bytes stack frame", r"Used (\d+) registers"))
    assert stack
    assert int(stack[1]) <= (0 if capability == (9, 0) else MOST_STACK)
    assert registers
    assert 2 * int(registers[1]) * threads <= 2**16


@pytest.mark.parametrize("name", ["ATTENTION", "ATTENTION_F32_128", "ATTENTION_BF16_128_CUT"])
def test_there_are_no_others(name: str) -> None:
    """Kernels are made by their names, but only those that there are."""
    kernels = pytest.importorskip("tpplan.decoder.attention_kernels")
    with pytest.raises(AttributeError, match=name):
        getattr(kernels, name)


def test_other_devices_and_heads_are_left_to_torch() -> None:
    """The CPU has no kernel, and no GPU has one for float32 or for heads that are no vectors."""
    assert not Attention.takes(torch.device("cpu"), torch.bfloat16, 128)
    gpu = torch.device("cuda", 0)
    assert not Attention.takes(gpu, torch.float32, 128)
    assert not Attention.takes(gpu, torch.float16, 100)
    assert not Attention.takes(gpu, torch.float16, 264)


@pytest.mark.parametrize("length", [1, 100, 4096, 16384, 2**20])
@pytest.mark.parametrize("count", [1, 2, 8, 72, 88, 130, 512, 5000])
def test_blocks_that_share_a_token(count: int, length: int) -> None:
    """They keep the device busy where there is work for them, and what they leave to the last one is bounded."""
    found, tiles = splits_of(count, length, 132), -(-length // 16)
    assert found >= 1
    assert found == 1 or (found - 1) * 4 < tiles
    assert found == 1 or found * count <= 198
    if tiles >= 4 * 132:
        assert found * count > 66
