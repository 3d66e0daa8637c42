"""The sines and cosines of rotary embeddings are those of transformers, to the bit."""

from __future__ import annotations

import importlib
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.utils import logging

from tests.rope_cases import EDGES, GEMMA3_FORMS, LLAMA, LLAMA3, LONGROPE, MODELS, ORIGINAL, WRONG, YARN, Json
from tpplan.errors import ExecutionError, ModelError
from tpplan.exec import rope as rope_module
from tpplan.exec.rope import Rope
from tpplan.exec.rope_scaling import Default

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


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
