"""Linear attention by the gated delta rule: chunks against transformers, and the states that sequences have."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import tpplan
from tests.checkpoints import saved_values
from tests.decoder_cases import (
    HYBRIDS,
    LENGTH,
    check,
    check_sixteen_bits,
    decoding,
    model_of,
    plan_of,
    request_of,
)
from tests.examples import examples
from tests.later import transformers
from tests.watching import Watching
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling, generate
from tpplan.decoder.layer.delta import read_chunks
from tpplan.decoder.model.settings import settings_of
from tpplan.errors import ModelError, RequestError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path


@settings(max_examples=examples(40), deadline=None)
@given(
    sequences=st.integers(1, 3),
    size=st.integers(1, 150),
    keys=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.sampled_from([1, 8, 24]), st.sampled_from([4, 16])),
    most=st.sampled_from([1, 2**11, 2**13, 2**15, 2**17, 2**20]),
    forgets=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_chunks_as_in_transformers(
    *,
    sequences: int,
    size: int,
    keys: int,
    group: int,
    dims: tuple[int, int],
    most: int,
    forgets: float,
    seed: int,
) -> None:
    """Outputs and states, from any state on, for any room for temporaries, also where a chunk forgets all before."""
    made = torch.Generator().manual_seed(seed)
    key_dim, value_dim = dims
    q, k = torch.randn(2, sequences, size, keys, key_dim, generator=made)
    v = torch.randn(sequences, size, keys, group, value_dim, generator=made)
    beta = torch.rand(sequences, size, keys, group, generator=made)
    logs = -forgets * torch.rand(sequences, size, keys, group, generator=made)
    state = torch.randn(sequences, keys, group, key_dim, value_dim, generator=made)
    q[0, 0] = 0  # whose norm is that of its epsilon
    module = transformers.models.qwen3_5.modeling_qwen3_5
    wanted, end = module.torch_recurrent_gated_delta_rule(
        q,
        k,
        v.flatten(2, 3),
        g=logs.flatten(2),
        beta=beta.flatten(2),
        initial_state=state.flatten(1, 2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    read_chunks(torch.stack((q, k), dim=3), v, beta, logs, state, most)
    torch.testing.assert_close(v.flatten(2, 3), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state.flatten(1, 2), end, atol=2e-5, rtol=1e-4)


class Peak(Watching):
    """Counts the bytes of what torch makes.

    Attributes:
        live: bytes of tensors that live.
        most: the most that there were.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is told, and count what is new."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(result.alias_info for result in func._schema.returns):
            size = made.untyped_storage().nbytes()
            self.live += size
            self.most = max(self.most, self.live)
            finalize(made.untyped_storage(), self._gone, size).atexit = False
        return made

    def _gone(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("sizes", [(1, 256, 4, 1, 32, 32), (1, 256, 2, 3, 16, 32), (8, 64, 2, 2, 32, 16)])
def test_chunks_take_no_more_than_there_is(sizes: tuple[int, ...]) -> None:
    """However little that is, temporaries fit; and where it is more, it is used."""
    sequences, size, keys, group, key_dim, value_dim = sizes
    for most in (2**12, 2**15, 2**17):
        qk = torch.randn(sequences, size, keys, 2, key_dim).bfloat16()
        v = torch.randn(sequences, size, keys, group, value_dim).bfloat16()
        beta, logs = torch.rand(sequences, size, keys, group), -torch.rand(sequences, size, keys, group)
        state = torch.zeros(sequences, keys, group, key_dim, value_dim)
        with torch.inference_mode(), Peak() as peak:
            read_chunks(qk, v, beta, logs, state, most)
        assert 0.2 * most < peak.most / 4 <= most


@pytest.mark.parametrize("rows", [96, 40])
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_long_prompts(model_type: str, rows: int) -> None:
    """Longer than a chunk, in one pass or in several, and steps behind them: as transformers has them."""
    model, text = model_of(model_type), [(7 * i + i // 3) % 200 for i in range(91)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([text])).logits[0, -3:]
    plan = plan_of(model.directory, 2, request_of(rows=rows), {}, seed=4)
    with decoding(plan, model_type, "fp32") as decoder:
        found = [decoder.prefill(text[:-2], 0)]
        for place in (-2, -1):
            tokens, positions = ([torch.tensor([n])] * 2 for n in (text[place], len(text) + place))
            found.append(decoder.decode(tokens, positions))
        logits = torch.cat([decoder.context.gather(each, Axis.VOCAB).tensor for each in found])
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
def test_cuts_that_leave_something_out(model_type: str, layout: str) -> None:
    """Devices without key heads, some of which have heads of attention, and one that has key heads alone."""
    cut: dict[Axis, tuple[int, ...]] = {
        Axis.LINEAR_HEADS: (0, 0, 3, 3, 4),
        Axis.KV_HEADS: (0, 2, 2, 4, 4),
        Axis.INTERMEDIATE: (0, 32, 32, 72, 72),
        Axis.VOCAB: (0, 100, 100, 203, 203),
        Axis.RESIDUAL: (0, 24, 24, 24, 48),
    }
    model = model_of(model_type)
    check(model, plan_of(model.directory, 4, request_of(layout), cut, seed=2), "events", new=8)


def _in_bfloat16(source: Path, directory: Path) -> None:
    """Save a model in bfloat16 as Qwen3.5's checkpoints are: decays and norms of linear attention stay in float32."""
    kept = ("linear_attn.A_log", "linear_attn.norm.weight")
    tensors = {name: x if name.endswith(kept) else x.bfloat16() for name, x in saved_values(source).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")


def test_states_take_what_the_plan_counts(tmp_path: Path) -> None:
    """In bfloat16 the inputs of the convolution take 2 bytes, states 4, and devices without key heads have none."""
    _in_bfloat16(model_of("qwen3_5_text").directory, tmp_path)
    cut: dict[Axis, tuple[int, ...]] = {Axis.LINEAR_HEADS: (0, 1, 1, 4), Axis.KV_HEADS: (0, 0, 4, 4)}
    plan = plan_of(tmp_path, 3, request_of(batch=3), cut, seed=3)
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        decoder = Decoder(context, tmp_path, load_weights(plan, tmp_path, context))
        decoder.prefill([3, 4, 5])
        found = [decoder.cache_bytes(device) for device in range(3)]
    key_head = 3 * (4 * 2 * (2 * 8 + 2 * 12) + 4 * 2 * 8 * 12)  # of 3 layers: 4 inputs, states of 2 values
    keys_and_values = LENGTH * 4 * 2 * 32 * 2  # of one layer: 4 heads, K and V
    assert found == [3 * key_head, 3 * keys_and_values, 3 * 3 * key_head]
    assert found == [each.cache_bytes for each in plan.memory]


@pytest.mark.parametrize(("model_type", "layout"), [("qwen3_5_text", "gather"), ("qwen3_next", "reduce")])
def test_sixteen_bits_lose_what_they_lose_in_transformers(model_type: str, layout: str, tmp_path: Path) -> None:
    """States are in 32 bits, as there."""
    check_sixteen_bits(model_of(model_type), layout, torch.bfloat16, tmp_path)


def _logits(decoder: Decoder, found: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return decoder.context.gather(found, Axis.VOCAB).tensor.clone()


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_sequences_begin_with_cleared_states(model_type: str) -> None:
    """Whatever they had before: by a prompt at the start, or by a step at position 0. Others keep theirs."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, request_of(), {}, seed=7)
    with decoding(plan, model_type, "fp32") as decoder:
        used = len(decoder.context.all_devices)
        first, other = model.prompts[1], model.prompts[0]
        decoder.read([Prompt(first[:6], 0), Prompt(other[:3], 1)])
        with torch.inference_mode():
            for linear in (each for layer in decoder.stack.linear for each in layer.values()):
                linear.state.inputs[0, 0], linear.state.recurrent[0, 0, 0] = torch.nan, torch.inf
        for position, token in enumerate(first[:-1]):
            tokens, positions = ([torch.tensor([n])] * used for n in (token, position))
            decoder.decode(tokens, positions)
        tokens, positions = ([torch.tensor([n])] * used for n in (first[-1], len(first) - 1))
        stepped = _logits(decoder, decoder.decode(tokens, positions))
        rest = _logits(decoder, decoder.read([Prompt(other[3:], 1, 3)]))
        again = _logits(decoder, decoder.prefill(other, 0))
    torch.testing.assert_close(stepped[0], model.logits[1], atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(rest[0], model.logits[0], atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(again[0], model.logits[0], atol=3e-4, rtol=1e-4)


def test_states_cannot_go_back() -> None:
    """A prompt that continues where the states are not is refused, with where they are; the states stay right."""
    model = model_of("qwen3_5_text")
    text = model.prompts[1]
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=7), "qwen3_5_text", "fp32") as decoder:
        decoder.prefill(text[:9])
        for start in (4, 10):
            with pytest.raises(
                RequestError, match=f"sequence 0 is to go on behind {start} tokens, .* are behind 9"
            ) as e:
                decoder.prefill([1, 2], 0, start)
            assert "start 0" in e.value.hint
        with pytest.raises(RequestError, match=r"sequence 1 is to go on behind 2 tokens, .* are behind 0"):
            decoder.prefill([1, 2], 1, 2)
        torch.testing.assert_close(
            _logits(decoder, decoder.prefill(text[9:], 0, 9))[0], model.logits[1], atol=3e-4, rtol=1e-4
        )
        with patch.object(decoder, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            decoder.prefill(text, 1)
        with pytest.raises(RequestError, match="its states are those of a prompt or step that did not end"):
            decoder.prefill(text[9:], 1, 9)
        steps = decoder.steps(1)
        steps.start([text], Sampling())
        steps.step()
        with pytest.raises(RequestError, match=rf"behind {len(text)} tokens, .* are behind {len(text) + 1}"):
            decoder.prefill([1], 0, len(text))
        decoder.prefill([1], 0, len(text) + 1)


def test_a_text_goes_on_behind_a_step_that_did_not_end() -> None:
    """It is read again: nobody knows which layers have seen the token."""
    model = model_of("qwen3_5_text")
    prompt, expected = model.prompts[0], model.tokens[0]
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=7), "qwen3_5_text", "fp32") as decoder:
        tokens = generate(decoder, [prompt], 20)
        found = [next(tokens)[0] for _ in range(4)]
        with patch.object(decoder.stack, "_add", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            next(tokens)
        rest = [token for (token,) in generate(decoder, [prompt + expected[:4]], 8, resume=True)]
    assert found + rest == expected[:12]


@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_experts_in_one_tensor(layout: str, tmp_path: Path) -> None:
    """As Qwen's own checkpoints have them, gate matrices in front of up matrices; a second decoder finds them, too."""
    model, tensors = model_of("qwen3_5_moe_text"), saved_values(model_of("qwen3_5_moe_text").directory)
    for start in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{start}experts.{i}.{of}_proj.weight") for i in range(6)])
            for of in ("gate", "up", "down")
        )
        tensors[f"{start}experts.gate_up_proj"] = torch.cat((gates, ups), dim=1)
        tensors[f"{start}experts.down_proj"] = downs
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model.directory / "config.json", tmp_path)
    plan = plan_of(tmp_path, 3, request_of(layout), {}, seed=3)
    check(evolve(model, directory=tmp_path), plan, "peer", new=8)
    with compile_plan(plan, backend="cpu") as context:
        weights = load_weights(plan, tmp_path, context)
        for _ in range(2):
            decoder = Decoder(context, tmp_path, weights, cache="fp32")
            found = _logits(decoder, decoder.prefill(model.prompts[0]))
            torch.testing.assert_close(found[0], model.logits[0], atol=3e-4, rtol=1e-4)


def test_other_activations_are_refused(tmp_path: Path) -> None:
    """Convolutions of these models have SiLU behind them."""
    source = model_of("qwen3_5_text").directory
    shutil.copy(source / "model.safetensors", tmp_path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}), encoding="utf-8")
    with pytest.raises(ModelError, match="hidden_act is 'gelu'"):
        settings_of(tmp_path, tpplan.read_model(tmp_path))
