"""The original's operations and its layers' patterns: exact, also where the original was wrong."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.exllamav2.models import (
    HALF,
    finalized,
    noise,
    parts_of,
    shapes,
    size_of,
    small_model,
)
from tpplan.exec import build
from tpplan.exec.backends.adversary import Adversary
from tpplan.exllamav2 import (
    BROADCAST_ID,
    BROADCAST_KV,
    BROADCAST_Q,
    BROADCAST_RS,
    BROADCAST_VC,
    TPContext,
)

if TYPE_CHECKING:
    from torch import Tensor


# The layers' patterns


def _attention(tp: TPContext, hidden: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """The calls of an attention layer in the original (``forward_tp_old``), and what they should give."""
    rows = hidden.shape[0]
    residual = tp.broadcast(0, hidden, BROADCAST_KV, dim=dim)
    whole = noise(1, rows, heads * dim)
    outputs = tp.allgather(1, parts_of(tp, whole, BROADCAST_Q, dim), BROADCAST_Q, BROADCAST_Q, dim=dim)
    assert all(torch.equal(output, whole) for output in outputs)
    projected = [output[:, a * dim : b * dim] * 2 for output, (_, a, b) in zip(outputs, tp.q_split or (), strict=True)]
    tp.add_residual(projected, residual, BROADCAST_Q, dim=dim)
    return tp.gather(0, projected, BROADCAST_Q, dim=dim), whole * 2 + hidden


def _mlp(tp: TPContext, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The calls of an MLP in the original (``forward_tp_old``), with the residual where it is added."""
    rows, width = hidden.shape[0], size_of(tp, BROADCAST_ID)
    whole = noise(2, rows, width)
    residual = tp.broadcast(0, hidden, BROADCAST_RS)
    outputs = tp.allgather(1, parts_of(tp, whole, BROADCAST_ID), BROADCAST_ID, BROADCAST_RS)
    assert all(torch.equal(output, whole) for output in outputs)
    down = parts_of(tp, hidden * 3, BROADCAST_RS)
    tp.add_residual(down, residual, BROADCAST_RS)
    return tp.gather(0, down, BROADCAST_RS), hidden * 3 + hidden


@shapes
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_layers(gpu_split: tuple[float, ...], keys: dict[str, Any], rows: int) -> None:
    """Attention, MLP and output matrix, call by call as in the original, are exact on every kind of split."""
    tp = finalized(gpu_split, **({"head_dim": 32} | keys))
    hidden = noise(3, rows, size_of(tp, BROADCAST_RS))
    if size_of(tp, BROADCAST_Q) * 32 == hidden.shape[1]:
        got, expected = _attention(tp, hidden, size_of(tp, BROADCAST_Q), 32)
        assert torch.equal(got, expected)
    got, expected = _mlp(tp, hidden)
    assert torch.equal(got, expected)
    logits = noise(4, rows, size_of(tp, BROADCAST_VC), dtype=torch.float32)
    assert torch.equal(tp.gather(1, parts_of(tp, logits, BROADCAST_VC), BROADCAST_VC), logits)
    tp.unload()


@given(data=st.data())
@settings(max_examples=examples(40))
def test_any_split_any_order(data: st.DataObject) -> None:
    """Whatever the budgets, heads and rows, and whichever operations follow each other, every byte is right."""
    budgets = data.draw(st.lists(st.sampled_from((0.0, 1.25, 1.5, 2.0, 3.5)), min_size=1, max_size=5).filter(any))
    kv, groups = data.draw(st.sampled_from((1, 3, 4, 8))), data.draw(st.sampled_from((1, 2)))
    tp = finalized(
        budgets,
        num_key_value_heads=kv,
        num_key_value_groups=groups,
        hidden_size=32 * data.draw(st.integers(8, 24)),
        intermediate_size=128 * data.draw(st.integers(2, 9)),
        vocab_size=data.draw(st.integers(600, 3000)),
    )
    for seed in range(data.draw(st.integers(1, 6))):
        kind, other, buffer = (data.draw(st.sampled_from(options)) for options in (range(5), range(5), (0, 1)))
        dim = 32 if kind in {BROADCAST_KV, BROADCAST_Q} else 1
        dtype = data.draw(st.sampled_from((torch.half, torch.float32, torch.bfloat16)))
        whole = noise(seed, data.draw(st.integers(0, 40)), size_of(tp, kind) * dim, dtype=dtype)
        parts = parts_of(tp, whole, kind, dim)
        assert torch.equal(tp.gather(buffer, parts, kind, dim), whole)
        outputs = tp.allgather(buffer, parts, kind, other, dim)
        assert [torch.equal(output, whole) for output in outputs] == [True] * len(tp.get_devs(other))
        copies = tp.broadcast(buffer, whole, other, dim)
        assert [torch.equal(copy, whole) for copy in copies] == [True] * len(tp.get_devs(other))
        sources = tp.broadcast(buffer, whole.neg(), kind)
        tp.add_residual(parts, sources, kind, dim)
        assert all(not part.any() for part in parts)
    tp.unload()


@pytest.mark.parametrize("transport", ["peer", "host", "events"])
@pytest.mark.parametrize("seed", range(4))
def test_layers_under_an_adversary(transport: str, seed: int) -> None:
    """The patterns are exact, too, where everything that may happen late does."""
    tp = TPContext(small_model(), [2.0, 1.0, 1.5], backend="cpu")
    tp.finalize()
    places, random = [torch.device("cpu")] * 3, Random(seed)
    adverse = lambda memory: Adversary(memory, random)  # noqa: E731
    assert tp.context is not None
    tp.context.close()
    tp.context = build.build(tp.plan, places, adverse, transport=transport, max_rows=40, dtype=HALF)
    wholes = [noise(i, 5, 2048) for i in range(4)]
    results = [tp.allgather(1, parts_of(tp, whole, BROADCAST_ID), BROADCAST_ID, BROADCAST_RS) for whole in wholes]
    copies = [tp.broadcast(0, whole, BROADCAST_KV) for whole in wholes]
    gathered = [tp.gather(0, parts_of(tp, whole, BROADCAST_ID), BROADCAST_ID) for whole in wholes]
    assert all(map(torch.equal, gathered, wholes))
    tp.wait_streams()
    for whole, *lists in zip(wholes, results, copies, strict=True):
        assert all(torch.equal(tensor, whole) for tensors in lists for tensor in tensors)
    tp.unload()


# What was wrong in the original


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_every_size_of_element(dtype: torch.dtype) -> None:
    """Elements of 1, 2, 4 and 8 bytes arrive whole; the original counted 2 bytes for each."""
    tp = finalized()
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 2048)).to(dtype)
    assert all(torch.equal(copy, whole) for copy in tp.broadcast(0, whole, BROADCAST_KV))
    parts = parts_of(tp, whole, BROADCAST_ID)
    assert all(torch.equal(x, whole) for x in tp.allgather(1, parts, BROADCAST_ID, BROADCAST_Q))
    assert torch.equal(tp.gather(0, parts, BROADCAST_ID), whole)


def test_shapes_of_other_inputs() -> None:
    """Tensors of one and of three dimensions, wide and strided ones are broadcast as they are (block tables, masks)."""
    tp = finalized()
    for x in (torch.arange(7, dtype=torch.int32), noise(0, 2, 3, 512), noise(1, 1, 20000), noise(2, 512, 9).t()):
        assert all(torch.equal(copy, x) for copy in tp.broadcast(0, x, BROADCAST_ID))


def test_gathered_results_do_not_change() -> None:
    """A gathered tensor is complete and stays what it is; the pinned buffer has a copy of the latest."""
    tp = finalized()
    wholes = [noise(i, 6, 2048) for i in range(3)]
    results = [tp.gather(1, parts_of(tp, whole, BROADCAST_ID), BROADCAST_ID) for whole in wholes]
    assert all(map(torch.equal, results, wholes))
    assert torch.equal(tp.get_pinned(1, 2, 3, 2048).view(6, 2048), wholes[-1])
    views = parts_of(tp, tp.get_pinned(1, 1, 6, 2048)[0], BROADCAST_ID)
    assert torch.equal(tp.gather(1, views, BROADCAST_ID), wholes[-1])


def test_a_result_larger_than_the_buffer() -> None:
    """A gather beyond the pinned buffer is whole; the original wrote past the end."""
    tp = finalized(max_output_len=1)
    assert tp.pinned_temp is not None
    logits = noise(0, 40, 4096, dtype=torch.float32)
    assert logits.nbytes > tp.pinned_temp[0].nbytes
    before = tp.pinned_temp[0].fill_(1).clone()
    assert torch.equal(tp.gather(0, parts_of(tp, logits, BROADCAST_VC), BROADCAST_VC), logits)
    assert torch.equal(tp.pinned_temp[0], before)


def test_operands_may_be_overwritten_at_once() -> None:
    """What is done to an input after the call does not reach the results, also back to back on one buffer."""
    tp = finalized()
    results = []
    for i in range(4):
        whole = noise(i, 4, 2048)
        parts = parts_of(tp, whole, BROADCAST_ID)
        results.append((whole.clone(), tp.allgather(0, parts, BROADCAST_ID, BROADCAST_ID), tp.broadcast(0, whole, 0)))
        for tensor in (whole, *parts):
            tensor.fill_(math.nan)
    for whole, *lists in results:
        assert all(torch.equal(tensor, whole) for tensors in lists for tensor in tensors)


def test_all_reduce() -> None:
    """Every device gets its own residual plus the sum over all, added in float32 and rounded once."""
    tp = finalized((1.0, 1.0, 1.0))
    tensors = [noise(i, 5, 512) for i in range(3)]
    residual = noise(9, 5, 512)
    residuals = [residual.clone() for _ in tensors]
    expected = (sum(tensor.float() for tensor in tensors) + residual.float()).half()
    kept = [tensor.clone() for tensor in tensors]
    tp.all_reduce(0, tensors, residuals)
    assert all(torch.equal(each, expected) for each in residuals)
    assert all(map(torch.equal, tensors, kept))


def test_allgather_into_another_split() -> None:
    """The result is as wide as the gathered axis, not as the one whose devices get it."""
    tp = finalized()
    whole = noise(0, 3, 8 * 32)
    results = tp.allgather(0, parts_of(tp, whole, BROADCAST_KV, 32), BROADCAST_KV, BROADCAST_ID, dim=32)
    assert [torch.equal(result, whole) for result in results] == [True] * 3
