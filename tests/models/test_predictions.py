"""Prediction layers of each family: published numbers of parameters, and names and shapes as engines load them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import tpplan
from tests.checkpoints import Tensors, tensor_bytes, write_checkpoint
from tests.family_models import hub_config
from tests.later import transformers
from tests.published import MODELS, example, mla, shape
from tpplan.core.axes import Axis
from tpplan.errors import ModelError
from tpplan.models.families import LANGUAGE_MODELS
from tpplan.models.families.predictions import PREDICTIONS
from tpplan.models.reader import read_prediction_layers
from tpplan.planner.draft import reserve_for_draft, split_draft
from tpplan.planner.options import Options
from tpplan.planner.plan import plan_request

if TYPE_CHECKING:
    from pathlib import Path

_ONE = {"num_nextn_predict_layers": 1}
#: Kinds of the 88 layers of Nemotron 3 Super.
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"

#: The config.json of models as far as it tells of shapes; how many parameters the hub counts in their files; and how
#: many of these are copies of the embedding and the output matrix, or further parts.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "GLM-4.5": (MODELS["GLM-4.6"] | _ONE, 358_337_791_296, 2 * 151_552 * 5120),
    "GLM-4.5-Air": (MODELS["GLM-4.5-Air"] | _ONE, 110_468_824_832, 2 * 151_552 * 4096),
    "GLM-5": (
        {"model_type": "glm_moe_dsa", "index_n_heads": 32, "index_head_dim": 128, **_ONE}
        | shape(vocab=154_880, hidden=6144, dense=12_288, expert=2048, layers=78, q=64, top=8, first=3, shared=1)
        | shape(routed=256)
        | mla(2048, 192, 256),
        753_864_139_008,
        0,
    ),
    "DeepSeek-V3.2": (MODELS["DeepSeek-V3.2"] | _ONE, 685_355_329_792, 2 * 129_280 * 7168),
    "DeepSeek-V4-Flash": (
        {key: value for key, value in MODELS["DeepSeek-V4-Flash"].items() if key != "expert_dtype"} | _ONE,
        290_944_616_402,
        0,
    ),
    "Hy3": (
        {"model_type": "hy_v3", "num_experts": 192, "num_shared_experts": 1, **_ONE}
        | shape(vocab=120_832, hidden=4096, dense=13_312, expert=1536, layers=80, q=64, kv=8, head_dim=128)
        | shape(top=8, first=1, context=262_144),
        298_786_155_776,
        0,
    ),
    "LongCat-Flash": (
        {"model_type": "longcat_flash", "num_layers": 28, "ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048}
        | {"zero_expert_num": 256, "moe_topk": 12}
        | shape(vocab=131_072, hidden=6144, q=64, routed=512)
        | mla(1536, 128, 128),
        561_862_880_256,
        131_072 * 6144,
    ),
    "Qwen3-Next-80B-A3B": (example("Qwen3-Next-80B-A3B"), 81_324_862_720, 0),
    # Each of its three layers has an output matrix of its own, and an embedding is in no layer.
    "Step-3.5-Flash": (
        {"model_type": "step3p5", "num_attention_groups": 8, "moe_num_experts": 288, "moe_top_k": 8}
        | {"layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12, "num_nextn_predict_layers": 3}
        | {"share_expert_dim": 1280, "sliding_window": 512, "attention_other_setting": {"num_attention_heads": 96}}
        | shape(vocab=128_896, hidden=4096, dense=11_264, expert=1280, layers=45, q=64, head_dim=128, context=262_144),
        199_384_301_376,
        3 * 128_896 * 4096,
    ),
    # Without the corrections of its routers, which are in 32 bits: of 512 experts in 41 layers.
    "Nemotron-3-Super": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": _SUPER, "mtp_hybrid_override_pattern": "*E", **_ONE}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
        | {"moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376}
        | shape(vocab=131_072, hidden=4096, dense=2688, expert=2688, q=32, kv=2, head_dim=128, top=22, routed=512)
        | shape(context=262_144),
        123_611_012_096,
        -41 * 512,
    ),
}


def alone(config: dict[str, Any], tmp_path: Path) -> Path:
    """Return a config.json alone."""
    path = tmp_path / "alone" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str, tmp_path: Path) -> None:
    """The hub counts those of the model, of its prediction layers, and what these have once more."""
    config, published, copies = PUBLISHED[name]
    path = alone(config, tmp_path)
    model, layers = tpplan.read_model(path), read_prediction_layers(path)
    assert model.parameter_count + layers.parameter_count + copies == published


def test_ling_3_flash_as_published(tmp_path: Path) -> None:
    """Its config is the default of transformers' class."""
    config = {key: value for key, value in hub_config({"model_type": "bailing_hybrid"}).to_dict().items() if value}
    path = alone(config | {"num_nextn_predict_layers": 1, "architectures": None}, tmp_path)
    together = tpplan.read_model(path).parameter_count + read_prediction_layers(path).parameter_count
    assert together == 127_486_405_600


def test_a_config_that_tells_of_layers_that_were_not_published(tmp_path: Path) -> None:
    """MiniMax-M2's files have as many parameters as the model without the three that its config.json tells of."""
    path = alone(MODELS["MiniMax-M2"] | {"num_mtp_modules": 3}, tmp_path)
    assert tpplan.read_model(path).parameter_count == 228_689_764_864
    with pytest.raises(ModelError, match="no published files of minimax_m2 have the prediction layers") as caught:
        read_prediction_layers(path)
    assert "leave out --mtp" in caught.value.hint


Shapes = dict[str, tuple[int, ...]]

H, WIDE, EXPERT, SHARED, N = 64, 96, 32, 48, 2
_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
_MIXED: dict[str, Any] = {"num_experts": N, "num_experts_per_tok": 1, "moe_intermediate_size": EXPERT}
_NORMS: Shapes = {f"{of}_layernorm.weight": (H,) for of in ("input", "post_attention")}
_HEADS: Shapes = {f"self_attn.{of}_norm.weight": (16,) for of in ("q", "k")}
_ATTENTION: Shapes = {
    **{f"self_attn.{of}_proj.weight": (64, H) for of in "qo"},
    **{f"self_attn.{of}_proj.weight": (32, H) for of in "kv"},
}
_JOIN: Shapes = {"enorm.weight": (H,), "hnorm.weight": (H,), "eh_proj.weight": (H, 2 * H)}
_FUSED: Shapes = {
    "mtp.fc.weight": (H, 2 * H),
    **{f"mtp.{name}.weight": (H,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
}
_LATENT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
_LATENT |= {"v_head_dim": 16, "head_dim": None, "num_key_value_heads": None}


def latent(name: str = "self_attn", q_rank: int = 24, out: str = "o_proj") -> Shapes:
    """Return the shapes of latent attention."""
    query = {"q_a_proj": (q_rank, H), "q_a_layernorm": (q_rank,), "q_b_proj": (4 * 20, q_rank)}
    shapes: Shapes = {
        **(query if q_rank else {"q_proj": (4 * 20, H)}),
        "kv_a_proj_with_mqa": (48, H),
        "kv_a_layernorm": (40,),
        "kv_b_proj": (4 * (12 + 16), 40),
        out: (H, 4 * 16),
    }
    return {f"{name}.{key}.weight": shape for key, shape in shapes.items()}


def gated(name: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    """Return the shapes of a gated MLP."""
    gate, up, down = (f"{name}.{own}.weight" for own in names)
    return {gate: (width, H), up: (width, H), down: (H, width)}


def mixture(name: str, *shared: str, gate: str = "gate") -> Shapes:
    """Return the shapes of a router, two experts and shared ones."""
    experts = (gated(f"{name}.{part}", EXPERT) for part in ("experts.0", "experts.1", *shared))
    return {f"{name}.{gate}.weight": (N, H), **{key: shape for each in experts for key, shape in each.items()}}


def at(start: str, *shapes: Shapes) -> Shapes:
    """Return shapes under names that start so."""
    return {f"{start}{name}": shape for each in shapes for name, shape in each.items()}


_NUMBERED = ("w1", "w3", "w2")
_INDEX: Shapes = {
    "self_attn.index_q_proj.weight": (32, H),
    "self_attn.index_k_proj.weight": (16, H),
    **{f"self_attn.index_{of}_norm.weight": (16,) for of in "qk"},
}
_V4: Shapes = {
    **dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight", "attn_norm.weight", "ffn_norm.weight"), (H,)),
    **dict.fromkeys(("e_proj.weight", "h_proj.weight"), (H, H)),
    "hc_head_fn": (4, 4 * H),
    "hc_head_base": (4,),
    "hc_head_scale": (1,),
    **{f"hc_{of}_fn": (24, 4 * H) for of in ("attn", "ffn")},
    **{f"hc_{of}_base": (24,) for of in ("attn", "ffn")},
    **{f"hc_{of}_scale": (3,) for of in ("attn", "ffn")},
    "attn.wq_a.weight": (24, H),
    "attn.q_norm.weight": (24,),
    "attn.wq_b.weight": (4 * 16, 24),
    "attn.wkv.weight": (16, H),
    "attn.kv_norm.weight": (16,),
    "attn.attn_sink": (4,),
    "attn.wo_a.weight": (2 * 8, 2 * 16),
    "attn.wo_b.weight": (H, 2 * 8),
    "ffn.gate.weight": (N, H),
    "ffn.gate.bias": (N,),
    **gated("ffn.experts.0", EXPERT, _NUMBERED),
    **gated("ffn.experts.1", EXPERT, _NUMBERED),
    **gated("ffn.shared_experts", EXPERT, _NUMBERED),
}

#: By the type of the language model: what a config.json has beside the sizes, and the tensors that engines load.
LOADED: dict[str, tuple[dict[str, Any], Shapes]] = {
    "bailing_moe": (
        _MIXED | {"num_shared_experts": 1, "use_qk_norm": True, "moe_router_enable_expert_bias": True},
        at(
            "model.layers.2.",
            _JOIN,
            _NORMS,
            {"final_layernorm.weight": (H,), "attention.query_key_value.weight": (128, H)},
            {"attention.dense.weight": (H, 64), "mlp.gate.expert_bias": (N,)},
            {f"attention.{of}_layernorm.weight": (16,) for of in ("query", "key")},
            mixture("mlp", "shared_experts"),
        ),
    ),
    "bailing_hybrid": (
        _MIXED | _LATENT | {"q_lora_rank": None, "head_dim": 16, "layer_group_size": 2, "num_shared_experts": 1},
        at(
            "model.layers.2.",
            _JOIN,
            _NORMS,
            {"final_layernorm.weight": (H,), "attention.g_proj.weight": (4, H), "mlp.gate.expert_bias": (N,)},
            latent("attention", 0, "dense"),
            mixture("mlp", "shared_experts"),
        ),
    ),
    "deepseek_v4": (
        _MIXED
        | {"q_lora_rank": 24, "o_lora_rank": 8, "o_groups": 2, "hc_mult": 4, "num_key_value_heads": 1}
        | {"index_n_heads": 2, "index_head_dim": 16, "compress_ratios": [0, 4, 0], "sliding_window": 8},
        at("mtp.0.", _V4),
    ),
    "exaone_moe": (
        _MIXED | {"num_shared_experts": 1, "mtp_layer_types": ["sliding_attention"], "sliding_window": 8},
        {**_FUSED, **at("mtp.layers.0.", _NORMS, _ATTENTION, _HEADS, gated("mlp", WIDE))},
    ),
    "longcat_flash": (
        _MIXED | _LATENT | {"num_hidden_layers": None, "num_layers": 2, "zero_expert_num": 2},
        {
            "model.mtp.norm.weight": (H,),
            **at(
                "model.mtp.layers.0.",
                {"enorm.m.weight": (H,), "hnorm.m.weight": (H,), "eh_proj.weight": (H, 2 * H)},
                _NORMS,
                latent(),
                gated("transformer_layer.mlp", WIDE),
            ),
        },
    ),
    "mellum": (_MIXED, {**_FUSED, **at("mtp.layers.0.", _NORMS, _ATTENTION, _HEADS, mixture("mlp"))}),
    # All three have windows, whose layers have KV heads of their own, and no experts.
    "mimo_v2_flash": (
        _MIXED
        | {"num_nextn_predict_layers": None, "v_head_dim": 8, "swa_v_head_dim": 8, "swa_num_key_value_heads": 4}
        | {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "sliding_window_size": 8},
        {
            name: shape
            for i in range(3)
            for name, shape in at(
                f"model.mtp.layers.{i}.",
                _JOIN,
                {"input_layernorm.weight": (H,), "pre_mlp_layernorm.weight": (H,), "final_layernorm.weight": (H,)},
                {"self_attn.q_proj.weight": (64, H), "self_attn.k_proj.weight": (64, H)},
                {"self_attn.v_proj.weight": (32, H), "self_attn.o_proj.weight": (H, 32)},
                {"self_attn.attention_sink_bias": (4,)},
                gated("mlp", WIDE),
            ).items()
        },
    ),
    "nemotron_h": (
        {
            "hybrid_override_pattern": "M-",
            "mtp_hybrid_override_pattern": "*E",
            "num_hidden_layers": None,
            "n_routed_experts": N,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": EXPERT,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": SHARED,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
        },
        {
            **at("mtp.layers.0.", _JOIN, {"norm.weight": (H,)}),
            **{name.replace("self_attn", "mixer"): shape for name, shape in at("mtp.layers.0.", _ATTENTION).items()},
            **at(
                "mtp.layers.1.",
                {"norm.weight": (H,), "final_layernorm.weight": (H,), "mixer.gate.weight": (N, H)},
                {"mixer.gate.e_score_correction_bias": (N,)},
                {f"mixer.experts.{i}.up_proj.weight": (EXPERT, 24) for i in range(N)},
                {f"mixer.experts.{i}.down_proj.weight": (24, EXPERT) for i in range(N)},
                {"mixer.fc1_latent_proj.weight": (24, H), "mixer.fc2_latent_proj.weight": (H, 24)},
                {"mixer.shared_experts.up_proj.weight": (SHARED, H)},
                {"mixer.shared_experts.down_proj.weight": (H, SHARED)},
            ),
        },
    ),
    "glm4_moe_lite": (
        _MIXED | _LATENT | {"n_shared_experts": 1},
        at(
            "model.layers.2.",
            _JOIN,
            _NORMS,
            {"shared_head.norm.weight": (H,), "mlp.gate.e_score_correction_bias": (N,)},
            latent(),
            mixture("mlp", "shared_experts"),
        ),
    ),
    # Queries come with gates of their heads.
    "qwen3_5_text": (
        {"num_nextn_predict_layers": None, "mtp_num_hidden_layers": 1},
        {
            **_FUSED,
            **at("mtp.layers.0.", _NORMS, _HEADS, _ATTENTION, gated("mlp", WIDE)),
            "mtp.layers.0.self_attn.q_proj.weight": (128, H),
        },
    ),
    "qwen3_5_moe_text": (
        _MIXED | {"num_nextn_predict_layers": None, "shared_expert_intermediate_size": SHARED},
        {
            **_FUSED,
            **at("mtp.layers.0.", _NORMS, _HEADS, _ATTENTION, mixture("mlp"), gated("mlp.shared_expert", SHARED)),
            "mtp.layers.0.self_attn.q_proj.weight": (128, H),
            "mtp.layers.0.mlp.shared_expert_gate.weight": (1, H),
        },
    ),
    # Behind the model's types are those of the prediction layers, of which the first has more query heads.
    "step3p5": (
        {
            **_MIXED,
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
            "sliding_window": 8,
            "attention_other_setting": {"num_attention_heads": 6},
            "moe_layers_enum": "1",
        },
        at(
            "model.layers.2.",
            _JOIN,
            _NORMS,
            _HEADS,
            {"transformer.shared_head.norm.weight": (H,), "self_attn.g_proj.weight": (6, H)},
            {"self_attn.q_proj.weight": (96, H), "self_attn.o_proj.weight": (H, 96)},
            {f"self_attn.{of}_proj.weight": (32, H) for of in "kv"},
            gated("mlp", WIDE),
        ),
    ),
}
#: The same of language models in others, by the type of these.
WRAPPED: dict[str, tuple[dict[str, Any], Shapes]] = {
    "exaone4_5": (
        {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2},
        {
            **_FUSED,
            **at(
                "mtp.layers.0.",
                {f"post_{of}_layernorm.weight": (H,) for of in ("attention", "feedforward")},
                _ATTENTION,
                _HEADS,
                gated("mlp", WIDE),
            ),
        },
    ),
    "glm_ocr": (
        {"model_type": "glm_ocr_text"},
        at(
            "model.language_model.layers.2.",
            _JOIN,
            _NORMS,
            {"shared_head.norm.weight": (H,), "post_self_attn_layernorm.weight": (H,)},
            {"post_mlp_layernorm.weight": (H,), "mlp.gate_up_proj.weight": (2 * WIDE, H)},
            {"mlp.down_proj.weight": (H, WIDE)},
            _ATTENTION,
        ),
    ),
    "minimax_m3_vl": (
        {
            "model_type": "minimax_m3_vl_text",
            "num_local_experts": N,
            "num_experts_per_tok": 1,
            "intermediate_size": EXPERT,
            "dense_intermediate_size": WIDE,
            "shared_intermediate_size": SHARED,
            "layer_types": ["full_attention"] * 2,
            "mlp_layer_types": ["dense"] * 2,
            "num_mtp_modules": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "num_nextn_predict_layers": None,
        },
        {
            **at("language_model.model.mtp.layers.0.", _JOIN, {"final_layernorm.weight": (H,)}),
            **at(
                "language_model.model.mtp.layers.0.transformer_layer.",
                _NORMS,
                _ATTENTION,
                _HEADS,
                _INDEX,
                {"block_sparse_moe.gate.weight": (N, H), "block_sparse_moe.e_score_correction_bias": (N,)},
                gated("block_sparse_moe.experts.0", EXPERT, _NUMBERED),
                gated("block_sparse_moe.experts.1", EXPERT, _NUMBERED),
                gated("block_sparse_moe.shared_experts", SHARED),
            ),
        },
    ),
}


def config_of(model_type: str) -> dict[str, Any]:
    """Return a small config.json."""
    one = {"num_nextn_predict_layers": 1}
    if model_type in WRAPPED:
        return {"model_type": model_type, "text_config": {**_SIZES, **one, **WRAPPED[model_type][0]}}
    return {"model_type": model_type, **_SIZES, **one, **LOADED.get(model_type, (_MIXED, {}))[0]}


def stored(shapes: Shapes) -> Tensors:
    """Return tensors in 16 bits, but corrections of routers and what mixes streams."""
    wide = ("correction_bias", "expert_bias", "gate.bias", "attn_sink", "_fn", "_base", "_scale")
    return {name: ("F32" if name.endswith(wide) else "BF16", shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("model_type", [*LOADED, *WRAPPED])
def test_names_and_shapes_are_those_that_engines_load(model_type: str, tmp_path: Path) -> None:
    """Files with these tensors, and copies of embedding and output matrix, have the same bytes as a config alone."""
    config = config_of(model_type)
    own = stored({**LOADED, **WRAPPED}[model_type][1])
    other: Tensors = {"model.norm.weight": ("BF16", (H,)), "model.layers.1.input_layernorm.weight": ("BF16", (H,))}
    first = next(iter(own))
    start = first[: first.index("layers.")] if "layers." in first else "mtp."
    copies: Tensors = {f"{start}embed_tokens.weight": ("BF16", (96, H))}
    if start.endswith("model.") or model_type == "glm_ocr":
        start = f"{start}layers.2."
        copies = {f"{start}{name}.weight": ("BF16", (96, H)) for name in ("embed_tokens", "shared_head.head")}
    if model_type == "step3p5":
        copies = {f"{start}transformer.shared_head.output.weight": ("BF16", (96, H))}
    if model_type == "deepseek_v4":
        copies = {f"mtp.0.{name}.weight": ("BF16", (96, H)) for name in ("emb.tok_emb", "head")}
    directory = write_checkpoint(tmp_path / model_type, config, other | own | copies)
    layers = read_prediction_layers(directory)
    assert layers.weight_bytes == tensor_bytes(own)
    assert read_prediction_layers(alone(config, tmp_path)).weight_bytes == tensor_bytes(own)
    dropped = next(name for name in own if name.endswith("norm.weight"))
    del own[dropped]
    write_checkpoint(directory, config, other | own | copies)
    with pytest.raises(ModelError, match="lacks"):
        read_prediction_layers(directory)


@pytest.mark.parametrize("model_type", [*LOADED, *WRAPPED])
def test_plans_of_both_ways(model_type: str, tmp_path: Path) -> None:
    """Every device leaves room for all of them, or for what a plan of them takes there."""
    path = alone(config_of(model_type), tmp_path)
    model, layers, devices = tpplan.read_model(path), read_prediction_layers(path), tpplan.parse_devices("4GiB,2GiB")
    asked = Options(context=64).request(model)
    request, plan = split_draft(asked, layers, model, devices)
    assert sum(entry.weights_bytes for entry in plan.memory) >= layers.weight_bytes
    for times, each in ((1, request), (2, reserve_for_draft(asked, layers, model, devices))):
        memory = plan_request(model, devices, each).memory
        left = sum(device.budget_bytes for device in devices) - sum(e.used_bytes + e.free_bytes for e in memory)
        assert left >= times * layers.weight_bytes


def test_every_family_is_tested() -> None:
    """Each of the tables is one of a language model, and compared with something of others."""
    elsewhere = {"deepseek_v3", "ernie4_5_moe", "mimo"}  # in tests/planner/test_draft.py
    wrapped = {config["model_type"] for config, _ in WRAPPED.values()}
    published = {config["model_type"] for config, *_ in PUBLISHED.values()}
    assert {*LOADED, *wrapped, *published, *elsewhere} == PREDICTIONS.keys()
    assert PREDICTIONS.keys() <= LANGUAGE_MODELS.keys()


def test_windows_of_prediction_layers(tmp_path: Path) -> None:
    """They cache what their own attention sees: a window, or a text's compressed tokens."""
    windows = {
        name: {block.attention and block.attention.window for block in layers.blocks}
        for name in ("mimo_v2_flash", "step3p5", "exaone_moe", "mellum", "deepseek_v4", "glm4_moe")
        for layers in [read_prediction_layers(alone(config_of(name), tmp_path))]
    }
    assert windows == {
        "mimo_v2_flash": {9},  # a key counts the tokens before the query
        "step3p5": {8},
        "exaone_moe": {8},
        "mellum": {1024},
        "deepseek_v4": {8},
        "glm4_moe": {0},
    }


@pytest.mark.parametrize("count", [1, 2])
def test_files_say_how_many_there_are_where_a_config_does_not(count: int, tmp_path: Path) -> None:
    """MiMo-V2's config.json counts none of its layers."""
    own = {name: shape for name, shape in LOADED["mimo_v2_flash"][1].items() if int(name.split(".")[3]) < count}
    directory = write_checkpoint(tmp_path / "mimo", config_of("mimo_v2_flash"), stored(own))
    assert read_prediction_layers(directory).layer_count == count
    write_checkpoint(directory, config_of("mimo_v2_flash"), {"model.norm.weight": ("BF16", (H,))})
    with pytest.raises(ModelError, match="the files have no prediction layers\n"):
        read_prediction_layers(directory)


def test_layers_that_a_prediction_needs_together(tmp_path: Path) -> None:
    """Nemotron's are of the kinds that its config lists or has letters for; one has attention, the other experts."""
    config = config_of("nemotron_h")
    listed = {key: value for key, value in config.items() if key != "mtp_hybrid_override_pattern"}
    for told in ({}, {"mtp_layers_block_type": ["attention", "moe"]}):
        layers = read_prediction_layers(alone(listed | told, tmp_path))
        assert [(block.layers, bool(block.attention), block.experts) for block in layers.blocks] == [
            ((0,), True, 0),
            ((1,), False, N),
        ]
    with pytest.raises(ModelError, match="num_nextn_predict_layers is 2, outside 0 to 1"):
        read_prediction_layers(alone(config | {"num_nextn_predict_layers": 2}, tmp_path))
    with pytest.raises(ModelError, match="has 'X'"):
        read_prediction_layers(alone(config | {"mtp_hybrid_override_pattern": "*X"}, tmp_path))


@pytest.mark.parametrize("name", ["re:.*mtp.*", "mtp.layers.0.mlp.gate_proj"])
def test_modules_that_are_not_quantised_are_found_by_their_names(name: str, tmp_path: Path) -> None:
    """A config.json names them as they are in files."""
    config = config_of("exaone_moe")
    whole = read_prediction_layers(alone(config, tmp_path)).weight_bytes
    told: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": [name]}
    told["config_groups"] = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
        }
    }
    found = read_prediction_layers(alone(config | {"quantization_config": told}, tmp_path)).weight_bytes
    matrices = sum(
        shape[0] * shape[1] for key, shape in LOADED["exaone_moe"][1].items() if key.endswith("_proj.weight")
    )
    spared = matrices if name != "mtp.layers.0.mlp.gate_proj" else WIDE * H
    scales = 7 - (7 if spared == matrices else 1)
    assert found == whole - (matrices - spared) + 2 * scales


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3", "mellum"])
def test_transformers_loads_the_names(model_type: str, tmp_path: Path) -> None:
    """Its model of prediction layers finds all that it has under these names, and its shapes are the same."""
    sizes = {key: value for key, value in _SIZES.items() if key != "torch_dtype"} | {"num_experts_per_tok": 1}
    sizes |= {"moe_intermediate_size": EXPERT, "num_nextn_predict_layers": 1, "pad_token_id": 0}
    sizes |= {"num_experts": N} if model_type == "mellum" else {"n_routed_experts": N, "n_shared_experts": 1}
    if model_type == "deepseek_v3":
        sizes |= _LATENT | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
        del sizes["head_dim"]
    config = hub_config({"model_type": model_type} | sizes)
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layers = read_prediction_layers(tmp_path / "config.json")
    start = "mtp." if model_type == "mellum" else "model.layers.2."
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter, _ in layers.tensors():
        own = name.replace("{layer}", "0")
        own = start + (own if model_type == "mellum" else own.removeprefix("layers.0."))
        for expert in range(parameter.copies):
            tensors[own.replace("{expert}", str(expert))] = torch.zeros(parameter.shape)
    save_file(tensors, tmp_path / "model.safetensors")
    model.config.name_or_path = str(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [rf"^{start}"]  # those of published numbers of layers
    loaded = transformers.modeling_layers.MtpModel.from_pretrained(model)
    theirs = {name: p for name, p in loaded.named_parameters() if name.startswith("layers.")}
    biases = {name: p for name, p in loaded.named_buffers() if "e_score_correction_bias" in name}
    assert sum(p.numel() for p in (*theirs.values(), *biases.values())) == layers.parameter_count
    assert all(not p.any() for p in theirs.values())
    assert {p.axis for b in layers.blocks for q in b.parameters for dim in q.dims for p in dim} >= {Axis.KV_HEADS}
