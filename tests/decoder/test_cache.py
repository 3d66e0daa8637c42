"""The decoder's cache: what it takes, what smaller kinds lose, and how they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoder_cases import LENGTH, decoding, model_of, plan_of, request_of
from tests.examples import examples
from tests.watching import Watching
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Prompt
from tpplan.decoder.cache import heads, layer
from tpplan.decoder.cache.store import Store, check_kind
from tpplan.decoder.prompts import length_of
from tpplan.errors import ExecutionError


class Largest(Watching):
    """Measures what torch makes.

    Attributes:
        numel: elements of the largest tensor that is no view.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is told, and look at what comes of it."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(result.alias_info for result in func._schema.returns):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8", "q6", "q4"])
@pytest.mark.parametrize(("model_type", "kv"), [("gemma2", "idle"), ("qwen3", "replicate"), ("qwen3_next", "idle")])
def test_the_cache_takes_what_the_plan_counts(model_type: str, kv: str, kind: str) -> None:
    """On every device to the byte, also where windows slide and heads are repeated."""
    plan = plan_of(model_of(model_type).directory, 5, request_of(kv=kv, kind=kind), {}, seed=3)
    with decoding(plan, model_type) as decoder:
        devices = decoder.context.all_devices
        counted = {device: plan.memory[device].cache_bytes for device in devices}
        assert {device: decoder.cache_bytes(device) for device in devices} == counted


@pytest.mark.parametrize("more", [1, -1])
def test_a_cache_that_takes_other_bytes_is_not_used(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any token is computed, both numbers of bytes are told, of a cache that is too small, too."""
    plan = plan_of(model_of("qwen3").directory, 1, request_of(), {}, seed=3)
    monkeypatch.setattr(heads, "length_of", lambda request: length_of(request) + more)
    counted = plan.memory[0].cache_bytes
    taken = counted + more * counted // LENGTH
    what = f"the cache takes {taken} bytes on device 0, the plan for .* counts {counted}\n"
    with pytest.raises(ExecutionError, match=what), decoding(plan, "qwen3"):
        pass


@pytest.mark.parametrize(("kind", "error"), [("fp16", 1e-3), ("q8", 3e-2), ("fp8", 3e-1), ("q6", 3e-1), ("q4", 6e-1)])
def test_a_smaller_cache_loses_a_little(kind: str, error: float) -> None:
    """What 16 bits and fewer lose shows in the logits, and is as small as the bits promise."""
    model = model_of("qwen3")
    plan = plan_of(model.directory, 3, request_of(kind=kind), {}, seed=5)
    found = []
    for each in ("fp32", kind):
        with decoding(plan, "qwen3", each) as decoder:
            decoder.prefill(model.prompts[1][:-1])
            everywhere = [torch.tensor([number]) for number in (model.prompts[1][-1], len(model.prompts[1]) - 1)]
            tokens, positions = ([x] * len(decoder.context.all_devices) for x in everywhere)
            found.append(decoder.context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor)
    torch.testing.assert_close(found[0][0], model.logits[1], atol=1e-4, rtol=1e-4)
    assert 0 < (found[1] - found[0]).abs().max() < error


def test_a_smaller_cache_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more sequences or heads than may be made at a time, a step makes some after the other, to the same logits."""
    plan = plan_of(model_of("qwen3").directory, 1, request_of(kind="q8", batch=6), {}, seed=5)
    one = 2 * LENGTH * 4 * 32  # elements of a sequence
    with decoding(plan, "qwen3") as decoder, torch.inference_mode():
        for sequence in range(6):
            decoder.prefill([*range(sequence, 2 * sequence + 3)], sequence)
        tokens, positions = torch.arange(6), torch.arange(6) + 3
        found = []
        for most, made in ((8 * one, 6 * one), (2 * one, 2 * one), (one, one), (one // 2, one // 2), (1, one // 4)):
            monkeypatch.setattr(layer, "AT_ONCE", most)
            with Largest() as largest:
                found.append(decoder.decode([tokens], [positions])[0])
            assert largest.numel == made
    torch.testing.assert_close(found[1:], found[:1] * 4, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["fp32", "q8", "q6", "q4"])
@pytest.mark.parametrize(("model_type", "kv"), [("gemma2", "idle"), ("gemma2", "replicate"), ("qwen3", "replicate")])
def test_texts_grow_in_pieces(model_type: str, kv: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in passes, and steps behind them, lead to the same logits however few heads are taken at a time."""
    plan = plan_of(model_of(model_type).directory, 3, request_of(kv=kv, kind="q8"), {}, seed=6)
    found = []
    for most in (2**24, 1):
        monkeypatch.setattr(layer, "AT_ONCE", most)
        with decoding(plan, model_type, kind) as decoder:
            used = decoder.context.all_devices
            read = decoder.read([Prompt(range(7, 20), 0), Prompt(range(30, 45), 1)])
            tokens, positions = ([torch.tensor(numbers)] * len(used) for numbers in ([3, 4], [13, 15]))
            both = read, decoder.decode(tokens, positions)
            found += [decoder.context.gather(logits, Axis.VOCAB).tensor.clone() for logits in both]
    torch.testing.assert_close(found[2:], found[:2], atol=1e-4, rtol=1e-4)


def _mixed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the Walsh-Hadamard transform of each 32 elements, by its definition: signs are parities of index bits.

    Its factor is that of what is stored; twice that undoes it.
    """
    signs = [[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
    mixed: np.ndarray[Any, Any] = x.reshape(*x.shape[:-1], -1, 32) @ np.array(signs) / 8
    return mixed.reshape(x.shape)


@settings(max_examples=examples(30), deadline=None)
@given(
    kind=st.sampled_from(["q6", "q4"]),
    groups=st.integers(1, 4),
    size=st.floats(1e-3, 1e3),
    outlier=st.sampled_from([0.0, 1.0, 50.0]),
    seed=st.integers(0, 2**16),
)
def test_what_few_bits_keep(*, kind: str, groups: int, size: float, outlier: float, seed: int) -> None:
    """Of 4 bits, each group is off by half a step of its largest mixed element, of 8 bits by half a step of its own.

    Products with queries and sums of values are those of what was written, but for that.
    """
    made = torch.Generator().manual_seed(seed)
    width = 32 * groups
    kv = size * torch.randn(2, 1, 2, 3, width, generator=made)
    kv[..., 5] += size * outlier
    store = Store(kind, (1, 2, 4, width), torch.float32, torch.device("cpu"))
    store.write(slice(0, 1), slice(0, 2), slice(1, 4), kv)
    assert 8 * store.nbytes == 2 * 2 * 4 * width * {"q6": 6.5, "q4": 4.5}[kind]
    k, v = store.read_at(slice(0, 1), slice(0, 2), slice(1, 4)).double().numpy()
    for half, found, steps in ((0, k, 7 if kind == "q4" else 127), (1, v, 7)):
        wanted = kv[half].double().numpy()
        wanted = _mixed(wanted) if steps == 7 else wanted
        off, largest = (abs(x).reshape(*x.shape[:-1], -1, 32).max(-1) for x in (found - wanted, wanted))
        assert (off <= largest / steps * (0.5 + steps * 2**-10) + 2**-24 * steps).all()
    one = torch.eye(width)  # each element of what is kept
    back = store.mix_queries(one).double().numpy() @ k.swapaxes(-1, -2)
    undone = store.unmix(torch.from_numpy(v).float()).double().numpy()
    for whole, found, other in ((kv[0], back.swapaxes(-1, -2), k), (kv[1], undone, v)):
        is_mixed = other is v or kind == "q4"
        np.testing.assert_allclose(found, 2 * _mixed(other) if is_mixed else other, atol=1e-4 * size * (1 + outlier))
        error, there = (np.linalg.norm(x) for x in (found - whole.double().numpy(), whole.double().numpy()))
        assert error < (0.15 if is_mixed else 0.02) * there


def test_nibbles_of_a_head() -> None:
    """A byte has an element of the first half of the head in its low bits, and one of the second in the others."""
    mixed = torch.zeros(64)
    mixed[0], mixed[1], mixed[32], mixed[33] = 7.0, -7.0, 7.0, 3.0
    kv = torch.from_numpy(2 * _mixed(mixed.double().numpy())).float().expand(2, 1, 1, 1, 64)
    store = Store("q4", (1, 1, 1, 64), torch.float32, torch.device("cpu"))
    store.write(slice(0, 1), slice(0, 1), slice(0, 1), kv)
    for half, scales in zip(store.halves, store.scales, strict=True):
        assert half.flatten().tolist() == [0xFF, 0xB1, *[0x88] * 30]
        assert scales.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["q8", "q6", "q4"])
def test_heads_that_groups_do_not_divide(kind: str) -> None:
    """They are refused before weights are read, with kinds of caches that take them."""
    with pytest.raises(ExecutionError, match=f"no cache of kind {kind} for heads of 48 elements") as error:
        check_kind(kind, 48)
    assert error.value.hint == "plan with --cache fp16, fp8; q8, q6, q4 take heads of a multiple of 32"
    check_kind(kind, 64)
