"""Models that come with code of their own: they are a model of transformers under other names, and as large as said."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import Tensors, tensor_bytes, write_checkpoint
from tests.examples import examples
from tests.family_configs import INNER, SECTIONS, configs
from tests.family_models import assert_consistent, hub_config, meta_model, named, saved_tensors, spec_of
from tpplan.core.axes import Axis
from tpplan.errors import ModelError
from tpplan.models.reader import read_model
from tpplan.planner.ledger import cache_bytes_per_token

if TYPE_CHECKING:
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]

#: For each the model of transformers that computes the same, and keys by which its config differs.
LIKE: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("aquila", "minicpm", "solar", "telechat3", "xverse"), ("llama", {})),
    "orion": ("stablelm", {}),
    "internlm": ("llama", {"bias": "attention_bias"}),
    "exaone": ("llama", {"num_layers": "num_hidden_layers"}),
    "deepseek": ("glm4_moe", {}),
    "qwen": ("qwen2", {"kv_channels": "head_dim"}),
    "internlm2": ("llama", {"bias": "attention_bias"}),
    "baichuan": ("llama", {}),
    "chatglm": (
        "glm",
        {
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "multi_query_group_num": "num_key_value_heads",
            "kv_channels": "head_dim",
            "seq_length": "max_position_embeddings",
            "add_qkv_bias": "attention_bias",
        },
    ),
    "bailing_moe": (
        "glm4_moe",
        {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"},
    ),
}

#: What names of these have in place of those of transformers; where that of queries is another, the projections of
#: queries, keys and values are one.
NAMES: dict[str, dict[str, str]] = {
    "exaone": {
        r"^model\.layers": "transformer.h",
        r"^model\.embed_tokens": "transformer.wte",
        r"^model\.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        r"self_attn\.o_proj": "self_attn.out_proj",
        r"self_attn\.": "attn.attention.",
        r"mlp\.gate_proj": "mlp.c_fc_0",
        r"mlp\.up_proj": "mlp.c_fc_1",
        r"mlp\.down_proj": "mlp.c_proj",
    },
    "qwen": {
        r"^model\.layers": "transformer.h",
        r"^model\.embed_tokens": "transformer.wte",
        r"^model\.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        r"self_attn\.q_proj": "attn.c_attn",
        r"self_attn\.o_proj": "attn.c_proj",
        r"mlp\.up_proj": "mlp.w1",
        r"mlp\.gate_proj": "mlp.w2",
        r"mlp\.down_proj": "mlp.c_proj",
    },
    "internlm2": {
        r"^model\.embed_tokens": "model.tok_embeddings",
        r"^lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        r"self_attn\.q_proj": "attention.wqkv",
        r"self_attn\.o_proj": "attention.wo",
        r"mlp\.gate_proj": "feed_forward.w1",
        r"mlp\.up_proj": "feed_forward.w3",
        r"mlp\.down_proj": "feed_forward.w2",
    },
    "baichuan": {r"self_attn\.q_proj": "self_attn.W_pack"},
    "chatglm": {
        r"^model\.layers": "transformer.encoder.layers",
        r"^model\.embed_tokens": "transformer.embedding.word_embeddings",
        r"^model\.norm": "transformer.encoder.final_layernorm",
        r"^lm_head": "transformer.output_layer",
        r"self_attn\.q_proj": "self_attention.query_key_value",
        r"self_attn\.o_proj": "self_attention.dense",
        r"mlp\.gate_up_proj": "mlp.dense_h_to_4h",
        r"mlp\.down_proj": "mlp.dense_4h_to_h",
    },
    "bailing_moe": {
        r"^model\.embed_tokens": "model.word_embeddings",
        r"self_attn\.q_proj": "attention.query_key_value",
        r"self_attn\.o_proj": "attention.dense",
        r"self_attn\.q_norm": "attention.query_layernorm",
        r"self_attn\.k_norm": "attention.key_layernorm",
        r"gate\.e_score_correction_bias": "gate.expert_bias",
    },
}

#: Biases of all matrices, which these models of transformers have not.
UNLIKE = ("add_bias_linear", "use_bias", "post_layer_norm", "moe_shared_expert_intermediate_size")


def _like(model_type: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the model of transformers that computes the same."""
    like, keys = LIKE[model_type]
    config = {keys.get(key, key): value for key, value in raw.items()} | {"model_type": like}
    if model_type == "qwen":
        config |= {"intermediate_size": raw["intermediate_size"] // 2, "use_sliding_window": False}
    if model_type in {"minicpm", "exaone"}:
        config.setdefault("tie_word_embeddings", True)
    if model_type in {"internlm", "internlm2"}:
        config["attention_bias"] = raw.get("bias", True)
    if model_type == "chatglm":
        config["attention_bias"] = raw.get("add_qkv_bias", False)
    if model_type in {"bailing_moe", "deepseek"}:
        config.setdefault("n_shared_experts", 1)  # transformers has always some
        config.setdefault("first_k_dense_replace", 0)
        config.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    if model_type in {"qwen", "baichuan"}:
        config["num_key_value_heads"] = raw["num_attention_heads"]
    return config


def _renamed(model_type: str, raw: dict[str, Any], shapes: Shapes) -> Shapes:
    """Return the same tensors as these checkpoints have them."""
    found: Shapes = {}
    names = NAMES.get(model_type, {})
    fused = any("q_proj" in old for old in names)
    for name, (rows, *columns) in shapes.items():
        own = re.sub(r"self_attn\.[kv]_proj", "self_attn.q_proj", name) if fused else name
        if "shared_experts" in own and not (raw.get("num_shared_experts") or raw.get("n_shared_experts")):
            continue
        if own.endswith("correction_bias") and not raw.get("moe_router_enable_expert_bias"):
            continue
        for old, new in names.items():
            own = re.sub(old, new, own)
        found[own] = (rows + found.get(own, (0,))[0], *columns)
    return found


def _shapes(raw: dict[str, Any]) -> Shapes:
    return {name: parameter.shape for name, parameter, _ in named(spec_of(raw))}


@pytest.mark.parametrize("model_type", LIKE)
@settings(max_examples=examples(8))
@given(data=st.data())
def test_they_are_a_model_of_transformers_under_other_names(model_type: str, data: st.DataObject) -> None:
    """Shapes and cache are those of the model that computes the same; queries, keys and values are in one tensor."""
    raw = {key: value for key, value in data.draw(configs(model_type)).items() if key not in UNLIKE}
    if model_type == "qwen":
        raw["no_bias"] = True
        raw["kv_channels"] = raw["hidden_size"] // raw["num_attention_heads"]
    model = meta_model(hub_config(_like(model_type, raw)))
    theirs = {name: tuple(tensor.shape) for name, tensor in saved_tensors(model).items()}
    assert _shapes(raw) == _renamed(model_type, raw, theirs)
    spec, like = spec_of(raw), spec_of(_like(model_type, raw))
    assert_consistent(spec)
    assert cache_bytes_per_token(spec, "fp16") == cache_bytes_per_token(like, "fp16")
    assert spec.max_context == like.max_context


@pytest.mark.parametrize("model_type", ["qwen", "chatglm", "bailing_moe"])
@settings(max_examples=examples(4))
@given(data=st.data())
def test_biases_of_all_matrices(model_type: str, data: st.DataObject) -> None:
    """A config that says so gives every matrix of a layer a bias of its outputs, but routers and routed experts."""
    switch = {"qwen": {"no_bias": False}, "chatglm": {"add_bias_linear": True}, "bailing_moe": {"use_bias": True}}
    raw = {**data.draw(configs(model_type)), **switch[model_type]}
    shapes = _shapes(raw)
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 2 and (".h." in name or ".layers." in name):
            routed = ".mlp.gate." in name or ".experts." in name
            assert (name.replace(".weight", ".bias") in shapes) != routed
            assert routed or shapes[name.replace(".weight", ".bias")] == shape[:1]


def test_minicpm_with_experts_is_mixtral_under_other_names() -> None:
    """Its experts are as wide as its MLPs were."""
    raw = {
        "vocab_size": 40,
        "hidden_size": 48,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    mixtral = saved_tensors(meta_model(hub_config({**raw, "model_type": "mixtral", "num_local_experts": 4})))
    assert _shapes({**raw, "model_type": "minicpm", "num_experts": 4}) == {
        name.replace("block_sparse_moe", "mlp"): tuple(tensor.shape) for name, tensor in mixtral.items()
    }


def test_what_is_fused_is_cut_as_engines_cut_it() -> None:
    """InternLM2 has queries, key and value of each KV head in a row; the others all queries, then keys, then values."""
    raws = {
        "internlm2": {"num_key_value_heads": 2, "intermediate_size": 24},
        "chatglm": {"multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 8, "ffn_hidden_size": 24},
    }
    common = {"hidden_size": 48, "num_attention_heads": 6, "num_layers": 1, "num_hidden_layers": 1}
    common |= {"vocab_size": 40, "max_position_embeddings": 64}
    cuts = {}
    for model_type, keys in raws.items():
        spec = spec_of({"model_type": model_type, **common, **keys})
        (fused,) = [p for p in spec.blocks[0].parameters if re.search(r"(wqkv|query_key_value)\.weight", p.name)]
        cuts[model_type] = [(segment.axis, segment.length) for segment in fused.dims[0]]
    assert cuts == {
        "internlm2": [(Axis.KV_HEADS, (6 + 2 * 2) * 8)],
        "chatglm": [(Axis.Q_HEADS, 48), (Axis.KV_HEADS, 16), (Axis.KV_HEADS, 16)],
    }


def _config(model_type: str, **sizes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "tie_word_embeddings": False, **sizes}


_HEADS_32 = {"hidden_size": 4096, "num_attention_heads": 32}
_LING = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "use_bias": False,
    "use_qkv_bias": False,
}
_GLM = {
    **_HEADS_32,
    "ffn_hidden_size": 13_696,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "post_layer_norm": True,
    "rmsnorm": True,
    "original_rope": True,
}

#: Models as they are published: config.json as far as it tells of shapes, parameters, and elements of a token's cache.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    # The number of bytes that its index tells, over two.
    "Qwen-7B": (
        _config(
            "qwen",
            **_HEADS_32,
            vocab_size=151_936,
            num_hidden_layers=32,
            intermediate_size=22_016,
            kv_channels=128,
            seq_length=8192,
            max_position_embeddings=32_768,
            no_bias=True,
        ),
        7_721_324_544,
        32 * 2 * 4096,
    ),
    # The same as its first config.json was.
    "Qwen-7B, early": (
        _config(
            "qwen",
            padded_vocab_size=151_936,
            n_embd=4096,
            n_head=32,
            n_layer=32,
            n_positions=8192,
            ffn_hidden_size=22_016,
            kv_channels=128,
            no_bias=True,
        ),
        7_721_324_544,
        32 * 2 * 4096,
    ),
    "InternLM2-7B": (
        _config(
            "internlm2",
            **_HEADS_32,
            vocab_size=92_544,
            num_hidden_layers=32,
            num_key_value_heads=8,
            intermediate_size=14_336,
            bias=False,
            max_position_embeddings=32_768,
        ),
        7_737_708_544,
        32 * 2 * 8 * 128,
    ),
    "Baichuan2-7B": (
        _config(
            "baichuan",
            **_HEADS_32,
            vocab_size=125_696,
            num_hidden_layers=32,
            intermediate_size=11_008,
            max_position_embeddings=4096,
            model_max_length=4096,
        ),
        7_505_973_248,
        32 * 2 * 4096,
    ),
    # 13,264,901,120, as its card says.
    "Baichuan-13B": (
        _config(
            "baichuan",
            hidden_size=5120,
            num_attention_heads=40,
            vocab_size=64_000,
            num_hidden_layers=40,
            intermediate_size=13_696,
            model_max_length=4096,
        ),
        13_264_901_120,
        40 * 2 * 5120,
    ),
    "ChatGLM3-6B": (
        _config("chatglm", **_GLM, padded_vocab_size=65_024, num_layers=28, seq_length=8192),
        6_243_584_000,
        28 * 2 * 2 * 128,
    ),
    "GLM-4-9B-Chat": (
        _config("chatglm", **_GLM, padded_vocab_size=151_552, num_layers=40, seq_length=131_072),
        9_399_951_360,
        40 * 2 * 2 * 128,
    ),
    # 2.4 thousand millions beside the embedding, as its card says.
    "MiniCPM-2B": (
        _config(
            "minicpm",
            hidden_size=2304,
            num_attention_heads=36,
            num_key_value_heads=36,
            vocab_size=122_753,
            num_hidden_layers=40,
            intermediate_size=5760,
            max_position_embeddings=2048,
        )
        | {"tie_word_embeddings": True},
        40 * (4 * 2304**2 + 3 * 2304 * 5760 + 2 * 2304) + 122_753 * 2304 + 2304,
        40 * 2 * 2304,
    ),
    # 13.6 so.
    "MiniCPM-MoE-8x2B": (
        _config(
            "minicpm",
            hidden_size=2304,
            num_attention_heads=36,
            num_key_value_heads=36,
            vocab_size=122_753,
            num_hidden_layers=40,
            intermediate_size=5760,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=4096,
        ),
        40 * (4 * 2304**2 + 8 * (3 * 2304 * 5760 + 2304) + 2 * 2304) + 2 * 122_753 * 2304 + 2304,
        40 * 2 * 2304,
    ),
    # 7,818,448,896, as its card says.
    "EXAONE-3.0-7.8B": (
        _config(
            "exaone",
            **_HEADS_32,
            num_key_value_heads=8,
            vocab_size=102_400,
            num_layers=32,
            intermediate_size=14_336,
            max_position_embeddings=4096,
        ),
        7_818_448_896,
        32 * 2 * 8 * 128,
    ),
    # 16,375,728,128, as its card says; the first layer is dense.
    "DeepSeek-MoE-16B": (
        _config(
            "deepseek",
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=102_400,
            num_hidden_layers=28,
            intermediate_size=10_944,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            max_position_embeddings=4096,
        ),
        16_375_728_128,
        28 * 2 * 2048,
    ),
    "InternLM-20B": (
        _config(
            "internlm",
            hidden_size=5120,
            num_attention_heads=40,
            num_key_value_heads=40,
            vocab_size=103_168,
            num_hidden_layers=60,
            intermediate_size=13_824,
            bias=False,
            max_position_embeddings=4096,
        ),
        60 * (4 * 5120**2 + 3 * 5120 * 13_824 + 2 * 5120) + 2 * 103_168 * 5120 + 5120,
        60 * 2 * 5120,
    ),
    # 2,795,443,200, as its card says.
    "StableLM-3B-4E1T": (
        _config(
            "stablelm_epoch",
            architectures=["StableLMEpochForCausalLM"],
            hidden_size=2560,
            intermediate_size=6912,
            max_position_embeddings=4096,
            norm_eps=1e-05,
            num_attention_heads=32,
            num_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            rope_pct=0.25,
            rope_theta=10_000,
            rotary_scaling_factor=1.0,
            vocab_size=50_304,
        ),
        2_795_443_200,
        32 * 2 * 2560,
    ),
    # 16.8 thousand millions, as its card says.
    "Ling-lite-1.5": (
        _config(
            "bailing_moe",
            **_LING,
            architectures=["BailingMoeForCausalLM"],
            vocab_size=126_464,
            num_hidden_layers=28,
            intermediate_size=1408,
            moe_intermediate_size=1408,
            num_experts=64,
            num_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=0,
        ),
        2 * 126_464 * 2048 + 2048 + 28 * (2048 * (2 * 2048 + 2 * 512) + 66 * 3 * 2048 * 1408 + 64 * 2048 + 2 * 2048),
        28 * 2 * 4 * 128,
    ),
    # 16.26; the first layer is dense, queries and keys are normed, and the router is corrected.
    "Ling-mini-2.0": (
        _config(
            "bailing_moe",
            **_LING,
            architectures=["BailingMoeV2ForCausalLM"],
            vocab_size=157_184,
            num_hidden_layers=20,
            intermediate_size=5120,
            moe_intermediate_size=512,
            moe_shared_expert_intermediate_size=512,
            num_experts=256,
            num_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
            head_dim=128,
            use_qk_norm=True,
            moe_router_enable_expert_bias=True,
        ),
        2 * 157_184 * 2048
        + 2048
        + 20 * (2048 * (2 * 2048 + 2 * 512) + 2 * 128 + 2 * 2048)
        + 3 * 2048 * 5120
        + 19 * (257 * 3 * 2048 * 512 + 256 * 2048 + 256),
        20 * 2 * 4 * 128,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    """Parameters, what a token takes in the cache, and the context."""
    raw, parameters, elements = PUBLISHED[name]
    spec = spec_of(raw)
    assert spec.parameter_count == parameters
    assert cache_bytes_per_token(spec, "fp16") == 2 * elements
    lengths = ("max_position_embeddings", "seq_length", "model_max_length", "n_positions")
    assert spec.max_context == next(raw[key] for key in lengths if key in raw)


def test_parameters_are_as_many_as_published() -> None:
    """What the arithmetic above gives is what their cards say, in thousands of millions."""
    assert round((PUBLISHED["MiniCPM-2B"][1] - 122_753 * 2304) / 1e9, 1) == 2.4
    assert round((PUBLISHED["MiniCPM-MoE-8x2B"][1] - 2 * 122_753 * 2304) / 1e9, 1) == 13.6
    assert round(PUBLISHED["InternLM-20B"][1] / 1e9) == 20
    assert round(PUBLISHED["Ling-lite-1.5"][1] / 1e9, 1) == 16.8
    assert round(PUBLISHED["Ling-mini-2.0"][1] / 1e9, 2) == 16.26


def _as_stored(raw: dict[str, Any], start: str) -> Tensors:
    return {start + name: ("BF16", shape) for name, shape in _shapes(raw).items()}


@pytest.mark.parametrize(
    ("model_type", "start", "beside"),
    [
        ("internvl_chat", "language_model.", {"vision_model.x.weight": "vision tower", "mlp1.0.weight": "projector"}),
        (
            "kimi_vl",
            "language_model.",
            {"vision_tower.x.weight": "vision tower", "multi_modal_projector.linear_1.weight": "projector"},
        ),
        ("minicpmv", "llm.", {"vpm.x.weight": "vision tower", "resampler.query": "other parts"}),
        ("minicpmo", "llm.", {"apm.x.weight": "audio tower", "tts.emb.weight": "other parts"}),
    ],
)
@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wrappers_with_code_of_their_own(
    tmp_path: Path, model_type: str, start: str, beside: dict[str, str], data: st.DataObject
) -> None:
    """Their language model is what it is alone behind its names, and what is beside it is told by its size."""
    inner = data.draw(st.sampled_from(INNER[model_type]))
    text = {**data.draw(configs(inner)), "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    around = {"model_type": model_type, **SECTIONS[model_type]}
    if model_type == "internvl_chat":
        raw = {**around, "llm_config": text}
    elif model_type == "kimi_vl":
        raw = {**around, "text_config": text}
    else:
        version = {"minicpmo": {"qwen2": 2.6, "qwen3": 4.5}, "minicpmv": {"qwen2": 2.6, "qwen3": 4.5, "llama": 4.0}}
        raw = {**text, **around, "version": version[model_type][inner]}
    tensors = _as_stored(text, start)
    others: Tensors = dict.fromkeys(beside, ("BF16", (3,)))
    spec = read_model(write_checkpoint(tmp_path, raw, tensors | others))
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert sum(part.bytes for part in spec.not_planned) == 2 * 2 * 3
    found = " ".join(part.what for part in spec.not_planned)
    assert all(what in found for what in beside.values())
    assert cache_bytes_per_token(spec, "fp16") == cache_bytes_per_token(spec_of(text), "fp16")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "minicpmv", "version": 9.9}, "version is '9.9', whose language model is not known"),
        ({"model_type": "minicpmv", "hidden_size": 2304, "query_num": 64}, "key of MiniCPM-V 2"),
        ({"model_type": "chatglm", "inner_hidden_size": 16_384}, "the first ChatGLM"),
        ({"model_type": "chatglm", "rmsnorm": False}, "rmsnorm is false"),
        (
            _config("qwen", **_HEADS_32, vocab_size=9, num_hidden_layers=1, intermediate_size=7),
            "is 7, which is not even",
        ),
    ],
)
def test_what_is_not_known_is_refused(raw: dict[str, Any], words: str) -> None:
    """By name, and with a hint."""
    with pytest.raises(ModelError) as caught:
        spec_of(json.loads(json.dumps(raw)))
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("model_type", ["lighton_ocr", "mistral3"])
def test_light_on_ocr_by_the_name_that_engines_know(model_type: str, tmp_path: Path) -> None:
    """It was published before transformers had a class of its own for it; names of tensors are those of that."""
    text = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40}
    name = "LightOnOCRForConditionalGeneration"
    raw = {"model_type": model_type, "architectures": [name], "vision_config": {}, "text_config": text}
    stored = _as_stored({**text, "tie_word_embeddings": False, "max_position_embeddings": 64}, "")
    tensors: Tensors = {key.replace("model.", "model.language_model.", 1): stored[key] for key in stored}
    others: Tensors = dict.fromkeys(
        ("model.vision_encoder.x.weight", "model.vision_projection.x.weight"), ("BF16", (3,))
    )
    spec = read_model(write_checkpoint(tmp_path, {**raw, "tie_word_embeddings": False}, tensors | others))
    assert spec.architecture == name
    assert spec.weight_bytes == tensor_bytes(tensors)


def test_stablelm_of_old_config_is_stablelm() -> None:
    """Names of tensors are those of today's class, with biases of queries where the config has them."""
    raw = PUBLISHED["StableLM-3B-4E1T"][0] | {"use_qkv_bias": True}
    today = {**raw, "model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}
    assert _shapes(raw) == {
        name: tuple(tensor.shape) for name, tensor in saved_tensors(meta_model(hub_config(today))).items()
    }
