"""The class of transformers that a language model has: its own, or one around it, without what reads images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

from tpplan.errors import RequestError
from tpplan.models.families.wrappers import WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What the names of arguments begin with that are for images, videos and sounds, and methods that take these.
_IMAGES: Final = ("pixel_", "image_", "video_", "audio_", "input_features", "mm_encoder", "vision_")
_FEATURES: Final = ("get_image_features", "get_video_features", "get_audio_features")


def text_of(config: Any) -> Any:
    """Return the config of the language model in a config of transformers, which may be all of it."""
    return config.get_text_config(decoder=True)


def runnable(config: Any) -> Any:
    """Return a config whose class has the language model, alone if transformers has that; None without any."""
    text = text_of(config)
    found = next((each for each in (text, config) if _class_of(each) is not None), None)
    around = next((name for name, each in WRAPPERS.items() if each.text == text.model_type), None)
    if found is not None or around is None:
        return found
    tied = getattr(text, "tie_word_embeddings", False)
    return AutoConfig.for_model(around, text_config=text.to_dict(), tie_word_embeddings=tied)


def _class_of(config: Any) -> Any:
    kind = type(config)
    for known in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if kind in known:
            return known[kind]
    return getattr(transformers, kind.__name__.replace("Config", "ForCausalLM"), None)


def on_meta(config: Any) -> Any:
    """Return a model of transformers whose tensors have no values, without parts that read images.

    Args:
        config: one that :func:`runnable` returned, with the dtype of weights.

    Raises:
        RequestError: transformers has no class for it.
    """
    text_of(config).dtype = config.dtype
    made_by = _class_of(config)
    if made_by is None:
        what = f"transformers has no class of {config.model_type} that generates text"
        raise RequestError(what, "docs/run-a-model.md lists what runs")
    with torch.device("meta"):
        made = made_by._from_config(config, dtype=config.dtype)  # noqa: SLF001 (as AutoModel does)
    if text_of(config) is not config:
        kept = {*made.get_decoder().modules(), made.get_output_embeddings()}
        for parent in (made, made.base_model):
            for name, child in [*parent.named_children()]:
                if kept.isdisjoint(child.modules()):
                    delattr(parent, name)
    return made


def starts(model: Any, root: str) -> Mapping[str, str]:
    """Return starts of the names of a language model's tensors, and what a model of transformers has in their place.

    Args:
        model: a model of transformers.
        root: how the names of the language model's tensors start.
    """
    decoder = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is decoder)
    if text_of(model.config) is model.config:
        return {root: ""} if root else {}
    return {f"{root}model.": f"{path}.", f"{root}lm_head.": "lm_head."}


def refuse_images(model: Any) -> None:
    """Let a model's methods that encode images raise an error.

    Args:
        model: a model of transformers, without the part that reads images.
    """

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise _refusal("images")

    for each in (model, model.base_model):
        for name in _FEATURES:
            if hasattr(each, name):
                setattr(each, name, refuse)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check that no argument of a model is for images.

    Raises:
        RequestError: one is.
    """
    for name, value in given.items():
        if value is not None and not _is_empty(value) and name.startswith(_IMAGES):
            raise _refusal(name)


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and all(each is None for each in value.values())


def _refusal(what: str) -> RequestError:
    return RequestError(
        f"this model was sharded for text, without what reads {what}",
        "pass text alone, or run all of the model by transformers on one device",
    )
