"""What a config leaves out, or sets to null, is as in transformers' configuration class."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.family_configs import INNER, WITHIN, around
from tests.family_models import (
    INCOMPLETE_DEFAULTS,
    NOT_IN_TRANSFORMERS,
    SAME,
    cached_windows,
    hub_config,
    meta_model,
    named,
    saved_tensors,
    spec_of,
)
from tests.later import transformers
from tpplan.errors import ModelError
from tpplan.models import families
from tpplan.models.config import ALIASES, FOREIGN_NAMES, OWN_NAMES, Config, epsilon_of
from tpplan.models.families.wrappers import WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Models that transformers can build: their types, and of language models within others those.
KNOWN = [(name, "") for name in sorted({*families.FAMILIES} - SAME.keys() - NOT_IN_TRANSFORMERS)]
KNOWN += [(name, inner) for name, inners in INNER.items() for inner in inners if name not in NOT_IN_TRANSFORMERS]

#: Small sizes in place of the defaults, as far as a family calls them so.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 20),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 5),
    **dict.fromkeys(("num_attention_heads", "n_head"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "o_groups"), 3),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 8),
    "mamba_d_head": 12,
    "mamba_d_ssm": 96,
    "vocab_size": 64,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
    "num_kv_shared_layers": 1,
}
#: Of the language model they say nothing.
ASIDE = {"model_type", "architectures", "vision_config", "text_config", "transformers_version", "dtype", "id2label"}

#: Of them the model without weights is the same, so it is not built again.
SAME_MODEL = {"_name_or_path", "chunk_size_feed_forward", "is_encoder_decoder", "label2id", "output_attentions"}
SAME_MODEL |= {"output_hidden_states", "return_dict", "bos_token_id", "eos_token_id", "attention_dropout"}

#: Why tpplan does not plan for some configs that transformers builds a model of: most cannot run.
UNFIT = re.compile(
    r" is null$|not a multiple|more than there are: \d+ experts| entries for |is \d+, but hidden_size"
    r"|none such is before them$"
)
#: Sizes that no config of a whole model lacks; those of the language model in another one are left out if usual.
LACKING = re.compile(r" (is|are) missing$")

#: What other names stand for.
NAMED = {name: key for table in (ALIASES, FOREIGN_NAMES) for key, names in table.items() for name in names}

NAMES_OF_EXPERTS = {"num_experts", *ALIASES["num_experts"]}

#: Keys that are looked up only where others ask for it, and one whose slip is a name that it has too.
NEVER_TOLD = {"block_ffn_dim_multiplier", "share_expert_dim", "word_embed_proj_dim"}
#: The error for opt has a hint of its own; Zamba's num_query_groups is taken for the missing key first.
NEVER_TOLD_OF = {"opt": {"hidden_size"}, "zamba2": {"num_key_value_heads"}}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the language model."""
    holder = config.get("thinker_config", config)
    text: dict[str, Any] = holder.get("text_config", holder)
    return text


def small(model_type: str, inner: str) -> dict[str, Any]:
    """Return all keys of a family's class, with its defaults for most."""
    wrapper = WRAPPERS.get(model_type)
    within = {"text_config": {"model_type": inner}} if wrapper and not wrapper.within else {}
    default = hub_config({"model_type": model_type, **within, **INCOMPLETE_DEFAULTS.get(model_type, {})}).to_dict()
    raw: dict[str, Any] = json.loads(json.dumps(default))
    text = text_of(raw)
    text.update({key: value for key, value in SMALL.items() if text.get(key) is not None})
    if wrapper:
        (raw[wrapper.within] if wrapper.within else raw).update(around(model_type, text))
    for key in (
        *("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"),
        *("indexer_types", "kv_source_layers", "activation_sparsity_pattern", "num_attention_heads_per_layer"),
        "hybrid_layer_ids",
    ):
        if text.get(key):
            text[key] = text[key][:5]
    if inner == "ernie4_5_vl_moe_text":
        text["rope_parameters"]["mrope_section"] = [1, 1, 2]  # half of a head
    if inner == "glm5_next_text":
        text["num_key_value_heads"] = text["num_attention_heads"]
    if text.get("num_kv_shared_layers"):
        text["layer_types"] = [("full_attention", "sliding_attention")[layer % 2] for layer in range(5)]
    text.pop("per_layer_config", None)
    if text.get("moe_layers"):
        text["moe_layers"] = [layer for layer in text["moe_layers"] if layer < 5]
    if families.LANGUAGE_MODELS[text["model_type"]].fixed_head:
        text.pop("head_dim", None)
    return raw


def facts_of_transformers(config: Any) -> dict[str, Any]:
    """Return the shapes of tensors, the windows of layers and the context of transformers' model."""
    return {
        "tensors": {name: tuple(tensor.shape) for name, tensor in saved_tensors(meta_model(config)).items()},
        "windows": cached_windows(config),
        "context": getattr(config.get_text_config(), "max_position_embeddings", None),
    }


def facts_of(raw: dict[str, Any], context: int | None) -> dict[str, Any]:
    """Return the same of a spec; a model without a limit has the context that tpplan gives it."""
    spec = spec_of(raw)
    return {
        "tensors": {name: parameter.shape for name, parameter, _ in named(spec)},
        "windows": {i: block.attention.window for block in spec.blocks for i in block.layers if block.attention},
        "context": context if spec.context_basis else context and spec.max_context,
    }


def compare(raw: dict[str, Any], known: dict[str, dict[str, Any]]) -> str:
    """Return what differs between a config's spec and transformers' model of it, empty if nothing does."""
    try:
        config = hub_config(raw)
        key = _key(config)
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        ours = facts_of(raw, context)
        if key not in known:
            known[key] = facts_of_transformers(config)
    except ModelError as error:
        lacking = LACKING.search(error.message) and raw["model_type"] not in WRAPPERS
        return "" if lacking or UNFIT.search(error.message) else error.message
    except Exception:  # noqa: BLE001 - of transformers, which has no model of this config
        return ""
    theirs = known[key]
    return "; ".join(f"{name}: {_differing(ours[name], theirs[name])}" for name in ours if ours[name] != theirs[name])


def _key(config: Any) -> str:
    raw = config.to_dict()
    for part in (raw, text_of(raw)):
        for key in SAME_MODEL & part.keys():
            del part[key]
    return json.dumps(raw, sort_keys=True, default=str)


def _differing(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, dict):
        return f"{ours}, expected {theirs}"
    found = [(key, ours.get(key), theirs.get(key)) for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)]
    return f"{len(found)} such as {found[0]}"


def keys_of(whole: dict[str, Any]) -> list[str]:
    """Return the keys of a language model that may be left out."""
    return sorted(text_of(whole).keys() - ASIDE - WITHIN.get(whole["model_type"], {}).keys())


def without(whole: dict[str, Any], keys: Iterable[str], *, null: bool = False) -> dict[str, Any]:
    """Return a config whose language model lacks some keys, or has null in their place."""
    raw: dict[str, Any] = json.loads(json.dumps(whole))
    for key in keys:
        text_of(raw)[key] = None
        if not null:
            del text_of(raw)[key]
    return raw


@pytest.mark.parametrize(("model_type", "inner"), KNOWN)
def test_a_key_left_out_or_null_is_as_in_the_class_of_transformers(model_type: str, inner: str) -> None:
    """Each key of the language model in turn; only sizes that the config of a whole model has may be missed."""
    whole = small(model_type, inner)
    config = hub_config(whole)
    known = {_key(config): facts_of_transformers(config)}
    spec_of(whole)  # not refused
    assert not compare(whole, known)
    changes = {(key, null): without(whole, (key,), null=null) for key in keys_of(whole) for null in (False, True)}
    assert not {change: wrong for change, raw in changes.items() if (wrong := compare(raw, known))}


@pytest.mark.parametrize(("model_type", "inner"), KNOWN)
def test_keys_that_must_be_there_are_told_together(model_type: str, inner: str) -> None:
    """Each size that is missed where it alone is left out is named where all of them are."""
    whole = small(model_type, inner)
    missed = {key for key in keys_of(whole) if LACKING.search(told_of(without(whole, (key,))).partition("\n")[0])}
    told = told_of(without(whole, missed)).partition("\n")[0] if missed else ""
    words = {NAMED.get(word, word) for word in re.findall(r"\w+", told)}
    assert {NAMED.get(key, key) for key in missed - {"layer_types"}} <= words


@pytest.mark.parametrize(("model_type", "inner"), KNOWN)
def test_windows_that_are_turned_on_are_as_long_as_in_the_class_of_transformers(model_type: str, inner: str) -> None:
    """Where the config says that there are some, but neither how long nor in which layers."""
    whole = small(model_type, inner)
    text = text_of(whole)
    if "use_sliding_window" in text:
        raw = without(whole, {"sliding_window", "max_window_layers", "layer_types"} & text.keys())
        text_of(raw).update(use_sliding_window=True, num_hidden_layers=40)  # more than may be without
        assert not compare(raw, {})


@settings(max_examples=examples(60))
@given(st.sampled_from(KNOWN), st.data())
def test_keys_left_out_together_are_as_in_the_class_of_transformers(
    model: tuple[str, str], data: st.DataObject
) -> None:
    """The default of a key may depend on another key."""
    whole = small(*model)
    keys = data.draw(st.lists(st.sampled_from(keys_of(whole)), min_size=2, max_size=5, unique=True))
    assert not compare(without(whole, keys), {})


def test_heliums_default_head_size_is_that_of_its_class() -> None:
    """128, not the hidden size over the heads; the output projection takes the hidden size all the same."""
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 512}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 512}
    assert spec_of({"model_type": "helium", **sizes}).parameter_count == 4_013_952


@pytest.mark.parametrize("name", OWN_NAMES)
def test_names_of_some_families_are_read_by_their_classes_alone(name: str) -> None:
    """A class has the name, or one that means the same becomes what it is set to; others do nothing with it."""
    (names,) = ({key, *others} for key, others in ALIASES.items() if name in {key, *others})
    readers = set()
    for model_type in {*families.LANGUAGE_MODELS} - SAME.keys() - NOT_IN_TRANSFORMERS:
        kind = transformers.CONFIG_MAPPING[model_type]
        with_name, usual = kind(**{name: 16}), kind()
        moved = [
            other for other in names - {name} if getattr(with_name, other, None) == 16 != getattr(usual, other, 16)
        ]
        if moved or name in kind.__dataclass_fields__ or name in kind.attribute_map:
            readers.add(model_type)
    assert readers == set(OWN_NAMES[name]) - SAME.keys() - NOT_IN_TRANSFORMERS


def test_the_epsilon_of_norms_has_the_name_of_the_class() -> None:
    """Another one in its place is told; where a class has several, or takes one for another, none is missed."""
    for model_type in {*families.LANGUAGE_MODELS} - SAME.keys() - NOT_IN_TRANSFORMERS:
        kind = transformers.CONFIG_MAPPING[model_type]
        names = {"rms_norm_eps", *FOREIGN_NAMES["rms_norm_eps"]}
        own = [*names & {*kind.__dataclass_fields__, *kind.attribute_map}]
        assert epsilon_of(model_type) == (own[0] if len(own) == 1 else ""), model_type


@pytest.mark.parametrize(("model_type", "inner"), KNOWN)
def test_the_number_of_experts_is_told_by_the_name_that_the_class_has(model_type: str, inner: str) -> None:
    """In the error, in the note on a default, and in the hint, which works when followed."""
    whole = small(model_type, inner)
    raw = without(whole, NAMES_OF_EXPERTS & text_of(whole).keys())
    text_of(raw)["num_expert"] = 8
    told = told_of(raw)
    if "num_expert meant as" in told and model_type != "dbrx":  # which has it in a section
        kind = transformers.CONFIG_MAPPING[text_of(whole)["model_type"]]
        fields = kind.__dataclass_fields__.keys()
        own = "n_routed_experts" if model_type.startswith("step") else (fields & NAMES_OF_EXPERTS).pop()
        assert f"is num_expert meant as {own}?" in told
        assert re.search(rf"{own}( \(or [^)]*\))? is missing|no {own}, whose default", told)
        text_of(raw)[own] = 8
        assert "expert" not in told_of(raw)
        ignored = max(name for name in NAMES_OF_EXPERTS - fields if getattr(kind(**{name: 37}), own) != 37)
        text_of(raw)[ignored] = text_of(raw).pop(own)
        assert f"has {ignored} and no {own}: tpplan reads it as {own}" in told_of(raw)


@pytest.mark.parametrize(("model_type", "inner"), KNOWN)
def test_no_key_of_a_default_config_is_taken_for_a_slip(model_type: str, inner: str) -> None:
    """Whether all keys are in it or, as transformers saves it, those that differ from the class."""
    within = {"text_config": {"model_type": inner}} if inner else {}
    config = hub_config({"model_type": model_type, **within, **INCOMPLETE_DEFAULTS.get(model_type, {})})
    for data in (config.to_dict(), {**config.to_diff_dict(), "model_type": model_type}, small(model_type, inner)):
        assert "meant as" not in told_of(json.loads(json.dumps(data, default=str)))


def told_of(raw: dict[str, Any]) -> str:
    """Return a spec's notes, or the error and its hint."""
    try:
        return "\n".join(families.spec_from_config(Config(raw, "config.json"), "m").notes)
    except ModelError as error:
        return f"{error.message}\n{error.hint}"


@settings(max_examples=examples(60))
@given(st.sampled_from(KNOWN), st.data())
def test_a_slip_of_any_key_is_told(model: tuple[str, str], data: st.DataObject) -> None:
    """Of each key whose value is looked at: a letter added, or two swapped. A default would be taken silently else."""
    whole = small(*model)
    never = NEVER_TOLD | NEVER_TOLD_OF.get(text_of(whole)["model_type"], set())
    key = data.draw(st.sampled_from([key for key in keys_of(whole) if key[0] != "_" and key not in never]))
    slip = data.draw(st.sampled_from((f"{key}s", key[:-2] + key[:-3:-1])))
    raw, wrong = without(whole, (key,)), without(whole, (key,))
    text_of(wrong)[key] = [[{}]]
    text_of(raw)[slip] = text_of(whole)[key]
    assume(len(key) >= len("bits") and slip not in text_of(whole) and slip != key)
    assume(f"{key} is [[" in told_of(wrong) or f"{key}[0] is" in told_of(wrong))
    told = told_of(raw)
    assert f"is {slip} meant as " in told
    if named := re.search(rf"no {key}, whose default \((\d+)\) is taken", told):
        try:
            default = getattr(hub_config(without(whole, (key,))).get_text_config(), key)
        except Exception:  # noqa: BLE001 - of transformers, whose default contradicts the small sizes
            return
        assert int(named[1]) == default


def test_no_key_of_a_class_is_taken_for_a_slip_of_another() -> None:
    """Such as qk_rope_head_dim where qk_nope_head_dim is missing: a hint that is followed would plan another model."""
    near = 0
    for model_type in {*families.FAMILIES} - SAME.keys() - NOT_IN_TRANSFORMERS:
        data = hub_config({"model_type": model_type, **INCOMPLETE_DEFAULTS.get(model_type, {})}).to_dict()
        for key in data:
            others = {name: value for name, value in data.items() if name != key}
            meant = Config(others, "config.json").meant_as(key)
            if not meant or meant in FOREIGN_NAMES.get(key, ()):
                continue
            near += 1
            try:
                told = "".join(families.spec_from_config(Config(others, "config.json"), "m").notes)
            except ModelError as error:
                told = error.hint
            assert meant not in told, model_type
    assert near


@pytest.mark.parametrize(("key", "context"), [("seq_length", 4096), ("max_position_embeddings", 4096), ("n_ctx", 2048)])
def test_bloom_has_its_context_by_the_name_of_the_models_on_the_hub(key: str, context: int) -> None:
    """Which is seq_length, 2048 in all of them; ALiBi has no limit."""
    spec = spec_of({"model_type": "bloom", "n_embed": 1024, "n_head": 16, "n_layer": 2, "vocab_size": 1000, key: 4096})
    assert (spec.max_context, spec.notes) == (context, ())
