"""Kernels for the attention of a decoding step compile for every generation of GPUs without one."""

from __future__ import annotations

import re

import pytest
import torch

from tests.test_kernels import CAPABILITIES
from tpplan.decoder.attention import Attention, splits_of
from tpplan.exec import kernel_cache

WIDE = {capability for capability in CAPABILITIES if capability >= (9, 0)}


@pytest.mark.parametrize("name", ["bf16_64", "f16_80", "bf16_128", "f16_128_capped", "bf16_256_capped"])
def test_they_multiply_matrices_and_spill_nothing(name: str) -> None:
    """Caches are read 16 bytes at a time, and multiplied as they are; all else is in 32 bits, in registers."""
    kind = name.partition("_")[0]
    name, threads = f"attention_{name}", 128 if "256" in name else 256
    for capability in WIDE if "256" in name else CAPABILITIES:
        text = kernel_cache.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        assert "ld.global.nc.L1::no_allocate.v4.u32" in text
        multiply = "mma.sync.aligned.m16n8k16.row.col.f32."
        assert text.count(f"{multiply}{kind}.{kind}.f32") == text.count("mma.sync") > 0
        assert ".f64" not in text
        assert ".local" not in text
        code, log = kernel_cache.assemble(text, capability)
        assert code[:4] == b"\x7fELF"
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
        found = re.search(r"Used (\d+) registers", log)
        assert found
        assert int(found[1]) * threads <= 2**16


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


@pytest.mark.parametrize("least", [4, 8])
@pytest.mark.parametrize("length", [1, 100, 4096, 16384, 2**20])
@pytest.mark.parametrize("count", [1, 2, 8, 130, 512, 1024, 5000])
def test_blocks_that_share_a_token(count: int, length: int, least: int) -> None:
    """They keep the device busy where there is work for them, and not too many are idle or must be merged."""
    found = splits_of(count, length, least, 132)
    tiles = -(-length // 16)
    assert 1 <= found <= 128
    assert (found - 1) * least < tiles
    assert found == 1 or found * count <= 1024
    if count < 132 and tiles >= least * 132:
        assert min(132, 128 * count) - count < found * count
