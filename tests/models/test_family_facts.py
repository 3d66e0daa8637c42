"""What is publicly known of models, against what their configs are read as."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import published
from tests.family_models import MISTRAL, example, hub_config, parameters_of, spec_of
from tpplan.core.axes import Axis

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec


def cache_elements(spec: ModelSpec) -> int:
    """Return the elements that all layers cache for one token."""
    attentions = [(block.attention, len(block.layers)) for block in spec.blocks]
    return sum(n * (a.latent_dim or a.kv_heads * (a.head_dim + a.v_head_dim)) for a, n in attentions if a)


@pytest.mark.parametrize(
    ("name", "parameters", "cache_bytes", "context"),
    [
        ("Llama-3.1-8B", 8_030_261_248, 131_072, 131_072),
        ("Llama-3.1-70B", 70_553_706_496, 327_680, 131_072),
        ("Qwen2.5-7B", 7_615_616_512, 57_344, 131_072),
        ("Mixtral-8x7B", 46_702_792_704, 131_072, 32_768),
        ("Qwen3-Next-80B-A3B", 79_674_391_296, 24_576, 262_144),
        ("DeepSeek-V3", 671_026_419_200, 70_272, 163_840),
    ],
)
def test_well_known_models(name: str, parameters: int, cache_bytes: int, context: int) -> None:
    """Published parameter counts, and the measured cache bytes per token at 16 bits."""
    spec = example(name)
    assert spec.parameter_count == parameters
    assert 2 * cache_elements(spec) == cache_bytes
    assert spec.max_context == context
    in_32_bits = 58 * 256 if name == "DeepSeek-V3" else 0  # the biases of its routers
    assert spec.weight_bytes == 2 * parameters + 2 * in_32_bits
    assert (spec.dtype, spec.weight_format, spec.tied_embeddings) == ("bfloat16", "BF16", False)


FALCON_7B = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}


@pytest.mark.parametrize(
    ("config", "kv_heads", "parameters"), [(FALCON_7B, 1, 6_921_720_704), (FALCON_40B, 8, 41_303_293_952)]
)
def test_falcon_kv_heads_are_not_what_the_config_says(config: dict[str, Any], kv_heads: int, parameters: int) -> None:
    """falcon-7b has one KV head though its config says 71; falcon-40b has 8."""
    spec = spec_of(config)
    (block,) = spec.blocks
    assert block.attention
    assert block.attention.kv_heads == kv_heads
    assert spec.parameter_count == parameters
    assert spec.max_context == 2048


#: Parameters of models as they are published, and the sizes in their configs: vocabulary, positions, width, layers,
#: query heads and KV heads, MLP.
PUBLISHED: dict[str, tuple[int, tuple[int | None, ...]]] = {
    "gptj": (6_050_882_784, (50_400, 2048, 4096, 28, 16, None, None)),
    "bloom": (176_247_271_424, (250_880, None, 14_336, 70, 112, None, None)),
    "opt": (125_239_296, (50_272, 2048, 768, 12, 12, None, 3072)),
    "gpt_bigcode": (15_517_456_384, (49_152, 8192, 6144, 40, 48, None, 24_576)),  # StarCoder
    "seed_oss": (36_151_104_512, (155_136, 524_288, 5120, 64, 80, 8, 27_648)),
    "glm": (9_399_951_360, (151_552, 131_072, 4096, 40, 32, 2, 13_696)),  # GLM-4-9B
    "olmo3": (7_298_011_136, (100_278, 65_536, 4096, 32, 32, 32, 11_008)),
    "qwen2_5_vl": (7_615_616_512, (152_064, 128_000, 3584, 28, 28, 4, 18_944)),  # without what reads images
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_parameter_counts(model_type: str) -> None:
    """Models of families that came later, and old ones whose configs leave sizes to their class."""
    parameters, sizes = PUBLISHED[model_type]
    keys = (
        *("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    )
    given = {key: size for key, size in zip(keys, sizes, strict=True) if size}
    assert spec_of({"model_type": model_type, **given}).parameter_count == parameters


def test_layers_of_exaone_without_windows() -> None:
    """EXAONE-4.0-32B slides in three of four layers, the 1.2B in none; the former's pattern is no number."""
    keys = MISTRAL | {"model_type": "exaone4", "num_key_value_heads": 8, "num_hidden_layers": 4}
    types = ["sliding_attention"] * 3 + ["full_attention"]
    large, small = (
        spec_of(keys | {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "layer_types": types}),
        spec_of(keys | {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    )
    assert [(b.layers, b.attention and b.attention.window) for b in large.blocks] == [((0, 1, 2), 4096), ((3,), 0)]
    assert [(b.layers, b.attention and b.attention.window) for b in small.blocks] == [((0, 1, 2, 3), 0)]


@pytest.mark.parametrize(
    ("extra", "kv_heads", "window"),
    [
        ({}, 8, 4096),
        ({"num_key_value_heads": None, "sliding_window": None}, 32, 0),
        ({"num_key_value_heads": 4, "sliding_window": 64}, 4, 64),
    ],
)
def test_mistral_tells_missing_from_null(extra: dict[str, Any], kv_heads: int, window: int) -> None:
    """Without num_key_value_heads Mistral has 8, with null one for each query head; the same goes for the window."""
    (block,) = spec_of(MISTRAL | extra).blocks
    assert block.attention
    assert (block.attention.kv_heads, block.attention.window) == (kv_heads, window)


def test_gpt_oss_is_not_a_multiple_of_128_and_alternates() -> None:
    """gpt-oss-20b: 2880 wide, even layers see 128 tokens, all experts in one tensor with gate and up interleaved."""
    config = published.example("gpt-oss-20b") | {"layer_types": None}
    config["sliding_window_pattern"] = 3  # which transformers does not read here
    spec = spec_of(config)
    sliding, full = spec.blocks
    assert sliding.layers == tuple(range(0, 24, 2))
    assert [block.attention and block.attention.window for block in spec.blocks] == [128, 0]
    assert dict(full.sizes()) == {Axis.KV_HEADS: 8, Axis.Q_HEADS: 64, Axis.EXPERT_INTERMEDIATE: 2880}
    assert spec.parameter_count == 20_914_757_184
    by_name = {p.name.removeprefix("model.layers.{layer}."): p for p in full.parameters}
    assert by_name["mlp.experts.gate_up_proj"].shape == (32, 2880, 5760)
    assert [by_name["mlp.experts.gate_up_proj"].cut_dim(layout) for layout in ("reduce", "gather")] == [2, 2]
    assert [by_name["mlp.experts.down_proj"].cut_dim(layout) for layout in ("reduce", "gather")] == [1, 2]
    assert [by_name["self_attn.sinks"].cut_dim(layout) for layout in ("reduce", "gather")] == [0, 0]


def test_nemotron_has_no_gate() -> None:
    """Nemotron (Minitron-8B): two matrices in the MLP, norms with biases, query heads wider than the hidden size."""
    config = {
        "model_type": "nemotron",
        **published.shape(vocab=256000, hidden=4096, dense=16384, layers=32, q=48, kv=8, head_dim=128, context=4096),
    }
    spec = spec_of(config)
    (block,) = spec.blocks
    attention, mlp, norms = 2 * (48 + 8) * 128 * 4096, 2 * 16384 * 4096, 4 * 4096
    assert sum(p.elements for p in block.parameters) == attention + mlp + norms
    assert spec.parameter_count == 32 * (attention + mlp + norms) + 2 * 256000 * 4096 + 2 * 4096


def test_which_tensors_are_looked_up() -> None:
    """A token reads one row of an embedding, unless that is the output matrix too, and one of GPT-2's positions."""
    for config, expected in (
        (MISTRAL, {"model.embed_tokens.weight"}),
        (MISTRAL | {"tie_word_embeddings": True}, set()),
        (hub_config({"model_type": "gpt2"}).to_dict(), {"transformer.wpe.weight"}),
    ):
        spec = spec_of(config)
        assert {p.name for p in parameters_of(spec) if p.lookup} == expected


def test_deepseek_shares_one_latent_cache() -> None:
    """All heads read one latent of 512 + 64 elements; keys are 128 + 64 wide, values 128; three layers are dense."""
    dense, sparse = example("DeepSeek-V3").blocks
    assert dense.attention == sparse.attention
    assert dense.attention
    assert (dense.attention.kv_heads, dense.attention.q_heads) == (128, 128)
    assert (dense.attention.latent_dim, dense.attention.head_dim, dense.attention.v_head_dim) == (576, 192, 128)
    assert dense.layers == (0, 1, 2)
    assert dict(dense.sizes())[Axis.INTERMEDIATE] == 18432
    assert {axis: size for axis, size in sparse.sizes() if axis not in {Axis.KV_HEADS, Axis.Q_HEADS}} == {
        Axis.EXPERT_INTERMEDIATE: 2048,
        Axis.SHARED_INTERMEDIATE: 2048,
    }
    assert (sparse.experts, sparse.experts_per_token) == (256, 8)


def test_deepseek_layers_at_intervals_and_without_experts() -> None:
    """moe_layer_freq makes every n-th layer sparse, and n_routed_experts null makes none."""
    data = json.loads(json.dumps(hub_config({"model_type": "deepseek_v2", "num_experts_per_tok": 6}).to_dict()))
    dense, sparse = spec_of(data | {"num_hidden_layers": 8, "first_k_dense_replace": 1, "moe_layer_freq": 3}).blocks
    assert sparse.layers == (3, 6)
    assert dense.layers == (0, 1, 2, 4, 5, 7)
    (only,) = spec_of(data | {"n_routed_experts": None}).blocks
    assert (only.experts, only.expert_intermediate, only.intermediate) == (0, 0, 11008)


def test_deepseek_v3_keeps_the_bias_of_its_router_in_32_bits() -> None:
    """The bias that corrects the router's scores is F32 in a model of BF16, whose router itself is BF16."""
    tensors = {p.name.partition("{layer}.")[2]: p for p in example("DeepSeek-V3").blocks[1].parameters}
    assert tensors["mlp.gate.weight"].dtype == "BF16"
    assert tensors["mlp.gate.e_score_correction_bias"].dtype == "F32"
    assert tensors["mlp.gate.e_score_correction_bias"].bytes == 4 * 256


def test_dtype_of_the_config_is_the_dtype_of_the_tensors() -> None:
    """torch_dtype, or dtype in newer configs, becomes the tensors' dtype; bfloat16 without either."""
    for extra, dtype in (({}, "BF16"), ({"torch_dtype": "float16"}, "F16"), ({"dtype": "torch.float32"}, "F32")):
        spec = spec_of(MISTRAL | extra)
        assert {p.dtype for p in parameters_of(spec)} == {dtype}
        assert spec.weight_format == dtype


def test_context_of_cohere_is_its_model_max_length() -> None:
    """Command R states 8192 positions and a model_max_length of 131072, which is what it was made for."""
    data = hub_config({"model_type": "cohere", "model_max_length": 131072}).to_dict()
    assert spec_of(data).max_context == 131072
