"""Models whose layers differ in more than their windows: published sizes, and caches as transformers keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

import tpplan
from tests.examples import examples
from tests.family_configs import configs
from tests.family_models import assert_same_tensors, build, hub_config, meta_model, saved_tensors, spec_of
from tests.later import transformers
from tpplan.core.plan import LAYOUTS, Cache
from tpplan.errors import ModelError
from tpplan.planfile.verify import problems
from tpplan.planner.ledger import cache_bytes_per_token, sequence_cache_bytes, state_bytes
from tpplan.reports.check import check
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.model import ModelSpec

_OUTSIDE: dict[str, Any] = {"vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": 0}
_PLAIN = _OUTSIDE | {"hidden_size": 48, "intermediate_size": 10, "num_attention_heads": 6}
_MLA = _PLAIN | {
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "kv_lora_rank": 10,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
}
_SHARING = _PLAIN | {
    "num_key_value_heads": 3,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 32,
    "vocab_size_per_layer_input": 40,
}
_INDEXER = {"index_n_heads": 3, "index_head_dim": 12, "index_topk": 4}

#: Small configs, and the elements of 16 bits that a token takes in all their layers, by hand.
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    # A latent of 10 + 8 elements in each layer, and a key of 12 where the layer has an indexer.
    "glm_moe_dsa": (
        _MLA | _INDEXER | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        4 * (10 + 8) + 2 * 12,
    ),
    # Keys and values of a wide head, and of three narrow ones; the last two layers share these.
    "gemma4_text": (
        _SHARING | {"head_dim": 4, "global_head_dim": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        2 * 8 + 3 * 2 * 4,
    ),
    # Three heads of 4 for keys and 6 for values, twice as many in the layer with a window.
    "mimo_v2_flash": (
        _PLAIN
        | {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4, "v_head_dim": 6, "num_hidden_layers": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "sliding_window": 32}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        (3 + 6) * (4 + 6),
    ),
    "gemma3n_text": (_SHARING | {"head_dim": 4}, 2 * 3 * 2 * 4),
    # Three heads of 4 in both layers, and a key of 12 in one.
    "minimax_m3_vl_text": (
        _PLAIN
        | {"num_key_value_heads": 3, "head_dim": 4, "num_hidden_layers": 2, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "index_n_heads": 3, "index_head_dim": 12, "rotary_dim": 4, "index_block_size": 2}
        | {"dense_intermediate_size": 7, "shared_intermediate_size": 5}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
        2 * 2 * 3 * 4 + 12,
    ),
}

#: DeepSeek-V4 with tokens compressed by three in one layer, and by seven in the other.
_V4 = _OUTSIDE | {
    "model_type": "deepseek_v4",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 9,
    "o_groups": 2,
    "o_lora_rank": 5,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "sliding_window": 32,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rate_csa": 3,
    "compress_rate_hca": 7,
    "moe_intermediate_size": 7,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}

#: Models as their classes in transformers describe them, or their published configs do: parameters, and elements that
#: a token takes in the cache of all layers.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "GLM-5": ({"model_type": "glm_moe_dsa"}, 743_911_218_432, 78 * (512 + 64 + 128)),
    "GLM-5, indexers of four layers": (
        {"model_type": "glm_moe_dsa", "index_topk_freq": 4},
        # Of layers 0 to 77 those from 1 on share, but for every fourth.
        743_911_218_432 - 57 * (2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32),
        78 * (512 + 64) + 21 * 128,
    ),
}


_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
PUBLISHED |= {
    # 30.7 thousand millions, as its card says.
    "Gemma-4-31B": (
        _GEMMA4
        | {"hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16}
        | {"num_global_key_value_heads": 4, "intermediate_size": 21504},
        30_697_345_340,
        50 * 2 * 16 * 256 + 10 * 2 * 4 * 512,
    ),
    # 25.2.
    "Gemma-4-26B-A4B": (
        _GEMMA4
        | {"hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"num_global_key_value_heads": 2, "intermediate_size": 2112, "moe_intermediate_size": 704}
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
        25_233_141_790,
        25 * 2 * 8 * 256 + 5 * 2 * 2 * 512,
    ),
    # 309, as its card says; nine layers without windows.
    "MiMo-V2-Flash": ({"model_type": "mimo_v2_flash"}, 308_778_780_864, (9 * 4 + 39 * 8) * (192 + 128)),
    # 284, as its card says. Of tokens a window has a latent of 512; a fourth of another and of a key, or a 128th.
    "DeepSeek-V4-Flash": ({"model_type": "deepseek_v4"}, 284_328_206_295, 43 * 512 + 20 * (512 + 128) // 4 + 23 * 4),
    # 33 and 3 per token.
    "Laguna-XS": ({"model_type": "laguna"}, 33_189_975_808, 40 * 2 * 8 * 128),
    # 196 and 11 per token; three of four layers have a window, and half as many query heads again.
    "Step-3.5-Flash": (
        {
            "model_type": "step3p5",
            "vocab_size": 128_896,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
            "num_nextn_predict_layers": 3,
            "sliding_window": 512,
            "attention_other_setting": {"num_attention_heads": 96},
        },
        # The class has a smaller vocabulary, and as many heads everywhere.
        195_843_845_184 + 2 * 81 * 4096 + 33 * 32 * (2 * 128 + 1) * 4096,
        45 * 2 * 8 * 128,
    ),
    # The last 15 of 35 layers share, of which every fifth has full attention; all have two heads of 256.
    "Gemma-3n-E4B": ({"model_type": "gemma3n_text"}, 6_835_235_568, 20 * 2 * 2 * 256),
}

PUBLISHED |= {
    # The text part: a layer has 32 query and 8 KV heads of 128 and three matrices of 14,336; eight of 40 attend to
    # images, by two norms and two gates more, and cache no text. The embedding has rows for eight more tokens than the
    # output matrix.
    "Llama-3.2-11B-Vision": (
        {"model_type": "mllama"},
        (2 * 128_256 + 8) * 4096
        + 4096
        + 40 * (2 * 4096 + 2 * (4096 + 1024) * 4096 + 3 * 4096 * 14_336)
        + 8 * (2 * 128 + 2),
        32 * 2 * 8 * 128,
    ),
    # 560, as its card says; each layer has two attentions with a latent each.
    "LongCat-Flash": ({"model_type": "longcat_flash"}, 560_664_980_480, 28 * 2 * (512 + 64)),
    # The text part of a model of 1T: 64 heads of 128, rotated by half in three of four layers, whose latent has that
    # half beside it; an indexer in each layer; one dense layer.
    "Mistral-Large-4": (
        {"model_type": "mistral_large4"},
        2 * 204_800 * 6144
        + 6144
        + 32
        + 72 * (2 * 6144 + 2 * 6144 * 64 * 128 + 512 + 2 * 64)
        + 54 * (6144 * (512 + 64) + 512 * 64 * (64 + 128))
        + 18 * (6144 * 512 + 512 * 64 * (128 + 128))
        + 72 * (6144 * (32 + 128 + 32 * 128) + 2 * 128 + 2 * 6144 + 2 * 32)
        + 3 * 6144 * 24_576
        + 71 * (6144 * 128 + 129 * 3 * 6144 * 6144),
        54 * (512 + 64 + 128) + 18 * (512 + 128),
    ),
    # By its class, if the first three layers are dense and have full attention; the others cache an indexer's key.
    "MiniMax-M3": (
        {
            "model_type": "minimax_m3_vl",
            "text_config": {
                "model_type": "minimax_m3_vl_text",
                "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
                "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
            },
        },
        2 * 200_064 * 6144
        + 6144
        + 60 * (2 * 6144 + 2 * 128 + 6144 * 128 * (2 * 64 + 2 * 4))
        + 3 * 3 * 6144 * 12_288
        + 57 * (129 * 3 * 6144 * 3072 + 128 * 6144 + 128)
        + 57 * (6144 * 128 * (4 + 1) + 2 * 128),
        60 * 2 * 4 * 128 + 57 * 128,
    ),
    # The thinker is as large as Qwen2.5-7B.
    "Qwen2.5-Omni-7B": ({"model_type": "qwen2_5_omni"}, 7_615_616_512, 28 * 2 * 4 * 128),
}

#: Plain matrix products, which know any width.
EAGER = {"experts_implementation": "eager"}


def published_config(name: str) -> dict[str, Any]:
    """Return the config of a published model, but for what a hub's config says in other words."""
    data: dict[str, Any] = hub_config(PUBLISHED[name][0]).to_dict()
    return {key: value for key, value in data.items() if key not in {"layer_types", "mlp_layer_types"}}


def published(name: str) -> ModelSpec:
    """Return a published model."""
    return spec_of(hub_config(PUBLISHED[name][0]).to_dict())


def kept(cache: Any) -> int:
    """Return the bytes that a cache of transformers holds of tokens."""
    names = ("keys", "values", "indexer_keys", "idx_keys")
    found = [getattr(layer, name, None) for layer in cache.layers for name in names]
    parts = ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")
    found += [each for layer in cache.layers for part in parts for each in getattr(layer, part, {}).values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in found if tensor is not None}
    return sum(storages.values())  # keys that are values too are held once


@pytest.mark.parametrize("model_type", SMALL)
def test_a_token_takes_what_transformers_keeps(model_type: str) -> None:
    """The cache of a small model after a prompt and a further token, and the same by hand."""
    keys, elements = SMALL[model_type]
    config = hub_config({"model_type": model_type, **keys})
    within = {"minimax_m3_vl_text": "minimax_m3_vl"}.get(model_type)  # of those that are planned within others only
    raw = {"model_type": within, "text_config": config.to_dict()} if within else config.to_dict()
    each = cache_bytes_per_token(spec_of(raw), "fp16")
    assert each == 2 * elements
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **EAGER).eval()
    with torch.no_grad():
        cache = model(torch.randint(1, 40, (3, 5)), use_cache=True).past_key_values
        assert kept(cache) == 3 * 5 * each
        model(torch.randint(1, 40, (3, 1)), use_cache=True, past_key_values=cache)
        assert kept(cache) == 3 * 6 * each


def test_a_compressed_cache_is_what_transformers_keeps() -> None:
    """After 20 tokens, when most are not compressed yet: six and two entries, and the rest of them in buffers."""
    config = hub_config(_V4)
    spec = spec_of(config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **EAGER).eval()
    with torch.no_grad():
        cache = model(torch.randint(1, 40, (3, 20)), use_cache=True).past_key_values
    window, entries = 2 * 20 * 16, 6 * (16 + 8) + 2 * 16
    # Two tokens of two series with weights, and of one series the three tokens before; six tokens with weights.
    buffers = 2 * 2 * 2 * (16 + 8) + 3 * 2 * (16 + 8) + 6 * 2 * 16
    assert kept(cache) == 3 * 2 * (window + entries + buffers)
    assert state_bytes(spec) == 2 * buffers
    counted = sequence_cache_bytes(spec, "fp16", 20)
    assert counted == 2 * (window + 20 * (16 + 8) // 3 + buffers) + 2 * 20 * 16 // 7
    assert kept(cache) <= 3 * counted


@settings(max_examples=examples(10))
@given(configs("nemotron-nas"))
def test_layers_that_a_search_chose_are_llamas(raw: dict[str, Any]) -> None:
    """What is left of a layer is Llama's, with KV heads and a width of its own, or a matrix is in its place."""
    spec = spec_of(raw)
    own: dict[int, dict[str, int]] = {}
    blocks = raw["block_configs"]
    for i, block in enumerate(blocks):
        width = int(2 * block["ffn"]["ffn_mult"] * raw["hidden_size"] / 3)
        own[i] = {
            "num_key_value_heads": 6 // block["attention"]["n_heads_in_group"],
            "intermediate_size": width if width % 256 == 0 else width + 256 - width % 256,
        }
    llama = {key: value for key, value in raw.items() if key != "block_configs"}
    llama |= {"model_type": "llama", "num_hidden_layers": 1}
    tensors: dict[str, torch.Tensor] = {}
    for i, sizes in own.items():
        one = saved_tensors(meta_model(hub_config(llama | sizes)))
        tensors |= {name.replace("layers.0.", f"layers.{i}."): tensor for name, tensor in one.items()}
    square = torch.empty(raw["hidden_size"], raw["hidden_size"], device="meta")
    for i, block in enumerate(blocks):
        for part, module, matrix, norm in (
            ("attention", "self_attn", "linear_attn", "input_layernorm"),
            ("ffn", "mlp", "linear_mlp", "post_attention_layernorm"),
        ):
            start = f"model.layers.{i}."
            if block[part]["no_op"] or block[part]["replace_with_linear"]:
                tensors = {n: tensor for n, tensor in tensors.items() if not n.startswith(f"{start}{module}.")}
            if block[part]["no_op"]:
                del tensors[f"{start}{norm}.weight"]
            elif block[part]["replace_with_linear"]:
                tensors[f"{start}{module}.{matrix}.weight"] = square
                if raw.get("attention_bias" if part == "attention" else "mlp_bias"):
                    tensors[f"{start}{module}.{matrix}.bias"] = square[0]
    assert_same_tensors(spec, tensors)
    heads = sum(own[i]["num_key_value_heads"] for i, block in enumerate(blocks) if _has_heads(block))
    assert cache_bytes_per_token(spec, "fp16") == heads * 2 * raw["head_dim"] * 2


def _has_heads(block: dict[str, Any]) -> bool:
    return not (block["attention"]["no_op"] or block["attention"]["replace_with_linear"])


def test_names_of_deepseek_v4_on_the_hub_are_known(tmp_path: Path) -> None:
    """Published files have no ``model.``, and other names outside the layers than transformers writes."""
    config = hub_config({**_V4, "num_hash_layers": 1})
    tensors = {
        name.replace("model.hc_head.hc_", "hc_head_")
        .replace("model.embed_tokens.", "embed.")
        .removeprefix("model."): each
        for name, each in saved_tensors(build(config)).items()
    }
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()
    assert {name for name in tensors if "layers." not in name} == {
        *("embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"),
    }
    save_file(tensors | {"mtp.0.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    spec = tpplan.read_model(tmp_path)
    assert spec.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert [part.bytes for part in spec.not_planned] == [12]


def test_a_plan_tells_of_images_that_are_cached() -> None:
    """What layers of Llama 3.2 cache of images is in no plan, and its notes say so."""
    (note,) = published("Llama-3.2-11B-Vision").notes
    assert "attend to images" in note


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    """Parameters, and what a token takes in the cache."""
    _, parameters, elements = PUBLISHED[name]
    spec = published(name)
    assert spec.parameter_count == parameters
    assert cache_bytes_per_token(spec, "fp16") == 2 * elements


#: What the hub's config of MiMo-V2-Flash says of its layers, and transformers' class takes for granted.
_MIMO: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7],
    "moe_layer_freq": [0] + [1] * 47,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({}, 0),
        ({"swa_num_key_value_heads": 4}, -39 * 4 * (192 + 128) * 4096),
        ({"swa_num_attention_heads": 32}, -39 * 32 * ((192 + 128) * 4096 + 1)),
        ({"swa_head_dim": 128}, -39 * (64 + 8) * 64 * 4096),
        ({"swa_v_head_dim": 64}, -39 * (64 + 8) * 64 * 4096),
        ({"add_full_attention_sink_bias": True}, 9 * 64),
        ({"add_swa_attention_sink_bias": False}, -39 * 64),
        # Dense layers of 16384 instead of 256 experts of 2048 and their router.
        ({"moe_layer_freq": [0, 0, 0, *[1] * 45]}, 2 * (3 * (16384 - 256 * 2048) * 4096 - 256 * 4097)),
        # Seven layers more with full attention, which have half as many KV heads and no sinks.
        ({"hybrid_layer_pattern": [0, 1, 1] * 16}, -7 * (4 * (192 + 128) * 4096 + 64)),
    ],
)
def test_what_the_hub_says_of_mimo_s_layers_is_read(changes: dict[str, Any], elements: int) -> None:
    """Each key adds or takes the elements that it stands for."""
    spec = spec_of({**published_config("MiMo-V2-Flash"), **_MIMO, **changes})
    assert spec.parameter_count == 308_778_780_864 + elements


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({"gating": "per-head", "gating_types": ["per_head"] * 40}, 0),
        ({"gating_types": ["per_head", "per_element"] * 20}, 20 * 48 * 127 * 2048),
        ({"gating": "per-element"}, 40 * 48 * 127 * 2048),
        ({"gating": "per-element", "gating_types": ["per_head"] * 40}, 0),
    ],
)
def test_gates_of_laguna_s_layers_are_read(changes: dict[str, Any], elements: int) -> None:
    """One for each head, or one for each of its 128 elements, in all layers or in those that are listed."""
    spec = spec_of({**published_config("Laguna-XS"), **changes})
    assert spec.parameter_count == 33_189_975_808 + elements


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_keys_and_values_that_no_layer_uses_are_told_and_not_planned(model_type: str, tmp_path: Path) -> None:
    """Google's files have them in layers that share those of others; transformers' class drops them as it loads."""
    keys = {**_SHARING, "head_dim": 4}
    config = hub_config({"model_type": model_type, **keys})
    model = build(config)
    tensors = saved_tensors(model)
    own = sum(tensor.nbytes for tensor in tensors.values())
    dropped = [name for name in model.model._keys_to_ignore_on_load_unexpected if name.startswith("layers.")]
    assert len(dropped) == 4 * config.num_kv_shared_layers
    unused = {f"model.{name}.weight": torch.zeros(7, 3) for name in dropped}
    unused |= {f"model.{name}.weight_scale": torch.zeros(7) for name in dropped if name.endswith("_proj")}
    save_file({**tensors, **unused}, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    spec = tpplan.read_model(tmp_path)
    assert spec.weight_bytes == own
    assert [part.bytes for part in spec.not_planned] == [sum(tensor.nbytes for tensor in unused.values())]
    save_file({**tensors, "model.layers.0.self_attn.k_extra.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="does not ask for"):
        tpplan.read_model(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_of_published_models(name: str, layout: str) -> None:
    """A plan for uneven devices holds every byte of every tensor, each within its budget, and breaks no rule."""
    model = published(name)
    size = model.weight_bytes // 4
    budgets = (2 * size, size, size * 3 // 2, size)
    devices = [tpplan.Device(name="x", budget_bytes=budget + 6 * 2**30) for budget in budgets]
    plan = tpplan.plan(model, devices, cache=Cache("fp16", 4096), layout=layout)
    assert not problems(plan)
    assert check({"plan": plan}, model).current
    held: dict[str, tuple[int, dict[tuple[int, int], None]]] = {}
    sizes = [0] * len(devices)
    for part in iter_slices(plan, model):
        sizes[part.device] += part.nbytes
        length, ranges = held.setdefault(part.name, (part.whole[part.dim or 0] if part.whole else 1, {}))
        ranges.update(dict.fromkeys(part.ranges if part.dim is not None else ((0, length),)))
    assert sizes == [entry.weights_bytes for entry in plan.memory]
    tensors = sum(len(block.layers) * sum(p.copies for p in block.parameters) for block in model.blocks)
    assert len(held) == tensors + len(model.parameters)
    for tensor, (length, ranges) in held.items():
        end = 0
        for first, last in sorted(ranges):
            assert first <= end, tensor
            end = max(end, last)
        assert end == length, tensor
