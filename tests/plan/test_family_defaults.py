"""What a config leaves out, or sets to null, is as in transformers' configuration class."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from tests.family_configs import VISION, WITHIN, configs
from tests.family_models import INCOMPLETE_DEFAULTS, SAME, hub_config, meta_model, named, saved_tensors, spec_of
from tpplan import families
from tpplan.errors import ModelError
from tpplan.families.wrappers import WRAPPERS

KNOWN = sorted({*families.supported()} - SAME.keys())

#: Small sizes in place of the defaults, as far as a family calls them so.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 20),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 5),
    **dict.fromkeys(("num_attention_heads", "n_head"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 3),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **{"vocab_size": 64, "pad_token_id": 0, "max_position_embeddings": 512},
}
#: Of the language model they say nothing.
ASIDE = {"model_type", "architectures", "vision_config", "text_config", "transformers_version", "dtype", "id2label"}

#: Why tpplan does not plan for some configs that transformers builds a model of, which mostly cannot run.
REFUSALS = re.compile(r" is missing| is null|not a multiple|more than the \d+ experts| entries for |is \d+, but hidden_size")


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the language model."""
    text: dict[str, Any] = config.get("text_config", config)
    return text


def small(model_type: str) -> dict[str, Any]:
    """Return all keys of a family's class, with its defaults for most."""
    given = hub_config({"model_type": model_type, **INCOMPLETE_DEFAULTS.get(model_type, {})}).to_dict()
    raw: dict[str, Any] = json.loads(json.dumps(given))
    if model_type in WRAPPERS:
        raw["vision_config"] = VISION[model_type]
    text = text_of(raw)
    text.update({key: value for key, value in SMALL.items() if text.get(key) is not None})
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if text.get(key):
            text[key] = text[key][:5]
    if text.get("moe_layers"):
        text["moe_layers"] = [layer for layer in text["moe_layers"] if layer < 5]
    if families.LANGUAGE_MODELS[text["model_type"]].fixed_head:
        text.pop("head_dim", None)
    return raw


def facts_of_transformers(config: Any) -> dict[str, Any]:
    """Return the shapes of tensors, the windows of layers and the context of transformers' model."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {
        "tensors": {name: tuple(tensor.shape) for name, tensor in saved_tensors(meta_model(config)).items()},
        "windows": {
            i: getattr(layer, "sliding_window", 0) for i, layer in layers if not isinstance(layer, LinearAttentionLayer)
        },
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
        return "" if REFUSALS.search(error.message) else error.message
    except Exception:  # noqa: BLE001 - of transformers, which has no model of this config
        return ""
    theirs = known[key]
    return "; ".join(f"{name}: {_differing(ours[name], theirs[name])}" for name in ours if ours[name] != theirs[name])


def _key(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def _differing(ours: Any, theirs: Any) -> str:
    if not isinstance(ours, dict):
        return f"{ours}, expected {theirs}"
    found = [(key, ours.get(key), theirs.get(key)) for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)]
    return f"{len(found)} such as {found[0]}"


@pytest.mark.parametrize("model_type", KNOWN)
def test_a_key_left_out_or_null_is_as_in_the_class_of_transformers(model_type: str) -> None:
    """Each key of the language model in turn; the sizes that no config lacks may be refused as missing."""
    whole, wrong = small(model_type), {}
    config = hub_config(whole)
    known = {_key(config): facts_of_transformers(config)}
    spec_of(whole)  # not refused
    assert not compare(whole, known)
    for key in sorted(text_of(whole).keys() - ASIDE - WITHIN.get(model_type, {}).keys()):
        for value in ("left out", None):
            raw = json.loads(json.dumps(whole))
            text_of(raw)[key] = value
            if value:
                del text_of(raw)[key]
            if difference := compare(raw, known):
                wrong[f"{key} {value}"] = difference
    assert not wrong
