"""The sines and cosines of rotary embeddings are those of transformers, to the bit."""

from __future__ import annotations

import importlib
import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.utils import logging

from tpplan.errors import ExecutionError, ModelError
from tpplan.exec import rope as rope_module
from tpplan.exec.rope import Rope
from tpplan.exec.rope_scaling import Default

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

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
    "Llama-3.1": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 8192,
            "rope_type": "llama3",
        },
    },
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
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, ("factor is missing",)),
    "factor null": ({"rope_scaling": {"type": "dynamic", "factor": None}}, ("factor is null",)),
    "factor a string": ({"rope_scaling": {"type": "linear", "factor": "4"}}, ("factor is '4'",)),
    "factor true": ({"rope_scaling": {"type": "linear", "factor": True}}, ("factor is True",)),
    "factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, ("factor is 0",)),
    "factor infinite": ({"rope_scaling": {"type": "linear", "factor": math.inf}}, ("factor is inf",)),
    "factor not a number": ({"rope_scaling": {"type": "linear", "factor": math.nan}}, ("factor is nan",)),
    "factor huge": ({"rope_scaling": {"type": "linear", "factor": 10**400}}, ("factor is 1000",)),
    "llama3 without low": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
        ("low_freq_factor is missing",),
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
    "longrope without list": ({"rope_scaling": {**LONGROPE, "long_factor": None}}, ("long_factor is missing",)),
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
    "ALiBi": ({"model_type": "falcon", "alibi": True}, ("no RoPE",)),
    "layer type unsaid": ({**GEMMA3_FORMS["new"]}, ("layers of type None", "full_attention, sliding_attention")),
    "layer type null": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "None": None}},
        ("layers of type None", "full_attention"),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Keep transformers from commenting on factors that it finds unusual."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def modeling(config: Json) -> Any:
    """Return the configuration object of transformers and the module with the model's code."""
    theirs = AutoConfig.for_model(**deepcopy(config))
    return theirs, importlib.import_module(type(theirs).__module__.replace(".configuration_", ".modeling_"))


def reference(config: Json, positions: int, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of transformers' module for this config, of shape [positions, columns]."""
    theirs, module = modeling(config)
    classes = [name for name in dir(module) if name.endswith("RotaryEmbedding") and not name.startswith("Apply")]
    assert len(classes) == 1, classes
    embedding = getattr(module, classes[0])(theirs)
    cos, sin = embedding(torch.zeros(1), torch.arange(positions)[None], *([layer_type] if layer_type else []))
    return sin[0], cos[0]


def styled(config: Json, table: Tensor) -> Tensor:
    """Return transformers' table with an entry for every element of a pair, as its rotation then expands it."""
    if config["model_type"] == "gpt_oss":  # its rotation takes half a row, once for each half
        return torch.cat((table, table), dim=1)
    if config["model_type"] in {"glm4", "deepseek_v3"}:  # their rotations use the first half, each entry for a pair
        return table[:, : table.shape[1] // 2].repeat_interleave(2, dim=1)
    return table


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tables hold the same bits."""
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))


def assert_tables(config: Json, positions: int, layer_type: str | None = None) -> None:
    """Assert that our tables are those of transformers."""
    sin, cos = Rope.from_config(deepcopy(config), layer_type).tables(positions)
    their_sin, their_cos = reference(config, positions, layer_type)
    assert same(sin, styled(config, their_sin))
    assert same(cos, styled(config, their_cos))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_models(config: Json) -> None:
    """Published models, and those whose config leaves the base or the part to the class, get transformers' tables."""
    for positions in (1, 4099):
        assert_tables(config, positions)


@pytest.mark.parametrize("name", ["Llama-3.1", "DeepSeek-V3", "falcon, dynamic", "Phi-3-mini-128k"])
def test_long_context(name: str) -> None:
    """The last of 131,073 positions is as exact as the first, although the tables are computed in parts."""
    assert_tables(MODELS[name], 131073)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("config", GEMMA3_FORMS.values(), ids=GEMMA3_FORMS)
def test_layer_types(config: Json, layer_type: str) -> None:
    """Layers of different type have tables of their own, in the old form of Gemma 3's config and in the new one."""
    assert_tables(config, 3001, layer_type)


def test_nested_text_config() -> None:
    """A model whose language part is nested has the tables of that part."""
    text = GEMMA3_FORMS["old"]
    nested = {
        "model_type": "gemma3",
        "rope_theta": 5,
        "text_config": {k: v for k, v in text.items() if k != "model_type"},
    }
    assert Rope.from_config(nested, "full_attention") == Rope.from_config(text, "full_attention")


def test_other_layer_types_are_ignored() -> None:
    """Where the layers do not differ, naming a type changes nothing."""
    assert Rope.from_config(LLAMA, "sliding_attention") == Rope.from_config(LLAMA)


numbers = st.floats(0.5, 64, width=32) | st.integers(1, 64)
contexts = st.integers(2, 3000)
maybe_one = st.none() | st.just(0) | st.floats(0.01, 2)


def parameters(kind: str, pairs: int) -> dict[str, st.SearchStrategy[Any]]:
    """Return what a kind of scaling may have."""
    factors = st.lists(st.floats(0.5, 64), min_size=pairs, max_size=pairs)
    kinds: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "default": {},
        "linear": {"factor": numbers},
        "dynamic": {"factor": numbers},
        "llama3": {
            "factor": numbers,
            "low_freq_factor": st.floats(0.1, 4),
            "high_freq_factor": st.floats(4.1, 64),
            ORIGINAL: contexts,
        },
        "yarn": {
            "factor": st.none() | numbers,
            "attention_factor": maybe_one,
            "beta_fast": st.none() | st.just(0) | st.floats(1, 64),
            "beta_slow": st.none() | st.just(0) | st.floats(0.1, 8),
            "mscale": maybe_one,
            "mscale_all_dim": maybe_one,
            "truncate": st.booleans(),
            ORIGINAL: contexts,
        },
        "longrope": {
            "short_factor": factors,
            "long_factor": factors,
            "factor": st.none() | numbers,
            "attention_factor": maybe_one,
            ORIGINAL: contexts,
        },
    }
    return kinds[kind]


@st.composite
def configs(draw: st.DrawFn, kind: str) -> tuple[Json, Json]:
    """Return the same model with any scaling of a kind in the old form of a config and in the new one."""
    head, part = 2 * draw(st.integers(2, 80)), draw(st.sampled_from([1.0, 0.25, 0.334, 0.5, 0.75]))
    dim = int(head * part)
    if (kind == "yarn" and dim % 2) or (kind == "dynamic" and dim <= 2):  # neither can be had
        part, dim = 1.0, head
    scaling = {"rope_type": kind, **draw(st.fixed_dictionaries(parameters(kind, -(-dim // 2))))}
    own = {"rope_theta": draw(st.floats(10, 1e8) | st.integers(100, 10**7)), "partial_rotary_factor": part}
    common = {
        "model_type": "phi",  # one that turns a part of a head with every kind
        "hidden_size": 4 * head,
        "num_attention_heads": 4,
        "max_position_embeddings": draw(st.integers(64, 3000)),
    }
    if ORIGINAL in scaling and draw(st.booleans()):
        common[ORIGINAL] = draw(contexts)
    return {**common, **own, "rope_scaling": scaling}, {**common, "rope_parameters": {**scaling, **own}}


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
@settings(max_examples=50)
@given(data=st.data(), positions=st.integers(1, 4000))
def test_any_parameters(kind: str, data: st.DataObject, positions: int) -> None:
    """Any parameters, parts and lengths give transformers' tables, in the old form of a config and in the new one."""
    old, new = data.draw(configs(kind))
    assert Rope.from_config(old) == Rope.from_config(new)
    assert_tables(new, positions)


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


@pytest.mark.parametrize("scaling", EDGES.values(), ids=EDGES)
def test_edges(scaling: Json) -> None:
    """Scalings at their edges give transformers' tables, for a sequence as long as the context or one more."""
    config = {**LLAMA, "rope_scaling": scaling}
    for positions in (64, 65, 256, 257):
        assert_tables(config, positions)


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 3.0}, {**LONGROPE, ORIGINAL: 256}])
def test_length_matters(scaling: Json) -> None:
    """With dynamic scaling and LongRoPE, a sequence beyond the context turns differently from its start on."""
    rope = Rope.from_config({**LLAMA, "rope_scaling": scaling})
    within, beyond = rope.tables(256)[0], rope.tables(257)[0]
    assert same(within[:9], rope.tables(9)[0])
    assert not same(within[:9], beyond[:9])


def rotated(rope: Rope, x: Tensor) -> Tensor:
    """Turn a head by the definition of the style: out = x · cos + (x with each pair turned by 90°) · sin."""
    sin, cos = rope.tables(x.shape[0])
    if rope.style == "neox":
        turned = torch.cat((-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]), dim=1)
    else:
        turned = torch.stack((-x[:, 1::2], x[:, 0::2]), dim=2).flatten(1)
    return x * cos + turned * sin


@pytest.mark.parametrize("name", ["Llama-3.1", "DeepSeek-V3", "GLM-4", "Command-R"])
def test_style(name: str) -> None:
    """The style read from the config is the one by which transformers' code for the model turns a head."""
    config = MODELS[name]
    rope = Rope.from_config(config)
    _, module = modeling(config)
    x = torch.randn(33, rope.width, generator=torch.Generator().manual_seed(5))
    sin, cos = reference(config, 33)
    turn = getattr(module, "apply_rotary_pos_emb_interleave", module.apply_rotary_pos_emb)
    theirs, _ = turn(x[None, None], x[None, None], cos[None], sin[None])
    ours = rotated(rope, x)
    if name == "DeepSeek-V3":  # it leaves the first of all pairs before the second of all
        ours = torch.cat((ours[:, 0::2], ours[:, 1::2]), dim=1)
    assert torch.equal(ours, theirs[0, 0])


def test_latent_attention_turns_its_rotary_part() -> None:
    """With MLA only the rotary part of a head is turned, also if the config tells the size of the whole."""
    config = MODELS["DeepSeek-V3"]
    assert Rope.from_config({**config, "head_dim": 192}) == Rope.from_config(config)


def test_deepseek_may_be_stored_in_halves() -> None:
    """A config that says that pairs are not interleaved gets the other style."""
    assert Rope.from_config({**MODELS["DeepSeek-V3"], "rope_interleave": False}).style == "neox"


def test_gptj() -> None:
    """GPT-J's own tables, which are made without a config, are the default ones in its style."""
    module = importlib.import_module("transformers.models.gptj.modeling_gptj")
    sin, cos = module.create_sinusoidal_positions(2048, 64).chunk(2, dim=1)
    config = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "rope_theta": 10000}
    assert Rope.from_config(config) == Rope(10000.0, 64, Default())
    ours = Rope(10000.0, 64, Default(), "gptj").tables(2048)
    assert same(ours[0], sin.repeat_interleave(2, dim=1))
    assert same(ours[1], cos.repeat_interleave(2, dim=1))


def test_no_positions() -> None:
    """Tables for no positions are empty, and fewer are refused."""
    rope = Rope.from_config(LLAMA)
    assert [table.shape for table in rope.tables(0)] == [(0, 64), (0, 64)]
    with pytest.raises(ExecutionError, match="-1 positions"):
        rope.tables(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("style", ["neox", "gptj"])
def test_fill(dtype: torch.dtype, style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables written in parts into strided slices are those made at once, cast; nothing around them is touched."""
    rope = Rope(10000.0, 30, Default(), style)
    whole = rope.tables(1001)
    arena = torch.full((2, 1003, 90), -7.0, dtype=dtype)
    outs = arena[:, 1:-1, 5:65:2]
    monkeypatch.setattr(rope_module, "_CHUNK", 30 * 13 + 7)  # 1001 = 77 × 13
    rope.fill(outs[0], outs[1])
    assert torch.equal(outs[0], whole[0].to(dtype))
    assert torch.equal(outs[1], whole[1].to(dtype))
    outs.fill_(-7.0)
    assert bool((arena == -7.0).all())


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many elements the largest tensor has that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returns, unless that is one of the tables."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_fill_needs_little_memory() -> None:
    """Whatever the length of the tables, no float32 tensor of more than 2^20 elements is made."""
    sin, cos = (torch.empty(100_000, 64, dtype=torch.bfloat16) for _ in range(2))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        Rope.from_config(LLAMA).fill(sin, cos)
    assert 0 < largest.elements <= 2**20


def test_sines_do_not_depend_on_neighbours() -> None:
    """Each sine and cosine is the same alone, in a row and in a table: what makes parts as good as the whole."""
    sin, cos = Rope.from_config(LLAMA).tables(131072)
    angles = torch.arange(131072)[:, None].float() * Rope.from_config(LLAMA).scaling.frequencies(10000.0, 64, 131072)
    shuffled = torch.randperm(angles.numel(), generator=torch.Generator().manual_seed(1))
    for table, function in ((sin, torch.sin), (cos, torch.cos)):
        flat = table[:, :32].reshape(-1)
        assert same(flat[shuffled], function(angles.reshape(-1)[shuffled]))
        for start in range(0, 4_000_000, 99_991):
            assert same(flat[start : start + 7], function(angles.reshape(-1)[start : start + 7]))


def test_defaults_of_torch_do_not_matter() -> None:
    """A caller's default dtype and device leave the tables as they are."""
    scalings: list[Json] = [{"rope_type": "dynamic", "factor": 3.0}, YARN, LLAMA3, LONGROPE, {"rope_type": "default"}]
    for scaling in scalings:
        rope = Rope.from_config({**LLAMA, "rope_scaling": scaling})
        before = rope.tables(300)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                after = rope.tables(300)
        finally:
            torch.set_default_dtype(torch.float32)
        assert same(before[0], after[0]), scaling
        assert same(before[1], after[1]), scaling


@pytest.mark.parametrize(
    ("sin", "cos", "words"),
    [
        (torch.zeros(4, 62), torch.zeros(4, 62), "sin is torch.float32 of shape \\[4, 62\\]"),
        (torch.zeros(4, 64), torch.zeros(4 * 64), "cos is torch.float32 of shape \\[256\\]"),
        (torch.zeros(4, 64), torch.zeros(4, 64, dtype=torch.int32), "cos is torch.int32"),
        (torch.zeros(4, 64), torch.zeros(5, 64), "sin has 4 positions and cos 5"),
    ],
)
def test_fill_refuses(sin: Tensor, cos: Tensor, words: str) -> None:
    """Tensors of another shape or dtype are refused before anything is written."""
    with pytest.raises(ExecutionError, match=words):
        Rope.from_config(LLAMA).fill(sin, cos)
    assert not sin.any()
    assert not cos.any()


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_config(changes: Json, words: tuple[str, ...]) -> None:
    """A config that is wrong is refused with the name of the key and what it is."""
    with pytest.raises(ModelError) as caught:
        Rope.from_config({**LLAMA, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)


KEYS = (
    *("model_type", "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "type", "factor", ORIGINAL),
    *("max_position_embeddings", "partial_rotary_factor", "head_dim", "qk_rope_head_dim", "rotary_dim", "hidden_size"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "attention_factor", "truncate", "text_config", "rotary_emb_base", "rotary_pct", "alibi"),
    *("full_attention", "sliding_attention", "rope_local_base_freq", "rope_interleave", "num_attention_heads"),
)
words = st.sampled_from(
    ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "gemma3", "llama", "gpt_oss", ""]
)
small = st.integers(-1, 70) | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1e-300, 1e300, 10**400])
values = st.none() | st.booleans() | words | small | st.lists(small, max_size=3)
objects = st.dictionaries(st.sampled_from(KEYS), values | st.dictionaries(st.sampled_from(KEYS), values, max_size=6))


@settings(max_examples=300)
@given(
    junk=objects,
    scaling=st.sampled_from([YARN, LLAMA3, LONGROPE, {"type": "dynamic", "factor": 2}]),
    more=st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
    layer_type=st.sampled_from([None, "full_attention"]),
)
def test_anything(junk: Json, scaling: Json, more: Json, layer_type: str | None) -> None:
    """Whatever a config.json holds, it is refused with a ModelError, or makes tables without another error."""
    for config in (junk, {**LLAMA, **junk}, {**LLAMA, "rope_scaling": {**scaling, **more}}):
        try:
            rope = Rope.from_config(config, layer_type)
        except ModelError:
            continue
        assert rope.tables(300)[0].shape == (300, rope.width)
