"""Configs that are wrong: a spec or a clear error, never a traceback."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import LLAMA
from tests.examples import examples
from tests.family_configs import configs
from tests.family_models import MISTRAL, assert_consistent, spec_of
from tpplan.core.axes import MAX_LAYERS
from tpplan.errors import ModelError
from tpplan.models import families
from tpplan.models.config import Config
from tpplan.models.families import spec_from_config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 30}, ("30 query heads", "8 key/value heads")),
        ({"hidden_size": 4097}, ("4097", "32 query heads")),
        ({"vocab_size": None}, ("vocab_size", "null")),
        ({"num_hidden_layers": True}, ("num_hidden_layers is True", "not a whole number")),
        ({"num_hidden_layers": "32"}, ("num_hidden_layers is '32'",)),
        ({"num_hidden_layers": 32.0}, ("num_hidden_layers is 32.0",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers is 0", f"1 to {MAX_LAYERS}")),
        ({"num_hidden_layers": MAX_LAYERS + 1}, ("num_hidden_layers is 10001",)),
        ({"hidden_size": -1}, ("hidden_size is -1",)),
        ({"hidden_size": 2**40}, ("hidden_size is 1099511627776",)),
        ({"n_embd": 7}, ("hidden_size is 4096", "n_embd", "7")),
        ({"layer_types": ["full_attention"]}, ("1 entry", "32 layers")),
        ({"layer_types": ["linear_attention"] * 32}, ("'linear_attention'", "sliding_attention")),
        ({"torch_dtype": "int3"}, ("torch_dtype is 'int3'", "bfloat16")),
        ({"architectures": ["MistralForSequenceClassification"]}, ("MistralForSequenceClassification",)),
        ({"architectures": [7]}, ("architectures[0] is 7",)),
        ({"is_encoder_decoder": True}, ("is_encoder_decoder is true",)),
        ({"model_type": "idefics9", "text_config": {"model_type": "mistral"}}, ("'idefics9'", "type mistral, which")),
        ({"model_type": "emu3", "text_config": {"model_type": "emu3_text_model"}}, ("'emu3'", "supported name")),
        ({"model_type": "mistral3", "text_config": {"model_type": "mamba"}}, ("text_config: model_type", "'mamba'")),
        (
            {"model_type": "llava", "text_config": {"model_type": "llava"}},
            ("'llava' is not", "like it are llama; "),
        ),
        ({"model_type": "florence2", "text_config": {"model_type": "bart"}}, ("'florence2'", "supported name")),
        ({"model_type": "other", "text_config": {"model_type": ["mistral"]}}, ("'other'", "supported name")),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, ("'mamba'", "MambaForCausalLM", "llama")),
        ({"model_type": None, "architectures": ["A"]}, ("model_type is null\n", "compare it with the config.json")),
        ({"model_type": "gemma3"}, ("text_config is missing",)),
        ({"model_type": "gemma3", "text_config": 3}, ("text_config is 3", "object")),
        ({"model_type": "cohere2", "head_dim": 4}, ("head_dim is 4", "128")),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, ("word_embed_proj_dim is 512", "hidden_size is 4096")),
        ({"model_type": "internlm3", "qkv_bias": True, "bias": False}, ("qkv_bias true and bias false",)),
        ({"model_type": "internlm3", "qkv_bias": True}, ("qkv_bias is true", "other projections")),
        ({"model_type": "qwen2_vl_text", "architectures": ["A"]}, ("'qwen2_vl_text'", "supported name")),
        ({"model_type": "qwen3_vl"}, ("text_config is missing",)),
        ({"model_type": "mixtral"}, ("num_local_experts", "missing")),
        ({"model_type": "mixtral", "num_local_experts": 1}, ("num_experts_per_tok is 2", "1 expert")),
        ({"model_type": "exaone_moe", "num_experts": 9, "mlp_layer_types": ["sparse"]}, ("1 entry", "32 layers")),
        (
            {"model_type": "hy_v3", "num_experts": 9, "mlp_layer_types": ["moe"] * 32},
            ("'moe'", "known are dense and sparse"),
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 9, "moe_topk": [1, 2]},
            ("moe_topk is [1, 2]", "not the same for all layers"),
        ),
        ({"model_type": "smollm3", "num_key_value_heads": 4, "no_rope_layers": [1]}, ("1 entry", "32 layers")),
        (
            {"model_type": "smollm3", "sliding_window": 9, "layer_types": ["sliding_attention"] * 32},
            ("layer_types has sliding_attention", "use_sliding_window is not true"),
        ),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], words: tuple[str, ...]) -> None:
    """An error names the file, the key and the values that are at odds, and has a hint."""
    with pytest.raises(ModelError) as caught:
        spec_of(MISTRAL | change)
    assert caught.value.hint
    assert caught.value.message.startswith("config.json: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config"), ("llm_config",) * 3],
)
def test_a_language_model_in_an_unknown_one_can_be_planned_alone(path: tuple[str, ...]) -> None:
    """The hint names where the language model's config is, and what it names is planned; what it lacks is said."""
    raw: dict[str, Any] = {**MISTRAL}
    for key in reversed(path):
        raw = {"model_type": "another_vlm", "vision_config": {"model_type": "clip_vision_model"}, key: raw}
    with pytest.raises(ModelError) as caught:
        spec_of(raw)
    start = f"its {'.'.join(path)} is of the type mistral, which is supported: save it as a config.json of its own"
    assert caught.value.hint.startswith(start)
    assert "not as it is" not in caught.value.hint
    section = raw
    for key in path:
        section = section[key]
    assert spec_of(section).layer_count == 32
    del section["hidden_size"]
    with pytest.raises(ModelError, match=r"not as it is: config.json: .*hidden_size is missing"):
        spec_of(raw)


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        *(("laguna", {"gating": value}, "gating is") for value in (["per-head"], {}, {"a": 1}, 1.5, "gated")),
        ("laguna", {"gating_types": ["per_head"] * 3}, "gating_types has 3 entries for 2 layers"),
        ("laguna", {"gating_types": ["per_head", "none"]}, "gating is 'none', known are per-head"),
        ("laguna", {"num_attention_heads_per_layer": [8]}, "num_attention_heads_per_layer has 1 entry for 2 layers"),
        (
            "mimo_v2_flash",
            {"hybrid_layer_pattern": [0, 1, 1]},
            "hybrid_layer_pattern is not a list of 2 zeros and ones",
        ),
        ("mimo_v2_flash", {"moe_layer_freq": [0, 2]}, "moe_layer_freq is not a list of 2 zeros and ones"),
        ("mimo_v2_flash", {"moe_layer_freq": 1}, "moe_layer_freq is 1"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, "8 query heads .* not a multiple of 3"),
    ],
)
def test_keys_of_layers_that_are_wrong_are_named(model_type: str, change: dict[str, Any], words: str) -> None:
    """Whatever their type, they end in an error with the key, and never are taken for something else."""
    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 8}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "num_experts": 4}
    raw = {"model_type": model_type, **shape, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert spec_of(raw).layer_count == 2
    with pytest.raises(ModelError, match=words):
        spec_of(raw | change)


@pytest.mark.parametrize("model_type", ["axk2", "deepseek_v32", "glm5_next_text", "glm_moe_dsa", "hy_v4"])
def test_an_indexer_needs_the_latent_of_the_queries(model_type: str) -> None:
    """Without it transformers builds no such model."""
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
    raw = MISTRAL | sizes | {"model_type": model_type, "num_key_value_heads": 32, "architectures": None}
    raw |= {"n_routed_experts": 8, "moe_intermediate_size": 8, "sliding_window": None}
    inner = {"model_type": "glm5_next", "text_config": raw} if model_type == "glm5_next_text" else raw
    assert spec_of(inner).layer_count == 32
    raw["q_lora_rank"] = None
    with pytest.raises(ModelError, match="q_lora_rank is null, but the indexer reads the latent of the queries"):
        spec_of(inner)


_GLM: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
_GLM |= {"model_type": "glm5_next_text", "n_routed_experts": 8, "num_experts_per_tok": 2}


def test_layers_of_linear_attention_have_no_indexer_to_share() -> None:
    """Of GLM-5.3 every fourth layer has attention: the first of these has an indexer, whatever is said before it."""
    types = ["shared", "shared", "shared", "full"]
    (last,) = [
        block
        for block in spec_of({"model_type": "glm5_next", "text_config": _GLM | {"indexer_types": types}}).blocks
        if any("indexer" in parameter.name for parameter in block.parameters)
    ]
    assert last.layers == (3,)
    with pytest.raises(ModelError, match=r"layer 3 shares an indexer \(indexer_types\), but no layer before it"):
        spec_of({"model_type": "glm5_next", "text_config": _GLM | {"indexer_types": types[::-1]}})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"model_type": "zamba2", "num_hidden_layers": 38, "n_mamba_heads": 64},
            "layers_block_type is missing, which 38 layers",
        ),
        (
            {"model_type": "minimax_text_01", "num_hidden_layers": 32, "attn_type_list": [0, 1]},
            "attn_type_list has 2 entries for 32 layers",
        ),
    ],
)
def test_kinds_of_layers_are_of_all_layers(raw: dict[str, Any], words: str) -> None:
    """An error names the key that the config has, or lacks."""
    with pytest.raises(ModelError, match=words):
        spec_of(MISTRAL | {"architectures": None, "num_local_experts": 4} | raw)


def test_an_indexer_of_qwen4_has_one_key() -> None:
    """Any other number is refused by transformers, too."""
    sizes = {"num_hidden_layers": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 64}
    raw: dict[str, Any] = {"model_type": "qwen4_exp_text", **sizes}
    assert spec_of(raw).layer_count == 4
    with pytest.raises(ModelError, match="indexer_kv_heads is 2, expected 1"):
        spec_of(raw | {"indexer_kv_heads": 2})


@pytest.mark.parametrize(
    ("model_type", "near"),
    [("qwen4_next", ("qwen3_next",)), ("Llama", ("llama", "mllama", "llama4", "llava")), ("bert", ())],
)
def test_no_other_architecture_is_proposed(model_type: str, near: tuple[str, ...]) -> None:
    """Near names are listed, few of them, and none is proposed: a plan of another architecture would be wrong."""
    with pytest.raises(ModelError) as caught:
        spec_of(MISTRAL | {"model_type": model_type, "architectures": None})
    like, where = caught.value.hint.split("; ")
    assert where.startswith("the README lists all, ")
    names = like.removeprefix("supported names like it are ")
    assert tuple(names.split(", "))[: len(near)] == near if near else like == "no supported name is like it"
    assert set(names.split(", ")) <= set(families.supported()) or not near
    assert len(caught.value.hint) < 200


@pytest.mark.parametrize("model_type", ["Llama", "llama-2", "transformer"])
def test_the_type_of_the_class_that_a_config_names_is_proposed(model_type: str) -> None:
    """Which works when followed."""
    with pytest.raises(
        ModelError, match=f"config.json: model_type '{model_type}' .'LlamaForCausalLM'. is not"
    ) as caught:
        spec_of({**LLAMA, "model_type": model_type})
    assert caught.value.hint == "the model_type of a LlamaForCausalLM is llama"
    assert spec_of({**LLAMA, "model_type": "llama"}).notes == ()


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *(("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("float", "float32")),
        *(("torch.float16", "float16"), ("torch.half", "float16"), ("auto", "bfloat16"), (None, "bfloat16")),
    ],
)
def test_names_of_dtypes(text: str | None, dtype: str) -> None:
    """Configs name a dtype as torch does, or as people do; ``auto`` leaves it to the weights, or to the default."""
    assert spec_of(MISTRAL | {"torch_dtype": text}).dtype == dtype


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.integers(),
    st.sampled_from((2**31, 2**31 + 1, 2**63, 10**4000, MAX_LAYERS, 65536, 65537)),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers() | st.text(max_size=3) | st.none(), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=examples(300))
@given(data=st.data())
def test_mutated_configs_give_a_spec_or_a_clear_error(data: st.DataObject) -> None:
    """Whatever is done to a config, the answer is a consistent spec or a ModelError with a hint."""
    model_type = data.draw(st.sampled_from(families.supported()))
    raw = data.draw(configs(model_type))
    target = raw["text_config"] if "text_config" in raw and data.draw(st.booleans()) else raw
    keys = sorted({*target, "architectures", "torch_dtype", "layer_types", "head_dim", "sliding_window"})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True)):
        if data.draw(st.booleans()):
            target.pop(key, None)
        else:
            target[key] = data.draw(JUNK)
    try:
        spec = families.spec_from_config(Config(raw, "config.json"), "model")
    except ModelError as error:
        caught: ModelError | None = error
    else:
        caught = None
        assert_consistent(spec)
    assert caught is None or (caught.hint and len(str(caught)) < 1500)


def test_mlps_of_mpt_have_one_width() -> None:
    """Its config has a ratio, which transformers' class does not read; another one than its own is refused."""
    assert spec_of({"model_type": "mpt", "expansion_ratio": 4}).parameter_count == 1_311_213_568
    with pytest.raises(ModelError, match="expansion_ratio is 3"):
        spec_of({"model_type": "mpt", "expansion_ratio": 3})


@pytest.mark.parametrize(
    ("key", "slip"),
    [
        ("num_key_value_heads", "num_key_value_head"),
        ("num_key_value_heads", "numKeyValueHeads"),
        ("num_key_value_heads", "multi_query_group_num"),
        ("num_key_value_heads", "n_kv_heads"),
        ("tie_word_embeddings", "tie_word_embedding"),
        ("torch_dtype", "torch_dtpye"),
        ("torch_dtype", "dtypes"),
        ("num_key_value_heads", "num_key_value_heads_"),
        ("tie_word_embeddings", "tie_word_embeddingss"),
    ],
)
def test_keys_that_are_nearly_known_are_told(key: str, slip: str) -> None:
    """A default would be taken silently else: a model would have as many KV heads as query heads."""
    data = {(slip if name == key else name): value for name, value in LLAMA.items()}
    told = f"config.json has {slip}, which is not read, and no {key}, whose default is taken: is {slip} meant as {key}?"
    assert spec_from_config(Config(data, "config.json"), "m").notes == (told,)
    assert spec_from_config(Config({**data, key: LLAMA[key]}, "config.json"), "m").notes == ()
    del data[slip]
    for other in ("num_key_value_pairs", f"swa_{key}", f"{key}_of_layers"):
        assert spec_from_config(Config(data | {other: 1}, "config.json"), "m").notes == ()


@pytest.mark.parametrize(
    ("key", "slip"),
    [
        ("factor", "factors"),
        ("rope_type", "ropetype"),
        ("factor", "facotr"),
        ("factor", "facter"),
        ("beta_fast", "beta_fasst"),
    ],
)
def test_slips_in_the_parameters_of_rope_are_told(key: str, slip: str) -> None:
    """The context would be as long as without scaling."""
    scaling = {"rope_type": "linear", "factor": 4.0, "beta_fast": 32.0}
    told = {name: value for name, value in scaling.items() if name != key} | {slip: scaling[key]}
    (note,) = spec_from_config(Config(LLAMA | {"rope_scaling": told}, "config.json"), "m").notes
    assert note.startswith(f"config.json: rope_scaling has {slip}, which is not read, and no {key}, ")
    assert spec_from_config(Config(LLAMA | {"rope_scaling": scaling}, "config.json"), "m").notes == ()


@pytest.mark.parametrize("key", ["", "_", "-", " ", "é"])
def test_odd_keys_are_no_slips(key: str) -> None:
    """JSON allows them, at the top and in objects; also in models whose norms have no epsilon."""
    data = LLAMA | {key: 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0, key: 1}}
    assert spec_from_config(Config(data, "config.json"), "m").notes == ()
    other = {**LLAMA, key: 1, "model_type": "olmo", "architectures": ["OlmoForCausalLM"]}
    assert spec_from_config(Config(other, "config.json"), "m").notes == ()


def test_each_key_is_told_of_once_and_all_are() -> None:
    """Of an object, and where a key may be meant as one of two."""
    scaling = {"rope_typ": "linear", "factr": 4.0, "beta_fst": 32.0}
    slips = {"rope_scaling": scaling, "routed_scaling_facter": 2.5}
    notes = spec_from_config(Config(LLAMA | slips, "config.json"), "m").notes
    assert [note.rpartition(": is ")[2] for note in notes] == [
        "beta_fst meant as beta_fast?",
        "factr meant as factor?",
        "rope_typ meant as rope_type?",
        "routed_scaling_facter meant as routed_scaling_factor?",
    ]


@pytest.mark.parametrize(
    ("key", "slip", "value"),
    [
        ("rms_norm_eps", "rms_norm_epss", 1e-5),
        *(
            ("rms_norm_eps", name, 1e-5)
            for name in (
                *("norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
                *("layernorm_epsilon", "rms_norm_epsilon"),
            )
        ),
        ("n_group", "n_groups", 2),
        ("swiglu_limit", "swiglu_limits", 7.0),
        ("rope_theta", "rope_thetta", 5e5),
        ("hidden_act", "hiden_act", "gelu"),
        ("partial_rotary_factor", "partial_rotary_facotr", 0.5),
        ("norm_topk_prob", "norm_top_k_prob", True),
    ],
)
def test_slips_of_keys_that_only_decoders_read_are_told(key: str, slip: str, value: object) -> None:
    """No plan depends on them, but the text that a model writes."""
    told = f"config.json has {slip}, which is not read, and no {key}, whose default is taken: is {slip} meant as {key}?"
    assert spec_from_config(Config(LLAMA | {slip: value}, "config.json"), "m").notes == (told,)
    for more in ({key: value}, {key: value, slip: value}):
        assert spec_from_config(Config(LLAMA | more, "config.json"), "m").notes == ()


@pytest.mark.parametrize(
    ("kind", "meant"), [("lama3", "llama3"), ("liner", "linear"), ("yran", "yarn"), ("llama4", ""), ("yarn2", "")]
)
def test_kinds_of_rope_that_are_misspelt_are_told(kind: str, meant: str) -> None:
    """The context would be as long as without scaling; a kind with another number is another kind."""
    config = Config(LLAMA | {"rope_scaling": {"rope_type": kind, "factor": 4.0}}, "config.json")
    told = f"config.json: rope_scaling: rope_type is '{kind}', which is not known: is {meant} meant?"
    assert spec_from_config(config, "m").notes == ((told,) if meant else ())


@pytest.mark.parametrize(
    ("architectures", "hint"),
    [
        (["LlamaForCausalLM"], "the model_type of a LlamaForCausalLM is llama"),
        (["OtherForCausalLM"], "compare it with the config.json that the model came with"),
    ],
)
def test_a_missing_type_is_told_by_the_class(architectures: list[str], hint: str) -> None:
    """If that is a class of one that is known."""
    data = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"architectures": architectures}
    with pytest.raises(ModelError, match="model_type is missing") as caught:
        spec_from_config(Config(data, "config.json"), "m")
    assert caught.value.hint == hint


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_slips_in_the_rope_of_a_kind_of_layers_are_told(model_type: str) -> None:
    """Whether or not the context depends on the scaling."""
    layers = {"full_attention": {"rope_type": "default", "rope_thetta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    data = {**MISTRAL, "model_type": model_type, "rope_parameters": layers}
    told = "config.json: rope_parameters: full_attention has rope_thetta, which is not read, and no rope_theta, "
    assert [note[: len(told)] for note in spec_of(data).notes] == [told]


@pytest.mark.parametrize("slip", ["head_dims", "headdim", "head_dmi", "had_dim", "heads_dim"])
def test_slips_of_short_keys_are_told(slip: str) -> None:
    """In a note where the default fits, or in the hint of the error where it does not."""
    data = {name: value for name, value in LLAMA.items() if name != "head_dim"} | {slip: 64}
    told = f"config.json has {slip}, which is not read, and no head_dim, whose default is taken"
    (note,) = spec_from_config(Config(data | {"hidden_size": 240}, "config.json"), "m").notes
    assert note == f"{told}: is {slip} meant as head_dim?"
    with pytest.raises(ModelError, match="256 is not a multiple of 6") as caught:
        spec_from_config(Config(data, "config.json"), "m")
    assert caught.value.hint == f"is {slip} meant as head_dim?"
    del data[slip]
    for other in ("v_head_dim", "head_dim_of_it", "k_head_dim", "hidden"):
        assert spec_from_config(Config(data | {other: 1, "hidden_size": 240}, "config.json"), "m").notes == ()


@pytest.mark.parametrize(("key", "slip"), [("hidden_size", "hidden_sizes"), ("num_key_value_heads", "n_kv_heads")])
def test_slips_in_the_config_of_a_language_model_within_another_are_told(key: str, slip: str) -> None:
    """Sizes have defaults there that the config of a whole model must have."""
    text = {"model_type": "llama", **{name: value for name, value in LLAMA.items() if name not in {key, "head_dim"}}}
    text["num_attention_heads"] = 8
    notes = spec_of({"model_type": "llava", "text_config": {**text, slip: LLAMA[key]}}).notes
    default = {"hidden_size": " (4096)"}.get(key, "")  # of transformers' LlamaConfig
    told = f"config.json: text_config has {slip}, which is not read, and no {key}, whose default{default} is taken"
    assert told in " ".join(notes)


@pytest.mark.parametrize(
    ("key", "slip"),
    [
        ("hidden_size", "hiden_size"),
        ("hidden_size", "hidden_sizes"),
        ("hidden_size", "hidden_sise"),
        ("hidden_size", "hiddenSize"),
        ("hidden_size", "d_model"),
        ("vocab_size", "vocab_sise"),
        ("vocab_size", "padded_vocab_size"),
        ("model_type", "model_tpye"),
        ("model_type", "modelType"),
        ("intermediate_size", "intermediate-size"),
        ("num_hidden_layers", "num_layers"),
        ("num_attention_heads", "n_heads"),
        ("max_position_embeddings", "max_seq_len"),
        ("max_position_embeddings", "max_sequence_length"),
    ],
)
@pytest.mark.parametrize("architectures", [{}, {"architectures": ["LlamaForCausalLM"]}])
def test_a_missing_key_that_is_nearly_there_is_named(key: str, slip: str, architectures: dict[str, object]) -> None:
    """In the hint, which works when followed."""
    data = LLAMA | {"model_type": "llama"}
    data.pop("architectures", None)
    data |= architectures
    value = data.pop(key)
    with pytest.raises(ModelError, match=f"{key} (or .*)?is missing") as caught:
        spec_from_config(Config({**data, slip: value}, "config.json"), "m")
    assert caught.value.hint == f"is {slip} meant as {key}?"
    assert spec_from_config(Config({**data, key: value}, "config.json"), "m").notes == ()


def test_all_missing_keys_are_told_at_once() -> None:
    """With those that were probably meant as some of them, and those that are null."""
    data = {"model_type": "llama", "d_model": 64, "vocab_sise": 9, "num_attention_heads": 8, "intermediate_size": None}
    with pytest.raises(ModelError) as caught:
        spec_from_config(Config({**data, "num_key_value_heads": 8}, "config.json"), "m")
    told = "num_hidden_layers, hidden_size, vocab_size and max_position_embeddings are missing"
    assert caught.value.message == f"config.json: {told}; intermediate_size is null"
    others = "for the others, compare it with the config.json that the model came with"
    assert caught.value.hint == f"is d_model meant as hidden_size and vocab_sise as vocab_size? {others}"


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_no_key_of_another_meaning_is_named(key: str) -> None:
    """Keys of parts, of experts and of other sizes contain the name of the one that is missing."""
    others = ("moe_intermediate_size", "text_vocab_size", "hidden_size_per_layer_input", "linear_num_key_heads")
    data = {name: value for name, value in LLAMA.items() if name != key} | dict.fromkeys(others, 8)
    with pytest.raises(ModelError, match="is missing") as caught:
        spec_from_config(Config(data, "config.json"), "m")
    assert caught.value.hint == "compare it with the config.json that the model came with"


@pytest.mark.parametrize(("key", "name"), [("num_key_value_heads", "num_kv_heads"), ("hidden_size", "n_embd")])
def test_names_of_other_families_are_told(key: str, name: str) -> None:
    """They are read, but transformers takes the default of its class, such as as many KV heads as query heads."""
    data = {(name if each == key else each): value for each, value in LLAMA.items()}
    spec = spec_from_config(Config(data, "config.json"), "m")
    assert spec.blocks == spec_from_config(Config(LLAMA, "config.json"), "m").blocks
    (note,) = spec.notes
    assert note.startswith(f"config.json has {name} and no {key}: tpplan reads it as {key}, which it is in models of ")
    assert note.endswith("; in a model of type llama transformers ignores it and takes a default")
    assert spec_from_config(Config({**data, key: LLAMA[key]}, "config.json"), "m").notes == ()
