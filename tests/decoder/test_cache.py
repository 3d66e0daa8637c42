"""The decoder's cache: what it takes, what smaller kinds lose, and how they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoder_cases import LENGTH, decoding, model_of, plan_of, request_of
from tests.watching import Watching
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Prompt
from tpplan.decoder.cache import heads, layer
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


@pytest.mark.parametrize("kind", ["fp16", "fp8", "q8"])
@pytest.mark.parametrize(("model_type", "kv"), [("gemma2", "idle"), ("qwen3", "replicate")])
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


@pytest.mark.parametrize(("kind", "error"), [("fp16", 1e-3), ("q8", 3e-2), ("fp8", 3e-1)])
def test_a_smaller_cache_loses_a_little(kind: str, error: float) -> None:
    """What 16 and 8 bits lose shows in the logits, and is as small as the bits promise."""
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


@pytest.mark.parametrize("kind", ["fp32", "q8"])
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
