"""Configs of rotary embeddings: of models, of every kind, and wrong ones."""

from __future__ import annotations

import math
from typing import Any

from tests.published import example

Json = dict[str, Any]

ORIGINAL = "original_max_position_embeddings"

#: A small model; the tests of a kind add its parameters.
LLAMA: Json = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}

YARN: Json = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
LLAMA3: Json = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, ORIGINAL: 64}
LONGROPE: Json = {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [3] * 32, ORIGINAL: 64}

#: Models as they are published, as far as RoPE goes.
MODELS: dict[str, Json] = {
    "Llama-2": {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096},
    "Llama-3.1": example("Llama-3.1-8B"),
    "Phi-3-mini-128k": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        ORIGINAL: 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "long_factor": [1.03 * 1.09**pair for pair in range(48)],
            "short_factor": [1 + 0.05 * pair for pair in range(48)],
            "type": "longrope",
        },
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        ORIGINAL: 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "long_factor": [1 + pair for pair in range(48)],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
    },
    "Qwen2.5 with YaRN": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, ORIGINAL: 32768, "type": "yarn"},
    },
    "Qwen3, head size left out": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
    },
    "Qwen3-Next": example("Qwen3-Next-80B-A3B"),
    "Qwen3-Next, silent": {"model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16},
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            ORIGINAL: 4096,
            "type": "yarn",
        },
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            ORIGINAL: 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    "gpt-oss, silent": {"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64},
    "gpt-oss, null": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "rope_parameters": None,
    },
    "Gemma-2": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "num_attention_heads": 16,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    },
    "falcon, dynamic": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "factor": 3.7},
    },
    "GLM-4": {"model_type": "glm4", "hidden_size": 4096, "num_attention_heads": 32, "partial_rotary_factor": 0.5},
    "GLM-4, silent": {"model_type": "glm4", "hidden_size": 4096, "num_attention_heads": 32},
    "Command-R": {
        "model_type": "cohere",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 8000000.0,
    },
    "Command-R, silent": {"model_type": "cohere", "hidden_size": 8192, "num_attention_heads": 64},
    "Pythia": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "rotary_emb_base": 20000,
        "rotary_pct": 0.5,
    },
    "Pythia, silent": {"model_type": "gpt_neox", "hidden_size": 2048, "num_attention_heads": 16},
    "StableLM, silent": {"model_type": "stablelm", "hidden_size": 2560, "num_attention_heads": 32},
    "Phi-2": {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4},
    "Phi, silent": {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32},
    "Nemotron, silent": {"model_type": "nemotron", "hidden_size": 3072, "num_attention_heads": 24, "head_dim": 128},
    "Mixtral, silent": {"model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32},
    "SmolLM3, silent": {"model_type": "smollm3", "hidden_size": 2048, "num_attention_heads": 16},
    "Ministral-3": {
        "model_type": "ministral3",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 262144,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            ORIGINAL: 16384,
            "rope_theta": 1000000.0,
            "type": "yarn",
        },
    },
    "Ministral-3, silent": {"model_type": "ministral3", "max_position_embeddings": 262144},
    "CWM, silent": {"model_type": "cwm", "max_position_embeddings": 131072},
    "Apertus, silent": {"model_type": "apertus", "hidden_size": 4096, "num_attention_heads": 32},
    "ERNIE-4.5, silent": {"model_type": "ernie4_5", "hidden_size": 1024, "num_attention_heads": 16},
    "GLM-4-9B, silent": {"model_type": "glm", "hidden_size": 4096, "num_attention_heads": 32},
    "Helium, silent": {"model_type": "helium", "hidden_size": 2560, "num_attention_heads": 20},
    "Hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    },
}

_HEADS: Json = {"hidden_size": 2048, "num_attention_heads": 16}

#: Mixtures of experts whose configs leave nearly all to their classes.
MIXTURES: dict[str, Json] = {
    **{
        model_type: {"model_type": model_type, **_HEADS}
        for model_type in (
            *("afmoe", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "granitemoe"),
            *("granitemoeshared", "hy_v3", "minimax_m2", "olmoe", "phimoe", "solar_open"),
        )
    },
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", **_HEADS, "head_dim": 128},
    "hunyuan_v1_moe, alpha": {
        "model_type": "hunyuan_v1_moe",
        **_HEADS,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "deepseek_v32": {"model_type": "deepseek_v32", **_HEADS, "qk_rope_head_dim": 64},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_HEADS, "qk_rope_head_dim": 64},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **_HEADS, "qk_rope_head_dim": 64},
    "MiniMax-M2": {"model_type": "minimax_m2", **_HEADS, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000},
}

#: Gemma 3's layers differ; both forms of its config, and one in which the new form has what the old one cannot say.
GEMMA3: Json = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
OLMO3: Json = {
    "model_type": "olmo3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 65536,
}
GEMMA3_FORMS: dict[str, Json] = {
    "old": {
        **GEMMA3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "silent": GEMMA3,
    "new": {
        **GEMMA3,
        "rope_parameters": {
            "full_attention": {"factor": 8.0, "rope_theta": 2000000.0, "rope_type": "linear"},
            "sliding_attention": {"rope_theta": 30000.0, "rope_type": "default"},
        },
    },
    "both": {
        **GEMMA3,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
        "rope_parameters": {"full_attention": {"factor": 8.0, "rope_type": "linear"}, "sliding_attention": None},
    },
    "OLMo 3": {
        **OLMO3,
        "rope_theta": 400000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, ORIGINAL: 8192, "attention_factor": 1.2},
    },
    "OLMo 3, silent": OLMO3,
    "yarn, its truncate out of sight": {
        **GEMMA3,
        ORIGINAL: 512,
        "rope_parameters": {
            "full_attention": {**YARN, ORIGINAL: 3000, "truncate": False},
            "sliding_attention": {"rope_type": "dynamic", "factor": 2},
        },
    },
}

#: A config that is wrong in one way, and what the error must name.
WRONG: dict[str, tuple[Json, tuple[str, ...]]] = {
    "unknown kind": (
        {"rope_scaling": {"rope_type": "ntk-by-feeling"}},
        ("ntk-by-feeling", "default, linear, dynamic, llama3, yarn, longrope"),
    ),
    "kind no string": ({"rope_scaling": {"rope_type": 7}}, ("rope_type is 7",)),
    "no object": ({"rope_scaling": "linear"}, ("rope_scaling is 'linear'",)),
    "linear without factor": (
        {"rope_scaling": {"type": "linear"}},
        ("factor is missing", "hint: add factor, by which "),
    ),
    "factor misspelt": (
        {"rope_scaling": {"type": "linear", "facter": 2.0}},
        ("rope_scaling: factor is missing", "hint: is facter meant as factor?"),
    ),
    "factor null": ({"rope_scaling": {"type": "dynamic", "factor": None}}, ("factor is null",)),
    "factor a string": ({"rope_scaling": {"type": "linear", "factor": "4"}}, ("factor is '4'",)),
    "factor true": ({"rope_scaling": {"type": "linear", "factor": True}}, ("factor is True",)),
    "factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, ("factor is 0",)),
    "factor infinite": ({"rope_scaling": {"type": "linear", "factor": math.inf}}, ("factor is inf",)),
    "factor not a number": ({"rope_scaling": {"type": "linear", "factor": math.nan}}, ("factor is nan",)),
    "factor huge": ({"rope_scaling": {"type": "linear", "factor": 10**400}}, ("factor is 1000",)),
    "llama3 without low": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
        ("low_freq_factor is missing", "hint: add low_freq_factor, which is 1.0 in "),
    ),
    "llama3 in the wrong order": (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4}},
        ("low_freq_factor 4", "high_freq_factor 4"),
    ),
    "original context a float": ({"rope_scaling": {**LLAMA3, ORIGINAL: 64.0}}, (f"{ORIGINAL} is 64.0",)),
    "yarn without factor and context": ({"rope_scaling": {"rope_type": "yarn"}}, ("factor is missing",)),
    "yarn with a negative": ({"rope_scaling": {**YARN, "beta_fast": -1}}, ("beta_fast is -1",)),
    "yarn with a string": ({"rope_scaling": {**YARN, "mscale": "1"}}, ("mscale is '1'",)),
    "yarn, truncate a number": ({"rope_scaling": {**YARN, "truncate": 1}}, ("truncate is 1",)),
    "yarn, odd": ({"rope_scaling": YARN, "partial_rotary_factor": 0.18}, ("even", "found 11")),
    "dynamic in two dimensions": (
        {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2},
        ("more than 2", "found 2"),
    ),
    "dynamic with alpha": ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, ("alpha",)),
    "ntk by name": ({"rope_scaling": {"rope_type": "ntk", "alpha": 1000.0}}, ("rope_type is 'ntk'",)),
    "mrope of a text model": ({"rope_scaling": {"type": "mrope"}}, ("rope_type is 'mrope'",)),
    "longrope with mscale": ({"rope_scaling": {**LONGROPE, "long_mscale": 1.2}}, ("mscale",)),
    "longrope without list": ({"rope_scaling": {**LONGROPE, "long_factor": None}}, ("long_factor is null",)),
    "longrope, no list": ({"rope_scaling": {**LONGROPE, "long_factor": 2}}, ("long_factor is 2",)),
    "longrope, too few": ({"rope_scaling": {**LONGROPE, "short_factor": [1] * 31}}, ("31 numbers", "expected 32")),
    "longrope, no number": (
        {"rope_scaling": {**LONGROPE, "short_factor": [1] * 30 + ["x", 1]}},
        ("short_factor[30] is 'x'",),
    ),
    "longrope, 0": ({"rope_scaling": {**LONGROPE, "short_factor": [1] * 31 + [0]}}, ("short_factor[31] is 0",)),
    "longrope, context of 1": ({"rope_scaling": {**LONGROPE, ORIGINAL: 1}}, (f"{ORIGINAL} is 1",)),
    "theta a string": ({"rope_theta": "1e4"}, ("rope_theta is '1e4'",)),
    "theta 1": ({"rope_theta": 1}, ("rope_theta is 1",)),
    "theta unknown": ({"model_type": "unheard-of", "rope_theta": None}, ("rope_theta is missing",)),
    "no part": ({"partial_rotary_factor": 0}, ("partial_rotary_factor is 0",)),
    "more than whole": ({"partial_rotary_factor": 1.5}, ("partial_rotary_factor is 1.5",)),
    "too small a part": ({"partial_rotary_factor": 0.01}, ("0 rotary dimensions", "head of 64")),
    "odd whole": ({"head_dim": 63}, ("63 rotary dimensions", "head of 63")),
    "more than a head": ({"rotary_dim": 66}, ("66 rotary dimensions", "head of 64")),
    "no head": ({"hidden_size": None}, ("hidden_size",)),
    "no context": (
        {"max_position_embeddings": None, "rope_scaling": {"type": "dynamic", "factor": 2}},
        ("max_position_embeddings", "is missing"),
    ),
    "learned positions": ({"model_type": "gpt2"}, ("no RoPE",)),
    "other learned positions": ({"model_type": "opt"}, ("no RoPE",)),
    "a base for each layer": ({"model_type": "granite_swa", "layer_rope_theta": [1e4, 0]}, ("layer_rope_theta gives",)),
    "alpha in two dimensions": (
        {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 9.0}, "head_dim": 2},
        ("more than 2", "found 2"),
    ),
    "ALiBi": ({"model_type": "falcon", "alibi": True}, ("no RoPE",)),
    "layer type unsaid": ({**GEMMA3_FORMS["new"]}, ("layers of type None", "full_attention, sliding_attention")),
    "layer type null": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "None": None}},
        ("layers of type None", "full_attention"),
    ),
}


#: Scalings at their edges: where a formula changes, or a number means "not given".
EDGES: dict[str, Json] = {
    "YaRN, factor left to the contexts": {**YARN, "factor": None},
    "YaRN, hardly longer": {**YARN, "factor": 1.5},
    "YaRN, shorter": {**YARN, "factor": 0.75},
    "YaRN, mscale alone": {**YARN, "mscale": 0.8},
    "YaRN, mscale over 0": {**YARN, "mscale": 0.8, "mscale_all_dim": 0},
    "YaRN, mscale over mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "YaRN, attention of 0": {**YARN, "attention_factor": 0.0},
    "YaRN, ramp beyond the last pair": {**YARN, "rope_theta": 9.0, ORIGINAL: 600},
    "YaRN, ramp without width": {**YARN, ORIGINAL: 6},
    "YaRN, turns of 0": {**YARN, "beta_fast": 0, "beta_slow": 0},
    "dynamic, not to be computed in float32": {"rope_type": "dynamic", "factor": 1.3},
    "LongRoPE, hardly longer": {**LONGROPE, "factor": 1.5},
    "LongRoPE, shorter": {**LONGROPE, "factor": 0.75},
    "LongRoPE, attention of 0": {**LONGROPE, "attention_factor": 0},
    "type beside rope_type": {"rope_type": "linear", "type": "dynamic", "factor": 2},
    "original context left out": {key: value for key, value in LLAMA3.items() if key != ORIGINAL},
}
