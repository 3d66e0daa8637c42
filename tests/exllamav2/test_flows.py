"""A model that is loaded and run in ExLlamaV2's order of calls has the logits of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.exllamav2.client import EPSILON, FLOWS, Client, reference
from tests.exllamav2.models import HALF
from tests.later import transformers
from tpplan.errors import ExecutionError
from tpplan.exllamav2 import BROADCAST_RS

#: Budgets and sizes; ExLlamaV2's MLP needs residual columns wherever there is a part of it.
SHAPES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "uneven": ((1.5, 1.0, 1.25), {}),
    "a GPU without heads": ((1.0, 1.0, 1.0, 1.0), {"num_key_value_heads": 2, "num_key_value_groups": 8}),
    "a GPU that is left alone, a padded vocabulary": ((1.5, 0.0, 1.0), {"vocab_size": 2001}),
}


def _ids(client: Client) -> torch.Tensor:
    return torch.randint(client.config.vocab_size, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("has_contexts", [True, False], ids=["scratch of the model", "scratch of tpplan"])
@pytest.mark.parametrize(("gpu_split", "keys"), SHAPES.values(), ids=SHAPES)
def test_flows(gpu_split: tuple[float, ...], keys: dict[str, Any], *, has_contexts: bool) -> None:
    """Every flow has the reference's logits, bit for bit, also after another ``finalize()``."""
    client = Client(gpu_split, has_contexts=has_contexts, **keys)
    ids = _ids(client)
    expected = reference(client.config, client.weights, ids)
    assert expected.dtype == HALF
    for flow in FLOWS:
        assert torch.equal(client.logits(ids, flow), expected), flow
    client.tp.finalize()
    for flow in reversed(FLOWS):
        assert torch.equal(client.logits(ids, flow), expected), flow
    client.tp.unload()


def test_transformers_agrees() -> None:
    """The logits are those of transformers' llama with the same weights, within float16."""
    client = Client((1.5, 1.0, 1.25), has_contexts=False)
    c, w = client.config, client.weights
    config = transformers.LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        num_hidden_layers=c.num_hidden_layers,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": c.rotary_embedding_base},
        rms_norm_eps=EPSILON,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": w["embedding"], "model.norm.weight": w["norm"], "lm_head.weight": w["head"].T}
    names = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o"}
    names |= {name: f"mlp.{name}" for name in ("gate", "up", "down")}
    for layer in range(c.num_hidden_layers):
        of = f"model.layers.{layer}"
        state |= {f"{of}.{name}_proj.weight": w[f"{layer}.{part}"].T for part, name in names.items()}
        state[f"{of}.input_layernorm.weight"] = w[f"{layer}.before attention"]
        state[f"{of}.post_attention_layernorm.weight"] = w[f"{layer}.before mlp"]
    model.load_state_dict({name: weight.float() for name, weight in state.items()})
    ids = _ids(client)
    with torch.inference_mode():
        expected = model(ids).logits
    found = client.logits(ids, "flash").float()
    assert (found - expected).abs().max() < 0.02
    assert expected.abs().max() > 2
    client.tp.unload()


def test_scratch_and_tables_are_the_models() -> None:
    """Where the model has device contexts, slices are in their scratch, and ``get_sin_cos`` has their tables."""
    client = Client((1.5, 0.0, 1.0), has_contexts=True)
    tp = client.tp
    contexts = {device: client.get_device_context(device) for device in tp.all_devs}
    for context in contexts.values():
        assert context.sin is not None
        context.sin = [context.sin[0] + 1, context.sin[0] + 2]  # of a second base too
    sin, cos = tp.get_sin_cos()
    assert (sin[1].is_meta, cos[1].is_meta) == (True, True)
    for device, context in contexts.items():
        assert torch.equal(sin[device], torch.cat(context.sin or []))
        assert torch.equal(cos[device], torch.cat(context.cos or []))
    tp.begin_scratch_alloc_tp()
    tp.reserve_scratch([64, 0, 128])
    slices = tp.get_scratch_slice_tp(3, torch.float32, BROADCAST_RS)
    for tensor, context, start in zip(slices, contexts.values(), (64, 128), strict=True):
        assert context.scratch is not None
        assert tensor.data_ptr() - context.scratch.data_ptr() == start
        assert context.scratch_idx * 2 == start + tensor.nbytes


def test_too_little_scratch_of_the_model_is_an_error() -> None:
    """The error has the numbers, takes nothing, and a hint that helps; the original's had neither."""
    client = Client((1.5, 1.0, 1.25), has_contexts=True)
    tp, context = client.tp, client.get_device_context(1)
    tp.begin_scratch_alloc_tp()
    tp.reserve_scratch([0, 64])
    free = 2 * len(context.scratch if context.scratch is not None else ()) - 64
    with pytest.raises(
        ExecutionError, match=rf"device 1 \(GPU 1\): {free + 64} bytes asked for, {free} free of"
    ) as caught:
        tp.reserve_scratch([64, free + 64, 64])
    assert caught.value.hint.startswith("call begin_scratch_alloc_tp() before slices")
    assert [client.get_device_context(device).scratch_idx for device in range(3)] == [0, 32, 0]
    with pytest.raises(ExecutionError) as caught:
        tp.reserve_scratch([0, 10**9])
    assert caught.value.hint == "load the model with a larger max_input_len"
