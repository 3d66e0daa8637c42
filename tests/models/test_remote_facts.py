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
from tests.family_configs import INNER, REMOTE, SECTIONS, configs
from tests.family_models import assert_consistent, hub_config, meta_model, named, saved_tensors, spec_of
from tests.weight_plans import plan_of, request_of
from tpplan.core.axes import Axis
from tpplan.core.plan import LAYOUTS
from tpplan.errors import ModelError
from tpplan.models.families.wrappers import WRAPPERS
from tpplan.models.reader import read_model
from tpplan.planner.ledger import cache_bytes_per_token, demands, state_bytes
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]

#: For each the model of transformers that computes the same, and keys by which its config differs.
LIKE: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("aquila", "minicpm", "solar", "telechat3", "xverse"), ("llama", {})),
    "orion": ("stablelm", {}),
    "TeleFLM": ("llama", {}),
    **dict.fromkeys(("minimax_text_01", "minimax_m1"), ("minimax", {"attn_type_list": "layer_types"})),
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
    if like == "minimax":
        config["layer_types"] = [("linear_attention", "full_attention")[kind] for kind in raw["attn_type_list"]]
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
        if own.endswith(("_decay", "slope_rate")):  # of which only transformers' files have copies
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


def test_groups_of_chatglm_are_one_by_default() -> None:
    """As in its configuration_chatglm.py; without multi_query_attention every head has its own."""
    raw = {"model_type": "chatglm", "hidden_size": 48, "num_attention_heads": 6, "num_layers": 1, "kv_channels": 8}
    raw |= {"padded_vocab_size": 40, "ffn_hidden_size": 24, "seq_length": 64}
    found = []
    for grouped in (True, False):
        spec = spec_of({**raw, "multi_query_attention": grouped})
        (fused,) = [p for p in spec.blocks[0].parameters if p.name.endswith("query_key_value.weight")]
        found.append([segment.length for segment in fused.dims[0]])
        assert spec_of({**raw, "multi_query_attention": grouped, "multi_query_group_num": 2}).notes == ()
    assert found == [[48, 8, 8], [48, 48, 48]]


def _sized(model_type: str, *sizes: int, **others: Any) -> dict[str, Any]:
    """Return a config of these sizes, in the order of the usual keys; 0 leaves a key out."""
    keys = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
        *("intermediate_size", "max_position_embeddings"),
    )
    given = {key: size for key, size in zip(keys, sizes, strict=True) if size}
    return {"model_type": model_type, "tie_word_embeddings": False, **given, **others}


_LING = {"use_bias": False, "use_qkv_bias": False}
_GLM = {
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
_MINICPM = (40, 2304, 36, 36, 122_753, 5760)
_LIGHTNING = {
    "head_dim": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "attn_type_list": [int(layer % 8 == 7) for layer in range(80)],
    "shared_intermediate_size": 0,
}
#: The language model of DeepSeek-OCR, whose keys of latent attention say nothing.
_DEEPSEEK_OCR = {
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
    "use_mla": False,
    "moe_intermediate_size": 896,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}

#: Models as they are published: config.json as far as it tells of shapes, parameters, and elements of a token's cache.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    # The number of bytes that its index tells, over two.
    "Qwen-7B": (
        _sized("qwen", 32, 4096, 32, 0, 151_936, 22_016, 32_768, kv_channels=128, seq_length=8192, no_bias=True),
        7_721_324_544,
        32 * 2 * 4096,
    ),
    # The same as its first config.json was.
    "Qwen-7B, early": (
        _sized("qwen", *[0] * 7, padded_vocab_size=151_936, n_embd=4096, n_head=32, n_layer=32)
        | {"n_positions": 8192, "ffn_hidden_size": 22_016, "kv_channels": 128, "no_bias": True},
        7_721_324_544,
        32 * 2 * 4096,
    ),
    "InternLM2-7B": (
        _sized("internlm2", 32, 4096, 32, 8, 92_544, 14_336, 32_768, bias=False),
        7_737_708_544,
        32 * 2 * 8 * 128,
    ),
    "Baichuan2-7B": (
        _sized("baichuan", 32, 4096, 32, 0, 125_696, 11_008, 4096, model_max_length=4096),
        7_505_973_248,
        32 * 2 * 4096,
    ),
    # 13,264,901,120, as its card says.
    "Baichuan-13B": (
        _sized("baichuan", 40, 5120, 40, 0, 64_000, 13_696, 0, model_max_length=4096),
        13_264_901_120,
        40 * 2 * 5120,
    ),
    "ChatGLM3-6B": (
        _sized("chatglm", 0, 4096, 32, 0, 0, 0, 0, **_GLM, padded_vocab_size=65_024, num_layers=28, seq_length=8192),
        6_243_584_000,
        28 * 2 * 2 * 128,
    ),
    "GLM-4-9B-Chat": (
        _sized("chatglm", 0, 4096, 32, 0, 0, 0, 0, **_GLM, padded_vocab_size=151_552, num_layers=40)
        | {"seq_length": 131_072},
        9_399_951_360,
        40 * 2 * 2 * 128,
    ),
    # 2.4 thousand millions beside the embedding, as its card says.
    "MiniCPM-2B": (
        _sized("minicpm", *_MINICPM, 2048) | {"tie_word_embeddings": True},
        40 * (4 * 2304**2 + 3 * 2304 * 5760 + 2 * 2304) + 122_753 * 2304 + 2304,
        40 * 2 * 2304,
    ),
    # 13.6 so.
    "MiniCPM-MoE-8x2B": (
        _sized("minicpm", *_MINICPM, 4096, num_experts=8, num_experts_per_tok=2),
        40 * (4 * 2304**2 + 8 * (3 * 2304 * 5760 + 2304) + 2 * 2304) + 2 * 122_753 * 2304 + 2304,
        40 * 2 * 2304,
    ),
    # 7,818,448,896, as its card says.
    "EXAONE-3.0-7.8B": (
        _sized("exaone", 0, 4096, 32, 8, 102_400, 14_336, 4096, num_layers=32),
        7_818_448_896,
        32 * 2 * 8 * 128,
    ),
    # 16,375,728,128, as its card says; the first layer is dense.
    "DeepSeek-MoE-16B": (
        _sized("deepseek", 28, 2048, 16, 16, 102_400, 10_944, 4096, moe_intermediate_size=1408, n_routed_experts=64)
        | {"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        16_375_728_128,
        28 * 2 * 2048,
    ),
    "InternLM-20B": (
        _sized("internlm", 60, 5120, 40, 40, 103_168, 13_824, 4096, bias=False),
        60 * (4 * 5120**2 + 3 * 5120 * 13_824 + 2 * 5120) + 2 * 103_168 * 5120 + 5120,
        60 * 2 * 5120,
    ),
    # 2,795,443,200, as its card says.
    "StableLM-3B-4E1T": (
        _sized("stablelm_epoch", 32, 2560, 32, 32, 50_304, 6912, 4096, architectures=["StableLMEpochForCausalLM"])
        | {"norm_eps": 1e-05, "num_heads": 32, "rope_pct": 0.25, "rope_theta": 10_000, "rotary_scaling_factor": 1.0},
        2_795_443_200,
        32 * 2 * 2560,
    ),
    # 16.8 thousand millions, as its card says.
    "Ling-lite-1.5": (
        _sized("bailing_moe", 28, 2048, 16, 4, 126_464, 1408, 32_768, **_LING, architectures=["BailingMoeForCausalLM"])
        | {"moe_intermediate_size": 1408, "num_experts": 64, "num_shared_experts": 2, "num_experts_per_tok": 6}
        | {"first_k_dense_replace": 0},
        2 * 126_464 * 2048 + 2048 + 28 * (2048 * (2 * 2048 + 2 * 512) + 66 * 3 * 2048 * 1408 + 64 * 2048 + 2 * 2048),
        28 * 2 * 4 * 128,
    ),
    # 16.26; the first layer is dense, queries and keys are normed, and the router is corrected.
    "Ling-mini-2.0": (
        _sized("bailing_moe", 20, 2048, 16, 4, 157_184, 5120, 32_768, **_LING)
        | {"architectures": ["BailingMoeV2ForCausalLM"], "moe_intermediate_size": 512, "num_experts": 256}
        | {"moe_shared_expert_intermediate_size": 512, "num_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 1, "head_dim": 128, "use_qk_norm": True, "moe_router_enable_expert_bias": True},
        2 * 157_184 * 2048
        + 2048
        + 20 * (2048 * (2 * 2048 + 2 * 512) + 2 * 128 + 2 * 2048)
        + 3 * 2048 * 5120
        + 19 * (257 * 3 * 2048 * 512 + 256 * 2048 + 256),
        20 * 2 * 4 * 128,
    ),
    # 456,089,655,296, as its card says; one layer of eight caches tokens.
    "MiniMax-Text-01": (
        _sized("minimax_text_01", 80, 6144, 64, 8, 200_064, 9216, 10_240_000, **_LIGHTNING),
        456_089_655_296,
        10 * 2 * 8 * 128,
    ),
    # 3,836,021,760 are those of Phi-4-mini, which it was made of.
    "Phi-4-multimodal": (
        _sized("phi4mm", 32, 3072, 24, 8, 200_064, 8192, 131_072) | {"tie_word_embeddings": True},
        3_836_021_760,
        32 * 2 * 8 * 128,
    ),
    "DeepSeek-OCR": (
        _sized("deepseek_vl_v2", *[0] * 7, architectures=["DeepseekOCRForCausalLM"], max_position_embeddings=8192)
        | {"language_config": _sized("deepseek_v2", 12, 1280, 10, 10, 129_280, 6848, 8192, **_DEEPSEEK_OCR)},
        2 * 129_280 * 1280
        + 1280
        + 12 * (4 * 1280**2 + 2 * 1280)
        + 3 * 1280 * 6848
        + 11 * (66 * 3 * 1280 * 896 + 64 * 1280),
        12 * 2 * 1280,
    ),
    "TeleChat2-7B": (
        _sized(
            "telechat", 0, 4096, 0, 0, 131_072, 0, 0, n_layer=30, n_head=32, ffn_hidden_size=12_288, seq_length=8192
        ),
        2 * 131_072 * 4096 + 4096 + 30 * (4 * 4096**2 + 3 * 4096 * 12_288 + 4 * 4096),
        30 * 2 * 4096,
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


_SEES = {"vision_model.x.weight": "vision tower", "mlp1.0.weight": "projector"}
_VERSIONS = {"minicpmo": {"qwen2": 2.6, "qwen3": 4.5}, "minicpmv": {"qwen2": 2.6, "qwen3": 4.5, "llama": 4.0}}

#: What is beside the language model in others than InternVL, by the names of its tensors.
BESIDE: dict[str, dict[str, str]] = {
    "deepseek_vl_v2": {"vision.x.weight": "vision tower", "view_seperator": "projector", "sam_model.x": "other parts"},
    "dots_ocr": {"vision_tower.x.weight": "vision tower"},
    "interns1": {"vision_tower.x.weight": "vision tower", "multi_modal_projector.linear_1.weight": "projector"},
    **{key: {"visual.x.weight": "vision tower", "mlp_AR.x.weight": "other parts"} for key in ("Keye", "KeyeVL1_5")},
    "kimi_k3": {"vision_tower.x.weight": "vision tower", "mm_projector.proj.0.weight": "projector"},
    "kimi_vl": {"vision_tower.x.weight": "vision tower", "multi_modal_projector.linear_1.weight": "projector"},
    "minicpmv": {"vpm.x.weight": "vision tower", "resampler.query": "other parts"},
    "minicpmo": {"apm.x.weight": "audio tower", "tts.emb.weight": "other parts"},
    "opencua": {"vision_tower.x.weight": "vision tower"},
    **{key: {"visual_tokenizer.x.weight": "other parts", "vte.weight": "other parts"} for key in ("ovis", "ovis2_5")},
    "phi3_v": {"model.vision_embed_tokens.x.weight": "vision tower"},
    "ultravox": {"audio_tower.x.weight": "audio tower", "multi_modal_projector.linear_1.weight": "projector"},
}


@pytest.mark.parametrize("model_type", REMOTE)
@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wrappers_with_code_of_their_own(tmp_path: Path, model_type: str, data: st.DataObject) -> None:
    """Their language model is what it is alone behind its names, and what is beside it is told by its size."""
    wrapper, beside = WRAPPERS[model_type], BESIDE.get(model_type, _SEES)
    inner = data.draw(st.sampled_from(INNER[model_type]))
    text = {**data.draw(configs(inner)), "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    around = {"model_type": model_type, **SECTIONS[model_type]}
    raw = {**text, **around} if wrapper.flat else {**around, wrapper.section: text}
    if model_type in _VERSIONS:
        raw["version"] = _VERSIONS[model_type][inner]
    tensors = _as_stored(text, wrapper.root)
    others: Tensors = dict.fromkeys(beside, ("BF16", (3,)))
    spec = read_model(write_checkpoint(tmp_path, raw, tensors | others))
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert sum(part.bytes for part in spec.not_planned) == len(beside) * 2 * 3
    found = " ".join(part.what for part in spec.not_planned)
    assert all(what in found for what in beside.values())
    assert cache_bytes_per_token(spec, "fp16") == cache_bytes_per_token(spec_of(text), "fp16")


#: The language model of Kimi K3, of few layers and experts.
_KIMI_K3 = _sized("kimi_linear", 3, 7168, 96, 96, 163_840, 33_792, 64, first_k_dense_replace=1, num_experts=4) | {
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "mla_use_output_gate": True,
    "attn_res_block_size": 12,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {"head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
    | {"kda_layers": [1, 2], "full_attn_layers": [3]},
}


def test_kimi_k3_has_what_its_text_part_says_beside_kimi_linear() -> None:
    """Experts of a narrower stream, gates of all channels, and sums of earlier layers, each by its key.

    As on the hub, where decays of 96 heads are 128 numbers: SGLang and vLLM load the first 96.
    """
    h, heads = 7168, 96 * 128
    delta = 4 * heads * h + 96 * h + 128 * h + heads * 128 + 3 * heads * 4 + heads + 128 + 128 + h * heads
    latent = 1536 * h + 1536 + 96 * 192 * 1536 + (512 + 64) * h + 512 + 96 * 256 * 512 + 2 * heads * h
    experts = 4 * 3 * 3584 * 3072 + 4 * h + 4 + 2 * 3 * h * 3072 + 2 * 3584 * h + 3584
    layers = 2 * delta + latent + 3 * h * 33_792 + 2 * experts + 3 * (2 * h + 4 * h)
    outside = 2 * 163_840 * h + h + 2 * h
    raw = {"model_type": "kimi_k3", "text_config": _KIMI_K3, "vision_config": {}}
    spec = spec_of(raw)
    assert spec.parameter_count == layers + outside
    assert cache_bytes_per_token(spec, "fp16") == 2 * (512 + 64)
    assert state_bytes(spec) == 2 * (4 * 3 * heads * 2 + 96 * 128 * 128 * 4)
    shapes = _shapes(raw)
    start = "language_model.model.layers."
    assert shapes[f"{start}1.block_sparse_moe.experts.3.w1.weight"] == (3072, 3584)
    assert shapes[f"{start}1.block_sparse_moe.routed_expert_norm.weight"] == (3584,)
    assert shapes[f"{start}0.self_attn.g_proj.weight"] == shapes[f"{start}2.self_attn.g_proj.weight"] == (heads, h)
    assert shapes[f"{start}0.self_attn.A_log"] == (128,)
    assert shapes["language_model.model.output_attn_res_proj.weight"] == (1, h)
    assert shapes[f"{start}2.mlp_res_proj.weight"] == (1, h)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_have_the_decays_of_their_heads_and_the_zeros_behind_all(layout: str) -> None:
    """Of 6 heads of 8 elements, whose decays are stored as 8 numbers, the third device has none."""
    section = {"head_dim": 8, "num_heads": 6, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
    small = {"num_hidden_layers": 1, "hidden_size": 48, "vocab_size": 64, "intermediate_size": 16, "num_experts": 0}
    raw = _KIMI_K3 | small | {"linear_attn_config": section | {"kda_layers": [1], "full_attn_layers": []}}
    spec, request = spec_of(raw), request_of(layout=layout)
    heads = [(0, 4, 6, 6) if d.axis is Axis.LINEAR_HEADS else (0, 0, 0, d.size) for d in demands(spec, request, 3).axes]
    found = [each for each in iter_slices(plan_of(spec, request, heads), spec) if each.name.endswith("A_log")]
    assert {each.device: each.ranges for each in found} == {0: ((0, 4), (6, 8)), 1: ((4, 6), (6, 8))}
    wide = spec_of(raw | {"linear_attn_config": raw["linear_attn_config"] | {"num_heads": 8}})
    assert {p.shape for _, p, _ in wide.tensors() if p.name.endswith("A_log")} == {(8,)}


@pytest.mark.parametrize(
    ("key", "value", "gone"),
    [
        ("routed_expert_hidden_size", None, "routed_expert"),
        ("latent_moe_use_norm", False, "routed_expert_norm"),
        ("mla_use_output_gate", False, "2.self_attn.g_proj"),
        ("attn_res_block_size", None, "res_proj"),
        ("linear_attn_config", {**_KIMI_K3["linear_attn_config"], "use_full_rank_gate": False}, "0.self_attn.g_proj"),
    ],
)
def test_without_a_key_kimi_k3_is_kimi_linear(key: str, value: Any, gone: str) -> None:
    """What a key of Kimi K3 stands for is there with it, and not without."""
    assert any(gone in name for name in _shapes(_KIMI_K3))
    assert not any(gone in name for name in _shapes(_KIMI_K3 | {key: value}))


def test_the_language_model_of_ultravox_may_be_elsewhere() -> None:
    """Its own code saves no config of a language model that it names, whose weights are not in its files either."""
    raw = {"model_type": "ultravox", "audio_model_id": "openai/whisper-large-v3-turbo", "hidden_size": 4096}
    with pytest.raises(ModelError, match=r"text_model_id is 'meta-llama/Llama-3\.3-70B-Instruct'") as caught:
        spec_of(raw | {"text_model_id": "meta-llama/Llama-3.3-70B-Instruct"})
    assert caught.value.hint.startswith("plan that model")


def test_names_of_deepseek_ocr(tmp_path: Path) -> None:
    """Its checkpoint has the language model under its own names, that of DeepSeek-VL2 behind ``language.``."""
    raw = PUBLISHED["DeepSeek-OCR"][0]
    text = raw["language_config"] | {"num_hidden_layers": 2, "hidden_size": 20, "vocab_size": 40, "n_routed_experts": 6}
    shapes = _shapes(raw | {"language_config": text})
    assert all(name.startswith("language.") for name in shapes)
    tensors: Tensors = {name.removeprefix("language."): ("BF16", shape) for name, shape in shapes.items()}
    others: Tensors = {"model.sam_model.x.weight": ("BF16", (3,)), "model.projector.layers.weight": ("BF16", (3,))}
    spec = read_model(write_checkpoint(tmp_path, raw | {"language_config": text}, tensors | others))
    assert spec.weight_bytes == tensor_bytes(tensors)


#: Hy4-preview as published, of two layers and small.
_HY4 = _sized("hy_v4", 2, 24, 4, 4, 40, 20, 64, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=8) | {
    "q_lora_rank": 9,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "hc_mult": 2,
    "torch_dtype": "bfloat16",
}


def test_names_of_hy4_as_published(tmp_path: Path) -> None:
    """What mixes streams, in 32 bits, and gates of MLPs have other names in published files than transformers saves.

    These are the names that its ``conversion_mapping.py`` takes apart, and that converters to GGUF map.
    """
    h, streams = 24, 2
    wide: dict[str, tuple[int, ...]] = {
        **{f"hc_{part}_layer.hc_pre.hc_fn": (2 * streams, streams * h) for part in ("attn", "mlp")},
        **{f"hc_{part}_layer.hc_pre.hc_base": (2 * streams,) for part in ("attn", "mlp")},
        **{f"hc_{part}_layer.hc_pre.hc_scale": (2,) for part in ("attn", "mlp")},
        "self_attn.learnable_sink_param": (4,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_a_proj.weight": (9, h),
        "self_attn.q_a_layernorm.weight": (9,),
        "self_attn.q_b_proj.weight": (4 * 10, 9),
        "self_attn.kv_a_proj_with_mqa.weight": (7 + 4, h),
        "self_attn.kv_a_layernorm.weight": (7,),
        "self_attn.kv_b_proj.weight": (4 * (6 + 5), 7),
        "self_attn.o_proj.weight": (h, 4 * 5),
        "self_attn.linear_gate.weight": (4 * 5, h),
        "self_attn.indexer.wq_b.weight": (2 * 8, 9),
        "self_attn.indexer.wk.weight": (8, h),
        "self_attn.indexer.k_norm.weight": (8,),
        "self_attn.indexer.k_norm.bias": (8,),
        "self_attn.indexer.weights_proj.weight": (2, h),
    }
    mlp = {f"{name}_proj.weight": (20, h) for name in ("gate", "up")} | {"down_proj.weight": (h, 20)}
    shared = {f"{name}_proj.weight": (8, h) for name in ("gate", "up")} | {"down_proj.weight": (h, 8)}
    tensors: Tensors = {
        **dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (40, h))),
        "model.norm.weight": ("BF16", (h,)),
        "model.hc_head.hc_head_fn": ("F32", (streams, streams * h)),
        "model.hc_head.hc_head_base": ("F32", (streams,)),
        "model.hc_head.hc_head_scale": ("F32", (1,)),
        **{f"model.layers.{i}.{name}": ("F32", shape) for i in range(2) for name, shape in wide.items()},
        **{f"model.layers.{i}.{name}": ("BF16", shape) for i in range(2) for name, shape in layer.items()},
        **{f"model.layers.0.mlp.{name}": ("BF16", shape) for name, shape in mlp.items()},
        **{f"model.layers.1.mlp.shared_experts.{name}": ("BF16", shape) for name, shape in shared.items()},
        "model.layers.1.mlp.gate.weight": ("BF16", (3, h)),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (3,)),
        "model.layers.1.mlp.experts.gate_up_proj": ("BF16", (3, 2 * 8, h)),
        "model.layers.1.mlp.experts.down_proj": ("BF16", (3, h, 8)),
    }
    spec = read_model(write_checkpoint(tmp_path, _HY4, tensors))
    assert spec.weight_bytes == spec_of(_HY4).weight_bytes == tensor_bytes(tensors)
    assert [tuple(block.layers) for block in spec.blocks] == [(0,), (1,)]


def test_adapters_of_phi4_are_told(tmp_path: Path) -> None:
    """Matrices are those of Phi-4-mini behind another name; those of adapters and towers are told, not planned."""
    raw = _sized("phi4mm", 1, 16, 2, 1, 40, 24, 64, vision_lora={"r": 4}, speech_lora={"r": 4}, torch_dtype="bfloat16")
    shapes = _shapes(raw)
    tensors: Tensors = {
        re.sub(r"(_proj)\.weight", r"\1.base_layer.weight", name): ("BF16", shape) for name, shape in shapes.items()
    }
    assert sum("base_layer" in name for name in tensors) == 4
    others: Tensors = {
        "model.layers.0.mlp.down_proj.lora_A.vision.weight": ("BF16", (4, 24)),
        "model.embed_tokens_extend.image_embed.img_processor.x.weight": ("BF16", (3,)),
        "model.embed_tokens_extend.audio_embed.encoder.x.weight": ("BF16", (5,)),
    }
    spec = read_model(write_checkpoint(tmp_path, raw, tensors | others))
    assert spec.weight_bytes == tensor_bytes(tensors)
    beside = {part.what: part.bytes for part in spec.not_planned}
    assert beside == {"adapters": 192, "vision tower": 6, "audio tower": 10}


def test_telechat_has_keys_and_values_of_a_head_side_by_side() -> None:
    """A cut takes whole heads of both; matrices that lead back have biases."""
    spec = spec_of(PUBLISHED["TeleChat2-7B"][0])
    found = {p.name.split(".", 3)[-1]: p for p in spec.blocks[0].parameters}
    (joined,) = found["self_attention.key_value.weight"].dims[0]
    assert (joined.axis, joined.length) == (Axis.KV_HEADS, 2 * 4096)
    biased = {name for name in found if name.endswith("bias")}
    assert biased == {"self_attention.dense.bias", "mlp.down_proj.bias"}


def test_lightning_attention_keeps_a_state_of_16_bits() -> None:
    """Of each head a matrix of its size by its size, in 70 layers, and no convolution."""
    assert state_bytes(spec_of(PUBLISHED["MiniMax-Text-01"][0])) == 70 * 64 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "minicpmv", "version": 9.9}, "version is '9.9', whose language model is not known"),
        ({"model_type": "minicpmv", "hidden_size": 2304, "query_num": 64}, "key of MiniCPM-V 2"),
        ({"model_type": "chatglm", "inner_hidden_size": 16_384}, "the first ChatGLM"),
        ({"model_type": "chatglm", "rmsnorm": False}, "rmsnorm is false"),
        (_sized("minimax_text_01", 1, 64, 4, 2, 9, 7, 8, attn_type_list=[2]), "attn_type_list has 2, known are 0"),
        (_sized("minimax_text_01", 1, 64, 4, 2, 9, 7, 8), "attn_type_list is missing"),
        (_sized("minimax_m1", 1, 64, 4, 2, 9, 7, 8, shared_intermediate_size=8), "shared_intermediate_size is 8"),
        (
            _sized("qwen", 1, 4096, 32, 0, 9, 7, 0),
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
